"""The page of a dataset: what is in it, what it costs, how it was proven, and its documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

import spec_data
from spec_data.models.reading import load_tokenizer
from spec_data.options.dataset_page_options import ReportConfig, named_place
from spec_data.pages.page_parts import Axis, Bars, Figures, Note, Page, Part, Section, Table
from spec_data.report import column_payload, dataset_lines
from spec_data.reports.corpus_sections import counts_section, documents_section
from spec_data.reports.token_viewer import (
    TeacherView,
    ViewedDocument,
    affordable_sample,
    sample_text,
    shown_documents,
    token_viewer,
)
from spec_data.shards.even_sample import even_sample
from spec_data.shards.index import read_index
from spec_data.shards.likelihood_text import suspicions
from spec_data.shards.reader import INDEX, HiddenStatesDataset, load_head_tensors, mapped_file
from spec_data.shards.schema import ALL, FINAL, Manifest, apply_head, predicts_supervised
from spec_data.terminal.progress import progress

# -- state norms -----------------------------------------------------------------------------------
# How large the captured states are: norms of tokens, and channels that stand out.
#
# Shapes: T tokens of a document, H channels.


OUTLIER = 10.0
"""A channel stands out if its root mean square is so many times the median channel's."""


@dataclass(frozen=True, kw_only=True)
class ColumnNorms:
    """The states of one column in sampled documents.

    Attributes:
        name: of the column. tokens: how many were measured.
        median, high, largest: L2 norms of tokens: median, 99th percentile, maximum.
        channels: the channels of the largest root mean square, as (channel, times the median
            channel's), largest first.
        outliers: how many channels have at least `OUTLIER` times the median.
    """

    name: str
    tokens: int
    median: float
    high: float
    largest: float
    channels: tuple[tuple[int, float], ...]
    outliers: int


def column_norms(
    dataset: HiddenStatesDataset, documents: Sequence[int], most: int = 3
) -> list[ColumnNorms]:
    """Measure the columns of states in some documents.

    Args:
        dataset: with all columns. documents: numbers of documents, at least one.
        most: channels that are named per column.

    Returns:
        One entry per column of states, in the order of the dataset.

    Raises:
        DatasetError: damage.
    """
    columns = [c for c in dataset.manifest.columns if c.name.startswith("hidden.")]
    reader = HiddenStatesDataset(dataset.path, ["loss_mask", *(c.name for c in columns)])
    norms: dict[str, list[np.ndarray]] = {c.name: [] for c in columns}
    squares = {c.name: np.zeros(c.width or 1) for c in columns}
    for number in progress(list(documents), desc="norms", unit="docs", leave=False):
        row = reader[int(number)]
        mask = row["loss_mask"].numpy()
        stored = predicts_supervised(mask, np.array([0, len(mask)]))
        for column in columns:
            states = row[column.name].double().numpy()  # [T, H]
            states = states[stored] if column.sparse else states
            norms[column.name].append(np.sqrt((states**2).sum(1)))
            squares[column.name] += (states**2).sum(0)
    return [_summary(name, np.concatenate(norms[name]), squares[name], most) for name in norms]


def _summary(name: str, norms: np.ndarray, squares: np.ndarray, most: int) -> ColumnNorms:
    """Summarise the norms [N] of one column, and the sums of squares [H] of its channels."""
    if not len(norms):
        return ColumnNorms(
            name=name, tokens=0, median=0, high=0, largest=0, channels=(), outliers=0
        )
    size = np.sqrt(squares / len(norms))  # [H]
    middle = float(np.median(size))
    ratio = size / middle if middle else np.where(size > 0, np.inf, 0.0)
    first = np.argsort(-ratio, kind="stable")[:most]
    return ColumnNorms(
        name=name,
        tokens=len(norms),
        median=float(np.median(norms)),
        high=float(np.quantile(norms, 0.99)),
        largest=float(norms.max()),
        channels=tuple((int(c), float(ratio[c])) for c in first),
        outliers=int((ratio >= OUTLIER).sum()),
    )


# -- teacher scores --------------------------------------------------------------------------------
# What the target predicts for every token of a document, from the stored columns.
#
# The first choice is stored. Entropy and NLL need all logits: they are computed from `hidden.final`
# and the stored head (with the error of the codec), or read from `logits`.
#
# Shapes: T tokens of a document, K of them with a stored prediction, H, V.


_AT_ONCE = 64  # tokens whose logits are in memory


def known_tokens(mask: np.ndarray, teacher: str) -> np.ndarray:
    """Return the tokens for which the dataset holds a prediction of the target.

    Args:
        mask: the loss mask [T]. teacher: "all" or "supervised", as in the manifest.

    Returns:
        bool [T]; the first token has none.
    """
    known = np.ones(len(mask), bool) if teacher == ALL else np.asarray(mask) != 0
    known[:1] = False
    return known


@dataclass
class TeacherScores:
    """Entropies and NLLs of documents of one dataset; None where not all logits can be known."""

    weight: Tensor | None
    bias: Tensor | None
    dataset: HiddenStatesDataset

    @classmethod
    def of(cls, dataset: HiddenStatesDataset) -> "TeacherScores | None":
        """Read the head of a dataset; None: it stores only some of the logits (topk).

        Raises:
            MissingError, DatasetError: the head is missing or damaged.
        """
        supervision = dataset.manifest.supervision
        if supervision.startswith("topk"):
            return None
        if supervision != "final-hidden":
            return cls(None, None, dataset)
        head = load_head_tensors(dataset.path, dataset.manifest)
        bias = head.get("lm_head_bias")
        return cls(head["lm_head"].float(), None if bias is None else bias.float(), dataset)

    def view(self, row: dict[str, Any]) -> TeacherView:
        """Return the predictions for a document, with entropies and NLLs.

        Args:
            row: of the dataset, with ids, mask, `target_argmax`, and `hidden.final` or `logits`.

        Returns:
            First choice, entropy and NLL of the K known tokens.
        """
        ids, mask = row["input_ids"], row["loss_mask"].numpy()
        known = known_tokens(mask, self.dataset.teacher)
        before = torch.from_numpy(np.flatnonzero(known) - 1)  # [K]
        entropies, nlls = (
            [torch.zeros(0, dtype=torch.float64)],
            [torch.zeros(0, dtype=torch.float64)],
        )
        for places in before.split(_AT_ONCE):
            log_p = self._logits(row, places).double().log_softmax(-1)  # [k, V]
            entropies.append(-(log_p.exp() * log_p).nan_to_num(0.0).sum(-1))
            nlls.append(-log_p.gather(-1, ids[places + 1].long()[:, None])[:, 0])
        return TeacherView(
            known=known,
            choice=row["target_argmax"][before].numpy().astype(np.int64),
            entropy=torch.cat(entropies).numpy(),
            nll=torch.cat(nlls).numpy(),
        )

    def _logits(self, row: dict[str, Any], places: Tensor) -> Tensor:
        """Return the logits [k, V] that the target has after the tokens at `places` [k]."""
        if self.weight is None:
            logits: Tensor = row["logits"][places]
            return logits
        spec = self.dataset.manifest.head
        return apply_head(row[FINAL][places].float(), self.weight, self.bias, spec)


# -- dataset page ----------------------------------------------------------------------------------


SAMPLED = 32
"""Documents in which norms are measured, and for which logits are computed unless --scored."""
OPERATIONS = 4e12
"""Floating-point operations for logits unless --scored says otherwise: about a minute on a CPU."""
_MOST_SOURCES = 20  # in charts


def dataset_page(config: ReportConfig) -> Page:
    """Return the page of a sealed dataset.

    Args:
        config: the dataset, and how many documents are shown and measured.

    Returns:
        The page; equal datasets and options have equal pages.

    Raises:
        MissingError, DatasetError: the dataset is not sealed, or damaged.
        TargetError: its tokenizer cannot be loaded.
    """
    dataset = HiddenStatesDataset(config.data)
    shown = shown_documents(dataset.lengths, config.documents)
    sampled = even_sample(shown, SAMPLED)
    sections = [
        _overview(dataset),
        _storage(dataset.manifest),
        documents_section(dataset.lengths, dataset.supervised, _sources(dataset)),
    ]
    counts = dataset.manifest.documents
    if counts.rendered:
        sections.append(counts_section(structs.asdict(counts), dataset.manifest.totals.tokens))
    if dataset.manifest.target.converted is None:  # nothing was packed: the states were read
        sections.append(_capture(dataset.manifest))
    sections.append(_agreement(dataset.manifest))
    sections.append(_states(column_norms(dataset, sampled), len(sampled), len(dataset)))
    sections.append(_documents(dataset, shown, _scored(dataset, shown, config.scored)))
    return Page(
        title=named_place(config.data).name,
        kind="Dataset",
        sections=sections,
        footer=f"spec-data {spec_data.__version__}",
    )


def _scored(dataset: HiddenStatesDataset, shown: list[int], wanted: int | None) -> list[int]:
    """Return the documents for which logits are computed: `wanted`, or what takes a minute."""
    if wanted is not None:
        return even_sample(shown, wanted)
    if dataset.manifest.supervision != "final-hidden":
        return even_sample(shown, SAMPLED)  # logits are read, not computed
    head = dataset.manifest.head
    tokens = dataset.lengths if dataset.teacher == ALL else dataset.supervised
    costs = tokens * (2.0 * head.vocab_size * head.hidden_size)
    return affordable_sample(shown, SAMPLED, costs, OPERATIONS)


def _sources(dataset: HiddenStatesDataset) -> Any:
    """Return the source of each document, texts [D]."""
    data = mapped_file(dataset.path, INDEX, dataset.manifest)
    return read_index(data, dataset.manifest, dataset.path / INDEX).column("source")


def _overview(dataset: HiddenStatesDataset) -> Section:
    manifest = dataset.manifest
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
    skipped = {"documents", "tokens", "supervised tokens", "bytes of all shards", "bytes per token"}
    rows = [[n.strip(), v] for n, v in dataset_lines(manifest) if n not in skipped]
    facts = Table(title="What it is", columns=[("", "text"), ("", "text")], rows=rows)
    warnings = [Note(text=text, warning=True) for text in suspicions(manifest)]
    return Section(title="Overview", parts=[figures, *warnings, facts])


def _storage(manifest: Manifest) -> Section:
    totals = manifest.totals
    tokens = max(totals.tokens, 1)
    payload = column_payload(manifest.columns, totals.tokens, totals.supervised)
    rows: list[list[Any]] = []
    for column in manifest.columns:
        row = [column.name, column.codec, payload[column.name] / tokens, payload[column.name]]
        row += [getattr(column.error, n, None) for n in ("mse_median", "mse_max", "kl", "escaped")]
        rows.append(row)
    chart = Bars(
        title="Bytes per token, by column",
        x=Axis(title="column", format="text"),
        y=Axis(title="bytes per token", least=0),
        labels=[column.name for column in manifest.columns],
        series={"bytes per token": [payload[c.name] / tokens for c in manifest.columns]},
    )
    table = Table(
        title="Columns",
        columns=[
            ("column", "text"),
            ("codec", "text"),
            ("bytes per token", "number"),
            ("payload", "bytes"),
            ("error", "number"),
            ("worst channel", "number"),
            ("teacher KL", "number"),
            ("escaped", "share"),
        ],
        rows=rows,
        note="Error: mean squared error of a channel over its variance, median over channels, as "
        "measured on held-out documents; a dash: the column is exact. Teacher KL: of the teacher's "
        "distribution, in nats. Columns that hold only some tokens count as their average.",
    )
    return Section(title="Bytes", parts=[chart, table])


def _capture(manifest: Manifest) -> Section:
    packing = manifest.packing
    parts: list[Part] = []
    if packing.utilisation is not None:
        items: list[tuple[str, Any, Any]] = [
            ("slots that hold a token", packing.utilisation, "share"),
            ("slots per row", packing.pack_length, "count"),
        ]
        parts.append(Figures(items=items))
    rows = [[name, value] for name, value in packing.differences.items()]
    parts.append(
        Table(
            title="Masks that were tried",
            columns=[("mask", "text"), ("difference from unpacked states", "number")],
            rows=rows or [[packing.form, None]],
            note=f"Used: {packing.form}. Allowed: {packing.tolerance:.1e}, relative.",
        )
    )
    return Section(
        title="Packing at capture",
        parts=parts,
        text="Documents share the rows of the target's batch. Packed states must equal unpacked "
        "ones before the first shard is written.",
    )


def _agreement(manifest: Manifest) -> Section:
    text = (
        "Would the target say this? First choice: supervised tokens that are the target's arg "
        "max. NLL: the mean negative log-likelihood of supervised tokens, in nats. Own: the same "
        "of text that the target samples."
    )
    found = manifest.agreement.sources if manifest.agreement else None
    if not found:
        note = Note(text="Not recorded: a view of a part of a source.")
        return Section(title="Agreement with the target", parts=[note], text=text)
    largest = sorted(found, key=lambda name: -found[name].tokens)[:_MOST_SOURCES]
    shares = Bars(
        title="First choices, by source",
        x=Axis(title="source", format="text"),
        y=Axis(title="share of tokens", format="share", least=0, most=1),
        labels=largest,
        series={
            "this dataset": [found[n].share for n in largest],
            "the target's own text": [found[n].own_share for n in largest],
        },
    )
    nll = Bars(
        title="NLL, by source",
        x=Axis(title="source", format="text"),
        y=Axis(title="nats per token", least=0),
        labels=largest,
        series={
            "this dataset": [found[n].nll for n in largest],
            "the target's own text": [found[n].own_nll for n in largest],
        },
    )
    table = Table(
        title="By source",
        columns=[
            ("source", "text"),
            ("supervised tokens", "count"),
            ("first choice", "share"),
            ("own first choice", "share"),
            ("NLL", "number"),
            ("own NLL", "number"),
        ],
        rows=[
            [name, a.tokens, a.share, a.own_share, a.nll, a.own_nll] for name, a in found.items()
        ],
        note=f"The responses are recorded as {manifest.policy}.",
    )
    return Section(title="Agreement with the target", parts=[shares, nll, table], text=text)


def _states(norms: list[ColumnNorms], measured: int, total: int) -> Section:
    labels = [own.name for own in norms]
    chart = Bars(
        title="Norms of states",
        x=Axis(title="column", format="text"),
        y=Axis(title="L2 norm", log=True),
        labels=labels,
        series={
            "median": [own.median for own in norms],
            "99th percentile": [own.high for own in norms],
            "largest": [own.largest for own in norms],
        },
    )
    table = Table(
        title="Norms and outlier channels",
        columns=[
            ("column", "text"),
            ("tokens", "count"),
            ("median", "number"),
            ("99th percentile", "number"),
            ("largest", "number"),
            (f"channels of {OUTLIER:g} × median", "count"),
            ("largest channels", "text"),
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
        title="States",
        parts=[chart, table],
        text=f"Measured in {measured:,} of {total:,} documents, evenly spaced, as the codec "
        "decodes them.",
    )


def _documents(dataset: HiddenStatesDataset, shown: list[int], scored: list[int]) -> Section:
    tokenizer = load_tokenizer(dataset.target_dir)
    scores = TeacherScores.of(dataset) if len(scored) else None
    columns = ["input_ids", "loss_mask", "target_argmax"]
    plain = HiddenStatesDataset(dataset.path, columns)
    state = [name for name in (FINAL, "logits") if name in dataset.columns]
    whole = HiddenStatesDataset(dataset.path, [*columns, *state])
    wanted = set(scored) if scores else set()
    documents = []
    for number in progress(shown, desc="documents", unit="docs", leave=False):
        row = (whole if number in wanted else plain)[number]
        teacher = scores.view(row) if scores and number in wanted else _choices(row, dataset)
        documents.append(
            ViewedDocument(
                number=number,
                name=row["doc_id"],
                source=row["source"],
                ids=row["input_ids"].numpy(),
                mask=row["loss_mask"].numpy(),
                turns=[(t["role"], t["start"], t["end"]) for t in row["turns"]],
                teacher=teacher,
            )
        )
    note = sample_text(len(shown), len(dataset))
    if wanted:
        note += (
            f" Entropy and probability are known in {len(wanted):,} of them, evenly spaced "
            "(--scored), from the stored states; first choices in all."
        )
    viewer = token_viewer(tokenizer, documents, note)
    return Section(title="Tokens", parts=[viewer])


def _choices(row: dict[str, Any], dataset: HiddenStatesDataset) -> TeacherView:
    """Return the stored first choices for the tokens of a document."""
    known = known_tokens(row["loss_mask"].numpy(), dataset.teacher)
    choice = row["target_argmax"].numpy()[np.flatnonzero(known) - 1]
    return TeacherView(known=known, choice=choice.astype(np.int64))
