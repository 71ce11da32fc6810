"""The plan of a dataset: every document, tokenised, in order, cut into units.

A unit is a fixed list of documents that becomes one shard. The plan is a pure function of the
corpus, the tokenizer and the settings. The bytes of a unit depend on nothing else, so units can be
captured on any machine, in any order, and after any crash.

Shapes: D documents of the plan, N tokens of all documents.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spec_data.capture.mask_forms import REQUESTS, ROWS, SINGLE
from spec_data.corpus.documents import CUT_ANSWERS, UNENDED, Document
from spec_data.generation.plan_file import (
    PLAN_COLUMNS,
    PlannedDocuments,
    PlanWriter,
    Prepared,
    Preparing,
    Scratch,
)
from spec_data.shards.errors import CorpusError, DatasetError
from spec_data.shards.files import (
    dump_json,
    replace_durably,
    sha256_file,
    sha256_json,
    temporary_name,
    write_atomically,
    writing,
)
from spec_data.shards.identity import count_kwargs
from spec_data.shards.packing import pack_documents
from spec_data.shards.schema import Column
from spec_data.shards.writer import UnitData, shard_bytes

# -- seen ------------------------------------------------------------------------------------------
# Which documents were added already, by digests of 16 bytes, in 16 bytes each.
#
# A Python set needs 90 to 150 bytes per digest. Here digests stand in sorted runs of numpy, and
# runs of similar length are merged, so there are few of them. A merge takes twice its bytes for a
# moment.


_DIGEST = np.dtype("S16")  # compared with all 16 bytes; zeros at the end do not matter


class Seen:
    """A growing set of digests of 16 bytes."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []  # each sorted, without repetitions, longest first

    def add(self, digests: Sequence[bytes]) -> list[bool]:
        """Add digests; return for each whether it is new, in order."""
        found = np.frombuffer(b"".join(digests), _DIGEST)
        known = np.zeros(len(found), bool)
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, found), len(run) - 1)
            known |= run[at] == found
        first = np.zeros(len(found), bool)
        run, places = np.unique(found, return_index=True)
        first[places] = True
        new = first & ~known
        self._insert(run[new[places]])
        return new.tolist()

    def _insert(self, run: np.ndarray) -> None:
        if not len(run):
            return
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]))
        self._runs.append(run)


# -- plan builder ----------------------------------------------------------------------------------
# Collect the documents of a plan: de-duplicate, write and count them.


_LITTLE = 0.01  # of the tokens: fewer that are cut off need no warning
_COMPARED = 1024  # documents that are compared with the earlier ones at once


@dataclass
class DocumentCounts:
    """What happened to every corpus row and every document.

    Attributes:
        rows: corpus rows read; bad_rows: those that could not be parsed.
        unrendered: rows without a document, by reason; unrendered_examples: the first of each.
        rendered: documents; dropped: documents that were dropped, by reason.
        cut: documents that were cut to the maximum length; tokens_cut: tokens lost by it.
        tail_tokens_trimmed: tokens after the last supervised token that were removed.
        rendering: rows by the method that proved their turns, and counts of what was left out.
        kwargs_used: chats by the template kwargs that rendered them (see shards.identity).
    """

    rows: int = 0
    bad_rows: int = 0
    unrendered: dict[str, int] = field(default_factory=dict)
    unrendered_examples: dict[str, list[str]] = field(default_factory=dict)
    rendered: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    tokens_cut: int = 0
    tail_tokens_trimmed: int = 0
    rendering: dict[str, int] = field(default_factory=dict)
    kwargs_used: dict[str, int] | None = None  # of a plan of an older release


def count_warnings(counts: Mapping[str, Any], tokens: int) -> list[str]:
    """Return what in the counts of a corpus misleads a draft, in words.

    Args:
        counts: the fields of `DocumentCounts`, as a plan or a manifest has them.
        tokens: those that are kept.
    """
    found = []
    cut, rendering = counts.get("tokens_cut", 0), counts.get("rendering", {})
    if cut > _LITTLE * (cut + tokens):
        found.append(
            f"{cut / (cut + tokens):.0%} of all tokens ({cut:,}) were cut off at the maximal "
            f"length, of {counts['cut']:,} documents: raise --max-length, or split long documents"
        )
    if unended := rendering.get(UNENDED, 0) - rendering.get(CUT_ANSWERS, 0):
        found.append(
            f"{unended:,} turns have no end-of-turn token: the chat template writes none after "
            "them, and the target's generation_config.json names none that can be appended "
            "(eos_token_id). A draft never learns to stop there"
        )
    return found


class PlanBuilder:
    """Collect prepared documents into a plan file: de-duplicate, write and count them.

    Memory holds 24 bytes per document, and the documents of one record batch.
    """

    def __init__(
        self, max_length: int, keep_tails: bool = False, folder: Path | None = None
    ) -> None:
        """Prepare documents as `Preparing` does, and write them to a temporary file in `folder`,
        or where the system puts such files; it is removed with the plan."""
        self.prepare = Preparing(max_length, keep_tails)
        self.counts = DocumentCounts()
        self.tokens = 0
        self._dropped: Counter[str] = Counter()
        self._seen = Seen()
        self._waiting: list[Prepared] = []
        self._scratch = Scratch(folder)
        self._file = self._scratch.path / "plan.arrow"
        self._writer = PlanWriter(self._file)

    def add(self, document: Document) -> None:
        """Prepare and add one document, or count it as dropped."""
        self.add_prepared(self.prepare(document))

    def add_prepared(self, document: Prepared) -> None:
        """Add one document that was prepared as `prepare` does, or count it as dropped."""
        self.counts.rendered += 1
        self.counts.cut += document.cut > 0
        self.counts.tokens_cut += document.cut
        self.counts.tail_tokens_trimmed += document.tail
        if document.dropped is not None:
            self._dropped[document.dropped] += 1
            return
        self._waiting.append(document)
        if len(self._waiting) == _COMPARED:
            self._write()

    def _write(self) -> None:
        """Write the documents that are waiting, but those that were added before."""
        waiting, self._waiting = self._waiting, []
        for document, new in zip(waiting, self._seen.add([d.digest for d in waiting]), strict=True):
            if new:
                self.tokens += len(document.mask)
                self._writer.add(document)
            else:
                self._dropped["duplicate"] += 1

    def discard(self) -> None:
        """Remove what was written."""
        self._writer.discard()
        self._scratch.remove()

    def count_rows(
        self,
        *,
        rows: int,
        bad_rows: int,
        unrendered: Mapping[str, int],
        unrendered_examples: Mapping[str, list[str]],
        rendering: Mapping[str, int],
        kwargs_used: Mapping[str, int],
        dropped: Mapping[str, int],
    ) -> None:
        """Store the counts of reading and rendering; see `DocumentCounts`.

        `dropped` counts, by reason, the documents that rendering dropped; they were never passed to
        `add`.
        """
        self.counts.rows, self.counts.bad_rows = rows, bad_rows
        self.counts.unrendered = dict(sorted(unrendered.items()))
        self.counts.unrendered_examples = dict(sorted(unrendered_examples.items()))
        self.counts.rendering = dict(rendering)
        self.counts.kwargs_used = count_kwargs(kwargs_used)
        self.counts.rendered += sum(dropped.values())
        self._dropped.update(dropped)

    def finish(self) -> PlannedDocuments:
        """Complete the file and the counts, and return the documents.

        Raises:
            CorpusError: no document is left.
            OSError: the disk is full.
        """
        self._write()
        self.counts.dropped = dict(sorted(self._dropped.items()))
        if not self.tokens:
            self.discard()
            raise CorpusError(
                f"no document is left to capture: {self.counts.rows} rows read, "
                f"{self.counts.bad_rows} bad, not rendered {self.counts.unrendered or 'none'}, "
                f"dropped {self.counts.dropped or 'none'}"
            )
        record = self._writer.finish()
        return PlannedDocuments(self._file, record.sha256, self._scratch)


# -- plan ------------------------------------------------------------------------------------------


__all__ = ["PLAN_COLUMNS", "DocumentCounts", "Plan", "load_plan", "planned", "save_plan"]

LEAST_PACK_LENGTH, MOST_PACK_LENGTH = 512, 2048
"""Of packs whose length is not given. Attention in a pack grows with the square of its length, and
so does its mask; longer documents have rows of their own."""


@dataclass
class Plan:
    """The documents, the units [first, last) that partition them, and how they came about."""

    documents: PlannedDocuments
    units: list[tuple[int, int]]
    counts: DocumentCounts
    corpus: list[dict[str, Any]]
    settings: dict[str, Any]
    pack_length: int

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 [D]."""
        return np.diff(self.documents.offsets)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.documents.offsets[-1])

    @property
    def supervised(self) -> int:
        """Supervised tokens of all documents."""
        return self.documents.supervised

    @property
    def predicting(self) -> int:
        """Number of tokens whose next token is supervised: those that a sparse column stores."""
        return self.documents.predicting

    def unit_documents(self, unit: int, columns: tuple[Column, ...]) -> UnitData:
        """Return the arrays of a unit's shard: texts, turns and mask are set, states are zero."""
        first, last = self.units[unit]
        data = self.documents
        return UnitData.allocate(
            columns,
            data.doc_ids[first:last],
            data.sources[first:last],
            data.turns[first:last],
            self.lengths[first:last].tolist(),
            self.unit_tokens(unit)["loss_mask"],
        )

    def unit_tokens(self, unit: int) -> dict[str, np.ndarray]:
        """Return `input_ids` (int32 [n]) and `loss_mask` (uint8 [n]) of the tokens of a unit."""
        first, last = self.units[unit]
        a, b = self.documents.offsets[first], self.documents.offsets[last]
        return {name: array[a:b] for name, array in self.documents.tokens.items()}

    def unit_set_tokens(self, units: Iterable[int]) -> int:
        """Return the number of tokens of several units."""
        return sum(int(self.lengths[a:b].sum()) for a, b in (self.units[u] for u in units))

    def unit_bytes(self, unit: int, columns: tuple[Column, ...]) -> int:
        """Return the exact size of a unit's shard; no state is needed for it."""
        return shard_bytes(self.unit_documents(unit, columns), columns)

    def utilisation(self) -> float:
        """Return the share of the slots of all rows that hold a token, 0 to 1."""
        slots = 0
        for a, b in self.units:
            lengths = self.lengths[a:b]
            long = lengths > self.pack_length  # each has a row of its own length
            packs = pack_documents(lengths[~long].tolist(), self.pack_length)
            slots += len(packs) * self.pack_length + int(lengths[long].sum())
        return self.tokens / slots

    @property
    def fingerprint(self) -> str:
        """Hash of the settings; only runs with the same one may be resumed or mixed."""
        return sha256_json(self.settings)


def planned(
    documents: PlannedDocuments,
    counts: DocumentCounts,
    corpus: list[dict[str, Any]],
    settings: dict[str, Any],
    pack_length: int,
    unit_tokens: int,
) -> Plan:
    """Return a plan, with units of consecutive documents of at most `unit_tokens` tokens.

    Args:
        documents, counts: what rendering resulted in.
        corpus: the manifest's entry of each source.
        settings: everything that decides the bytes of the dataset.
        pack_length: tokens that a pack holds; 0: the longest document, from 512 to 2,048.
        unit_tokens: most tokens of a unit; a longer document has a unit of its own.
    """
    lengths = np.diff(documents.offsets)
    longest = int(lengths.max())
    length = pack_length or min(max(longest, LEAST_PACK_LENGTH), MOST_PACK_LENGTH)
    return Plan(documents, cut_units(lengths, unit_tokens), counts, corpus, settings, length)


def cut_units(lengths: np.ndarray, unit_tokens: int) -> list[tuple[int, int]]:
    """Return units [first, last) of consecutive documents with at most `unit_tokens` tokens.

    `lengths` are the tokens per document, int64 [D]. A longer document is a unit of its own.
    """
    units, first, total = [], 0, 0
    for index, length in enumerate(lengths.tolist()):
        if total and total + length > unit_tokens:
            units.append((first, index))
            first, total = index, 0
        total += length
    units.append((first, len(lengths)))
    return units


def unit_batches(
    lengths: list[int], form: str, pack_length: int, batch_tokens: int
) -> list[list[list[int]]]:
    """Return the forwards of one unit: a list of batches, each a list of rows.

    A row is a list of document indices in the unit. In packed forms it is a pack, filled by best
    fit. In the form "rows" it is one document; documents are sorted by length, so that there is
    little padding. In the form "single" a batch is one document, and in the other forms, too, if
    the document is longer than a pack: its row then needs neither padding nor a mask. In the form
    "requests" a row is one document, and the rows of a batch have `batch_tokens` tokens together.
    """
    if form == SINGLE:
        return [[[d]] for d in range(len(lengths))]
    if form == REQUESTS:
        return [[[d] for d in group] for group in _in_turn(lengths, batch_tokens)]
    short = [d for d, length in enumerate(lengths) if length <= pack_length]
    alone = [[[d]] for d, length in enumerate(lengths) if length > pack_length]
    if form == ROWS:
        batches: list[list[list[int]]] = []
        for d in sorted(short, key=lambda d: (-lengths[d], d)):
            widest = lengths[batches[-1][0][0]] if batches else 0
            if batches and widest * (len(batches[-1]) + 1) <= batch_tokens:
                batches[-1].append([d])
            else:
                batches.append([[d]])
        return batches + alone
    found = pack_documents([lengths[d] for d in short], pack_length)
    packs = [[short[i] for i in pack] for pack in found]
    step = max(1, batch_tokens // pack_length)
    return [packs[i : i + step] for i in range(0, len(packs), step)] + alone


def _in_turn(lengths: list[int], most: int) -> list[list[int]]:
    """Divide documents, in their order, into groups of at most `most` tokens, or one document."""
    groups: list[list[int]] = []
    left = 0
    for d, length in enumerate(lengths):
        if length > left or not groups:
            groups.append([])
            left = most
        groups[-1].append(d)
        left -= length
    return groups


def save_plan(folder: Path, plan: Plan) -> None:
    """Write plan.arrow, then plan.json; the plan is complete if plan.json exists.

    plan.arrow is a second name of the file of the documents where the file system allows it.

    Raises:
        OSError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "plan.arrow"
    if plan.documents.file != file:
        link_or_copy(plan.documents.file, file)
    meta = {
        "settings": plan.settings,
        "fingerprint": plan.fingerprint,
        "documents_sha256": plan.documents.sha256,
        "units": [list(u) for u in plan.units],
        "counts": asdict(plan.counts),
        "corpus": plan.corpus,
        "pack_length": plan.pack_length,
    }
    write_atomically(folder / "plan.json", dump_json(meta))


def link_or_copy(source: Path, file: Path) -> None:
    """Let `file` be a second name of `source`, or a copy on another file system; durably.

    Raises:
        OSError: the disk is full; no file is left behind.
    """
    temporary = temporary_name(file)
    with writing(file, temporary):
        try:
            os.link(source, temporary)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, temporary)
            with temporary.open("rb+") as copy:
                os.fsync(copy.fileno())
        replace_durably(temporary, file)


def read_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a saved plan, or None if there is no complete plan."""
    return _read_meta(folder)["settings"] if (folder / "plan.json").is_file() else None


def read_units(folder: Path) -> list[tuple[int, int]]:
    """Return the units [first, last) of a saved plan, without reading its documents."""
    return [(first, last) for first, last in _read_meta(folder)["units"]]


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / "plan.json"
    try:
        meta: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetError(
            f"{file}: damaged ({error}); delete {folder.parent} and run `spec-data generate` again"
        ) from None
    return meta


def load_plan(folder: Path) -> Plan:
    """Return a saved plan.

    Raises:
        DatasetError: plan.arrow is not the one that plan.json describes.
    """
    meta = _read_meta(folder)
    file = folder / "plan.arrow"
    if not file.is_file() or sha256_file(file) != meta["documents_sha256"]:
        raise DatasetError(
            f"{file}: damaged; delete {folder.parent} and run `spec-data generate` again"
        )
    try:
        documents = PlannedDocuments(file, meta["documents_sha256"])
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise DatasetError(f"{file}: not a plan ({error}); delete {folder.parent}") from None
    return Plan(
        documents,
        [(a, b) for a, b in meta["units"]],
        DocumentCounts(**meta["counts"]),
        meta["corpus"],
        meta["settings"],
        meta["pack_length"],
    )
