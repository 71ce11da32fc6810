"""Datasets to damage, and how someone who covers the traces would write them: checksums agree."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64

from spec_data.shards.checksums import CHECKSUMS, chunk_checksums, row_checksums
from spec_data.shards.errors import SpecDataError
from spec_data.shards.reader import INDEX, HiddenStatesDataset
from spec_data.shards.records import plain
from spec_data.shards.seal import file_records
from spec_data.verification.run import examine
from tests.spec_data.runs import ON_CPU
from tests.spec_data.shards.integrity_tools import write_manifest


def linked_copy(whole: Path, to: Path, *changed: str) -> Path:
    """Copy a dataset: hard links, but for the files that will be changed."""
    own = {"manifest.json", "state.json", *changed}

    def link(source: str, target: str) -> None:
        if str(Path(source).relative_to(whole)) in own:
            shutil.copyfile(source, target)
        else:
            Path(target).hardlink_to(source)

    return Path(shutil.copytree(whole, to, copy_function=link))


def trace_file(data: Path, name: str, content: bytes) -> None:
    """Write a file of the target or the index, with its checksums in the manifest."""
    (data / name).write_bytes(content)
    raw = json.loads((data / "manifest.json").read_text())
    raw["files"] |= plain(file_records(data, [name]))
    write_manifest(data, raw)


def trace_shard(data: Path, number: int, content: bytes) -> None:
    """Write a shard, with size, SHA-256 and outline in the manifest."""
    raw = json.loads((data / "manifest.json").read_text())
    record = raw["shards"][number]
    (data / record["file"]).write_bytes(content)
    outline = xxh3_64()
    try:
        for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(content)):
            outline.update(message.metadata)
    except (pa.ArrowException, OSError):
        pass  # no reader comes as far as the outline
    raw["totals"]["bytes"] += len(content) - record["bytes"]
    record |= {"bytes": len(content), "outline": outline.hexdigest()}
    record["sha256"] = hashlib.sha256(content).hexdigest()
    write_manifest(data, raw)


def hashed_again(content: bytes) -> tuple[bytes, list[int]]:
    """Compute the checksums of a shard's rows again; return the shard and the index's checksums.

    Raises:
        pa.ArrowInvalid: a text cannot be read.
    """
    raw, buffer = bytearray(content), pa.py_buffer(content)
    sums = []
    for batch in pa.ipc.open_stream(buffer):
        batch.validate(full=True)
        found = chunk_checksums(batch.columns[:-1])
        values = batch.column(CHECKSUMS).values.buffers()[1]
        start = values.address - buffer.address
        raw[start : start + found.nbytes] = found.tobytes()
    for batch in pa.ipc.open_stream(pa.py_buffer(bytes(raw))):
        sums += row_checksums(batch).tolist()
    return bytes(raw), sums


def index_table(data: Path) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer((data / INDEX).read_bytes())).read_all()


def stream_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def set_column(table: pa.Table, name: str, change: Callable[[np.ndarray], Any]) -> pa.Table:
    values = table.column(name).to_numpy().copy()
    change(values)
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), pa.array(values))


def trace_everywhere(data: Path, number: int, content: bytes) -> None:
    """Write a shard, with the checksums of its rows in itself and in the index, too.

    Raises:
        pa.ArrowInvalid: a text cannot be read; nothing is written.
    """
    content, sums = hashed_again(content)
    table = index_table(data)
    (rows,) = np.nonzero(table.column("shard").to_numpy() == number)
    trace_file(data, INDEX, stream_of(set_column(table, "checksum", lambda v: v.put(rows, sums))))
    trace_shard(data, number, content)


def use(data: Path) -> str:
    """Open, read and verify a dataset; return "refused: ..." in words, or "read".

    Any other error is a fault of the reader, and reaches the caller.
    """
    found = []
    for step in (read_everything, verify_everything):
        try:
            step(data)
        except SpecDataError as error:
            found.append(f"refused: {error}")
    return " | ".join(found) or "read"


def read_everything(data: Path) -> None:
    """Read every column of every document."""
    dataset = HiddenStatesDataset(data)
    for row in range(len(dataset)):
        _ = dataset[row]


def verify_everything(data: Path) -> None:
    """Run `verify`; its failures are an error here."""
    found = examine(data=str(data), running=ON_CPU, samples=2)
    if found.failures:
        raise SpecDataError("; ".join(found.failures))
