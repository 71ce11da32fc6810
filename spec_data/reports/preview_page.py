"""The page of a corpus before any GPU time: what `generate` would make of it, and its documents.

The rows are read, rendered, masked, cut and compared by the code of `generate`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

import spec_data
from spec_data.corpus.record_reader import SourceReport
from spec_data.generation.plan import (
    Plan,
    RowSettings,
    cut_into_units,
    end_token_ids,
    render_corpus,
)
from spec_data.generation.setup import corpus_reader, within_context
from spec_data.models.reading import load_config, load_tokenizer, text_config
from spec_data.models.resolve import resolve_model
from spec_data.options.dataset_page_options import PreviewConfig
from spec_data.options.generate_options import GenerateConfig
from spec_data.pages.page_parts import Figures, Note, Page, Part, Section, Table
from spec_data.reports.corpus_sections import counts_section, documents_section
from spec_data.reports.token_viewer import (
    ViewedDocument,
    sample_text,
    shown_documents,
    token_viewer,
)

_AT_ONCE = 16_384  # documents whose masks are in memory
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a corpus becomes.

    Attributes:
        plan: its documents and counts, as `generate` plans them.
        tokenizer: what rendered them. reports: what was read, by source.
        max_length: tokens at which documents were cut.
    """

    plan: Plan
    tokenizer: PreTrainedTokenizerBase
    reports: Sequence[SourceReport]
    max_length: int


def read_preview(config: PreviewConfig) -> Preview:
    """Read and render a corpus as `generate` does; no weights are read.

    Args:
        config: the corpus, the tokenizer, and how rows become documents.

    Returns:
        The planned documents, in a temporary file that is removed with them.

    Raises:
        CorpusError: the corpus cannot be read, too many rows are bad, or no document is left.
        MissingError, TargetError: the tokenizer does not exist, or cannot be loaded.
    """
    wanted = config.as_generate()
    directory, model_config = _model(wanted)
    tokenizer = load_tokenizer(directory, config.trust_remote_code)
    vocab_size = len(tokenizer)
    if model_config is not None:
        vocab_size = text_config(model_config).vocab_size
        wanted = within_context(wanted, model_config)
    given = RowSettings(
        tokenizer=tokenizer,
        mask=wanted.mask,
        template_kwargs=wanted.template_kwargs,
        eot_token_ids=tuple(end_token_ids(directory)),
        vocab_size=vocab_size,
        max_length=wanted.max_length,
    )
    reader = corpus_reader(wanted)
    rendered = render_corpus(reader, given, wanted.num_proc)
    plan = cut_into_units(rendered, settings={}, most=lambda tokens: tokens)
    return Preview(
        plan=plan, tokenizer=tokenizer, reports=reader.reports, max_length=wanted.max_length
    )


def _model(config: GenerateConfig) -> tuple[Path, Any]:
    """Return the directory of the tokenizer, and the model's config; None for a tokenizer alone."""
    path = Path(config.target).expanduser()
    alone = any((path / name).is_file() for name in _TOKENIZER_FILES)
    if path.is_dir() and alone and not (path / "config.json").is_file():
        return path, None
    directory, _ = resolve_model(config.target, config.revision, weights=False)
    return directory, load_config(directory, config.trust_remote_code)


def preview_page(config: PreviewConfig, found: Preview) -> Page:
    """Return the page of a corpus.

    Args:
        config: what it was read with, and how many documents are shown. found: what it becomes.

    Returns:
        The page; equal corpora and options have equal pages.
    """
    plan = found.plan
    supervised = _supervised(plan)
    sections = [
        _overview(config, found),
        counts_section(asdict(plan.counts), plan.tokens),
        documents_section(plan.lengths, supervised, pa.array(plan.documents.sources)),
        _documents(config, found),
    ]
    names = ", ".join(Path(source.rstrip("/")).name or source for source in config.corpus)
    return Page(
        title=names,
        kind="Corpus preview",
        sections=sections,
        footer=f"spec-data {spec_data.__version__}",
    )


def _supervised(plan: Plan) -> np.ndarray:
    """Return the supervised tokens per document, int64 [D]."""
    offsets = plan.documents.offsets
    mask = plan.documents.tokens["loss_mask"]
    counts = [np.zeros(0, np.int64)]
    for first in range(0, len(plan.lengths), _AT_ONCE):
        own = offsets[first : first + _AT_ONCE + 1]
        ends = np.concatenate([[0], np.cumsum(mask[own[0] : own[-1]] != 0)])
        counts.append(np.diff(ends[own - own[0]]))
    return np.concatenate(counts)


def _overview(config: PreviewConfig, found: Preview) -> Section:
    plan = found.plan
    parts: list[Part] = [
        Figures(
            items=[
                ("documents", len(plan.lengths), "count"),
                ("tokens", plan.tokens, "count"),
                ("supervised tokens", plan.documents.supervised, "count"),
                ("share supervised", plan.documents.supervised / plan.tokens, "share"),
                ("longest document", int(plan.lengths.max()), "count"),
                ("slots of packs filled", plan.utilisation(), "share"),
            ]
        )
    ]
    if config.limit and plan.counts.rows >= config.limit:
        parts.append(Note(text=f"Only the first {plan.counts.rows:,} rows were read (--limit)."))
    parts.append(
        Table(
            title="How rows become documents",
            columns=[("", "text"), ("", "text")],
            rows=[
                ["tokenizer of", Path(config.target).name],
                ["supervised tokens (--mask)", config.mask],
                ["cut at (--max-length)", f"{found.max_length:,} tokens"],
                ["chat template kwargs", json.dumps(config.as_generate().template_kwargs)],
                ["packs", f"{plan.pack_length:,} tokens"],
            ],
        )
    )
    parts.append(
        Table(
            title="Sources as they were read",
            columns=[
                ("source", "text"),
                ("kind", "text"),
                ("format", "text"),
                ("rows", "count"),
                ("bad", "count"),
                ("not rendered", "count"),
            ],
            rows=[[r.source, r.kind, r.format, r.rows, r.bad, r.unrendered] for r in found.reports],
        )
    )
    for report in found.reports:
        if report.template_left_out:
            kinds = ", ".join(f"{name} ({n:,})" for name, n in report.template_left_out.items())
            text = f"{report.source}: the chat template left out {kinds}, so no draft sees them."
            parts.append(Note(text=text, warning=True))
        if report.unused_columns:
            names = ", ".join(report.unused_columns)
            parts.append(Note(text=f"{report.source}: columns that are not used: {names}."))
    bad = [[r.source, text] for r in found.reports for text in r.bad_examples]
    if bad:
        columns = [("source", "text"), ("problem", "text")]
        parts.append(Table(title="Bad rows", columns=columns, rows=bad))  # type: ignore[arg-type]
    text = (
        "Rendered, masked and cut as spec-data generate does it with the same options; no "
        "weights were read."
    )
    return Section(title="Overview", parts=parts, text=text)


def _documents(config: PreviewConfig, found: Preview) -> Section:
    plan = found.plan
    shown = shown_documents(plan.lengths, config.documents)
    documents = []
    for number in shown:
        data = plan.documents.read(number, number + 1)
        documents.append(
            ViewedDocument(
                number=number,
                name=data.doc_ids[0],
                source=data.sources[0],
                ids=data.tokens["input_ids"],
                mask=data.tokens["loss_mask"],
                turns=data.turns[0],
            )
        )
    note = sample_text(len(shown), len(plan.lengths))
    return Section(title="Tokens", parts=[token_viewer(found.tokenizer, documents, note)])
