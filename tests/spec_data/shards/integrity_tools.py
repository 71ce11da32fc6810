"""A dataset to damage, and ways to do it.

Test modules take the fixtures by assignment: an import would look unused, and shadowed.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from spec_data.shards.files import dump_json
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import fingerprint
from tests.factory import random_documents, tiny_dataset


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three shards of four documents; the same token counts in each, so that sizes agree."""
    few = random_documents(4, 64, 0)
    documents = [d for i in range(3) for d in reordered(few, i)]
    path = tmp_path_factory.mktemp("whole") / "data"
    return tiny_dataset(path, documents=documents, docs_per_shard=4)


def reordered(documents: list, shift: int) -> list:
    """The same lengths and masks, other tokens."""
    return [([(t + shift) % 64 for t in ids], mask, turns) for ids, mask, turns in documents]


@pytest.fixture
def data(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "data"))


def shard_file(data: Path, number: int) -> Path:
    return data / "shards" / f"unit-{number:05d}.arrow"


def read_all(data: Path, check: str = "first") -> list[dict]:
    dataset = HiddenStatesDataset(data, check=check)
    return [dataset[i] for i in range(len(dataset))]


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
    )


def place_of(data: Path, number: int, column: str, row: int) -> tuple[int, int]:
    """Where the values of one document's field lie in the file of a shard."""
    buffer = pa.py_buffer(shard_file(data, number).read_bytes())
    (batch,) = pa.ipc.open_stream(buffer)
    array = batch.column(column)
    a, b = array.offsets.to_pylist()[row : row + 2]
    values, width = array.values, 1
    if isinstance(values.type, pa.FixedSizeListType):
        values, width = values.values, values.type.list_size
    size = values.type.bit_width // 8 * width
    start = values.buffers()[1].address - buffer.address
    return start + a * size, start + b * size


def flip(file: Path, position: int, bit: int = 3) -> None:
    raw = bytearray(file.read_bytes())
    raw[position] ^= 1 << bit
    file.write_bytes(raw)


def change_manifest(data: Path, **changes) -> None:
    write_manifest(data, json.loads((data / "manifest.json").read_text()) | changes)


def write_manifest(data: Path, raw: dict) -> None:
    """Write a manifest with a fingerprint, and what follows from it: someone covers the traces."""
    raw["fingerprint"] = fingerprint(raw)
    (data / "manifest.json").write_text(json.dumps(raw))
    state = json.loads((data / "state.json").read_text())
    state["_fingerprint"] = raw["fingerprint"][:16]
    (data / "state.json").write_text(dump_json(state))


def to_first_format(data: Path) -> None:
    """Make a dataset what format 1.0 was: no checksums anywhere."""
    raw = json.loads((data / "manifest.json").read_text()) | {"format_version": "1.0"}
    for record in raw["shards"]:
        file = data / record["file"]
        buffer = pa.py_buffer(file.read_bytes())
        schema = pa.ipc.open_stream(buffer).schema
        schema = schema.remove(len(schema) - 1).with_metadata({"spec-data": "1.0"})
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            for batch in pa.ipc.open_stream(buffer):
                stream.write_batch(pa.RecordBatch.from_arrays(batch.columns[:-1], schema=schema))
        del record["outline"]
        record["bytes"] = file.stat().st_size
        record["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    index = pa.ipc.open_stream(pa.py_buffer((data / "index.arrow").read_bytes())).read_all()
    index = index.drop_columns(["checksum"])
    with pa.OSFile(str(data / "index.arrow"), "wb") as sink:
        pa.ipc.new_stream(sink, index.schema).write_table(index)
    for name, record in raw["files"].items():
        del record["xxh3"]
        record["bytes"] = (data / name).stat().st_size
        record["sha256"] = hashlib.sha256((data / name).read_bytes()).hexdigest()
    raw["totals"]["bytes"] = sum(record["bytes"] for record in raw["shards"])
    write_manifest(data, raw)
