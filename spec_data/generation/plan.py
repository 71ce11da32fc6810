"""The plan of a dataset: every document, tokenised, in order, cut into units.

A unit is a fixed list of documents: one shard. The plan is a pure function of the corpus, the
tokenizer and the settings; a unit's bytes depend on nothing else, so units may run anywhere, in
any order, after any crash.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spec_data.corpus.documents import Document, cut_document
from spec_data.shards.errors import CorpusError, DatasetError
from spec_data.shards.files import dump_json, sha256_file, sha256_json, write_atomically
from spec_data.shards.packing import pack_documents
from spec_data.shards.schema import Column, predicts_supervised
from spec_data.shards.writer import UnitData, shard_bytes, write_shard
from spec_data.target.mask_forms import ROWS, SINGLE

PLAN_COLUMNS = (Column(name="input_ids", codec="int32"), Column(name="loss_mask", codec="bool8"))
LEAST_PACK_LENGTH = 512


@dataclass
class DocumentCounts:
    """Where every corpus row and every document went.

    `unrendered` counts rows (`unrendered_examples` says where the first few are), `dropped` and
    `cut` documents, by reason; `rendering` counts rows by the way their turns were proven, and what
    rendering left out of them.
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


@dataclass
class Plan:
    """Documents (as one token-column store) and the units that partition them."""

    documents: UnitData
    units: list[tuple[int, int]]
    counts: DocumentCounts
    corpus: list[dict[str, Any]]
    settings: dict[str, Any]
    pack_length: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 [N]."""
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
        """Tokens whose next token is supervised: rows of a sparse column."""
        mask, offsets = self.documents.tokens["loss_mask"], self.documents.offsets
        return int(predicts_supervised(mask, offsets).sum())

    def unit_documents(self, unit: int, columns: tuple[Column, ...]) -> UnitData:
        """Arrays for a unit's shard, with texts, turns and mask filled in and states still zero."""
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
        """`input_ids` and `loss_mask` of a unit, flat."""
        first, last = self.units[unit]
        a, b = self.documents.offsets[first], self.documents.offsets[last]
        return {name: array[a:b] for name, array in self.documents.tokens.items()}

    def unit_bytes(self, unit: int, columns: tuple[Column, ...]) -> int:
        """Exact size of a unit's shard, before any state exists."""
        return shard_bytes(self.unit_documents(unit, columns), columns)

    def utilisation(self) -> float:
        """Share of the slots of all packs that hold a token."""
        rows = sum(
            len(pack_documents(self.lengths[a:b].tolist(), self.pack_length)) for a, b in self.units
        )
        return self.tokens / (rows * self.pack_length)

    @property
    def fingerprint(self) -> str:
        """Hash of the settings: what may be resumed or mixed."""
        return sha256_json(self.settings)


class PlanBuilder:
    """Collects rendered documents: cuts, filters, de-duplicates, counts."""

    def __init__(self, max_length: int, keep_tails: bool = False) -> None:
        """Documents over `max_length` tokens are cut; so is what follows the last supervised token.

        No draft learns from such a tail: the target is causal, nothing there is drafted, and the
        teacher of the last supervised token is the state before it.
        """
        self.max_length = max_length
        self.keep_tails = keep_tails
        self.counts = DocumentCounts()
        self._dropped: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._texts: list[tuple[str, str, list[tuple[str, int, int]]]] = []

    def add(self, document: Document) -> None:
        """Take one document, or count why not."""
        self.counts.rendered += 1
        if not any(document.loss_mask[1:]):
            self._dropped["nothing-supervised"] += 1
            return
        document = self._trimmed(document)
        if len(document.input_ids) > self.max_length:  # a prefix is what serving sees too
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
        """The document up to its last supervised token, unless tails are kept."""
        tail = document.loss_mask[::-1].index(1)
        if self.keep_tails or not tail:
            return document
        self.counts.tail_tokens_trimmed += tail
        return cut_document(document, len(document.input_ids) - tail)

    def lost(self, reasons: Mapping[str, int]) -> None:
        """Count documents that rendering gave up, by reason."""
        self.counts.rendered += sum(reasons.values())
        self._dropped.update(reasons)

    def build(
        self,
        corpus: list[dict[str, Any]],
        settings: dict[str, Any],
        pack_length: int,
        bytes_per_token: int,
        max_shard_bytes: int,
    ) -> Plan:
        """Close the collection: units of consecutive documents up to `max_shard_bytes`.

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
        units = cut_units(lengths, max(1, max_shard_bytes // bytes_per_token))
        length = pack_length or max(int(lengths.max()), LEAST_PACK_LENGTH)
        return Plan(documents, units, self.counts, corpus, settings, length)


def cut_units(lengths: np.ndarray, unit_tokens: int) -> list[tuple[int, int]]:
    """Consecutive documents [first, last) of at most `unit_tokens` tokens (one is always taken)."""
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
    """Batches of rows of document numbers for one unit: the forwards of its capture.

    Packed forms fill rows by best fit; "rows" puts one document per row, sorted by length so that
    padding is small; "single" runs every document by itself.
    """
    if form == SINGLE:
        return [[[d]] for d in range(len(lengths))]
    if form == ROWS:
        batches: list[list[list[int]]] = []
        for d in sorted(range(len(lengths)), key=lambda d: (-lengths[d], d)):
            widest = lengths[batches[-1][0][0]] if batches else 0
            if batches and widest * (len(batches[-1]) + 1) <= batch_tokens:
                batches[-1].append([d])
            else:
                batches.append([[d]])
        return batches
    rows = pack_documents(lengths, pack_length)
    step = max(1, batch_tokens // pack_length)
    return [rows[i : i + step] for i in range(0, len(rows), step)]


def save_plan(folder: Path, plan: Plan) -> None:
    """Write plan.arrow, then plan.json (whose presence means the plan is whole)."""
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
    """The settings of a saved plan, or None when there is no (whole) plan."""
    return _read_meta(folder)["settings"] if (folder / "plan.json").is_file() else None


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / "plan.json"
    try:
        meta: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetError(
            f"{file}: damaged ({error}); delete {folder.parent} and generate again"
        ) from None
    return meta


def load_plan(folder: Path) -> Plan:
    """Read a saved plan.

    Raises:
        DatasetError: plan.arrow is not the one that plan.json describes.
    """
    meta = _read_meta(folder)
    file = folder / "plan.arrow"
    if not file.is_file() or sha256_file(file) != meta["documents_sha256"]:
        raise DatasetError(f"{file}: damaged; delete {folder.parent} and generate again")
    return Plan(
        _read_documents(file),
        [(a, b) for a, b in meta["units"]],
        DocumentCounts(**meta["counts"]),
        meta["corpus"],
        meta["settings"],
        meta["pack_length"],
    )


def _read_documents(file: Path) -> UnitData:
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
