"""A dataset to damage, and ways to do it.

Test modules take the fixtures by assignment: an import would look unused, and shadowed.
"""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from spec_data.shards.files import dump_json
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import fingerprint
from spec_data.shards.shard import Shard
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
def unchecked(monkeypatch):
    """No chunk is compared with its checksum."""
    monkeypatch.setattr(Shard, "_check", lambda self, field, place, chunk: None)


@pytest.fixture
def data(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "data"))


def shard_file(data: Path, number: int) -> Path:
    return data / "shards" / f"unit-{number:05d}.arrow"


def read_all(data: Path) -> list[dict]:
    dataset = HiddenStatesDataset(data)
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


def flip(file: Path, position: int | None = None, bit: int = 3) -> None:
    """Flip a bit of a file, of its middle by default."""
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 if position is None else position] ^= 1 << bit
    file.write_bytes(raw)


def write_manifest(data: Path, raw: dict) -> None:
    """Write a manifest with a fingerprint, and what follows from it: someone covers the traces."""
    raw["fingerprint"] = fingerprint(raw)
    (data / "manifest.json").write_text(json.dumps(raw))
    state = json.loads((data / "state.json").read_text())
    state["_fingerprint"] = raw["fingerprint"][:16]
    (data / "state.json").write_text(dump_json(state))
