"""One mapped shard, checked against the manifest and the index.

Metadata, checksums, offsets and schema are checked when they are first used. The bytes of a chunk
are checked when they are read, before the caller has them; `checking.py` decides which reads.
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from spec_data.shards.checking import ChunkChecks
from spec_data.shards.checksums import (
    checksum,
    chunk_checksums,
    list_views,
    read_batches,
    schema_of,
    stored_checksums,
    string_views,
    turns_bytes,
)
from spec_data.shards.codecs import LossyCodec, Tables, bf16_tensor
from spec_data.shards.errors import DatasetError
from spec_data.shards.schema import Column, Manifest, ShardRecord, predicts_supervised

# -- coded -----------------------------------------------------------------------------------------
# Decode stored tokens of a lossy column to states, and put escaped tokens in their places.
#
# There are two ways, with bit-identical results. `decode_rows` decodes at once into a CPU buffer.
# `CodedRows` gathers the codes of a micro-batch, moves them to the training device as a half or a
# quarter of the bytes, and decodes them there.
#
# A row here is one stored token of the column. Shapes: n, N rows, W code bytes per row, H
# channels.


DECODED_AT_ONCE = 1 << 24
"""Elements decoded together on a device: bounds the extra memory of decoding."""


@dataclass(frozen=True)
class StoredRows:
    """One document's part of a column: views of the mapped file, which must not be written to.

    `values` is [n, W] (or [n]). In a lossy column these are codes, with `scale` uint16 [n];
    `escape_index` int32 [k] lists the rows that escaped, ascending, and `escape` uint16 [k, H] has
    the bits of their bfloat16 states.
    """

    values: np.ndarray
    scale: np.ndarray
    escape_index: np.ndarray
    escape: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def cut(self, start: int, stop: int) -> "StoredRows":
        """Return rows [start, stop), with their escaped tokens numbered from `start`."""
        if start == 0 and stop == len(self.values):
            return self
        a, b = np.searchsorted(self.escape_index, [start, stop]) if len(self.escape) else (0, 0)
        return StoredRows(
            self.values[start:stop],
            self.scale[start:stop],
            self.escape_index[a:b] - start,
            self.escape[a:b],
        )

    def take(self, rows: np.ndarray) -> "StoredRows":
        """Return some rows, int64 [n] ascending, with their escaped tokens numbered anew."""
        _, here, there = np.intersect1d(
            rows, self.escape_index, assume_unique=True, return_indices=True
        )
        escape_index = here.astype(np.int32)
        escape = self.escape[there]
        return StoredRows(self.values[rows], self.scale[rows], escape_index, escape)


def decode_rows(codec: LossyCodec, stored: StoredRows, tables: Tables, out: Tensor) -> None:
    """Decode `stored` (n rows) into the CPU tensor `out` [n, H], bfloat16 or float32."""
    codec.decode_into(stored.values, stored.scale, tables, out)
    if len(stored.escape_index):
        rows = torch.from_numpy(stored.escape_index.astype(np.int64))
        out[rows] = bf16_tensor(stored.escape).to(out.dtype)


class CodedRows:
    """The stored rows of a lossy column for one micro-batch, gathered document by document.

    `codes` [N, W], `scale` bf16 [N] and `slots` int64 [N] are allocated once for N slots and reused
    for every micro-batch. `slots` says to which slot of the micro-batch a row belongs. Escaped
    tokens are few and are kept apart.
    """

    def __init__(self, column: Column, tables: Tables, slots: int, pin: bool) -> None:
        """Allocate for `slots` tokens of `column`; `tables` are on the device that decodes.

        Raises:
            ValueError: the column is not lossy.
        """
        if column.lossy is None:
            raise ValueError(f"column {column.name} has nothing to decode")
        self.codec, self.tables, self.width = column.lossy, tables, column.width or 1
        kind = torch.int8 if self.codec.storage == np.int8 else torch.uint8
        size = (slots, column.stored_width or 1)
        self.codes = torch.zeros(size, dtype=kind, pin_memory=pin)
        self.scale = torch.zeros(slots, dtype=torch.bfloat16, pin_memory=pin)
        self.slots = torch.zeros(slots, dtype=torch.int64, pin_memory=pin)
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self.count = 0
        self._first_slot = 0
        self._escaped: list[tuple[np.ndarray, np.ndarray]] = []

    def begin_pack(self, first_slot: int) -> None:
        """Begin a pack, whose slot 0 is slot `first_slot` of the micro-batch."""
        self._first_slot = first_slot

    def add(self, stored: StoredRows, tokens: np.ndarray) -> None:
        """Append rows; `tokens` int64 [n] has the slot of each, counted within the current pack."""
        rows = slice(self.count, self.count + len(stored))
        np.copyto(self.codes[rows].numpy(), stored.values)
        np.copyto(self.scale[rows].view(torch.uint16).numpy(), stored.scale)
        np.add(tokens, self._first_slot, out=self.slots[rows].numpy())
        if len(stored.escape_index):
            self._escaped.append((stored.escape_index + np.int64(self.count), stored.escape))
        self.count = rows.stop

    def states(
        self, slots: int, device: torch.device | str, dtype: torch.dtype, non_blocking: bool
    ) -> Tensor:
        """Decode on `device` to states [slots, H] of `dtype`; zero where no row was added."""
        out = torch.zeros(slots, self.width, dtype=dtype, device=device)
        tables = self.tables.to(device)
        codes, scale, places = (
            values[: self.count].to(device, non_blocking=non_blocking)
            for values in (self.codes, self.scale, self.slots)
        )
        step = max(1, DECODED_AT_ONCE // self.width)
        for a in range(0, self.count, step):
            part = slice(a, a + step)
            out[places[part]] = self.codec.decode(codes[part], scale[part], tables).to(dtype)
        for rows, bits in self._escaped:
            where = places[torch.from_numpy(rows).to(device, non_blocking=non_blocking)]
            out[where] = bf16_tensor(bits).to(device, non_blocking=non_blocking).to(dtype)
        return out


def runs(kept: np.ndarray) -> list[tuple[int, int]]:
    """Return the stretches [start, stop) of consecutive True in `kept`, bool [n]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], kept.astype(np.int8), [0]])))
    return list(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))


# -- shard -----------------------------------------------------------------------------------------


_MASK = Column(name="loss_mask", codec="bool8")
_TEXTS = ("doc_id", "source", "turns")
_NO_ROWS = np.zeros(0, np.int32)
_NOT_FINITE = np.uint16(0x7F80)  # the exponent bits of a bf16 that is infinite or not a number


@dataclass(frozen=True)
class IndexRows:
    """What the index says about the documents of one shard.

    Without `checksums`, documents are compared by their ids: a dataset that is still being
    generated has no index.
    """

    first: int  # number of the shard's first document in the dataset
    ids: pa.StringArray
    lengths: np.ndarray  # int64 [rows], tokens
    kept: np.ndarray  # int64 [rows], tokens stored in sparse columns
    checksums: np.ndarray | None  # uint64, of all documents of the dataset


class Place(NamedTuple):
    """A row of a shard: its record batch, and its number in it."""

    row: int
    batch: int
    local: int


class Shard:
    """Numpy views of a shard's record batches, made at first use; nothing is copied."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        record: ShardRecord,
        index: IndexRows,
        check: str,
        remote: tuple[str, Path] | None = None,
    ) -> None:
        """Map the shard that `record` describes, in the dataset directory `path`.

        `check` is one of checking.CHECKS. `remote` is the URL of a remote shard and its local copy,
        which is deleted if it is damaged.

        Raises:
            DatasetError: the shard is damaged, of another dataset, or another shard under its name.
        """
        self.record = record
        self.file = remote[1] if remote else path / self.record.file
        self.name = f"{remote[0]} (local copy {remote[1]})" if remote else str(self.file)
        self._is_copy = remote is not None
        try:
            schema, self.batches, outline = read_batches(self.file)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DatasetError(f"{self.name}: damaged ({error}); copy it again") from None
        expected = schema_of(manifest)
        if not schema.equals(expected, check_metadata=True):
            raise DatasetError(
                f"{self.name}: its columns are not those of the manifest; it belongs to another "
                "dataset or release"
            )
        if self.record.outline != outline:
            raise DatasetError(
                f"{self.name}: its metadata is not what the manifest says: it is damaged, of "
                "another dataset, or another shard under this name; copy it again"
            )
        if any(column.null_count for batch in self.batches for column in batch.columns):
            raise DatasetError(f"{self.name}: some of its values are null; copy this shard again")
        self.starts = [0, *itertools.accumulate(b.num_rows for b in self.batches)]
        if not self.starts[-1] == len(index.lengths) == self.record.rows:
            raise DatasetError(
                f"{self.name}: {self.starts[-1]} documents, the manifest says {self.record.rows}, "
                f"the index {len(index.lengths)}; copy the dataset again"
            )
        self.index, self._manifest = index, manifest
        self._fields = {name: number for number, name in enumerate(expected.names)}
        self._checks = ChunkChecks(check, self.record.rows, len(expected))
        self._checksums = [stored_checksums(batch) for batch in self.batches]
        if index.checksums is None:
            self._check_documents()
        self._placed = bytearray(self.record.rows)  # 1: the row is the one that the index has
        self._views: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}
        self._readable: set[int] = set()  # record batches whose texts are checked

    def _check_documents(self) -> None:
        """Check that every row is the document that the index has here, by ids."""
        for first, batch in zip(self.starts, self.batches, strict=False):
            expected = self.index.ids[first : first + batch.num_rows]
            bounds, text = string_views(batch.column("doc_id"))
            own_bounds, own_text = string_views(expected)
            wrong = np.flatnonzero(bounds != own_bounds)
            if not len(wrong) and not pa.py_buffer(text).equals(pa.py_buffer(own_text)):
                letter = np.flatnonzero(text != own_text)[0]
                wrong = np.searchsorted(bounds, [letter], "right")
            if len(wrong):
                row = first + max(0, int(wrong[0]) - 1)
                raise DatasetError(
                    f"{self.where(row)}, column doc_id: not the document that the index has here: "
                    "damaged, renamed, swapped or of another dataset; copy this shard again"
                )

    def place(self, row: int) -> Place:
        """Return where to read a row, whose checksums are compared with the index once."""
        batch = bisect.bisect_right(self.starts, row) - 1
        if not self._placed[row]:
            self._check_row(row, batch)
            self._placed[row] = 1
        return Place(row, batch, row - self.starts[batch])

    def _check_row(self, row: int, batch: int) -> None:
        """Check that a row's checksums are those that the index has here."""
        expected = self.index.checksums
        if expected is None:
            return
        found = checksum(self._checksums[batch][row - self.starts[batch]])
        if expected[self.index.first + row] == found:
            return
        (elsewhere,) = np.flatnonzero(expected == found)[:1].tolist() or [None]
        if elsewhere is None:
            what = "its checksums are damaged, or it is of another dataset; copy this shard again"
        else:
            records = self._manifest.shards
            ends = itertools.accumulate(record.rows for record in records)
            number = next(i for i, end in enumerate(ends) if elsewhere < end)
            what = (
                f"this is a row of {records[number].file}: swapped, renamed or copied; put the "
                "right file here"
            )
        raise DatasetError(f"{self.where(row)}: {what}")

    def where(self, row: int) -> str:
        """Name a row in an error message: file, number, document."""
        return f"{self.name}: row {row} (document {self.index.ids[row].as_py()})"

    def texts(self, place: Place) -> dict[str, Any]:
        """Return doc_id, source and turns of a row."""
        if place.batch not in self._readable:
            self._check_texts(place.batch)
        batch = self.batches[place.batch]
        found = {name: batch.column(name)[place.local].as_py() for name in _TEXTS}
        self._check("doc_id", place, found["doc_id"].encode())
        self._check("source", place, found["source"].encode())
        self._check("turns", place, turns_bytes(turn.values() for turn in found["turns"]))
        return found

    def _check_texts(self, batch: int) -> None:
        """Check offsets and UTF-8 of a record batch's texts, which Arrow itself does not do."""
        for name in _TEXTS:
            column = self.batches[batch].column(name)
            try:
                column.validate(full=True)
                if name == "turns" and any(c.null_count for c in column.flatten().flatten()):
                    raise pa.ArrowInvalid("null values")
            except pa.ArrowInvalid as error:
                raise DatasetError(
                    f"{self.name}: rows {self.starts[batch]} to {self.starts[batch + 1] - 1}, "
                    f"column {name}: damaged ({error}); copy this shard again"
                ) from None
        self._readable.add(batch)

    def length(self, row: int) -> int:
        """Tokens of a document."""
        return int(self.index.lengths[row])

    def mask(self, place: Place) -> np.ndarray:
        """Return the stored loss mask of a document, bool [T]."""
        return self.values(_MASK, place) != 0

    def kept(self, place: Place) -> np.ndarray:
        """Tokens that have a row in sparse columns, bool [T]."""
        mask = self.values(_MASK, place)
        return predicts_supervised(mask, np.array([0, len(mask)]))

    def values(self, column: Column, place: Place) -> np.ndarray:
        """Stored values (or codes) of one document, [n] or [n, W]: a view of the mapped file.

        Raises:
            DatasetError: damage, named by row and column.
        """
        found = self._part(column, place)
        self._check(column.name, place, found)
        return found

    def stored(self, column: Column, place: Place) -> StoredRows:
        """All parts of one document's column, views of the mapped file.

        Raises:
            DatasetError: damage, named by row and column.
        """
        values = self.values(column, place)
        if column.lossy is None:
            return StoredRows(values, values, _NO_ROWS, values)
        parts = (column.scale_part, *column.escape_parts)
        found = [self._part(part, place) for part in parts]
        for part, chunk in zip(parts, found, strict=True):
            self._check(part.name, place, chunk)
        stored = StoredRows(values, *found)
        self._check_lossy(column, place.row, stored)
        return stored

    def _check(self, field: str, place: Place, chunk: np.ndarray | bytes) -> None:
        """Compare a chunk with its checksum if this read is due."""
        number = self._fields[field]
        if not self._checks.due(place.row, number):
            return
        if self._checksums[place.batch][place.local, number] != checksum(chunk):
            if self._is_copy:
                self.file.unlink(missing_ok=True)  # the next run downloads it again
            raise DatasetError(
                f"{self.where(place.row)}, column {field}: damaged: its bytes do not match "
                "their checksum; copy this shard again (`spec-data verify` lists all damage)"
            )
        self._checks.done(place.row, number)

    def _check_lossy(self, column: Column, row: int, stored: StoredRows) -> None:
        """Refuse values that would decode to garbage, even if their checksum matches."""
        rows = stored.escape_index
        inside = not len(rows) or (rows[0] >= 0 and rows[-1] < len(stored))
        if len(rows) != len(stored.escape) or not inside or np.any(rows[1:] <= rows[:-1]):
            raise DatasetError(
                f"{self.where(row)}, column {column.name}.escape_index: not ascending rows "
                f"of {column.name}, one for each of {column.name}.escape; copy this shard again"
            )
        if ((stored.scale & _NOT_FINITE) == _NOT_FINITE).any():
            raise DatasetError(
                f"{self.where(row)}, column {column.name}.scale: not finite; copy this shard again"
            )

    def damage(self) -> Iterator[tuple[int, str]]:
        """Yield row and field of every chunk whose bytes do not match its checksum.

        Raises:
            DatasetError: checksums differ from the index, or texts cannot be read.
        """
        for batch, stored in enumerate(self._checksums):
            for row in range(self.starts[batch], self.starts[batch + 1]):
                self._check_row(row, batch)
            self._check_texts(batch)
            found = chunk_checksums(self.batches[batch].columns[:-1])
            for local, field in np.argwhere(found != stored).tolist():
                yield self.starts[batch] + local, self.batches[batch].schema.names[field]

    def _part(self, column: Column, place: Place) -> np.ndarray:
        """Return one document's part of a stored field, [n] or [n, W], unchecked; a view."""
        key = place.batch, column.name
        found = self._views.get(key)
        if found is None:
            offsets, values = list_views(self.batches[place.batch].column(column.name))
            self._check_offsets(column, place.batch, offsets, len(values))
            found = self._views[key] = offsets, values
        offsets, view = found
        return view[offsets[place.local] : offsets[place.local + 1]]

    def _check_offsets(self, column: Column, batch: int, offsets: np.ndarray, stored: int) -> None:
        """Check a column's offsets int64 [rows + 1] in a record batch: lengths as in the index, and
        all within the `stored` rows."""
        first, last = self.starts[batch], self.starts[batch + 1]
        found = np.diff(offsets)
        if column.name.endswith((".escape_index", ".escape")):
            wrong = found < 0
        else:
            expected = self.index.kept if column.sparse else self.index.lengths
            wrong = found != expected[first:last]
        if wrong.any():
            row = first + int(wrong.argmax())
            expect = int((self.index.kept if column.sparse else self.index.lengths)[row])
            raise DatasetError(
                f"{self.where(row)}, column {column.name}: {found[row - first]} tokens, the index "
                f"says {expect}; copy this shard again"
            )
        if offsets[0] != 0 or offsets[-1] > stored:
            raise DatasetError(
                f"{self.name}: rows {first} to {last - 1}, column {column.name}: offsets outside "
                "the column; copy this shard again"
            )
