"""Write one unit as one shard: an Arrow IPC stream file, written atomically, with checksums.

The file is a stream because `datasets` memory-maps only streams. Record batches hold about 32 MB,
so that a random read touches little and a reader keeps few of them.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from spec_data.shards.checksums import CHECKSUMS, arrow_schema, chunk_checksums, read_batches
from spec_data.shards.files import replace_durably, sha256_file, sync, temporary_name, writing
from spec_data.shards.schema import Column, ShardRecord, predicts_supervised

RECORD_BATCH_BYTES = 32 << 20


@dataclass
class Escapes:
    """Tokens of a lossy column stored in bf16: row numbers int64 [n], bits uint16 [n, H]."""

    rows: np.ndarray
    bits: np.ndarray

    def add(self, rows: np.ndarray, bits: np.ndarray) -> None:
        """Add tokens (rows int64 [k], bits uint16 [k, H]) and keep all rows in ascending order."""
        rows = np.concatenate([self.rows, rows])
        order = np.argsort(rows)
        self.rows, self.bits = rows[order], np.concatenate([self.bits, bits])[order]


@dataclass
class UnitData:
    """The D documents of one unit: texts per document, one array per part of a token column.

    `tokens` maps a part's name to its array, [N] or [N, W] in the part's storage dtype, with all
    documents one after another; document d has tokens offsets[d] to offsets[d + 1] (int64 [D+1]).
    Columns that store only some tokens use `sparse_offsets` instead. `escapes` is by column name.
    `turns` has (role, start, end) triples per document.
    """

    doc_ids: list[str]
    sources: list[str]
    turns: list[list[tuple[str, int, int]]]
    offsets: np.ndarray
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    escapes: dict[str, Escapes] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls,
        columns: tuple[Column, ...],
        doc_ids: list[str],
        sources: list[str],
        turns: list[list[tuple[str, int, int]]],
        lengths: list[int],
        loss_mask: np.ndarray | None = None,
    ) -> "UnitData":
        """Allocate zeroed arrays for documents of `lengths` tokens.

        `loss_mask` [N] is stored at once; it is required when a column is sparse.
        """
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        data = cls(doc_ids, sources, turns, offsets)
        if loss_mask is not None:
            data.tokens["loss_mask"] = loss_mask.astype(np.uint8)
        for column in columns:
            rows = int(data.row_offsets(column)[-1])
            for part in column.parts:
                shape = (rows, part.stored_width) if part.stored_width else rows
                data.tokens.setdefault(part.name, np.zeros(shape, dtype=part.storage))
            if column.lossy:
                none = np.zeros((0, column.width or 1), np.uint16)
                data.escapes[column.name] = Escapes(np.zeros(0, np.int64), none)
        return data

    @cached_property
    def sparse_offsets(self) -> np.ndarray:
        """Offsets of each document's rows in sparse columns, int64 [D+1]."""
        stored = predicts_supervised(self.tokens["loss_mask"], self.offsets)
        return np.concatenate([[0], np.cumsum(stored, dtype=np.int64)])[self.offsets]

    def row_offsets(self, column: Column) -> np.ndarray:
        """Return the offsets of each document's rows in a column, int64 [D+1]."""
        return self.sparse_offsets if column.sparse else self.offsets

    def select(self, keep: list[int], columns: tuple[Column, ...]) -> "UnitData":
        """Return a unit with only the documents `keep` (ascending); the same object if all are."""
        if len(keep) == len(self.doc_ids):
            return self
        out = UnitData(
            [self.doc_ids[d] for d in keep],
            [self.sources[d] for d in keep],
            [self.turns[d] for d in keep],
            np.concatenate([[0], np.cumsum(np.diff(self.offsets)[keep])]).astype(np.int64),
        )
        for column in columns:
            bounds = self.row_offsets(column)
            spans = [np.arange(bounds[d], bounds[d + 1]) for d in keep]
            rows = np.concatenate(spans) if spans else np.zeros(0, np.int64)
            for part in column.parts:
                out.tokens[part.name] = self.tokens[part.name][rows]
            if column.lossy:
                old = self.escapes[column.name]
                _, there, here = np.intersect1d(old.rows, rows, return_indices=True)
                out.escapes[column.name] = Escapes(here.astype(np.int64), old.bits[there])
        return out


def record_batches(
    unit: UnitData, columns: tuple[Column, ...], hashed: bool = True
) -> Iterator[pa.RecordBatch]:
    """Cut a unit into record batches; token arrays are wrapped, not copied.

    Without `hashed` all checksums are zero, which is enough to know the size of the shard.
    """
    schema = arrow_schema(columns)
    per_token = sum(c.bytes_per_token for c in columns)
    rows = len(unit.doc_ids)
    first = 0
    while first < rows:
        last = first + 1
        limit = unit.offsets[first] + RECORD_BATCH_BYTES // per_token
        while last < rows and unit.offsets[last + 1] <= limit:
            last += 1
        turns = [
            [{"role": r, "start": s, "end": e} for r, s, e in document]
            for document in unit.turns[first:last]
        ]
        arrays = [
            pa.array(unit.doc_ids[first:last], pa.string()),
            pa.array(unit.sources[first:last], pa.string()),
            *(a for c in columns for a in _column_arrays(c, unit, first, last, schema)),
            pa.array(turns, schema.field("turns").type),
        ]
        count = (last - first) * len(arrays)
        sums = chunk_checksums(arrays).ravel() if hashed else np.zeros(count, np.uint64)
        arrays.append(pa.FixedSizeListArray.from_arrays(sums, type=schema.field(CHECKSUMS).type))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        first = last


def _column_arrays(
    column: Column, unit: UnitData, first: int, last: int, schema: pa.Schema
) -> list[pa.Array]:
    """Return the Arrow arrays of one column's parts for documents [first, last)."""
    bounds = unit.row_offsets(column)[first : last + 1]
    a, b = int(bounds[0]), int(bounds[-1])
    arrays = [
        _list_array(unit.tokens[p.name][a:b], bounds - a, schema.field(p.name).type)
        for p in column.parts
    ]
    if column.lossy:
        escapes = unit.escapes[column.name]
        limits = np.searchsorted(escapes.rows, bounds)
        own = slice(limits[0], limits[-1])
        starts = np.repeat(bounds[:-1], np.diff(limits))
        index = (escapes.rows[own] - starts).astype(np.int32)
        for part, values in zip(column.escape_parts, (index, escapes.bits[own]), strict=True):
            kind = schema.field(part.name).type
            arrays.append(_list_array(values, limits - limits[0], kind))
    return arrays


def _list_array(values: np.ndarray, offsets: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Wrap values [n] or [n, W] and offsets int64 [rows + 1] as a list array of type `kind`."""
    child = pa.array(values.reshape(-1))
    if isinstance(kind.value_type, pa.FixedSizeListType):
        child = pa.FixedSizeListArray.from_arrays(child, type=kind.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), child, type=kind)


def shard_bytes(unit: UnitData, columns: tuple[Column, ...]) -> int:
    """Return the exact size in bytes of the shard that `write_shard` writes for this unit.

    Tokens can escape only once states exist; each escaped token then adds 2 H + 4 bytes.
    """
    sink = pa.MockOutputStream()
    with pa.ipc.new_stream(sink, arrow_schema(columns)) as stream:
        for batch in record_batches(unit, columns, hashed=False):
            stream.write_batch(batch)
    return sink.size()


class ShardStream:
    """A shard that is written piece by piece, to a temporary name until it is complete.

    What fails (OSError: the disk is full) leaves no file behind.
    """

    def __init__(self, path: Path, columns: tuple[Column, ...]) -> None:
        self._path, self._columns = path, columns
        self._temporary = temporary_name(path)
        self._sink = pa.OSFile(str(self._temporary), "wb")
        self._stream = pa.ipc.new_stream(self._sink, arrow_schema(columns))
        self._rows = self._tokens = self._supervised = 0

    def write(self, unit: UnitData) -> None:
        """Write the documents of `unit` after those before."""
        with self._discarded_on_error():
            for batch in record_batches(unit, self._columns):
                self._stream.write_batch(batch)
        self._rows += len(unit.doc_ids)
        self._tokens += int(unit.offsets[-1])
        self._supervised += int(unit.tokens["loss_mask"].sum(dtype=np.int64))

    def finish(self) -> ShardRecord:
        """Complete the file (fsync, rename) and return its record for the manifest."""
        with self._discarded_on_error():
            self._stream.close()
            self._sink.close()
            sync(self._temporary)
            record = ShardRecord(
                file=f"{self._path.parent.name}/{self._path.name}",
                rows=self._rows,
                tokens=self._tokens,
                supervised=self._supervised,
                bytes=self._temporary.stat().st_size,
                sha256=sha256_file(self._temporary),
                outline=read_batches(self._temporary)[2],
            )
            replace_durably(self._temporary, self._path)
        return record

    def discard(self) -> None:
        """Close and remove the file."""
        self._sink.close()
        self._temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        try:
            with writing(self._path):
                yield
        except BaseException:
            self.discard()
            raise


def write_shard(path: Path, unit: UnitData, columns: tuple[Column, ...]) -> ShardRecord:
    """Write one shard (temporary name, fsync, rename) and return its record for the manifest.

    Raises:
        OSError: the disk is full or the folder is not writable; no file is left behind.
    """
    stream = ShardStream(path, columns)
    stream.write(unit)
    return stream.finish()
