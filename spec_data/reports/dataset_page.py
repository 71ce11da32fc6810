"""The page of a dataset: what is in it, what it costs, how it was proven, and its documents."""

from typing import Any

import numpy as np

import spec_data
from spec_data.models.reading import load_tokenizer
from spec_data.options.dataset_page_options import ReportConfig, named_place
from spec_data.pages.page_parts import Axis, Bars, Figures, Note, Page, Part, Section, Table
from spec_data.progress import progress
from spec_data.report import column_payload, dataset_lines
from spec_data.reports.corpus_sections import counts_section, documents_section
from spec_data.reports.even_sample import affordable, even_numbers, sample_text, shown_documents
from spec_data.reports.state_norms import OUTLIER, ColumnNorms, column_norms
from spec_data.reports.teacher_scores import TeacherScores, known_tokens
from spec_data.reports.token_viewer import TeacherView, ViewedDocument, token_viewer
from spec_data.shards.index import read_index
from spec_data.shards.likelihood import read_agreement
from spec_data.shards.likelihood_text import suspicions
from spec_data.shards.reader import INDEX, HiddenStatesDataset, mapped_file
from spec_data.shards.schema import ALL, FINAL, Manifest

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
    sampled = shown[even_numbers(len(shown), SAMPLED)]
    sections = [
        _overview(dataset),
        _storage(dataset.manifest),
        documents_section(dataset.lengths, dataset.supervised, _sources(dataset)),
    ]
    counts = dataset.manifest.raw["documents"]
    if "rendered" in counts:
        sections.append(counts_section(counts, dataset.manifest.raw["totals"]["tokens"]))
    if "converted" not in dataset.manifest.target:  # nothing was packed: the states were read
        sections.append(_capture(dataset.manifest))
    sections.append(_agreement(dataset.manifest))
    sections.append(_states(column_norms(dataset, sampled.tolist()), len(sampled), len(dataset)))
    sections.append(_documents(dataset, shown, _scored(dataset, shown, config.scored)))
    return Page(
        title=named_place(config.data).name,
        kind="Dataset",
        sections=sections,
        footer=f"spec-data {spec_data.__version__}",
    )


def _scored(dataset: HiddenStatesDataset, shown: np.ndarray, wanted: int | None) -> np.ndarray:
    """Return the documents for which logits are computed: `wanted`, or what takes a minute."""
    if wanted is not None:
        return shown[even_numbers(len(shown), wanted)]
    found = shown[even_numbers(len(shown), SAMPLED)]
    if dataset.manifest.supervision != "final-hidden":
        return found  # logits are read, not computed
    head = dataset.manifest.head
    tokens = dataset.lengths if dataset.teacher == ALL else dataset.supervised
    return affordable(found, tokens * (2.0 * head.vocab_size * head.hidden_size), OPERATIONS)


def _sources(dataset: HiddenStatesDataset) -> Any:
    """Return the source of each document, texts [D]."""
    data = mapped_file(dataset.path, INDEX, dataset.manifest)
    return read_index(data, dataset.manifest, dataset.path / INDEX).column("source")


def _overview(dataset: HiddenStatesDataset) -> Section:
    manifest = dataset.manifest
    totals = manifest.raw["totals"]
    tokens = max(totals["tokens"], 1)
    figures = Figures(
        items=[
            ("documents", totals["documents"], "count"),
            ("tokens", totals["tokens"], "count"),
            ("supervised tokens", totals["supervised"], "count"),
            ("share supervised", totals["supervised"] / tokens, "share"),
            ("bytes of all shards", totals["bytes"], "bytes"),
            ("bytes per token", totals["bytes"] / tokens, "number"),
        ]
    )
    skipped = {"documents", "tokens", "supervised tokens", "bytes of all shards", "bytes per token"}
    rows = [[n.strip(), v] for n, v in dataset_lines(manifest) if n not in skipped]
    facts = Table(title="What it is", columns=[("", "text"), ("", "text")], rows=rows)
    warnings = [Note(text=text, warning=True) for text in suspicions(manifest.raw)]
    return Section(title="Overview", parts=[figures, *warnings, facts])


def _storage(manifest: Manifest) -> Section:
    totals = manifest.raw["totals"]
    tokens = max(totals["tokens"], 1)
    payload = column_payload(manifest.columns, totals["tokens"], totals["supervised"])
    rows: list[list[Any]] = []
    for column, raw in zip(manifest.columns, manifest.raw["columns"], strict=True):
        error = raw.get("error") or {}
        row = [column.name, column.codec, payload[column.name] / tokens, payload[column.name]]
        row += [error.get(name) for name in ("mse_median", "mse_max", "kl", "escaped")]
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
    packing = manifest.raw["packing"]
    parts: list[Part] = []
    if "utilisation" in packing:
        items: list[tuple[str, Any, Any]] = [
            ("slots that hold a token", packing["utilisation"], "share")
        ]
        if "pack_length" in packing:
            items.append(("slots per row", packing["pack_length"], "count"))
        parts.append(Figures(items=items))
    rows = [[name, value] for name, value in (packing.get("differences") or {}).items()]
    parts.append(
        Table(
            title="Masks that were tried",
            columns=[("mask", "text"), ("difference from unpacked states", "number")],
            rows=rows or [[packing.get("form", "unknown"), None]],
            note=f"Used: {packing.get('form', 'unknown')}. "
            f"Allowed: {packing.get('tolerance', 0):.1e}, relative.",
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
    found = read_agreement(manifest.raw)
    if not found:
        note = Note(text="Not recorded: a view of a part of a source, or an older release.")
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
        note=f"The responses are recorded as {manifest.raw['policy']}.",
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


def _documents(dataset: HiddenStatesDataset, shown: np.ndarray, scored: np.ndarray) -> Section:
    tokenizer = load_tokenizer(dataset.target_dir)
    scores = TeacherScores.of(dataset) if len(scored) else None
    columns = ["input_ids", "loss_mask", "target_argmax"]
    plain = HiddenStatesDataset(dataset.path, columns)
    state = [name for name in (FINAL, "logits") if name in dataset.columns]
    whole = HiddenStatesDataset(dataset.path, [*columns, *state])
    wanted = set(scored.tolist()) if scores else set()
    documents = []
    for number in progress(shown.tolist(), desc="documents", unit="docs", leave=False):
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
    note = sample_text(len(shown), len(dataset), "--documents")
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
