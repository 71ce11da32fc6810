"""`spec-data estimate`: what `generate` would write, before any GPU time."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spec_data.commands.generate import generate
from spec_data.generation.options import CaptureOptions
from spec_data.terminal import NOTICE
from spec_data.terminal.command import command, words_of
from spec_data.terminal.memory_rows import lines_of
from spec_data.terminal.paths import check_directory_to_write, check_file_to_write
from spec_data.terminal.types import Corpus, File, NewDataset, Target, path_list

if TYPE_CHECKING:
    from spec_data.generation.plan import Plan
    from spec_data.generation.probe import Probe
    from spec_data.generation.setup import Setup
    from spec_data.results import EstimateResult

logger = logging.getLogger(__name__)


@command
def estimate(
    target: Target,
    corpus: Corpus,
    out: NewDataset,
    options: CaptureOptions = CaptureOptions(),
    *,
    probe: bool = False,
    page: File | None = None,
) -> "EstimateResult":
    """Compute what `generate` would write: tokens, shards, bytes.

    The corpus is read and rendered, and nothing is written. Bytes of the shards are exact with
    --codec bf16. How many bits a lossy codec takes depends on the states: usually `bytes_least` to
    `bytes`, or with --probe as measured on a sample, to within about 3 %. A column that cannot keep
    its error takes what bf16 does (`bytes_bf16` if all are). Other files are sized to within 1 %
    and 64 KB, and an MTP block where the weights are here. Only the target's config and tokenizer
    are needed, unless --probe is given. Exit code 1 where the disk has less than `bytes` and these
    files take.

    Examples:
        spec-data estimate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/qwen3-8b
        spec-data estimate --target MODEL --corpus chats.jsonl --out DIR --limit 1000 --probe

    Args:
        target: the target model: a local directory or a Hugging Face Hub id.
        corpus: the conversations, as for `generate`.
        out: the directory that `generate` would write: it says which disk is meant.
        options: those of `generate`.
        probe: also load the target and run a few batches: tokens per second, time, memory.
        page: also write an HTML page of what would be captured: documents token by token, with the
            supervised ones marked, and what is left out, by reason.

    Returns:
        The sizes, and whether the disk has room (`fits`).

    Raises:
        ConfigError, CorpusError, TargetError, MissingError, RunError: as `generate`.

    >>> options = spec_data.CaptureOptions(layers=[0, 2, 4])
    >>> sizes = spec_data.estimate("target", "chats.jsonl", "data-3", options)
    >>> sizes.documents, sizes.layers, sizes.fits
    (12, (0, 2, 4), True)
    >>> sizes.bytes <= sizes.bytes_needed <= sizes.bytes_free
    True
    """
    given = {"target": target, "corpus": corpus, "out": out, "options": options}
    from spec_data.generation.probe import run_probe
    from spec_data.generation.setup import (
        announce_drafts,
        check_outside_corpus,
        image_files,
        make_plan,
        open_corpus,
        set_up,
    )
    from spec_data.models.devices import check_devices
    from spec_data.pages.dataset_page import plan_page
    from spec_data.pages.page import write_page
    from spec_data.shards.errors import ConfigError
    from spec_data.shards.storage import scheme_of

    options.check()
    if scheme_of(str(out)):
        raise ConfigError(
            f"--out {out}: estimate says whether a disk has room; give a local --out, the sizes "
            "are the same"
        )
    check_directory_to_write("--out", str(out))
    sources = path_list(corpus)
    check_outside_corpus(str(out), sources)
    shown = [name if lines_of(name) is None else "memory" for name in sources]
    if page is not None:
        check_file_to_write("--page", str(page))
    if probe:
        check_devices(options.device, options.spread.device_map)  # before the corpus is read
    with ExitStack() as stack:
        if probe:
            from spec_data.capture.processes import leading  # with all of a target

            stack.enter_context(leading(options.spread))
        setup = set_up(str(target), sources, options, weights=probe)
        drafts = announce_drafts(setup)
        images = image_files(setup)
        rows = open_corpus(sources, setup.options, tokenizer=setup.tokenizer, images=images)
        plan = make_plan(rows, setup)
        if page is not None:
            logger.log(NOTICE, "%s", write_page(str(page), plan_page(shown, setup, plan)))
        measured, columns = run_probe(setup, plan) if probe else (None, setup.columns)
    result = estimated(replace(setup, columns=columns), plan, drafts, Path(out), measured)
    words = (
        ("spec-data", "generate", *words_of(generate, given))
        if result.fits and shown == sources
        else ()
    )
    return replace(result, next_command=words, page=plan_page(shown, setup, plan, 0))


def estimated(
    setup: "Setup",
    plan: "Plan",
    drafts: tuple[dict[str, str | None], list[str]],
    out: Path,
    probe: "Probe | None" = None,
) -> "EstimateResult":
    """Return the sizes of the dataset of a plan; `out` says which disk is meant."""
    from msgspec import structs

    from spec_data.generation.probe import other_files, process_memory
    from spec_data.pages.report import as_text, columns_table, counts_text
    from spec_data.results import EstimateResult, skipped_rows
    from spec_data.shards.layer_ids import recipe_layers
    from spec_data.shards.schema import bits_range
    from spec_data.terminal.progress import size
    from spec_data.terminal.text_table import text_table

    tokens, predicting = plan.tokens, plan.documents.predicting
    weights, forward = process_memory(setup, plan) or (0, 0)
    counts = structs.asdict(plan.counts)
    shards = sum(plan.unit_bytes(unit, setup.columns) for unit in range(len(plan.units)))
    other = other_files(setup, plan)
    needed = min(shards, setup.options.ring_bytes or shards) + sum(other.values())
    existing = next(p for p in [out, *out.absolute().parents] if p.exists())
    free = shutil.disk_usage(existing).free
    least = in_bf16 = shards
    for column in (c for c in setup.columns if c.lossy and c.error is None):
        low, high = bits_range(column.quality)
        rows = predicting if column.sparse else tokens
        least -= int((high - low) / 8 * (column.width or 1) * rows)
        in_bf16 += max(0, int((16 - high) / 8 * (column.width or 1) * rows))
    blocks, captured = setup.target["num_layers"], set(setup.layers)
    own = [d for d in drafts[0] if captured.issuperset(recipe_layers(d, blocks) or ())]
    by_draft = bytes_by_draft(setup, plan, [d for d in drafts[0] if drafts[0][d] is None])
    alone = [
        (", ".join(group), ", ".join(map(str, layers)) or "none", f"{count:,}", size(count))
        for (layers, count), group in groups_of(by_draft, blocks).items()
    ]
    about = f"weights {size(weights)}, a forward {size(forward)}, and masks"
    lines = [
        ("target", f"{setup.target['name']} ({setup.target['num_layers']} blocks)"),
        ("longest document", f"{int(plan.lengths.max()):,}"),
        ("packing utilisation", f"{plan.utilisation():.1%} of packs of {plan.pack_length:,}"),
        ("shards", f"{len(plan.units):,}"),
        (
            "bytes of all shards",
            f"{shards:,}" + (f", at least {least:,}" if least < shards else ""),
        ),
        ("bytes of the target's embedding and head", f"{other['head']:,}"),
        *([("memory of each process, about", about)] if weights else []),
        *(probe.lines() if probe else []),
    ]
    return EstimateResult(
        target=setup.target["name"],
        layers=setup.layers,
        fitting=drafts[0],
        own_layers=tuple(draft for draft in own if drafts[0][draft] is None),
        draft_layers=setup.draft_layers,
        bytes_by_draft=by_draft,
        documents=len(plan.lengths),
        tokens=tokens,
        supervised_tokens=int(plan.documents.supervised.sum()),
        shards=len(plan.units),
        bytes=shards,
        bytes_least=least,
        bytes_bf16=in_bf16,
        other_bytes=other,
        bytes_needed=needed,
        bytes_free=free,
        fits=needed <= free,
        dropped=plan.counts.dropped,
        skipped_rows=skipped_rows(counts),
        probe=probe,
        process_bytes=weights + forward or None,
        text="\n\n".join(
            [
                "drafts that can be fitted\n  " + "\n  ".join(drafts[1]),
                counts_text(counts, tokens),
                as_text(columns_table(setup.columns, tokens, predicting)),
                *(
                    ["bytes of all shards for one draft alone (--for DRAFT), about"]
                    if alone
                    else []
                ),
                *(
                    [text_table([("drafts", "layers", "bytes", ""), *alone], "<<>>")]
                    if alone
                    else []
                ),
                text_table(lines),
            ]
        ),
    )


def bytes_by_draft(setup: "Setup", plan: "Plan", drafts: Sequence[str]) -> dict[str, int]:
    """Return about how many bytes the shards would have, captured with --for one draft alone.

    A draft whose recipe the target has too few blocks for is left out. Bits of lossy columns are
    those of `setup.columns`, or the most that are usual.
    """
    from spec_data.generation.options import column_qualities
    from spec_data.shards.layer_ids import recipe_layers
    from spec_data.shards.schema import token_columns

    options, known = setup.options, {column.name: column for column in setup.columns}
    found = {}
    for draft in drafts:
        layers = recipe_layers(draft, setup.target["num_layers"])
        if layers is None:
            continue
        named = {f"L{layer}" for layer in layers}
        codecs = {n: v for n, v in options.codecs.items() if n in named or not n.startswith("L")}
        columns = token_columns(
            layers,
            setup.target["hidden_size"],
            options.supervision,
            setup.vocab_size,
            qualities=column_qualities(codecs, layers),
            final_tokens=options.final,
            teacher_tokens=options.teacher,
        )
        found[draft] = round(
            sum(
                known.get(column.name, column).bytes_per_token
                * (plan.documents.predicting if column.sparse else plan.tokens)
                for column in columns
            )
        )
    return found


def groups_of(
    by_draft: Mapping[str, int], blocks: int
) -> dict[tuple[tuple[int, ...], int], list[str]]:
    """Return the drafts that read the same layers of a target with so many blocks, with bytes."""
    from spec_data.shards.layer_ids import recipe_layers

    groups: dict[tuple[tuple[int, ...], int], list[str]] = {}
    for draft, count in by_draft.items():
        groups.setdefault((recipe_layers(draft, blocks) or (), count), []).append(draft)
    return groups
