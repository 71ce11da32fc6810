"""One unit to one shard: an Arrow IPC stream file, written atomically and checksummed.

A stream rather than an IPC file: `datasets` memory-maps only streams. Record batches hold about
32 MB, so that a random read touches little and a reader holds few of them. `shard_bytes` gives the
exact size of a shard before a single state is computed.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from spec_data.shards.files import replace_durably
from spec_data.shards.schema import Column, ShardRecord, arrow_schema

RECORD_BATCH_BYTES = 32 << 20


@dataclass
class UnitData:
    """The documents of one unit: texts per document, one array per token column.

    `offsets` int64 [D+1] bounds each document's tokens in every array of `tokens` ([N] or [N, W]
    in the column's storage dtype). `turns` holds (role, start, end) triples per document.
    """

    doc_ids: list[str]
    sources: list[str]
    turns: list[list[tuple[str, int, int]]]
    offsets: np.ndarray
    tokens: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls,
        columns: tuple[Column, ...],
        doc_ids: list[str],
        sources: list[str],
        turns: list[list[tuple[str, int, int]]],
        lengths: list[int],
    ) -> "UnitData":
        """Zeroed arrays for these documents; pages are taken only when they are written."""
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        total = int(offsets[-1])
        arrays = {
            c.name: np.zeros((total, c.width) if c.width else total, dtype=c.coder.storage)
            for c in columns
        }
        return cls(doc_ids, sources, turns, offsets, arrays)

    def select(self, keep: list[int]) -> "UnitData":
        """A unit with only the documents `keep` (ascending); copies nothing when all are kept."""
        if len(keep) == len(self.doc_ids):
            return self
        spans = [np.arange(self.offsets[d], self.offsets[d + 1]) for d in keep]
        rows = np.concatenate(spans) if spans else np.zeros(0, np.int64)
        lengths = [len(s) for s in spans]
        return UnitData(
            [self.doc_ids[d] for d in keep],
            [self.sources[d] for d in keep],
            [self.turns[d] for d in keep],
            np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            {name: array[rows] for name, array in self.tokens.items()},
        )


def record_batches(unit: UnitData, columns: tuple[Column, ...]) -> Iterator[pa.RecordBatch]:
    """Cut a unit into record batches; token arrays are wrapped, never copied."""
    schema = arrow_schema(columns)
    per_token = sum(c.bytes_per_token for c in columns)
    rows = len(unit.doc_ids)
    first = 0
    while first < rows:
        last = first + 1
        limit = unit.offsets[first] + RECORD_BATCH_BYTES // per_token
        while last < rows and unit.offsets[last + 1] <= limit:
            last += 1
        a, b = int(unit.offsets[first]), int(unit.offsets[last])
        offsets = pa.array(unit.offsets[first : last + 1] - a, pa.int64())
        turns = [
            [{"role": r, "start": s, "end": e} for r, s, e in document]
            for document in unit.turns[first:last]
        ]
        arrays = [
            pa.array(unit.doc_ids[first:last], pa.string()),
            pa.array(unit.sources[first:last], pa.string()),
            *(_token_array(c, unit.tokens[c.name][a:b], offsets, schema) for c in columns),
            pa.array(turns, schema.field("turns").type),
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        first = last


def _token_array(
    column: Column, values: np.ndarray, offsets: pa.Array, schema: pa.Schema
) -> pa.Array:
    kind = schema.field(column.name).type
    flat = pa.array(values.reshape(-1))
    child = flat
    if column.width is not None:
        child = pa.FixedSizeListArray.from_arrays(flat, type=kind.value_type)
    return pa.LargeListArray.from_arrays(offsets, child, type=kind)


def shard_bytes(unit: UnitData, columns: tuple[Column, ...]) -> int:
    """Exact size in bytes of the shard that `write_shard` would write for this unit."""
    sink = pa.MockOutputStream()
    with pa.ipc.new_stream(sink, arrow_schema(columns)) as stream:
        for batch in record_batches(unit, columns):
            stream.write_batch(batch)
    return sink.size()


class _HashingFile:
    """A binary file that hashes and counts what is written to it."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb", buffering=0)
        self.digest = hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.size += len(view)
        while view:
            view = view[self.file.write(view) :]
        return self.size

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            os.fsync(self.file.fileno())
            self.file.close()
            self.closed = True


def write_shard(path: Path, unit: UnitData, columns: tuple[Column, ...]) -> ShardRecord:
    """Write one shard: temporary name, fsync, rename. Gives what the manifest says of it.

    Raises:
        OSError: the disk is full or the folder is not writable; no file is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    file = _HashingFile(temporary)
    try:
        sink = pa.PythonFile(file, mode="w")
        with pa.ipc.new_stream(sink, arrow_schema(columns)) as stream:
            for batch in record_batches(unit, columns):
                stream.write_batch(batch)
        sink.close()
        file.close()
        replace_durably(temporary, path)
    except BaseException:
        file.file.close()
        temporary.unlink(missing_ok=True)
        raise
    return ShardRecord(
        file=f"{path.parent.name}/{path.name}",
        rows=len(unit.doc_ids),
        tokens=int(unit.offsets[-1]),
        supervised=int(unit.tokens["loss_mask"].sum(dtype=np.int64)),
        bytes=file.size,
        sha256=file.digest.hexdigest(),
    )
