"""Make the plan: read, render and prepare the corpus, in several processes, and write it to disk.

The processes do not decide anything: rows are counted, and documents compared and written, by one
process in the order of the rows. So the plan is the same for any number of processes.
"""

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from spec_data.corpus.chat import Renderer, RenderError
from spec_data.corpus.documents import RenderCounts, Rendering
from spec_data.corpus.file_rows import RawRow, RowResult, parsed_row
from spec_data.corpus.in_order import default_processes, in_order
from spec_data.corpus.record_reader import CorpusReader, SourceReport
from spec_data.corpus.records import parse_row
from spec_data.corpus.sources import expected_rows
from spec_data.corpus.template import Template
from spec_data.generation.plan import DocumentCounts, Plan, PlanBuilder, count_warnings, planned
from spec_data.generation.plan_file import (
    BATCH_TOKENS,
    PlannedDocuments,
    Prepared,
    Preparing,
    unit_tokens,
)
from spec_data.generation.setup import Setup, corpus_reader, settings
from spec_data.shards.errors import TargetError
from spec_data.shards.files import read_object
from spec_data.terminal.progress import progress

logger = logging.getLogger(__name__)


class Made(NamedTuple):
    """What was made of a record: prepared documents, or the reason why it has none.

    Attributes:
        rendering: what is to be counted; its documents are those of `documents`.
        documents: the prepared documents.
        refused: (reason, message) of the RenderError of a record without documents.
    """

    rendering: Rendering | None = None
    documents: tuple[Prepared, ...] = ()
    refused: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Everything that decides which documents a row becomes; see `Renderer` and `Preparing`."""

    tokenizer: PreTrainedTokenizerBase
    mask: str
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    eot_token_ids: tuple[int, ...] = ()
    vocab_size: int
    preparing: Preparing


class RowWork:
    """Parse, render and prepare one row; made once per process."""

    def __init__(self, given: RowSettings) -> None:
        self._renderer = Renderer(
            given.tokenizer,
            mask=given.mask,
            template_kwargs=dict(given.template_kwargs),
            eot_token_ids=given.eot_token_ids,
            vocab_size=given.vocab_size,
        )
        self._prepare = given.preparing

    def __call__(self, row: RawRow) -> RowResult:
        """Return the result of a row.

        Raises:
            CorpusError: the chat template does not end, for several rows.
        """
        parsed = parsed_row(row, parse_row)
        if row.end or parsed.bad is not None:
            return parsed
        return replace(parsed, made=self._made(parsed), _record=None)

    def _made(self, parsed: RowResult) -> Made:
        try:
            rendering = self._renderer.rendering(parsed.record)
        except RenderError as error:
            return Made(refused=(error.reason, str(error)))
        documents = tuple(map(self._prepare, rendering.documents))
        return Made(replace(rendering, documents=[]), documents)


def make_plan(setup: Setup, scratch: Path | None = None) -> Plan:
    """Read, render and cut the corpus, and return the plan.

    Its documents are in a temporary file, which is removed with the plan, in the directory
    `scratch`, or where the system puts temporary files; `save_plan` keeps them.

    Raises:
        CorpusError: the corpus cannot be read, or no document is left.
        RunError: a process that rendered documents ended.
    """
    config = setup.config
    documents, counts, reports = _render(setup, scratch)
    tokens = int(documents.offsets[-1])
    for warning in count_warnings(asdict(counts), tokens):
        logger.warning("warning: %s", warning)
    batch_tokens = config.forward_tokens or BATCH_TOKENS
    size = config.max_shard_size, setup.bytes_per_token, tokens, batch_tokens
    return planned(
        documents,
        counts,
        [corpus_entry(r) for r in reports],
        settings(setup, reports),
        config.pack_length,
        unit_tokens(*size),
    )


def _render(
    setup: Setup, scratch: Path | None
) -> tuple[PlannedDocuments, DocumentCounts, list[SourceReport]]:
    """Return the documents of the corpus, their counts, and a report of every source."""
    config, reader = setup.config, corpus_reader(setup.config)
    Template(setup.tokenizer, config.template_kwargs).warn_of_the_date()
    builder = PlanBuilder(config.max_length, config.keep_tails, scratch)
    try:
        render_into(builder, reader, row_settings(setup), config.num_proc)
        return builder.finish(), builder.counts, reader.reports
    except BaseException:
        builder.discard()
        raise


def row_settings(setup: Setup) -> RowSettings:
    """Return how the rows of the corpus of `setup` become documents."""
    config = setup.config
    return RowSettings(
        tokenizer=setup.tokenizer,
        mask=config.mask,
        template_kwargs=config.template_kwargs,
        eot_token_ids=tuple(end_token_ids(setup.model_dir)),
        vocab_size=setup.vocab_size,
        preparing=Preparing(config.max_length, config.keep_tails),
    )


def render_into(
    builder: PlanBuilder, reader: CorpusReader, given: RowSettings, processes: int
) -> None:
    """Render all rows of `reader` in `processes` processes (0: the default) into `builder`.

    Raises:
        CorpusError: the corpus cannot be read, or too many rows are bad.
        RunError: a process ended.
    """
    counts = RenderCounts()
    total = expected_rows(reader.sources, reader.limit)
    processes = processes or default_processes()
    found = reader.results(lambda rows: in_order(rows, RowWork, (given,), processes))
    with closing(found) as results:
        for result in progress(results, desc="render", unit="rows", total=total):
            _add(result.made, builder, reader, counts)
    builder.count_rows(
        rows=sum(r.rows for r in reader.reports),
        bad_rows=sum(r.bad for r in reader.reports),
        unrendered=reader.refused,
        unrendered_examples=reader.refused_examples,
        rendering=counts.methods + counts.systems + counts.counts,
        kwargs_used=counts.kwargs_used,
        dropped=counts.dropped,
    )


def _add(made: Made, builder: PlanBuilder, reader: CorpusReader, counts: RenderCounts) -> None:
    """Count what was made of the row that was read last, and add its documents."""
    if made.refused is not None:
        reader.refuse(RenderError(*made.refused))
        return
    assert made.rendering is not None
    counts.count(made.rendering, len(made.documents))
    reader.count_left_out(made.rendering.left_out)
    for document in made.documents:
        builder.add_prepared(document)


def end_token_ids(directory: Path) -> list[int]:
    """Return the token ids that end generation, from generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        ids = read_object(file, TargetError).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []


def corpus_entry(report: SourceReport) -> dict[str, Any]:
    """Return the manifest's entry of one source."""
    entry = asdict(report)
    del entry["path"]  # a path of this machine
    return entry
