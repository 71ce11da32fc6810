"""The page of a dataset: what is in it, what it costs, how it was proven, and its documents.

`dataset_page` is that of a sealed dataset. `plan_page` is that of a plan, before any capture: the
same documents and masks, rendered by the code of `generate`, and what was left out.

Shapes: D documents, T tokens of a document, K of them with a stored prediction, H channels, V.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from msgspec import structs
from torch import Tensor

import spec_data
from spec_data.generation.plan import Plan, count_warnings
from spec_data.generation.setup import Setup
from spec_data.models.reading import load_tokenizer
from spec_data.pages.page import Axis, Bars, Figures, Note, Page, Part, Section, Table, histogram
from spec_data.pages.viewer import (
    TeacherView,
    ViewedDocument,
    affordable_sample,
    sample_text,
    shown_documents,
    token_viewer,
)
from spec_data.report import column_payload, counts_rows, dataset_lines
from spec_data.shards.checksums import numbers
from spec_data.shards.even_sample import even_sample
from spec_data.shards.likelihood_text import suspicions
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import (
    ALL,
    FINAL,
    Manifest,
    PackingRecord,
    apply_head,
    predicts_supervised,
)
from spec_data.terminal.progress import progress

DOCUMENTS = 1000
"""Documents that the viewer of a page holds unless --documents says otherwise."""
SAMPLED = 32
"""Documents in which norms are measured, and for which logits are computed unless --scored."""
OPERATIONS = 4e12
"""Floating-point operations for logits unless --scored says otherwise: about a minute on a CPU."""
OUTLIER = 10.0
"""A channel stands out if its root mean square is so many times the median channel's."""
_LOGITS = 64  # tokens whose logits are in memory
_MASKS = 16_384  # documents whose masks are in memory
_SOURCES = 20  # in charts; tables have more
_TABLE_SOURCES = 50


def dataset_page(data: str | Path, documents: int = DOCUMENTS, scored: int | None = None) -> Page:
    """Return the page of a sealed dataset; equal datasets and arguments have equal pages.

    Args:
        data: a directory or a URL. documents: how many the viewer holds at most.
        scored: for how many of them the target's entropy and the probability of every token are
            computed; None: as many as a minute on a CPU allows, at most SAMPLED.

    Raises:
        MissingError, DatasetError: the dataset is not sealed, or damaged.
        TargetError: its tokenizer cannot be loaded.
    """
    dataset = HiddenStatesDataset(data)
    manifest = dataset.manifest
    shown = shown_documents(dataset.lengths, documents)
    sampled = even_sample(shown, SAMPLED)
    sections = [
        _overview(manifest),
        _storage(manifest),
        _documents(dataset.lengths, dataset.supervised, dataset.index.column("source")),
    ]
    if manifest.documents.rendered:
        sections.append(_counts(structs.asdict(manifest.documents), manifest.totals.tokens))
    if manifest.target.converted is None:  # nothing was packed: the states were read
        sections.append(_packing(manifest.packing))
    sections.append(_agreement(manifest))
    sections.append(_norms(column_norms(dataset, sampled), len(sampled), len(dataset)))
    sections.append(_tokens(dataset, shown, _scored(dataset, shown, scored)))
    return Page(
        title=dataset_name(data).name,
        kind="Dataset",
        sections=sections,
        footer=f"spec-data {spec_data.__version__}",
    )


def plan_page(setup: Setup, plan: Plan, documents: int = DOCUMENTS) -> Page:
    """Return the page of what `generate` would capture; the viewer holds `documents` at most."""
    supervised = _supervised(plan)
    sources = pa.array(plan.documents.sources)
    shown = shown_documents(plan.lengths, documents)
    note = sample_text(len(shown), len(plan.lengths))
    viewer = token_viewer(setup.tokenizer, [_planned(plan, n) for n in shown], note)
    names = [Path(source.rstrip("/")).name or source for source in setup.rows.sources]
    return Page(
        title=", ".join(names),
        kind="Plan of a dataset",
        sections=[
            _plan_overview(setup, plan),
            _counts(asdict(plan.counts), plan.tokens),
            _documents(plan.lengths, supervised, sources),
            Section(title="Tokens", parts=[viewer]),
        ],
        footer=f"spec-data {spec_data.__version__}",
    )


def dataset_name(data: str | Path) -> Path:
    """Return the path (or the URL as one) of a dataset, so that its last part is a name."""
    path = Path(data)
    return path.resolve() if path.name in ("", "..") else path


# -- what is in it ---------------------------------------------------------------------------------


def _overview(manifest: Manifest) -> Section:
    totals = manifest.totals
    tokens = max(totals.tokens, 1)
    figures = Figures(
        items=[
            ("documents", totals.documents, "count"),
            ("tokens", totals.tokens, "count"),
            ("supervised tokens", totals.supervised, "count"),
            ("share supervised", totals.supervised / tokens, "share"),
            ("bytes of all shards", totals.bytes, "bytes"),
            ("bytes per token", totals.bytes / tokens, "number"),
        ]
    )
    above = {name for name, _, _ in figures.items}
    rows = [[name.strip(), value] for name, value in dataset_lines(manifest) if name not in above]
    facts = Table(title="What it is", columns=[("", "text"), ("", "text")], rows=rows)
    warnings = [Note(text=text, warning=True) for text in suspicions(manifest)]
    return Section(title="Overview", parts=[figures, *warnings, facts])


def _plan_overview(setup: Setup, plan: Plan) -> Section:
    rendering = setup.rendering
    figures = Figures(
        items=[
            ("documents", len(plan.lengths), "count"),
            ("tokens", plan.tokens, "count"),
            ("supervised tokens", plan.documents.supervised, "count"),
            ("share supervised", plan.documents.supervised / plan.tokens, "share"),
            ("longest document", int(plan.lengths.max()), "count"),
            ("slots of packs filled", plan.utilisation(), "share"),
        ]
    )
    settings = Table(
        title="How rows become documents",
        columns=[("", "text"), ("", "text")],
        rows=[
            ["target", setup.target["name"]],
            ["supervised tokens (--mask)", rendering.mask],
            ["cut at (--max-length)", f"{rendering.max_length:,} tokens"],
            ["chat template kwargs", str(rendering.template_kwargs)],
        ],
    )
    fields = ("source", "kind", "format", "rows", "bad", "unrendered")
    sources = Table(
        title="Sources as they were read",
        columns=[(name, "count" if i > 2 else "text") for i, name in enumerate(fields)],
        rows=[[source[name] for name in fields] for source in plan.corpus],
    )
    parts: list[Part] = [figures, settings, sources]
    if 0 < setup.rows.limit <= plan.counts.rows:
        parts.append(Note(text=f"Only the first {plan.counts.rows:,} rows were read (--limit)."))
    for source in plan.corpus:
        parts += _source_notes(source)
    bad = [[source["source"], text] for source in plan.corpus for text in source["bad_examples"]]
    if bad:
        columns = [("source", "text"), ("problem", "text")]
        parts.append(Table(title="Bad rows", columns=columns, rows=bad))  # type: ignore[arg-type]
    text = "Rendered, masked and cut as spec-data generate does it. Nothing is captured yet."
    return Section(title="Overview", parts=parts, text=text)


def _source_notes(source: dict[str, Any]) -> list[Part]:
    """Say what of a source's rows no draft sees."""
    name, notes = source["source"], list[Part]()
    if left := source["template_left_out"]:
        kinds = ", ".join(f"{kind} ({count:,})" for kind, count in left.items())
        text = f"{name}: the chat template left out {kinds}, so no draft sees them."
        notes.append(Note(text=text, warning=True))
    if unused := source["unused_columns"]:
        notes.append(Note(text=f"{name}: columns that are not used: {', '.join(unused)}."))
    return notes


def _supervised(plan: Plan) -> np.ndarray:
    """Return the supervised tokens per document, int64 [D]."""
    offsets, mask = plan.documents.offsets, plan.documents.tokens["loss_mask"]
    counts = [np.zeros(0, np.int64)]
    for first in range(0, len(plan.lengths), _MASKS):
        bounds = offsets[first : first + _MASKS + 1]
        ends = np.concatenate([[0], np.cumsum(mask[bounds[0] : bounds[-1]] != 0)])
        counts.append(np.diff(ends[bounds - bounds[0]]))
    return np.concatenate(counts)


def _planned(plan: Plan, number: int) -> ViewedDocument:
    data = plan.documents.read(number, number + 1)
    return ViewedDocument(
        number=number,
        name=data.doc_ids[0],
        source=data.sources[0],
        ids=data.tokens["input_ids"],
        mask=data.tokens["loss_mask"],
        turns=data.turns[0],
    )


def _documents(
    lengths: np.ndarray, supervised: np.ndarray, sources: pa.Array | pa.ChunkedArray
) -> Section:
    """Return lengths and sources: int64 [D] twice, and the source of each document, texts [D]."""
    charts = [
        histogram(values, title, f"{what} per document", "documents", note=_quantiles(values, what))
        for values, title, what in (
            (lengths, "Length of documents", "tokens"),
            (supervised, "Supervised tokens", "supervised tokens"),
        )
    ]
    return Section(
        title="Documents",
        parts=[*charts, _source_table(lengths, supervised, sources)],
        text="A document is one conversation or text, as token ids. Drafts learn its supervised "
        "tokens.",
    )


def _quantiles(values: np.ndarray, what: str) -> str:
    low, middle, high = (int(np.quantile(values, q, method="lower")) for q in (0.05, 0.5, 0.95))
    return (
        f"Median {middle:,} {what}; 5 % have at most {low:,}, 5 % have more than {high:,}; the "
        f"most is {int(values.max()):,}."
    )


def _source_table(
    lengths: np.ndarray, supervised: np.ndarray, sources: pa.Array | pa.ChunkedArray
) -> Table:
    whole = sources.combine_chunks() if isinstance(sources, pa.ChunkedArray) else sources
    coded = whole.dictionary_encode()
    names, number = coded.dictionary.to_pylist(), numbers(coded.indices)
    columns = [
        np.bincount(number, weights, len(names)).astype(np.int64).tolist()
        for weights in (None, lengths.astype(np.float64), supervised.astype(np.float64))
    ]
    rows = [
        [name, documents, tokens, own, own / max(tokens, 1)]
        for name, documents, tokens, own in zip(names, *columns, strict=True)
    ]
    rows.sort(key=lambda row: -row[2])
    note = f"The {_TABLE_SOURCES} largest of {len(rows):,}." if len(rows) > _TABLE_SOURCES else ""
    return Table(
        title="Sources",
        columns=[
            *(("source", "text"), ("documents", "count"), ("tokens", "count")),
            *(("supervised tokens", "count"), ("supervised", "share")),
        ],
        rows=rows[:_TABLE_SOURCES],
        note=note,
    )


def _counts(counts: dict[str, Any], tokens: int) -> Section:
    """Return what became of every row and document; `tokens` are those that are kept."""
    reasons = {"bad row": counts["bad_rows"]}
    reasons |= {f"not rendered: {name}": n for name, n in counts["unrendered"].items()}
    reasons |= {f"dropped: {name}": n for name, n in counts["dropped"].items()}
    left = {name: n for name, n in reasons.items() if n}
    parts: list[Part] = [
        Note(text=f"{text[0].upper()}{text[1:]}.", warning=True)
        for text in count_warnings(counts, tokens)
    ]
    if left:
        chart = Bars(
            title="Rows and documents left out",
            x="reason",
            y=Axis(title="rows or documents", format="count", least=0),
            labels=list(left),
            series={"left out": list(left.values())},
        )
        parts.append(chart)
    table = Table(
        title="From rows to documents",
        columns=[("", "text"), ("count", "count")],
        rows=[[name.strip(), value] for name, value in counts_rows(counts)],
        note="" if left or counts["cut"] else "Nothing was left out.",
    )
    parts.append(table)
    examples = [
        [name, messages[0]]
        for name, messages in counts.get("unrendered_examples", {}).items()
        if messages
    ]
    if examples:
        columns = [("reason", "text"), ("message", "text")]
        title = "An example of each reason"
        parts.append(Table(title=title, columns=columns, rows=examples))  # type: ignore[arg-type]
    return Section(title="What was left out", parts=parts)


# -- what it costs, and how it was proven ----------------------------------------------------------


def _storage(manifest: Manifest) -> Section:
    totals = manifest.totals
    tokens = max(totals.tokens, 1)
    payload = column_payload(manifest.columns, totals.tokens, totals.supervised)
    rows: list[list[Any]] = []
    figures = ("mse_median", "mse_max", "kl", "escaped")
    for column in manifest.columns:
        row = [column.name, column.codec, payload[column.name] / tokens, payload[column.name]]
        rows.append([*row, *(getattr(column.error, name, None) for name in figures)])
    chart = Bars(
        title="Bytes per token, by column",
        x="column",
        y=Axis(title="bytes per token", least=0),
        labels=[row[0] for row in rows],
        series={"bytes per token": [row[2] for row in rows]},
    )
    table = Table(
        title="Columns",
        columns=[
            *(("column", "text"), ("codec", "text"), ("bytes per token", "number")),
            *(("payload", "bytes"), ("error", "number"), ("worst channel", "number")),
            *(("teacher KL", "number"), ("escaped", "share")),
        ],
        rows=rows,
        note="Error: mean squared error of a channel over its variance, median over channels, as "
        "measured on held-out documents; a dash: the column is exact. Teacher KL: of the teacher's "
        "distribution, in nats. Columns that hold only some tokens count as their average.",
    )
    return Section(title="Bytes", parts=[chart, table])


def _packing(packing: PackingRecord) -> Section:
    parts: list[Part] = []
    if packing.utilisation is not None:
        item = ("slots that hold a token", packing.utilisation, "share")
        parts.append(Figures(items=[item]))  # type: ignore[list-item]
    table = Table(
        title="Masks that were tried",
        columns=[("mask", "text"), ("difference from unpacked states", "number")],
        rows=[[*row] for row in packing.differences.items()] or [[packing.form, None]],
        note=f"Used: {packing.form}. Allowed: {packing.tolerance:.1e}, relative.",
    )
    return Section(
        title="Packing at capture",
        parts=[*parts, table],
        text="Documents share the rows of the target's batch. Packed states must equal unpacked "
        "ones before the first shard is written.",
    )


def _agreement(manifest: Manifest) -> Section:
    sources = manifest.agreement.sources if manifest.agreement else None
    title = "Agreement with the target"
    if not sources:
        note = Note(text="Not recorded: a view of a part of a source.")
        return Section(title=title, parts=[note])
    largest = sorted(sources, key=lambda name: -sources[name].tokens)[:_SOURCES]

    def chart(title: str, axis: Axis, name: str, own: str) -> Bars:
        series = {"this dataset": name, "the target's own text": own}
        return Bars(
            title=title,
            x="source",
            y=axis,
            labels=largest,
            series={k: [getattr(sources[n], v) for n in largest] for k, v in series.items()},
        )

    share = Axis(title="share of tokens", format="share", least=0, most=1)
    table = Table(
        title="By source",
        columns=[
            *(("source", "text"), ("supervised tokens", "count"), ("first choice", "share")),
            *(("own first choice", "share"), ("NLL", "number"), ("own NLL", "number")),
        ],
        rows=[
            [name, a.tokens, a.share, a.own_share, a.nll, a.own_nll] for name, a in sources.items()
        ],
        note=f"The responses are recorded as {manifest.policy}.",
    )
    return Section(
        title=title,
        parts=[
            chart("First choices, by source", share, "share", "own_share"),
            chart("NLL, by source", Axis(title="nats per token", least=0), "nll", "own_nll"),
            table,
        ],
        text="Would the target say this? First choice: supervised tokens that are the target's arg "
        "max. NLL: the mean negative log-likelihood of supervised tokens, in nats. Own: the same "
        "of text that the target samples.",
    )


# -- norms of hidden states ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ColumnNorms:
    """How large the hidden states of one column are, and which channels stand out.

    Attributes:
        name: of the column. tokens: how many were measured.
        median, high, largest: L2 norms of tokens: median, 99th percentile, maximum.
        channels: the three channels of the largest root mean square, as (channel, times the median
            channel's), largest first.
        outliers: how many channels have at least OUTLIER times the median.
    """

    name: str
    tokens: int
    median: float
    high: float
    largest: float
    channels: tuple[tuple[int, float], ...]
    outliers: int

    @classmethod
    def of(cls, name: str, norms: np.ndarray, squares: np.ndarray) -> "ColumnNorms":
        """Summarise the norms [N] of a column and the sums of squares [H] of its channels."""
        norms = norms if (count := len(norms)) else np.zeros(1)
        size = np.sqrt(squares / max(count, 1))  # [H]
        middle = float(np.median(size))
        ratio = size / middle if middle else np.where(size > 0, np.inf, 0.0)
        first = np.argsort(-ratio, kind="stable")[: 3 * bool(count)]
        return cls(
            name=name,
            tokens=count,
            median=float(np.median(norms)),
            high=float(np.quantile(norms, 0.99)),
            largest=float(norms.max()),
            channels=tuple((int(c), float(ratio[c])) for c in first),
            outliers=int((ratio >= OUTLIER).sum()),
        )


def column_norms(dataset: HiddenStatesDataset, documents: Sequence[int]) -> list[ColumnNorms]:
    """Measure the columns of hidden states in some documents, at least one."""
    columns = [c for c in dataset.manifest.columns if c.name.startswith("hidden.")]
    reader = HiddenStatesDataset(dataset.path, ["loss_mask", *(c.name for c in columns)])
    norms: dict[str, list[np.ndarray]] = {c.name: [] for c in columns}
    squares = {c.name: np.zeros(c.width or 1) for c in columns}
    for number in progress(documents, desc="norms", unit="docs", leave=False):
        row = reader[number]
        mask = row["loss_mask"].numpy()
        stored = predicts_supervised(mask, np.array([0, len(mask)]))
        for column in columns:
            states = row[column.name].double().numpy()  # [T, H]
            states = states[stored] if column.sparse else states
            norms[column.name].append(np.sqrt((states**2).sum(1)))
            squares[column.name] += (states**2).sum(0)
    return [ColumnNorms.of(n, np.concatenate(norms[n]), squares[n]) for n in norms]


def _norms(norms: list[ColumnNorms], measured: int, total: int) -> Section:
    series = {"median": "median", "99th percentile": "high", "largest": "largest"}
    chart = Bars(
        title="Norms of hidden states",
        x="column",
        y=Axis(title="L2 norm", log=True),
        labels=[own.name for own in norms],
        series={name: [getattr(own, key) for own in norms] for name, key in series.items()},
    )
    table = Table(
        title="Norms and outlier channels",
        columns=[
            *(("column", "text"), ("tokens", "count"), ("median", "number")),
            *(("99th percentile", "number"), ("largest", "number")),
            *((f"channels of {OUTLIER:g} × median", "count"), ("largest channels", "text")),
        ],
        rows=[
            [
                *(own.name, own.tokens, own.median, own.high, own.largest, own.outliers),
                ", ".join(f"{c} ({ratio:.1f} ×)" for c, ratio in own.channels),
            ]
            for own in norms
        ],
        note="Size of a channel: its root mean square, as a multiple of the median channel's.",
    )
    return Section(
        title="Hidden states",
        parts=[chart, table],
        text=f"Measured in {measured:,} of {total:,} documents, evenly spaced, as the codec "
        "decodes them.",
    )


# -- documents token by token ----------------------------------------------------------------------


def _scored(dataset: HiddenStatesDataset, shown: list[int], scored: int | None) -> list[int]:
    """Return the documents for which all logits are computed."""
    supervision = dataset.manifest.supervision
    if supervision.startswith("topk"):
        return []  # only some of the logits are stored
    if scored is not None or supervision != "final-hidden":
        return even_sample(shown, SAMPLED if scored is None else scored)
    head = dataset.manifest.head
    tokens = dataset.lengths if dataset.manifest.teacher == ALL else dataset.supervised
    costs = tokens * (2.0 * head.vocab_size * head.hidden_size)
    return affordable_sample(shown, SAMPLED, costs, OPERATIONS)


def _tokens(dataset: HiddenStatesDataset, shown: list[int], scored: list[int]) -> Section:
    columns = ["input_ids", "loss_mask", "target_argmax"]
    states = [name for name in (FINAL, "logits") if name in dataset.columns]
    plain = HiddenStatesDataset(dataset.path, columns)
    whole = HiddenStatesDataset(dataset.path, [*columns, *states])
    teacher = Teacher(dataset)
    documents = []
    for number in progress(shown, desc="documents", unit="docs", leave=False):
        row = (whole if number in scored else plain)[number]
        documents.append(
            ViewedDocument(
                number=number,
                name=row["doc_id"],
                source=row["source"],
                ids=row["input_ids"].numpy(),
                mask=row["loss_mask"].numpy(),
                turns=[(t["role"], t["start"], t["end"]) for t in row["turns"]],
                teacher=teacher.view(row, number in scored),
            )
        )
    note = sample_text(len(shown), len(dataset))
    if scored:
        note += (
            f" Entropy and probability are known in {len(scored):,} of them, evenly spaced "
            "(--scored), from the stored states; first choices in all."
        )
    tokenizer = load_tokenizer(dataset.target_dir)
    return Section(title="Tokens", parts=[token_viewer(tokenizer, documents, note)])


class Teacher:
    """What the target predicts for the documents of a dataset, from the stored columns.

    The first choice is stored. Entropy and NLL need all logits: they are computed from
    `hidden.final` and the stored head (with the error of the codec), or read from `logits`.
    """

    def __init__(self, dataset: HiddenStatesDataset) -> None:
        self._dataset = dataset
        self._head: dict[str, Tensor] | None = None

    def view(self, row: dict[str, Any], scored: bool) -> TeacherView:
        """Return the predictions for a row of the dataset, with entropies and NLLs if `scored`."""
        mask = row["loss_mask"].numpy()
        known = mask != 0 if self._dataset.manifest.teacher != ALL else np.ones(len(mask), bool)
        known[:1] = False  # nothing predicts the first token
        before = torch.from_numpy(np.flatnonzero(known) - 1)  # [K]
        choice = row["target_argmax"][before].numpy().astype(np.int64)
        if not scored:
            return TeacherView(known=known, choice=choice)
        entropies, nlls = [torch.zeros(0).double()], [torch.zeros(0).double()]
        for slots in before.split(_LOGITS):
            log_p = self._logits(row, slots).double().log_softmax(-1)  # [k, V]
            entropies.append(-(log_p.exp() * log_p).nan_to_num(0.0).sum(-1))
            nlls.append(-log_p.gather(-1, row["input_ids"][slots + 1].long()[:, None])[:, 0])
        entropy, nll = torch.cat(entropies).numpy(), torch.cat(nlls).numpy()
        return TeacherView(known=known, choice=choice, entropy=entropy, nll=nll)

    def _logits(self, row: dict[str, Any], slots: Tensor) -> Tensor:
        """Return the logits [k, V] that the target has after the tokens at `slots` [k]."""
        if "logits" in row:
            logits: Tensor = row["logits"][slots]
            return logits
        if self._head is None:
            tensors = load_head_tensors(self._dataset.path, self._dataset.manifest)
            self._head = {name: tensor.float() for name, tensor in tensors.items()}
        weight, bias = self._head["lm_head"], self._head.get("lm_head_bias")
        return apply_head(row[FINAL][slots].float(), weight, bias, self._dataset.manifest.head)
