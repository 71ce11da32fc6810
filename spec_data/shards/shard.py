"""One shard, checked against the manifest and the index, and its columns, decoded.

when it is opened         schema, metadata, and the number of rows; no value is null
first use of a column     in a record batch: offsets, with the lengths in the index
first use of the texts    in a record batch: offsets and UTF-8
every read                whether the file was written to: then all of this is done again
before bytes are handed out    their checksum, and that of the row with the one in the index: at
                          their first use in this process, and at one read in 64 afterwards,
                          or at every read
"""

import bisect
import errno
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from spec_data.shards.blobs import decompress
from spec_data.shards.checksums import (
    CHECKSUMS,
    arrow_schema,
    checksum,
    chunk_checksums,
    list_views,
    stored_checksums,
    turns_bytes,
)
from spec_data.shards.codecs import Tables, bf16_tensor, decode, decode_into, tensor_of
from spec_data.shards.errors import DatasetError, RunError
from spec_data.shards.files import cause
from spec_data.shards.packing import runs
from spec_data.shards.schema import Column, Manifest, ShardRecord, predicts_supervised
from spec_data.shards.stream_file import StreamFile

log = logging.getLogger(__name__)

# -- coded -----------------------------------------------------------------------------------------
# Stored tokens ("rows" here, n or N of them, H channels) of a lossy column become states in two
# ways with equal bits: `decode_rows` decodes into a CPU buffer; `CodedRows` gathers codes, moves
# them to the training device and decodes there.

DECODED_AT_ONCE = 1 << 24
"""Elements decoded together on a device: bounds the extra memory of decoding."""


@dataclass(frozen=True)
class StoredRows:
    """One document's part of a column: `values` [n, W] (or [n]), which must not be written to.

    In a lossy column these are codes, int8 [n, H]; `escape_index` int32 [k], ascending, lists the
    rows that are stored in bf16, and `escape` uint16 [k, H] has their bits.
    """

    values: np.ndarray
    escape_index: np.ndarray
    escape: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def cut(self, start: int, stop: int) -> "StoredRows":
        """Return rows [start, stop)."""
        a, b = np.searchsorted(self.escape_index, [start, stop])
        return StoredRows(
            self.values[start:stop], self.escape_index[a:b] - np.int32(start), self.escape[a:b]
        )

    def take(self, rows: np.ndarray) -> "StoredRows":
        """Return some rows, int64 [n] ascending."""
        _, here, there = np.intersect1d(
            rows, self.escape_index, assume_unique=True, return_indices=True
        )
        return StoredRows(self.values[rows], here.astype(np.int32), self.escape[there])


def decode_rows(stored: StoredRows, tables: Tables, out: Tensor) -> None:
    """Decode `stored` (n rows) into the CPU tensor `out` [n, H], bfloat16 or float32."""
    decode_into(stored.values, tables, out)
    if len(stored.escape_index):
        rows = torch.from_numpy(stored.escape_index.astype(np.int64))
        out[rows] = bf16_tensor(stored.escape).to(out.dtype)


class CodedRows:
    """The stored rows of a lossy column for one micro-batch, gathered document by document.

    `codes` int8 [N, H], and `slots` int64 [N] of the micro-batch, are allocated once for N slots.
    """

    def __init__(self, width: int, slots: int, pin: bool) -> None:
        """Allocate for `slots` tokens of `width` channels."""
        self.codes = torch.zeros(slots, width, dtype=torch.int8, pin_memory=pin)
        self.slots = torch.zeros(slots, dtype=torch.int64, pin_memory=pin)
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self.count = 0
        self._first_slot = 0
        self._parts: list[tuple[Tables, int, int]] = []  # which rows have which tables
        self._escaped: list[tuple[np.ndarray, np.ndarray]] = []

    def begin_pack(self, first_slot: int) -> None:
        """Begin a pack, whose slot 0 is slot `first_slot` of the micro-batch."""
        self._first_slot = first_slot

    def add(self, stored: StoredRows, tables: Tables, tokens: np.ndarray) -> None:
        """Append rows; `tokens` int64 [n] has the slot of each, counted within the current pack."""
        rows = slice(self.count, self.count + len(stored))
        np.copyto(self.codes[rows].numpy(), stored.values)
        np.add(tokens, self._first_slot, out=self.slots[rows].numpy())
        if len(stored.escape_index):
            self._escaped.append((stored.escape_index + np.int64(self.count), stored.escape))
        first = self.count
        if self._parts and self._parts[-1][0] is tables:
            first = self._parts.pop()[1]
        self._parts.append((tables, first, rows.stop))
        self.count = rows.stop

    def states(
        self, slots: int, device: torch.device | str, dtype: torch.dtype, non_blocking: bool
    ) -> Tensor:
        """Decode on `device` to states [slots, H] of `dtype`; zero where no row was added."""
        width = self.codes.shape[1]
        out = torch.zeros(slots, width, dtype=dtype, device=device)
        codes, targets = (
            values[: self.count].to(device, non_blocking=non_blocking)
            for values in (self.codes, self.slots)
        )
        step = max(1, DECODED_AT_ONCE // width)
        for tables, first, last in self._parts:
            for a in range(first, last, step):
                part = slice(a, min(a + step, last))
                out[targets[part]] = decode(codes[part], tables).to(dtype)
        for rows, bits in self._escaped:
            few = torch.from_numpy(rows), bf16_tensor(bits)
            if non_blocking and out.is_cuda:  # the host would wait for pageable memory
                few = few[0].pin_memory(), few[1].pin_memory()
            where, states = (x.to(device, non_blocking=non_blocking) for x in few)
            out[targets[where]] = states.to(dtype)
        return out


# -- shard -----------------------------------------------------------------------------------------


TEXTS = ("doc_id", "source", "turns")
_NO_ROWS = np.zeros(0, np.int32)
Check = Literal["first", "always"]
CHECK_AGAIN: dict[str, float] = {"first": 1 / 64, "always": 1.0}
"""Share of the later reads of a chunk that compare its checksum again."""
_draw = random.Random().random  # processes leave out different reads, and no caller's seed is used


@dataclass(frozen=True)
class IndexRows:
    """What the index says about the documents of one shard.

    While it is generated, a dataset has no `checksums`: the SHA-256 of the shard is compared.
    """

    first: int  # number of the shard's first document in the dataset
    ids: pa.StringArray
    lengths: np.ndarray  # int64 [rows], tokens
    stored: np.ndarray  # int64 [rows], tokens stored in sparse columns
    checksums: np.ndarray | None  # uint64, of all documents of the dataset


class Shard:
    """The record batches of a shard, of which offsets are kept and values are read when needed.

    What reads values raises DatasetError for damage, named by row and column.
    """

    def __init__(
        self,
        file: Path,
        manifest: Manifest,
        record: ShardRecord,
        index: IndexRows,
        tables: Callable[[], Mapping[str, Tables]],
        url: str | None = None,
        check_again: float = CHECK_AGAIN["first"],
    ) -> None:
        """Open the shard that `record` describes; `tables` returns those of the lossy columns.

        `check_again` is one of `CHECK_AGAIN`. `url` is that of a remote shard, whose local copy
        `file` is deleted if it is damaged.
        DatasetError: it is damaged, of another dataset, or another shard under its name.
        """
        self.file, self.record, self.index = file, record, index
        self._check_again = check_again
        self.name = f"{url} (local copy {file})" if url else str(file)
        self._is_copy, self._tables = url is not None, tables
        self._columns = {column.name: column for column in manifest.columns}
        try:
            self._stream = StreamFile(file)
            schema, self._batches = self._stream.schema, self._stream.batches
        except (pa.ArrowException, OSError, ValueError) as error:
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise RunError(
                    f"{file}: too many files are open, and one is kept for every shard that is in "
                    "use; raise the limit (`ulimit -n`)"
                ) from None
            raise self._damaged(f"damaged ({cause(error)})") from None
        if not schema.equals(arrow_schema(manifest.columns), check_metadata=True):
            raise self._damaged("its columns are not those of the manifest: of another dataset")
        if record.outline != self._stream.outline:
            raise self._damaged(
                "its metadata is not what the manifest says: it is damaged, of another dataset, or "
                "another shard under this name"
            )
        if any(column.null_count for batch in self._batches for column in batch.columns):
            raise self._damaged("some of its values are null")
        self._starts = [0, *itertools.accumulate(b.num_rows for b in self._batches)]
        if not self._starts[-1] == len(index.lengths) == record.rows:
            raise self._damaged(
                f"{self._starts[-1]} documents, the manifest says {record.rows}, the index "
                f"{len(index.lengths)}"
            )
        self._fields = {name: number for number, name in enumerate(schema.names)}
        self._checked = np.zeros((record.rows, len(schema)), bool)  # chunks; last: those of a row
        self._checked_texts: set[int] = set()  # record batches
        self._checksums: dict[int, np.ndarray] = {}  # uint64 [rows, fields], of a record batch
        self._views: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}
        if index.checksums is None:
            self._check_ids()

    def where(self, row: int) -> str:
        """Name a row in an error message: file, number, document."""
        return f"{self.name}: row {row} (document {self.index.ids[row].as_py()})"

    # -- values -----------------------------------------------------------------------------------

    def texts(self, row: int) -> dict[str, Any]:
        """Return doc_id, source and turns of a row."""
        self._look()
        batch, local = self._locate(row)
        self._check_texts(batch)
        texts = {name: self._batches[batch].column(name)[local].as_py() for name in TEXTS}
        self._check("doc_id", row, texts["doc_id"].encode())
        self._check("source", row, texts["source"].encode())
        self._check("turns", row, turns_bytes(turn.values() for turn in texts["turns"]))
        return texts

    def mask(self, row: int) -> np.ndarray:
        """Return the stored loss mask of a document, bool [T]."""
        return self._values(self._columns["loss_mask"], row, keep=False) != 0

    def decode(self, name: str, row: int, out: Tensor | np.ndarray) -> None:
        """Decode the first n tokens of a column into `out`, [n] or [n, W].

        Tokens without a row become zero.
        """
        column = self._columns[name]
        if not (column.lossy or column.sparse):
            self._decode_plain(column, row, out)
            return
        values = out if isinstance(out, Tensor) else tensor_of(out)
        stored, spans = self._stored(column, row), [[0, len(values)]]
        if column.sparse:
            spans = runs(self.predicting(row)[: len(values)]).tolist()
        first, done = 0, 0
        for a, b in spans:
            part = stored.cut(first, first + b - a)
            if column.lossy:
                decode_rows(part, self._tables()[name], values[a:b])
            else:
                column.coder.decode_into(part.values, values[a:b])
            values[done:a] = 0
            first, done = first + b - a, b
        values[done:] = 0

    def _decode_plain(self, column: Column, row: int, out: Tensor | np.ndarray) -> None:
        """Decode a column with a value at every token; without a copy where bits are read whole."""
        bits = column.coder.bits(out) if isinstance(out, Tensor) else out
        place = self._place(column, row)
        same = bits is not None and (bits.shape, bits.dtype) == (place.shape, place.dtype)
        if bits is None or not same or not bits.flags.c_contiguous:
            column.coder.decode_into(self._values(column, row, keep=False)[: len(out)], out)
            return
        try:
            self._stream.read_into(place, bits)
        except OSError as error:
            raise self._damaged(f"cannot be read ({cause(error)})") from None
        self._check(column.name, row, bits)

    def gather(
        self, name: str, row: int, out: CodedRows, start: int, count: int, wanted: np.ndarray | None
    ) -> None:
        """Append the rows of the first `count` tokens of a lossy column to `out`, undecoded.

        Token 0 has slot `start`. `wanted`, bool [T], leaves out rows of other tokens; None: none.
        """
        column, tokens = self._columns[name], np.arange(count)
        if column.sparse:
            tokens = np.flatnonzero(self.predicting(row)[:count])
        rows = self._stored(column, row).cut(0, len(tokens))
        if wanted is not None:
            chosen = np.flatnonzero(wanted[tokens])
            rows, tokens = rows.take(chosen), tokens[chosen]
        out.add(rows, self._tables()[name], tokens + start)

    def rows(self, declared: Column, row: int, wanted: np.ndarray | None) -> StoredRows:
        """Return the rows of a column as `declared`: those of the tokens `wanted`, bool [T].

        `declared` has the codec of the column, or bf16, to which a lossy one is decoded.
        """
        column = self._columns[declared.name]
        rows = self._stored(column, row)
        if wanted is not None:
            stored = self.predicting(row) if column.sparse else slice(None)
            rows = rows.take(np.flatnonzero(wanted[stored]))
        if not column.lossy or declared.lossy:
            return rows
        states = torch.empty(len(rows), column.width or 1, dtype=torch.bfloat16)
        decode_rows(rows, self._tables()[column.name], states)
        bits = declared.coder.encode(states)
        return StoredRows(bits, _NO_ROWS, bits)

    def _locate(self, row: int) -> tuple[int, int]:
        """Return the record batch of a row, and its number there."""
        batch = bisect.bisect_right(self._starts, row) - 1
        return batch, row - self._starts[batch]

    def predicting(self, row: int) -> np.ndarray:
        """Return which tokens of a document have a row in sparse columns, bool [T]."""
        return predicts_supervised(self.mask(row))

    def _values(self, column: Column, row: int, keep: bool = True) -> np.ndarray:
        """Stored values (or bytes) of one document, [n] or [n, W]; `keep` as in `StreamFile`."""
        values = self._read(self._place(column, row), keep)
        self._check(column.name, row, values)
        return values

    def _place(self, column: Column, row: int) -> np.ndarray:
        """Return where the values of one document lie, [n] or [n, W]: they are not read."""
        self._look()
        batch, local = self._locate(row)
        if (view := self._views.get((batch, column.name))) is None:
            offsets, flat = self._unread(batch, column.name)
            self._check_offsets(column, batch, offsets, len(flat))
            view = self._views[batch, column.name] = offsets, flat
        offsets, flat = view
        return flat[offsets[local] : offsets[local + 1]]

    def _unread(self, batch: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets of a column of a record batch, and where its values lie."""
        array = self._batches[batch].column(name)
        self._load(array.buffers()[1])
        return list_views(array)

    # -- the file ---------------------------------------------------------------------------------

    def _look(self) -> None:
        """Begin to check anew if the file was written to since the last look."""
        if self._stream.changed():
            log.warning(
                "warning[shard-changed]: %s was written to while it was open; everything that is "
                "read of it is compared with its checksum again",
                self.name,
            )
            self._checked[:] = False
            for known in (self._checked_texts, self._checksums, self._views):
                known.clear()

    def _read(self, values: np.ndarray, keep: bool = True) -> np.ndarray:
        try:
            return self._stream.read(values, keep=keep)
        except OSError as error:  # cut off, or the disk cannot read it
            raise self._damaged(f"cannot be read ({cause(error)})") from None

    def _load(self, *buffers: pa.Buffer | None) -> None:
        try:
            self._stream.load(*buffers)
        except OSError as error:
            raise self._damaged(f"cannot be read ({cause(error)})") from None

    def _sums(self, batch: int) -> np.ndarray:
        """Return the stored checksums of a record batch, uint64 [rows, fields]."""
        if (sums := self._checksums.get(batch)) is None:
            self._load(*self._batches[batch].column(CHECKSUMS).buffers())
            sums = self._checksums[batch] = stored_checksums(self._batches[batch])
        return sums

    def _stored(self, column: Column, row: int) -> StoredRows:
        """All parts of one document's column; codes are decompressed."""
        values = self._values(column, row, keep=not column.lossy)
        if not column.lossy:
            return StoredRows(values, _NO_ROWS, values)
        rows, states = (self._values(part, row) for part in column.escape_parts)
        tokens = int((self.index.stored if column.sparse else self.index.lengths)[row])
        inside = not len(rows) or (rows[0] >= 0 and rows[-1] < tokens)
        if len(rows) != len(states) or not inside or np.any(rows[1:] <= rows[:-1]):
            what = f"not ascending rows of {column.name}, one for each of {column.name}.escape"
            raise self._damaged(what, row, f"{column.name}.escape_index")
        try:
            codes = decompress(values, tokens, column.width or 1, column.codec)
        except ValueError as error:
            raise self._damaged(f"damaged ({error})", row, column.name) from None
        return StoredRows(codes, rows, states)

    # -- checks -----------------------------------------------------------------------------------

    def damage(self) -> Iterator[tuple[int, str]]:
        """Yield row and field of every chunk whose bytes do not match its checksum.

        Raises:
            DatasetError: checksums differ from the index, or texts cannot be read.
        """
        self._look()
        for number, batch in enumerate(self._batches):
            first = self._starts[number]
            for local in range(batch.num_rows):
                self._check_row(first + local)
            self._check_texts(number)
            names = batch.schema.names[:-1]
            found = np.stack([self._chunk_sums(number, name) for name in names], axis=1)
            for local, field in np.argwhere(found != self._sums(number)).tolist():
                yield first + local, names[field]

    def _chunk_sums(self, number: int, name: str) -> np.ndarray:
        """Return the checksum of every chunk of a field in a record batch, uint64 [rows]."""
        array = self._batches[number].column(name)
        if not pa.types.is_large_list(array.type):
            return chunk_checksums([array])[:, 0]
        offsets, flat = self._unread(number, name)
        chunks = (flat[a:b] for a, b in itertools.pairwise(offsets.tolist()))
        return np.fromiter((checksum(self._read(c, keep=False)) for c in chunks), np.uint64)

    def _damaged(self, what: str, row: int | None = None, column: str = "") -> DatasetError:
        where = self.name if row is None else self.where(row)
        where += f", column {column}" if column else ""
        return DatasetError(f"{where}: {what}; copy this shard again")

    def _check(self, field: str, row: int, chunk: np.ndarray | bytes) -> None:
        """Compare a chunk with its checksum if this read is due."""
        checked, number = self._checked[row], self._fields[field]
        if not checked[-1]:
            self._check_row(row)
            checked[-1] = True
        if checked[number] and _draw() >= self._check_again:
            return
        batch, local = self._locate(row)
        if self._sums(batch)[local, number] != checksum(chunk):
            if self._is_copy:
                self.file.unlink(missing_ok=True)  # the next run downloads it again
            raise DatasetError(
                f"{self.where(row)}, column {field}: damaged: its bytes do not match "
                "their checksum; copy this shard again (`spec-data verify` lists all damage)"
            )
        checked[number] = True

    def _check_row(self, row: int) -> None:
        """Check that a row's checksums are those that the index has here."""
        expected = self.index.checksums
        batch, local = self._locate(row)
        digest = checksum(self._sums(batch)[local])
        if expected is None or expected[self.index.first + row] == digest:
            return
        raise self._damaged(
            "its checksums are not those that the index has here: damaged, swapped, renamed or of "
            "another dataset",
            row,
        )

    def _check_ids(self) -> None:
        """Check that the rows are the documents that the plan has here."""
        for number, batch in enumerate(self._batches):
            self._check_texts(number)
            planned = self.index.ids[self._starts[number] : self._starts[number + 1]]
            if not batch.column("doc_id").equals(planned):
                raise self._damaged("its documents are not those that the plan has here")

    def _check_texts(self, batch: int) -> None:
        """Check offsets and UTF-8 of a record batch's texts once, which Arrow does not do."""
        if batch in self._checked_texts:
            return
        for name in TEXTS:
            column = self._batches[batch].column(name)
            self._load(*column.buffers())
            try:
                column.validate(full=True)
                if name == "turns" and any(c.null_count for c in column.flatten().flatten()):
                    raise pa.ArrowInvalid("null values")
            except pa.ArrowInvalid as error:
                last = self._starts[batch + 1] - 1
                raise self._damaged(
                    f"rows {self._starts[batch]} to {last}, column {name}: damaged ({error})"
                ) from None
        self._checked_texts.add(batch)

    def _check_offsets(self, column: Column, batch: int, offsets: np.ndarray, stored: int) -> None:
        """Check a column's offsets int64 [rows + 1] in a record batch: lengths as in the index, and
        all within the `stored` rows."""
        first, last = self._starts[batch : batch + 2]
        lengths = np.diff(offsets)
        expected = (self.index.stored if column.sparse else self.index.lengths)[first:last]
        any_length = column.lossy or column.name.endswith((".escape_index", ".escape"))
        wrong = lengths < 0 if any_length else lengths != expected
        if wrong.any():
            local = int(wrong.argmax())
            what = f"{lengths[local]} tokens, the index says {expected[local]}"
            raise self._damaged(what, first + local, column.name)
        if offsets[0] != 0 or offsets[-1] > stored:
            raise self._damaged(
                f"rows {first} to {last - 1}, column {column.name}: offsets outside the column"
            )
