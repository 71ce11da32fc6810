"""The plan of a dataset: every document, tokenised, in order, cut into units.

A unit is a fixed list of documents that becomes one shard. The plan is a pure function of the
corpus, the tokenizer and the settings. The bytes of a unit depend on nothing else, so units can be
captured on any machine, in any order, and after any crash.

Shapes: D documents of the plan, N tokens of all documents.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spec_data.corpus.documents import Document, cut_document
from spec_data.shards.errors import CorpusError, DatasetError
from spec_data.shards.files import dump_json, sha256_file, sha256_json, write_atomically
from spec_data.shards.identity import count_kwargs
from spec_data.shards.packing import pack_documents
from spec_data.shards.schema import Column, predicts_supervised
from spec_data.shards.writer import UnitData, shard_bytes, write_shard
from spec_data.target.mask_forms import ROWS, SINGLE

PLAN_COLUMNS = (Column(name="input_ids", codec="int32"), Column(name="loss_mask", codec="bool8"))
LEAST_PACK_LENGTH, MOST_PACK_LENGTH = 512, 2048
"""Of packs whose length is not given. Attention in a pack grows with the square of its length, and
so does its mask; longer documents have rows of their own."""


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


@dataclass
class Plan:
    """The documents, the units [first, last) that partition them, and how they came about."""

    documents: UnitData
    units: list[tuple[int, int]]
    counts: DocumentCounts
    corpus: list[dict[str, Any]]
    settings: dict[str, Any]
    pack_length: int

    @property
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
        return int(self.documents.tokens["loss_mask"].sum(dtype=np.int64))

    @property
    def predicting(self) -> int:
        """Number of tokens whose next token is supervised: those that a sparse column stores."""
        mask, offsets = self.documents.tokens["loss_mask"], self.documents.offsets
        return int(predicts_supervised(mask, offsets).sum())

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


class PlanBuilder:
    """Collect rendered documents into a plan: cut, filter, de-duplicate and count them."""

    def __init__(self, max_length: int, keep_tails: bool = False) -> None:
        """Cut documents at `max_length` tokens and, unless `keep_tails`, after the last supervised
        token.

        No draft learns from the tokens after it: the target is causal, nothing is drafted there,
        and the teacher of the last supervised token is the state before that token.
        """
        self.max_length = max_length
        self.keep_tails = keep_tails
        self.counts = DocumentCounts()
        self._dropped: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._texts: list[tuple[str, str, list[tuple[str, int, int]]]] = []

    @property
    def tokens(self) -> int:
        """Tokens of the documents that were added and kept."""
        return sum(map(len, self._ids))

    def add(self, document: Document) -> None:
        """Add one document, or count it as dropped."""
        self.counts.rendered += 1
        if not any(document.loss_mask[1:]):
            self._dropped["nothing-supervised"] += 1
            return
        document = self._trimmed(document)
        if len(document.input_ids) > self.max_length:  # serving sees prefixes too
            self.counts.cut += 1
            self.counts.tokens_cut += len(document.input_ids) - self.max_length
            document = cut_document(document, self.max_length)
            if not any(document.loss_mask[1:]):
                self._dropped["nothing-supervised-within-max-length"] += 1
                return
            document = self._trimmed(document)
        ids = np.asarray(document.input_ids, np.int32)
        mask = np.asarray(document.loss_mask, np.uint8)
        turns = [(t.role, t.start, t.end) for t in document.turns]
        doc_id = hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest()[:32]
        if doc_id in self._seen:
            self._dropped["duplicate"] += 1
            return
        self._seen.add(doc_id)
        self._ids.append(ids)
        self._masks.append(mask)
        self._texts.append((doc_id, document.source, turns))

    def _trimmed(self, document: Document) -> Document:
        """Return the document up to its last supervised token, unless tails are kept."""
        tail = document.loss_mask[::-1].index(1)
        if self.keep_tails or not tail:
            return document
        self.counts.tail_tokens_trimmed += tail
        return cut_document(document, len(document.input_ids) - tail)

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

    def build(
        self,
        corpus: list[dict[str, Any]],
        settings: dict[str, Any],
        pack_length: int,
        unit_tokens: int,
    ) -> Plan:
        """Return the plan, with units of consecutive documents of at most `unit_tokens` tokens.

        Args:
            corpus: the manifest's entry of each source.
            settings: everything that decides the bytes of the dataset.
            pack_length: tokens that a pack holds; 0: the longest document, from 512 to 2,048.
            unit_tokens: most tokens of a unit; a longer document has a unit of its own.

        Raises:
            CorpusError: no document is left.
        """
        self.counts.dropped = dict(sorted(self._dropped.items()))
        if not self._ids:
            raise CorpusError(
                f"no document is left to capture: {self.counts.rows} rows read, "
                f"{self.counts.bad_rows} bad, not rendered {self.counts.unrendered or 'none'}, "
                f"dropped {self.counts.dropped or 'none'}"
            )
        lengths = np.array([len(i) for i in self._ids], np.int64)
        documents = UnitData(
            [t[0] for t in self._texts],
            [t[1] for t in self._texts],
            [t[2] for t in self._texts],
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            {"input_ids": np.concatenate(self._ids), "loss_mask": np.concatenate(self._masks)},
        )
        units = cut_units(lengths, unit_tokens)
        longest = int(lengths.max())
        length = pack_length or min(max(longest, LEAST_PACK_LENGTH), MOST_PACK_LENGTH)
        return Plan(documents, units, self.counts, corpus, settings, length)


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
    the document is longer than a pack: its row then needs neither padding nor a mask.
    """
    if form == SINGLE:
        return [[[d]] for d in range(len(lengths))]
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


def save_plan(folder: Path, plan: Plan) -> None:
    """Write plan.arrow, then plan.json; the plan is complete if plan.json exists."""
    record = write_shard(folder / "plan.arrow", plan.documents, PLAN_COLUMNS)
    meta = {
        "settings": plan.settings,
        "fingerprint": plan.fingerprint,
        "documents_sha256": record.sha256,
        "units": [list(u) for u in plan.units],
        "counts": asdict(plan.counts),
        "corpus": plan.corpus,
        "pack_length": plan.pack_length,
    }
    write_atomically(folder / "plan.json", dump_json(meta))


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
    return Plan(
        _read_documents(file),
        [(a, b) for a, b in meta["units"]],
        DocumentCounts(**meta["counts"]),
        meta["corpus"],
        meta["settings"],
        meta["pack_length"],
    )


def _read_documents(file: Path) -> UnitData:
    """Return the documents of plan.arrow."""
    table = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
    turns = [
        [(t["role"], t["start"], t["end"]) for t in document]
        for document in table.column("turns").to_pylist()
    ]
    tokens, lengths = {}, np.zeros(0, np.int64)
    for column in PLAN_COLUMNS:
        chunks = table.column(column.name).chunks
        tokens[column.name] = np.concatenate([c.flatten().to_numpy() for c in chunks])
        lengths = np.concatenate([np.diff(c.offsets.to_numpy()) for c in chunks])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return UnitData(
        table.column("doc_id").to_pylist(),
        table.column("source").to_pylist(),
        turns,
        offsets,
        tokens,
    )
