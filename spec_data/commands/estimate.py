"""`spec-data estimate`: what `generate` would write, before any GPU time."""

import inspect
import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from spec_data.commands.generate import Dtype, Mask, Packing, generate
from spec_data.terminal.command import command, words_of
from spec_data.terminal.paths import check_directory_to_write, check_file_to_write
from spec_data.terminal.types import (
    Corpus,
    Count,
    File,
    JsonObject,
    Layers,
    Names,
    NewDataset,
    Positive,
    Target,
    Text,
    comma_list,
    more,
    path_list,
)

if TYPE_CHECKING:
    from spec_data.generation.plan import Plan
    from spec_data.generation.probe import Probe
    from spec_data.generation.setup import Fitting, Setup
    from spec_data.results import EstimateResult

logger = logging.getLogger(__name__)

_CAPTURE = more("what is captured")
_DOCUMENTS = more("documents")
_RUNNING = more("how the target runs")
_WORKERS = more("shards and workers")


@command
def estimate(
    target: Target,
    corpus: Corpus,
    out: NewDataset,
    *,
    layers: Layers = "auto",
    for_: Names = "",
    codec: str = "lm4c",
    supervision: Annotated[str, _CAPTURE] = "final-hidden",
    final: Annotated[Literal["all", "supervised"], _CAPTURE] = "all",
    teacher: Annotated[Literal["supervised", "all"], _CAPTURE] = "supervised",
    max_length: Positive = 2048,
    limit: Count = 0,
    mask: Mask = "assistant",
    chat_template_kwargs: Annotated[JsonObject | None, _DOCUMENTS] = None,
    max_bad_rows: Annotated[Text, _DOCUMENTS] = "auto",
    max_row_bytes: Annotated[Text, _DOCUMENTS] = "8MB",
    num_proc: Annotated[Count, _DOCUMENTS] = 0,
    device: str = "auto",
    dtype: Annotated[Dtype, _RUNNING] = "auto",
    backend: Annotated[Literal["hf", "vllm"], _RUNNING] = "hf",
    device_map: Annotated[str | None, _RUNNING] = None,
    packing: Annotated[Packing, _RUNNING] = "auto",
    batch_tokens: Annotated[Text, _RUNNING] = "auto",
    revision: Annotated[str | None, _RUNNING] = None,
    trust_remote_code: Annotated[bool, _RUNNING] = False,
    max_shard_size: Annotated[Text, _WORKERS] = "auto",
    probe: bool = False,
    page: File | None = None,
) -> "EstimateResult":
    """Compute what `generate` would write with the same arguments: tokens, shards, bytes.

    The corpus is read and rendered, and nothing is written. Bytes of the shards are exact but for
    tokens that escape a lossy codec, those of all other files to within 1 % and 64 KB. Only the
    target's config and tokenizer are needed, unless --probe is given. Exit code 1 where the disk is
    too small.

    Examples:
        spec-data estimate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/qwen3-8b
        spec-data estimate --target MODEL --corpus chats.jsonl --out DIR --limit 1000 --probe

    Args:
        target: the target model: a local directory or a Hugging Face Hub id.
        corpus: the conversations, as for `generate`.
        out: the directory that `generate` would write: it says which disk is meant.
        layers: layer ids to capture, such as 1,3,5; auto, or spread:N.
        for_: drafts to capture for, such as eagle3,dspark or all, instead of --layers.
        codec: how states are stored: bf16, int8c, fp8, lm6c or lm4c; or aux=NAME,final=NAME.
        supervision: final-hidden, topk:K or logits.
        final: tokens at which hidden.final is stored.
        teacher: tokens at which the head runs.
        max_length: cut documents to this many tokens.
        limit: read at most this many corpus rows; 0 reads all.
        mask: supervised tokens: those of every assistant turn, of the last one, or all.
        chat_template_kwargs: JSON object of arguments for the chat template, such as
            {"enable_thinking": false}.
        max_bad_rows: stop if more rows are bad: a count, or a share such as 1%.
        max_row_bytes: a row of more bytes is a bad row.
        num_proc: processes that render the corpus; 0 takes one per core, at most 16.
        device: with --probe: device of the target.
        dtype: dtype in which the target runs; auto is the checkpoint's own.
        backend: with --probe: what runs the target.
        device_map: with --probe: spread the target over the GPUs of this machine.
        packing: with --probe: how documents share a row.
        batch_tokens: tokens per forward of the target; auto tries the longest documents on a GPU.
        revision: branch, tag or commit of a target on the Hub; not given: its main branch.
        trust_remote_code: run Python code that comes with the model; only for authors you trust.
        max_shard_size: size of one shard, such as 500MB; auto chooses.
        probe: also load the target and run a few batches: tokens per second, time, memory.
        page: also write an HTML page of what would be captured: documents token by token, with the
            supervised ones marked, and what is left out, by reason.

    Returns:
        The sizes, and whether the disk has room (`fits`).

    Raises:
        As `generate`.

    >>> sizes = spec_data.estimate("target", "chats.jsonl", "data-3", layers=[0, 2, 4])
    >>> sizes.documents, sizes.layers, sizes.fits
    (12, (0, 2, 4), True)
    >>> sizes.bytes <= sizes.bytes_needed <= sizes.bytes_free
    True
    """
    given = {name: value for name, value in locals().items() if name not in ("probe", "page")}
    from spec_data.generation.probe import run_probe
    from spec_data.generation.setup import (
        AnswerOptions,
        CaptureOptions,
        CorpusRows,
        RenderOptions,
        RunOptions,
        announce_drafts,
        check_outside_corpus,
        make_plan,
        set_up,
    )
    from spec_data.models.devices import check_devices
    from spec_data.models.spread import parse_spread
    from spec_data.pages.dataset_page import plan_page
    from spec_data.pages.page import write_page
    from spec_data.shards.errors import ConfigError
    from spec_data.shards.urls import scheme_of
    from spec_data.terminal.option_values import parse_batch_tokens, parse_drafts

    if scheme_of(str(out)):
        raise ConfigError(
            f"--out {out}: estimate says whether a disk has room; give a local --out, the sizes "
            "are the same"
        )
    check_directory_to_write("--out", str(out))
    sources = tuple(path_list(corpus))
    check_outside_corpus(str(out), sources)
    run = RunOptions(
        backend=backend,
        dtype=dtype,
        device=device,
        spread=parse_spread(device_map, None, None),
        packing=packing,
        batch_tokens=parse_batch_tokens(str(batch_tokens)),
        trust_remote_code=trust_remote_code,
    )
    if page is not None:
        check_file_to_write("--page", str(page))
    if probe:
        check_devices(device, run.spread.device_map)  # before the corpus is read
    setup = set_up(
        str(target),
        CorpusRows(
            sources=sources,
            limit=limit,
            max_bad_rows=str(max_bad_rows),
            max_row_bytes=str(max_row_bytes),
        ),
        RenderOptions(mask=mask, max_length=max_length, template_kwargs=chat_template_kwargs or {}),
        CaptureOptions(
            layers=comma_list(layers),
            drafts=parse_drafts(comma_list(for_)),
            supervision=supervision,
            codec=codec,
            final=final,
            teacher=teacher,
            max_shard_size=str(max_shard_size),
        ),
        run,
        AnswerOptions(),
        revision=revision,
        weights=probe,
    )
    drafts = announce_drafts(setup)
    plan = make_plan(setup, num_proc)
    if page is not None:
        logger.info("page: %s", write_page(str(page), plan_page(setup, plan)).path)
    measured = run_probe(setup, plan) if probe else None
    result = estimated(setup, plan, drafts, Path(out), measured)
    if not result.fits:
        return result
    words = words_of(inspect.unwrap(generate), given)
    return replace(result, next_command=("spec-data", "generate", *words))


def estimated(
    setup: "Setup", plan: "Plan", drafts: "Fitting", out: Path, probe: "Probe | None" = None
) -> "EstimateResult":
    """Return the sizes of the dataset of a plan; `out` says which disk is meant."""
    from spec_data.generation.target_files import other_files
    from spec_data.report import column_rows, counts_text, draft_facts, draft_rows
    from spec_data.results import EstimateResult, skipped_rows
    from spec_data.terminal.text_table import text_table

    tokens, predicting = plan.tokens, plan.documents.predicting
    shards = sum(plan.unit_bytes(unit, setup.columns) for unit in range(len(plan.units)))
    other = other_files(setup, plan)
    needed = shards + sum(other.values())
    existing = next(p for p in [out, *out.absolute().parents] if p.exists())
    free = shutil.disk_usage(existing).free
    reads = draft_facts(setup.draft_layers, setup.columns, tokens, predicting)
    return EstimateResult(
        target=setup.target["name"],
        blocks=setup.target["num_layers"],
        fitting=drafts.problems,
        layers=setup.layers,
        drafts=reads,
        documents=len(plan.lengths),
        tokens=tokens,
        supervised_tokens=plan.documents.supervised,
        longest_document=int(plan.lengths.max()),
        pack_length=plan.pack_length,
        packing_utilisation=plan.utilisation(),
        shards=len(plan.units),
        bytes=shards,
        bytes_per_token=shards / tokens,
        bytes_needed=needed,
        other_bytes=other,
        bytes_free=free,
        fits=needed <= free,
        dropped=plan.counts.dropped,
        skipped_rows=skipped_rows(asdict(plan.counts)),
        columns=[
            {"name": c.name, "codec": c.codec, "bytes_per_token": c.bytes_per_token}
            for c in setup.columns
        ],
        corpus=plan.corpus,
        counts=asdict(plan.counts),
        probe=probe,
        text="\n\n".join(
            [
                "drafts that can be fitted\n  " + "\n  ".join(drafts.lines),
                "corpus\n" + "\n".join(f"  {_source_text(source)}" for source in plan.corpus),
                counts_text(vars(plan.counts), tokens),
                column_rows(setup.columns, tokens, predicting),
                *([draft_rows(reads)] if reads else []),
                text_table(_lines(setup, plan, shards, other, free, probe)),
            ]
        ),
    )


def _lines(
    setup: "Setup",
    plan: "Plan",
    shards: int,
    other: dict[str, int],
    free: int,
    probe: "Probe | None",
) -> list[tuple[str, str]]:
    """Return the figures as names and values, in words."""
    from spec_data.terminal.progress import size

    needed = shards + sum(other.values())
    return [
        ("target", f"{setup.target['name']} ({setup.target['num_layers']} blocks)"),
        ("layers (output of block k, from 0)", ", ".join(map(str, setup.layers)) or "none"),
        ("documents", f"{len(plan.lengths):,}"),
        ("tokens", f"{plan.tokens:,}"),
        ("supervised tokens", f"{plan.documents.supervised:,}"),
        ("longest document", f"{int(plan.lengths.max()):,}"),
        ("pack length", f"{plan.pack_length:,}"),
        ("packing utilisation", f"{plan.utilisation():.1%}"),
        ("shards", f"{len(plan.units):,}"),
        ("bytes per token", f"{shards / plan.tokens:,.1f}"),
        ("bytes of all shards", f"{shards:,} ({size(shards)}){_escape_note(setup)}"),
        ("bytes of the target's embedding and head", f"{other['head']:,} ({size(other['head'])})"),
        ("bytes of all other files", size(sum(other.values()) - other["head"])),
        ("bytes of the whole directory", f"{size(needed)} (to within 1 % and 64 KB)"),
        ("free on this disk", size(free) + ("" if needed <= free else "  NOT ENOUGH")),
        *_probe_lines(probe),
    ]


def _probe_lines(probe: "Probe | None") -> list[tuple[str, str]]:
    from spec_data.terminal.progress import size

    if probe is None:
        return []
    minutes = probe.seconds / 60
    lasts = f"{minutes / 60:,.1f} hours" if minutes >= 120 else f"{minutes:,.1f} minutes"
    memory = "of the process" if probe.device == "cpu" else f"of {probe.device}"
    return [
        ("probe", f"{probe.tokens:,} tokens on {probe.device}, {probe.form}"),
        ("tokens per forward", f"{probe.batch_tokens:,}"),
        ("tokens per second", f"{probe.tokens_per_second:,.0f} (one worker)"),
        ("time to capture", f"about {lasts}"),
        (f"memory {memory}", f"{size(probe.memory_bytes)} at its peak"),
    ]


def _escape_note(setup: "Setup") -> str:
    lossy = [c for c in setup.columns if c.lossy]
    if not lossy:
        return ""
    return f", and {2 * (lossy[0].width or 1) + 4:,} per massive token and lossy column"


def _source_text(source: dict[str, Any]) -> str:
    return (
        f"{source['source']}: {source['kind']}, {source['format']}, {source['rows']:,} rows, "
        f"{source['bad']:,} bad, {source.get('unrendered', 0):,} that cannot be rendered"
    )
