"""The page of a dataset: its documents, where they are from, what they cost, what was left out.

`dataset_page` is that of a sealed dataset. `plan_page` is that of a plan, before any capture: the
same documents and masks, rendered by the code of `generate`.

Shapes: D documents, T tokens of a document, K of them with a stored prediction, V.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from msgspec import structs

import spec_data
from spec_data.generation.plan import Plan, count_warnings
from spec_data.generation.setup import Setup
from spec_data.models.reading import load_tokenizer
from spec_data.pages.page import Column, Figures, Note, Page, Part, Section, Table, histogram
from spec_data.pages.viewer import (
    ViewedDocument,
    affordable_sample,
    sample_text,
    shown_documents,
    token_viewer,
)
from spec_data.report import column_payload, counts_rows, dataset_lines
from spec_data.shards.even_sample import even_sample
from spec_data.shards.likelihood_text import suspicions
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import ALL, FINAL, Manifest, apply_head, mask_counts
from spec_data.terminal.progress import progress

DOCUMENTS = 1000
"""Documents that the viewer of a page holds unless --documents says otherwise."""
SCORED = 32
"""Documents for which logits are computed unless --scored says otherwise."""
OPERATIONS = 4e12
"""Floating-point operations for logits unless --scored says otherwise: about a minute on a CPU."""
_LOGITS = 64  # tokens whose logits are in memory
_MASKS = 16_384  # documents whose masks are in memory
_SOURCES = 50  # in a table


def dataset_page(data: str | Path, documents: int = DOCUMENTS, scored: int | None = None) -> Page:
    """Return the page of a sealed dataset; equal datasets and arguments have equal pages.

    Args:
        data: a directory or a URL. documents: how many the viewer holds at most.
        scored: for how many of them the target's entropy and the probability of every token are
            computed; None: as many as a minute on a CPU allows, at most SCORED.

    Raises:
        MissingError, DatasetError: the dataset is not sealed, or damaged.
        TargetError: its tokenizer cannot be loaded.
    """
    dataset = HiddenStatesDataset(data)
    manifest = dataset.manifest
    counts = structs.asdict(manifest.documents)
    warnings = [Note(text=text, warning=True) for text in suspicions(manifest)]
    named = ("documents", "tokens", "supervised tokens", "bytes of all shards", "bytes per token")
    rows = [[name.strip(), value] for name, value in dataset_lines(manifest) if name not in named]
    facts = Table(title="What it is", columns=[("", "text"), ("", "text")], rows=rows)
    sections = [
        Section(title="Overview", parts=[_figures(manifest), *warnings, facts]),
        _tokens(dataset, documents, scored),
        _documents(dataset.lengths, dataset.supervised, dataset.index.column("source"), manifest),
        _columns(manifest),
        *([_left_out(counts, manifest.totals.tokens)] if manifest.documents.rendered else []),
    ]
    return _page(dataset_name(data).name, "Dataset", sections)


def plan_page(setup: Setup, plan: Plan, documents: int = DOCUMENTS) -> Page:
    """Return the page of what `generate` would capture; the viewer holds `documents` at most."""
    shown = shown_documents(plan.lengths, documents)
    viewed = []
    for number in shown:
        own = plan.documents.read(number, number + 1)
        viewed.append(
            ViewedDocument(
                number=number,
                name=own.doc_ids[0],
                source=own.sources[0],
                ids=own.tokens["input_ids"],
                mask=own.tokens["loss_mask"],
                turns=own.turns[0],
            )
        )
    viewer = token_viewer(setup.tokenizer, viewed, sample_text(len(shown), len(plan.lengths)))
    sections = [
        _plan_overview(setup, plan),
        Section(title="Tokens", parts=[viewer]),
        _documents(plan.lengths, _supervised(plan), pa.array(plan.documents.sources)),
        _left_out(asdict(plan.counts), plan.tokens),
    ]
    names = [Path(source.rstrip("/")).name or source for source in setup.sources]
    return _page(", ".join(names), "Plan of a dataset", sections)


def _page(title: str, kind: str, sections: Sequence[Section]) -> Page:
    footer = f"spec-data {spec_data.__version__}"
    return Page(title=title, kind=kind, sections=sections, footer=footer)


def dataset_name(data: str | Path) -> Path:
    """Return the path (or the URL as one) of a dataset, so that its last part is a name."""
    path = Path(data)
    return path.resolve() if path.name in ("", "..") else path


# -- figures ---------------------------------------------------------------------------------------


def _figures(manifest: Manifest) -> Figures:
    totals, tokens = manifest.totals, max(manifest.totals.tokens, 1)
    return Figures(
        items=[
            ("documents", totals.documents, "count"),
            ("tokens", totals.tokens, "count"),
            ("supervised tokens", totals.supervised, "count"),
            ("share supervised", totals.supervised / tokens, "share"),
            ("bytes of all shards", totals.bytes, "bytes"),
            ("bytes per token", totals.bytes / tokens, "number"),
        ]
    )


def _plan_overview(setup: Setup, plan: Plan) -> Section:
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
    fields = ("source", "kind", "format", "rows", "bad", "unrendered")
    sources = Table(
        title="Sources as they were read",
        columns=[(name, "count" if i > 2 else "text") for i, name in enumerate(fields)],
        rows=[[source[name] for name in fields] for source in plan.corpus],
    )
    parts: list[Part] = [figures, sources]
    if 0 < setup.options.limit <= plan.counts.rows:
        parts.append(Note(text=f"Only the first {plan.counts.rows:,} rows were read (--limit)."))
    for source in plan.corpus:  # what of its rows no draft sees
        name = source["source"]
        if left := source["template_left_out"]:
            kinds = ", ".join(f"{kind} ({count:,})" for kind, count in left.items())
            text = f"{name}: the chat template left out {kinds}, so no draft sees them."
            parts.append(Note(text=text, warning=True))
        if unused := source["unused_columns"]:
            parts.append(Note(text=f"{name}: columns that are not used: {', '.join(unused)}."))
    bad = [[source["source"], text] for source in plan.corpus for text in source["bad_examples"]]
    if bad:
        named: list[Column] = [("source", "text"), ("problem", "text")]
        parts.append(Table(title="Bad rows", columns=named, rows=bad))
    text = "Rendered, masked and cut as spec-data generate does it. Nothing is captured yet."
    return Section(title="Overview", parts=parts, text=text)


def _supervised(plan: Plan) -> np.ndarray:
    """Return the supervised tokens per document, int64 [D]."""
    documents, counts = plan.documents, []
    for first in range(0, len(plan.lengths), _MASKS):
        bounds = documents.offsets[first : first + _MASKS + 1]
        mask = documents.tokens(first, first + len(bounds) - 1)["loss_mask"]
        counts.append(mask_counts(mask, bounds - bounds[0])[0])
    return np.concatenate(counts)


def _documents(
    lengths: np.ndarray,
    supervised: np.ndarray,
    sources: pa.Array | pa.ChunkedArray,
    manifest: Manifest | None = None,
) -> Section:
    """Return lengths and sources: int64 [D] twice, and the source of each document, texts [D]."""
    low, middle, high = (int(np.quantile(lengths, q, method="lower")) for q in (0.05, 0.5, 0.95))
    note = f"Median {middle:,}; 5 % have at most {low:,}, 5 % have more than {high:,}; the most "
    note += f"is {int(lengths.max()):,}."
    chart = histogram(lengths, "Length of documents", "tokens per document", "documents", note)
    table = pa.table({"source": sources, "tokens": lengths, "supervised": supervised})
    sums = [("tokens", "count"), ("tokens", "sum"), ("supervised", "sum")]
    grouped = table.group_by("source", use_threads=False).aggregate(sums).to_pylist()
    columns: list[Column] = [("source", "text"), ("documents", "count"), ("tokens", "count")]
    columns += [("supervised tokens", "count"), ("supervised", "share")]
    rows: list[list[Any]] = []
    for own in sorted(grouped, key=lambda own: -own["tokens_sum"])[:_SOURCES]:
        tokens, taught = own["tokens_sum"], own["supervised_sum"]
        rows.append([own["source"], own["tokens_count"], tokens, taught, taught / max(tokens, 1)])
    note = f"The {_SOURCES} largest of {len(grouped):,}. " if len(grouped) > _SOURCES else ""
    if manifest and manifest.agreement and (found := manifest.agreement.sources):
        columns += [("first choice", "share"), ("own first choice", "share")]
        columns += [("NLL", "number"), ("own NLL", "number")]
        for row in rows:
            agreement = found.get(row[0])
            figures = ("share", "own_share", "nll", "own_nll")
            row += [getattr(agreement, name, None) for name in figures]
        note += "First choice: supervised tokens that are the target's arg max. NLL: their mean "
        note += "negative log-likelihood, in nats. Own: the same of text that the target samples. "
        note += f"The responses are recorded as {manifest.policy}."
    by_source = Table(title="Sources", columns=columns, rows=rows, note=note)
    return Section(title="Documents", parts=[by_source, chart])


def _columns(manifest: Manifest) -> Section:
    totals, tokens = manifest.totals, max(manifest.totals.tokens, 1)
    payload = column_payload(manifest.columns, totals.tokens, totals.supervised)
    errors = ("mse_median", "mse_max", "kl", "escaped")
    rows: list[list[Any]] = []
    for column in manifest.columns:
        total = payload[column.name]
        figures = (getattr(column.error, name, None) for name in errors)
        rows.append([column.name, column.codec, total / tokens, total, *figures])
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
    return Section(title="Bytes", parts=[table])


def _left_out(counts: dict[str, Any], tokens: int) -> Section:
    """Return what became of every row and document; `tokens` are those that are kept."""
    table = Table(
        title="From rows to documents",
        columns=[("", "text"), ("count", "count")],
        rows=[[name.strip(), value] for name, value in counts_rows(counts)],
    )
    parts: list[Part] = [
        *(
            Note(text=f"{t[0].upper()}{t[1:]}.", warning=True)
            for t in count_warnings(counts, tokens)
        ),
        table,
    ]
    examples = [
        [k, texts[0]] for k, texts in counts.get("unrendered_examples", {}).items() if texts
    ]
    if examples:
        columns: list[Column] = [("reason", "text"), ("message", "text")]
        parts.append(Table(title="An example of each reason", columns=columns, rows=examples))
    return Section(title="What was left out", parts=parts)


# -- documents token by token ----------------------------------------------------------------------


def _tokens(dataset: HiddenStatesDataset, documents: int, scored: int | None) -> Section:
    shown = shown_documents(dataset.lengths, documents)
    with_logits = _scored(dataset, shown, scored)
    columns = ["input_ids", "loss_mask", "target_argmax"]
    states = [name for name in (FINAL, "logits") if name in dataset.columns]
    plain = HiddenStatesDataset(dataset.path, columns)
    full = HiddenStatesDataset(dataset.path, [*columns, *states])
    head = {}
    if with_logits and "logits" not in states:
        tensors = load_head_tensors(dataset.path, dataset.manifest)
        head = {name: tensor.float() for name, tensor in tensors.items()}
    viewed = []
    for number in progress(shown, desc="documents", unit="docs", leave=False):
        row = (full if number in with_logits else plain)[number]
        ids, mask = row["input_ids"], row["loss_mask"].numpy()
        known = np.ones(len(mask), bool) if dataset.manifest.teacher == ALL else mask != 0
        known[:1] = False  # nothing predicts the first token
        before = torch.from_numpy(np.flatnonzero(known) - 1)  # [K]
        figures = {}
        if number in with_logits:
            figures = _entropy_and_nll(dataset.manifest, row, before, head)
        viewed.append(
            ViewedDocument(
                number=number,
                name=row["doc_id"],
                source=row["source"],
                ids=ids.numpy(),
                mask=mask,
                turns=[(t["role"], t["start"], t["end"]) for t in row["turns"]],
                known=known,
                choice=row["target_argmax"][before].numpy().astype(np.int64),
                **figures,
            )
        )
    note = sample_text(len(shown), len(dataset))
    if with_logits:
        note += (
            f" Entropy and probability are known in {len(with_logits):,} of them, evenly spaced "
            "(--scored), from the stored states; first choices in all."
        )
    viewer = token_viewer(load_tokenizer(dataset.target_dir), viewed, note)
    return Section(title="Tokens", parts=[viewer])


def _scored(dataset: HiddenStatesDataset, shown: list[int], scored: int | None) -> list[int]:
    """Return the documents for which all logits are computed."""
    supervision = dataset.manifest.supervision
    if supervision.startswith("topk"):
        return []  # only some of the logits are stored
    if scored is not None or supervision != "final-hidden":
        return even_sample(shown, SCORED if scored is None else scored)
    head = dataset.manifest.head
    tokens = dataset.lengths if dataset.manifest.teacher == ALL else dataset.supervised
    costs = tokens * (2.0 * head.vocab_size * head.hidden_size)
    return affordable_sample(shown, SCORED, costs, OPERATIONS)


def _entropy_and_nll(
    manifest: Manifest, row: dict[str, Any], before: torch.Tensor, head: dict[str, torch.Tensor]
) -> dict[str, np.ndarray]:
    """Return entropies of the predictions after the tokens `before` [K], and NLLs, float64 [K].

    The logits are computed from `hidden.final` and the stored head, with the error of the codec,
    or read from `logits`.
    """
    entropy, nll = [torch.zeros(0).double()], [torch.zeros(0).double()]
    for slots in before.split(_LOGITS):
        if "logits" in row:
            logits = row["logits"][slots]
        else:
            states = row[FINAL][slots].float()
            logits = apply_head(states, head["lm_head"], head.get("lm_head_bias"), manifest.head)
        log_p = logits.double().log_softmax(-1)  # [k, V]
        entropy.append(-(log_p.exp() * log_p).nan_to_num(0.0).sum(-1))
        nll.append(-log_p.gather(-1, row["input_ids"][slots + 1].long()[:, None])[:, 0])
    return {"entropy": torch.cat(entropy).numpy(), "nll": torch.cat(nll).numpy()}
