"""The page of a dataset: its documents, the worst first, where they are from, what they cost.

`dataset_page` is that of a sealed dataset. `plan_page` is that of a plan, before any capture: the
same documents and masks, rendered by the code of `generate`.

Shapes: D documents, T tokens of a document.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import structs
from transformers import PreTrainedTokenizerBase

import spec_data
from spec_data.corpus.documents import count_warnings
from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup
from spec_data.models.tokenizer import load_tokenizer
from spec_data.pages.page import (
    Column,
    Figure,
    Note,
    Page,
    Part,
    Section,
    Table,
    Viewer,
    listed,
    shown,
    with_rows,
)
from spec_data.pages.report import captured_tokens, columns_table, counts_table, dataset_lines
from spec_data.pages.token_texts import TokenTexts
from spec_data.shards.packing import even_sample, runs, sample_documents
from spec_data.shards.pins import split_pin
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import ALL, Manifest
from spec_data.terminal.progress import progress, size
from spec_data.views.select import document_scores

DOCUMENTS = 1000
"""Documents that a page shows token by token unless --documents says otherwise."""
MOST_TOKENS = 4_000_000
"""About so many tokens are in a page at most, with about 5 bytes each."""
_SOURCES = 50  # in a table
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


def dataset_page(data: str | Path, documents: int = DOCUMENTS) -> Page:
    """Return the page of a sealed dataset; equal datasets and arguments have equal pages.

    Args:
        data: a directory or a URL. documents: how many the viewer holds at most; 0: no viewer.

    Raises:
        MissingError, DatasetError: the dataset is not sealed, or damaged.
        TargetError: its tokenizer cannot be loaded.
    """
    dataset = HiddenStatesDataset(data)
    manifest, totals = dataset.manifest, dataset.manifest.totals
    tokens: list[Part] = [Note(text=text, warning=True) for text in manifest.suspicions]
    if documents:
        tokens.append(_stored_documents(dataset, documents))
    sources, columns = dataset.index.column("source"), manifest.columns
    rows = dataset_lines(manifest)
    about = Table(title="", columns=[("", "text"), ("", "text")], rows=rows)
    sections = [
        Section(title="Tokens", parts=tokens),
        _documents(dataset.lengths, dataset.supervised, sources, manifest),
        Section(title="Bytes", parts=[columns_table(columns, totals.tokens, totals.supervised)]),
        Section(title="What it is", parts=[about]),
    ]
    if manifest.documents.rendered:
        counts = structs.asdict(manifest.documents)
        sections.append(_left_out(counts, captured_tokens(manifest)))
    kinds = sources.unique().to_pylist()
    lead = (
        f"{totals.documents:,} documents of {listed(kinds)}, with the states of "
        f"{len(manifest.layers)} layers of {manifest.target.name}; {manifest.policy}."
    )
    per_token = f"bytes per token, {size(totals.bytes)} in all"
    figures: list[Figure] = [
        (f"supervised of {totals.tokens:,} tokens", totals.supervised, "count"),
        (per_token, totals.bytes / max(totals.tokens, 1) or None, "number"),
    ]
    if manifest.agreement is not None:
        all_of = manifest.agreement.total
        own = shown(all_of.own_share, "share")
        name = f"the target's first choice; own samples {own}"
        figures.insert(1, (name, all_of.share, "share"))
    return _page(dataset_name(data).name, "Dataset", lead, figures, sections)


def plan_page(corpus: Sequence[str], setup: Setup, plan: Plan, documents: int = DOCUMENTS) -> Page:
    """Return the page of what `generate` would capture; the viewer holds `documents` at most."""
    viewer = TokenViewer(setup.tokenizer)
    for number in shown_documents(plan.lengths, documents):
        one = plan.documents.read(number, number + 1)
        ids, mask = one.tokens["input_ids"], one.tokens["loss_mask"]
        viewer.add(number, one.doc_ids[0], one.sources[0], ids, mask, one.turns[0])
    fields = ("source", "kind", "format", "rows", "bad", "unrendered")
    sources = Table(
        title="Sources as they were read",
        columns=[(name, "count" if i > 2 else "text") for i, name in enumerate(fields)],
        rows=[[getattr(source, name) for name in fields] for source in plan.corpus],
    )
    supervised = plan.documents.supervised
    overview: list[Part] = [sources]
    if 0 < setup.options.limit <= plan.counts.read:
        overview.append(Note(text=f"Only the first {plan.counts.read:,} rows were read (--limit)."))
    bad = [[source.source, text] for source in plan.corpus for text in source.bad_examples]
    overview += _examples("Bad rows", "source", bad)
    sections = [
        Section(title="Tokens", parts=[viewer.part(len(plan.lengths))]),
        _documents(plan.lengths, supervised, pa.array(plan.documents.sources)),
        Section(title="Corpus", parts=overview),
        _left_out(structs.asdict(plan.counts), plan.tokens),
    ]
    names = [Path(source.rstrip("/")).name or source for source in corpus]
    lead = (
        f"What spec-data generate would capture of {listed(names)}, rendered, masked and cut as it "
        f"does it: {plan.tokens:,} tokens. Nothing is captured yet."
    )
    figures: list[Figure] = [
        (f"documents of {plan.counts.read:,} rows", len(plan.lengths), "count"),
        ("supervised tokens", int(supervised.sum()), "count"),
        ("share supervised", int(supervised.sum()) / max(plan.tokens, 1), "share"),
    ]
    return _page(", ".join(names), "Plan of a dataset", lead, figures, sections)


def _page(
    title: str, kind: str, lead: str, figures: Sequence[Figure], sections: Sequence[Section]
) -> Page:
    footer = f"spec-data {spec_data.__version__}"
    kept = [section for section in sections if section.parts]
    return Page(title=title, kind=kind, lead=lead, figures=figures, sections=kept, footer=footer)


def dataset_name(data: str | Path) -> Path:
    """Return the path (or the URL as one) of a dataset, so that its last part is a name."""
    path = Path(split_pin(data)[0])
    return path.resolve() if path.name in ("", "..") else path


# -- figures ---------------------------------------------------------------------------------------


def _examples(title: str, name: str, rows: list[list[str]]) -> list[Part]:
    columns: list[Column] = [(name, "text"), ("message", "text")]
    return [Table(title=title, columns=columns, rows=rows)] if rows else []


def _documents(
    lengths: np.ndarray,
    supervised: np.ndarray,
    sources: pa.Array | pa.ChunkedArray,
    manifest: Manifest | None = None,
) -> Section:
    """Return lengths and sources: int64 [D] twice, and the source of each document, texts [D]."""
    table = pa.table({"source": sources, "tokens": lengths, "supervised": supervised})
    sums = [("tokens", "count"), ("tokens", "sum"), ("supervised", "sum")]
    grouped = table.group_by("source", use_threads=False).aggregate(sums).to_pylist()
    columns: list[Column] = [("source", "text"), ("documents", "count"), ("tokens", "count")]
    columns += [("supervised tokens", "count"), ("supervised", "share")]
    rows: list[list[Any]] = []
    for one in sorted(grouped, key=lambda one: -one["tokens_sum"])[:_SOURCES]:
        tokens, taught = one["tokens_sum"], one["supervised_sum"]
        rows.append([one["source"], one["tokens_count"], tokens, taught, taught / max(tokens, 1)])
    note = f"The {_SOURCES} largest of {len(grouped):,}. " if len(grouped) > _SOURCES else ""
    if manifest and manifest.agreement:
        columns += [("top-1", "share"), ("own top-1", "share")]
        columns += [("NLL", "number"), ("own NLL", "number")]
        for row in rows:
            agreement = manifest.agreement.sources.get(row[0])
            figures = ("share", "own_share", "nll", "own_nll")
            row += [getattr(agreement, name, None) for name in figures]
        note += (
            "Top-1: supervised tokens that are the target's arg max. NLL: their mean "
            "negative log-likelihood, in nats. Own: the same of text that the target samples. "
            f"The responses are recorded as {manifest.policy}."
        )
    quantiles = np.quantile(lengths, _QUANTILES, method="lower").tolist()
    longest = Table(
        title="Length of documents",
        columns=[("share of the documents", "share"), ("tokens at most", "count")],
        rows=list(zip(_QUANTILES, quantiles, strict=True)),
    )
    by_source = Table(title="Sources", columns=columns, rows=rows, note=note)
    return Section(title="Documents", parts=[by_source, longest])


def _left_out(counts: Mapping[str, Any], tokens: int | None) -> Section:
    """Return what became of every row and document; `tokens` as for `count_warnings`."""
    warnings = [f"{text[0].upper()}{text[1:]}." for text in count_warnings(counts, tokens)]
    parts: list[Part] = [Note(text=text, warning=True) for text in warnings]
    parts.append(counts_table(counts))
    unrendered = counts.get("unrendered_examples", {})
    examples = [[reason, texts[0]] for reason, texts in unrendered.items() if texts]
    parts += _examples("An example of each reason", "reason", examples)
    return Section(title="What was left out", parts=parts)


# -- documents token by token ----------------------------------------------------------------------


def shown_documents(lengths: np.ndarray, most: int) -> list[int]:
    """Return the numbers of the documents of a page: at most `most`, about MOST_TOKENS together.

    `lengths` are the tokens per document, int64 [D].
    """
    return even_sample(range(len(lengths)), min(most, len(sample_documents(lengths, MOST_TOKENS))))


class TokenViewer:
    """Documents token by token, in the compact form that `viewer.js` describes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._texts = TokenTexts(tokenizer)
        self._rows: dict[int, int] = {}  # of the table of tokens, by id
        self._documents: list[dict[str, Any]] = []
        self._scored = False

    def add(
        self,
        number: int,
        name: str,
        source: str,
        ids: np.ndarray,
        mask: np.ndarray,
        turns: Sequence[tuple[str, int, int]],
        choice: np.ndarray | None = None,
        scores: Sequence[float] = (),
    ) -> None:
        """Add the document of this number, id and source.

        Args:
            ids, mask: tokens, and 1 at supervised ones, [T].
            turns: (role, start, end) of the turns that may be supervised.
            choice: the target's first choice at every token, -1 where it is not stored, [T]; None:
                there is no target yet.
            scores: share of first choices and NLL of the document, nan where not known.
        """
        head = f"Document {number:,} · {source} · {len(ids):,} tokens, {np.count_nonzero(mask):,} "
        supervised, self._scored = int(np.count_nonzero(mask)), bool(scores)
        document: dict[str, Any] = {
            "number": number,
            "row": [number, len(ids), *(scores or (supervised,)), source],
            "head": head + "supervised",
            "id": name,
            "t": self._rows_of(ids),
            "m": runs(mask).ravel().tolist(),
            "turns": [list(turn) for turn in turns],
        }
        if choice is not None:
            stored, wrong = choice >= 0, np.flatnonzero((choice >= 0) & (choice != ids))
            document["known"] = runs(stored).ravel().tolist()
            pairs = np.stack([wrong, np.array(self._rows_of(choice[wrong]), np.int64)], 1)
            document["wrong"] = pairs.ravel().tolist()
            if count := np.count_nonzero(stored):
                share = shown(1 - len(wrong) / count, "share")
                document["head"] += f" · {share} the target's first choice"
        self._documents.append(document)

    def _rows_of(self, ids: np.ndarray) -> list[int]:
        return [self._rows.setdefault(token, len(self._rows)) for token in ids.tolist()]

    def part(self, total: int) -> Viewer:
        """Return the viewer; `total` documents are in the dataset."""
        count, tokens = len(self._documents), list(self._rows)
        note = f"This page holds {count:,} of {total:,} documents, evenly spaced."
        keys = [["sup", "supervised: learned by drafts"], ["special", "special token"]]
        columns: list[Column] = [("document", "count"), ("tokens", "count")]
        columns += [("supervised", "count"), ("source", "text")]
        sorts: list[Any] = [["in order", 0, 1], ["longest", 1, -1], ["least supervised", 2, 1]]
        if any("known" in document for document in self._documents):
            keys.append(["wrong", "the target would choose another token"])
        if self._scored:
            columns[2:3] = [("top-1", "share"), ("NLL", "number")]
            sorts = [["lowest top-1", 2, 1], ["highest NLL", 3, -1], *sorts[:2]]
        return Viewer(
            data={
                "note": note,
                "noun": "document",
                "item": "token",
                "keys": keys,
                "columns": columns,
                "sorts": sorts,
                "texts": self._texts.table(tokens),
                "tokens": tokens,
                "special": [i for i, token in enumerate(tokens) if token in self._texts.special],
                "documents": with_rows(columns, self._documents),
            }
        )


def _stored_documents(dataset: HiddenStatesDataset, documents: int) -> Viewer:
    """Return the viewer of some documents of a dataset."""
    viewer = TokenViewer(load_tokenizer(dataset.target_dir))
    opened = HiddenStatesDataset(dataset.location, ["input_ids", "loss_mask", "target_argmax"])
    every = dataset.manifest.teacher == ALL
    numbers = shown_documents(dataset.lengths, documents)
    nll = dataset.manifest.supervision == "final-hidden"  # others lack logits, or have gigabytes
    scores = np.stack(document_scores(dataset, np.array(numbers, np.int64), nll), 1).tolist()
    bar = progress(numbers, desc="documents", unit="docs", leave=False)
    for number, score in zip(bar, scores, strict=True):
        row = opened[number]
        mask = row["loss_mask"].numpy()
        choice = np.full(len(mask), -1, np.int64)  # nothing predicts the first token
        choice[1:] = np.where(every | (mask[1:] != 0), row["target_argmax"].numpy()[:-1], -1)
        ids, turns = row["input_ids"].numpy(), opened.turns_of(number)
        viewer.add(number, row["doc_id"], row["source"], ids, mask, turns, choice, score)
    return viewer.part(len(dataset))
