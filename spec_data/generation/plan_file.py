"""plan.arrow: the documents of a plan, written while they are rendered and read from a memory map.

Memory holds the documents of one record batch while writing, and 8 bytes per document while
reading. Everything else is read from the file when it is asked for, and copied: a view of a memory
map must not be written to.

Shapes: D documents, N tokens of all documents.
"""

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spec_data.corpus.documents import Document
from spec_data.options.option_values import parse_size
from spec_data.shards.checksums import list_views, read_batches
from spec_data.shards.schema import Column, ShardRecord, predicts_supervised
from spec_data.shards.writer import ShardStream, UnitData

# -- prepared --------------------------------------------------------------------------------------
# From a rendered document to the one that a plan stores: cut, trimmed, packed into bytes.
#
# It is done where the document was rendered, in any process, because it costs as much as writing.


StoredTurn = tuple[str, int, int]


class Prepared(NamedTuple):
    """A document as a plan stores it, or the reason why it stores none.

    Attributes:
        source: the name of its source.
        dropped: the reason; None for a document that is stored.
        cut: tokens lost by the maximum length; tail: tokens removed after the last supervised one.
        digest: 16 bytes, the beginning of a SHA-256 over ids and mask; its doc_id in hex.
        ids, mask: int32 and uint8 per token, as bytes.
        turns: (role, start, end) of each.
    """

    source: str
    dropped: str | None = None
    cut: int = 0
    tail: int = 0
    digest: bytes = b""
    ids: bytes = b""
    mask: bytes = b""
    turns: tuple[StoredTurn, ...] = ()


@dataclass(frozen=True)
class Preparing:
    """How documents are prepared.

    No draft learns from the tokens after the last supervised one: the target is causal, nothing is
    drafted there, and the teacher of the last supervised token is the state before that token.

    Attributes:
        max_length: documents are cut at this many tokens; serving sees such beginnings, too.
        keep_tails: keep the tokens after the last supervised token.
    """

    max_length: int
    keep_tails: bool = False

    def __call__(self, document: Document) -> Prepared:
        """Return the prepared document."""
        mask = np.asarray(document.loss_mask, np.uint8)
        if not mask[1:].any():
            return Prepared(document.source, "nothing-supervised")
        length = self._trimmed(mask)
        tail, cut = len(mask) - length, max(0, length - self.max_length)
        if cut:
            mask = mask[: self.max_length]
            if not mask[1:].any():
                reason = "nothing-supervised-within-max-length"
                return Prepared(document.source, reason, cut, tail)
            length = self._trimmed(mask)
            tail += len(mask) - length
        mask = mask[:length]
        ids = np.asarray(document.input_ids[:length], np.int32)
        turns = ((t.role, t.start, min(t.end, length)) for t in document.turns if t.start < length)
        parts = ids.tobytes(), mask.tobytes()
        digest = hashlib.sha256(parts[0] + parts[1]).digest()[:16]
        return Prepared(document.source, None, cut, tail, digest, *parts, tuple(turns))

    def _trimmed(self, mask: np.ndarray) -> int:
        """Return how many tokens are left without the tail."""
        return len(mask) if self.keep_tails else int(np.flatnonzero(mask)[-1]) + 1


# -- unit size -------------------------------------------------------------------------------------
# How many tokens a unit has: as many as --max-shard-size allows, or what "auto" chooses.
#
# A unit is what a killed worker captures again, what workers share out, and the step in which a
# training run beside generation sees data. "auto" keeps it below each of:
#
#     500 MB of shard     lm4c stores 8 KB per token of an 8B target (hidden size 4,096, 3 layers
#     and
#                         hidden.final): 61,000 tokens, 6 s at 10,000 tokens/s
#     262,144 tokens      for small targets, and for slow ones: 4.4 minutes at 1,000 tokens/s
#     1/16 of the corpus  so that a small corpus, too, has units to share out and to resume from;
#     but
#                         at least one batch of the target, below which the target is used badly


AUTO = "auto"
BATCH_TOKENS = 8192
"""Tokens per forward of the target where its memory is not measured."""
_BYTES, _TOKENS, _UNITS = 500_000_000, 262_144, 16


def unit_tokens(size: str, bytes_per_token: int, tokens: int, batch_tokens: int) -> int:
    """Return the most tokens of a unit, at least 1; a longer document has a unit of its own.

    Args:
        size: --max-shard-size, such as "500MB", or "auto".
        bytes_per_token: payload bytes of a stored token.
        tokens: tokens of all documents.
        batch_tokens: tokens per forward of the target.
    """
    if size != AUTO:
        return max(1, parse_size(size) // bytes_per_token)
    most = min(_BYTES // bytes_per_token, _TOKENS)
    share = max(-(-tokens // _UNITS), batch_tokens)  # rounded up
    return max(1, min(most, share))


# -- plan file -------------------------------------------------------------------------------------


PLAN_COLUMNS = (Column(name="input_ids", codec="int32"), Column(name="loss_mask", codec="bool8"))
_ROWS, _BATCH_BYTES = 16_384, 32 << 20  # of a record batch
_SCRATCH = ".rendering-"


class Scratch:
    """A new directory, removed with this object or at the end of the program."""

    def __init__(self, folder: Path | None) -> None:
        """Make it in `folder`, or where the system puts temporary files."""
        self.path = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
        self._end = weakref.finalize(self, _remove, self.path, os.getpid())

    def remove(self) -> None:
        """Remove the directory now."""
        self._end()


def remove_scratch(folder: Path) -> None:
    """Remove what killed processes left in `folder`; no process may be at work there."""
    for left in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked one
        shutil.rmtree(path, ignore_errors=True)


class PlanWriter:
    """Write documents to a file, one record batch at a time."""

    def __init__(self, file: Path) -> None:
        """Begin to write `file`; it exists once `finish` was called."""
        self._stream = ShardStream(file, PLAN_COLUMNS)
        self._waiting: list[Prepared] = []
        self._bytes = 0

    def add(self, document: Prepared) -> None:
        """Add a document.

        Raises:
            OSError: the disk is full.
        """
        self._waiting.append(document)
        self._bytes += len(document.ids) + len(document.mask)
        if len(self._waiting) == _ROWS or self._bytes >= _BATCH_BYTES:
            self._write()

    def finish(self) -> ShardRecord:
        """Complete the file, and return what describes it.

        Raises:
            OSError: the disk is full; no file is left behind.
        """
        self._write()
        return self._stream.finish()

    def discard(self) -> None:
        """Remove what was written."""
        self._stream.discard()

    def _write(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if not waiting:
            return
        lengths = [len(d.mask) for d in waiting]
        unit = UnitData(
            [d.digest.hex() for d in waiting],
            [d.source for d in waiting],
            [list(d.turns) for d in waiting],
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            {
                "input_ids": np.frombuffer(b"".join(d.ids for d in waiting), np.int32),
                "loss_mask": np.frombuffer(b"".join(d.mask for d in waiting), np.uint8),
            },
        )
        self._stream.write(unit)


class PlannedDocuments:
    """The documents of a plan file.

    Attributes:
        file: the file, with the hash `sha256`. It may be removed while this object exists.
        offsets: document d has tokens offsets[d] to offsets[d + 1], int64 [D + 1].
        tokens: `input_ids` (int32) and `loss_mask` (uint8) of all documents, [N] each: index them
            with a slice or an array of integers.
        doc_ids, sources, turns: sequences [D] of texts, texts, and lists of (role, start, end).
    """

    def __init__(self, file: Path, sha256: str, kept: Any = None) -> None:
        """Map `file`, whose hash is `sha256`; `kept` must live as long as this object.

        Raises:
            pa.ArrowInvalid, OSError: it is no plan file.
        """
        self.file, self.sha256, self._kept = file, sha256, kept
        self._batches = read_batches(file)[1]
        ends = [0]
        lengths = [np.zeros(1, np.int64)]
        for batch in self._batches:
            lengths.append(np.diff(list_views(batch.column("loss_mask"))[0]))
            ends.append(ends[-1] + batch.num_rows)
        self.offsets = np.cumsum(np.concatenate(lengths), dtype=np.int64)
        starts = self.offsets[ends]
        self.tokens: Mapping[str, FlatColumn] = {
            c.name: FlatColumn([list_views(b.column(c.name))[1] for b in self._batches], starts)
            for c in PLAN_COLUMNS
        }
        self.doc_ids = RowColumn(self._batches, "doc_id", ends)
        self.sources = RowColumn(self._batches, "source", ends)
        self.turns = RowColumn(self._batches, "turns", ends)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the ids and sources of all documents."""
        names = ("doc_id", "source")
        columns = [batch.column(name) for batch in self._batches for name in names]
        return sum(pc.sum(pc.binary_length(column)).as_py() for column in columns)

    @cached_property
    def supervised(self) -> int:
        """Supervised tokens of all documents."""
        return sum(int(v.sum(dtype=np.int64)) for v in self.tokens["loss_mask"].parts)

    @cached_property
    def predicting(self) -> int:
        """Number of tokens whose next token is supervised."""
        total = 0
        for batch in self._batches:
            offsets, mask = list_views(batch.column("loss_mask"))
            total += int(predicts_supervised(mask, offsets).sum())
        return total

    def select(self, documents: Sequence[int]) -> UnitData:
        """Return some documents, in the order of their numbers in `documents`."""
        bounds = self.offsets
        spans = [np.arange(bounds[d], bounds[d + 1]) for d in documents]
        flat = np.concatenate(spans) if spans else np.zeros(0, np.int64)
        return UnitData(
            [self.doc_ids[d] for d in documents],
            [self.sources[d] for d in documents],
            [self.turns[d] for d in documents],
            np.concatenate([[0], np.cumsum([len(s) for s in spans])]).astype(np.int64),
            {name: values[flat] for name, values in self.tokens.items()},
        )


class FlatColumn:
    """The values of a token column, [N], in parts that follow each other; indexing copies.

    Part p has the values starts[p] to starts[p + 1].
    """

    def __init__(self, parts: list[np.ndarray], starts: np.ndarray) -> None:
        self.parts = parts
        self._starts = starts

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        """Return the values of a slice without a step, or of an array of numbers int64 [n]."""
        if isinstance(index, np.ndarray):
            return self._gathered(index)
        first, last, step = index.indices(len(self))
        last = max(first, last)
        assert step == 1
        found = [self.parts[0][:0]]
        at = int(np.searchsorted(self._starts, first, "right")) - 1
        while at < len(self.parts) and self._starts[at] < last:
            start = int(self._starts[at])
            found.append(self.parts[at][max(0, first - start) : last - start])
            at += 1
        return np.concatenate(found)

    def _gathered(self, index: np.ndarray) -> np.ndarray:
        found = np.empty(len(index), self.parts[0].dtype)
        part = np.searchsorted(self._starts, index, "right") - 1
        for p in np.unique(part).tolist():
            own = part == p
            found[own] = self.parts[p][index[own] - self._starts[p]]
        return found


class RowColumn(Sequence[Any]):
    """A column with one value per document, [D], in record batches that follow each other."""

    def __init__(self, batches: list[pa.RecordBatch], name: str, ends: list[int]) -> None:
        self._columns = [batch.column(name) for batch in batches]
        self._ends = np.array(ends, np.int64)
        self._turns = name == "turns"

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, int | np.integer):
            if not -len(self) <= index < len(self):
                raise IndexError(index)
            index = int(index) % len(self)
            return self[index : index + 1][0]
        first, last, step = index.indices(len(self))
        last = max(first, last)
        found: list[Any] = []
        at = int(np.searchsorted(self._ends, first, "right")) - 1
        while at < len(self._columns) and self._ends[at] < last:
            start = int(self._ends[at])
            begin = max(0, first - start)
            found += self._values(self._columns[at].slice(begin, last - start - begin))
            at += 1
        return found[::step]

    def __iter__(self) -> Iterator[Any]:
        names: dict[Any, Any] = {}  # few sources, many documents: equal texts are one object
        for column in self._columns:
            values = self._values(column)
            yield from values if self._turns else (names.setdefault(v, v) for v in values)

    def _values(self, column: pa.Array) -> list[Any]:
        values: list[Any] = column.to_pylist()
        if self._turns:
            return [[(t["role"], t["start"], t["end"]) for t in turns] for turns in values]
        return values
