"""Write one unit as one shard: an Arrow IPC stream file, written atomically, with checksums.

`datasets` memory-maps only streams. Record batches hold about 32 MB, so that a random read touches
little and a reader keeps few of them.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from spec_data.shards.checksums import CHECKSUMS, arrow_schema, chunk_checksums, read_batches
from spec_data.shards.codecs import Encoded
from spec_data.shards.files import replace_durably, sha256_file, sync, temporary_name, writing
from spec_data.shards.packing import cut_units
from spec_data.shards.schema import Column, ShardRecord, predicts_supervised

RECORD_BATCH_BYTES = 32 << 20


@dataclass
class UnitData:
    """The D documents of one unit.

    `tokens` has an array by plain column, [N] or [N, W] in its storage dtype; document d has tokens
    offsets[d] to offsets[d + 1] (int64 [D+1]), in sparse columns by `sparse_offsets`. `coded` has
    the documents of each lossy column, and `turns` their (role, start, end) triples.
    """

    doc_ids: list[str]
    sources: list[str]
    turns: list[list[tuple[str, int, int]]]
    offsets: np.ndarray
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    coded: dict[str, list[Encoded]] = field(default_factory=dict)

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
        """Allocate zeroed arrays for documents of `lengths` tokens; lossy columns are empty.

        `loss_mask` [N] is stored at once; it is required when a column is sparse.
        """
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        data = cls(doc_ids, sources, turns, offsets)
        if loss_mask is not None:
            data.tokens["loss_mask"] = loss_mask.astype(np.uint8)
        for column in columns:
            if column.lossy:
                raw = np.zeros((0, column.width or 1), np.uint16)
                nothing = Encoded(np.zeros(0, np.uint8), np.zeros(0, np.int32), raw)
                data.coded[column.name] = [nothing] * len(lengths)
                continue
            rows = int(data.row_offsets(column)[-1])
            shape = (rows, column.width) if column.width else rows
            data.tokens.setdefault(column.name, np.zeros(shape, dtype=column.storage))
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
        """Return a unit with only the documents `keep`, ascending; the same object if all are."""
        if len(keep) == len(self.doc_ids):
            return self
        out = UnitData(
            [self.doc_ids[d] for d in keep],
            [self.sources[d] for d in keep],
            [self.turns[d] for d in keep],
            np.concatenate([[0], np.cumsum(np.diff(self.offsets)[keep])]).astype(np.int64),
        )
        for column in columns:
            if column.lossy:
                out.coded[column.name] = [self.coded[column.name][d] for d in keep]
                continue
            bounds = self.row_offsets(column)
            spans = [np.arange(bounds[d], bounds[d + 1]) for d in keep]
            rows = np.concatenate(spans) if spans else np.zeros(0, np.int64)
            out.tokens[column.name] = self.tokens[column.name][rows]
        return out


def record_batches(
    unit: UnitData, columns: tuple[Column, ...], hashed: bool = True
) -> Iterator[pa.RecordBatch]:
    """Cut a unit into record batches; token arrays are wrapped, not copied.

    Without `hashed` all checksums are zero, which is enough to know the size of the shard.
    """
    schema = arrow_schema(columns)
    sizes = np.sum([_document_bytes(unit, column) for column in columns], axis=0)
    for first, last in cut_units(sizes, RECORD_BATCH_BYTES):
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


def _document_bytes(unit: UnitData, column: Column) -> np.ndarray:
    """Return the bytes of a column in each document, int64 [D]."""
    if column.lossy:
        return np.array([coded.nbytes for coded in unit.coded[column.name]], np.int64)
    return np.diff(unit.row_offsets(column)) * (column.storage.itemsize * (column.width or 1))


def _column_arrays(
    column: Column, unit: UnitData, first: int, last: int, schema: pa.Schema
) -> list[pa.Array]:
    """Return the Arrow arrays of one column's parts for documents [first, last)."""
    if not column.lossy:
        bounds = unit.row_offsets(column)[first : last + 1]
        values = unit.tokens[column.name][bounds[0] : bounds[-1]]
        return [_list_array(values, bounds - bounds[0], schema.field(column.name).type)]
    coded = unit.coded[column.name][first:last]
    parts = [d.blob for d in coded], [d.rows for d in coded], [d.states for d in coded]
    names = [column.name, *(part.name for part in column.escape_parts)]
    return [
        _list_array(
            np.concatenate(values),
            np.concatenate([[0], np.cumsum([len(v) for v in values], dtype=np.int64)]),
            schema.field(name).type,
        )
        for name, values in zip(names, parts, strict=True)
    ]


def _list_array(values: np.ndarray, offsets: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Wrap values [n] or [n, W] and offsets int64 [rows + 1] as a list array of type `kind`."""
    child = pa.array(values.reshape(-1))
    if isinstance(kind.value_type, pa.FixedSizeListType):
        child = pa.FixedSizeListArray.from_arrays(child, type=kind.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), child, type=kind)


def shard_bytes(unit: UnitData, columns: tuple[Column, ...]) -> int:
    """Return the size in bytes of the shard that `write_shard` writes for this unit.

    It is exact but for lossy columns, which have `Column.bytes_per_token`.
    """
    sink = pa.MockOutputStream()
    with pa.ipc.new_stream(sink, arrow_schema(columns)) as stream:
        for batch in record_batches(unit, columns, hashed=False):
            stream.write_batch(batch)
    lossy = [c for c in columns if c.lossy]
    return sink.size() + sum(int(unit.row_offsets(c)[-1] * c.bytes_per_token) for c in lossy)


class ShardStream:
    """A shard that is written piece by piece; what fails (a full disk) leaves no file behind."""

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
    """Write one shard and return its record for the manifest; the errors are of ShardStream."""
    stream = ShardStream(path, columns)
    stream.write(unit)
    return stream.finish()
