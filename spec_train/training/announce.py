"""Log lines of a run before its first step: dataset, documents, batches, parameters."""

import logging
from typing import Any

from torch import Tensor

from spec_data.models.engines import engine_warnings
from spec_data.models.families import target_architectures
from spec_data.shards.layer_ids import recipe_layers
from spec_data.shards.remote import SIZE_VARIABLE
from spec_data.shards.serving import prompt_lines
from spec_data.terminal.progress import size
from spec_train.data.mixture import Documents, parts_of
from spec_train.data.order import SPLIT_RULE, STRETCHES_PER_WINDOW
from spec_train.data.splits import Splits
from spec_train.drafts import Draft
from spec_train.drafts.config import special_ids
from spec_train.drafts.draft import LayersDraft
from spec_train.drafts.vocabulary import vocabulary_coverage
from spec_train.formats.preflight import refusing
from spec_train.training.trainer import Trainer

log = logging.getLogger(__name__)

CLEARLY_BELOW = 0.01
"""Warn where the draft vocabulary misses this share of supervised tokens without need."""

FEWEST_HELD_OUT, FEWEST_TOKENS = 8, 500
"""Fewer held-out documents, or supervised tokens in them, choose the best draft by luck."""


def announce(trainer: Trainer, splits: Splits, total: int | None = None) -> None:
    """Log which draft is trained, and on which documents.

    `total` is the number of steps of the run, if the trainer only runs some of them.
    """
    dataset, selection, held_out = trainer.dataset, splits.selection, splits.measured
    for part in parts_of(dataset):
        quantised = part.manifest.target.quantised_as
        log.info(
            f"dataset    {part.location}: {len(part):,} documents, {part.lengths.sum():,} tokens, "
            f"{part.supervised.sum():,} supervised"
            + (f"; the target was quantised: {quantised}" if quantised else "")
        )
    reasons = [f"{count:,} with {reason}" for reason, count in selection.left_out.items()]
    log.info(
        f"documents  {len(splits.train.rows):,} for training, {splits.held_out:,} held out: all of "
        f"{splits.held_prompts:,} prompts ({len(held_out):,} measured); {selection.cut:,} cut to "
        f"{splits.train.seq_len} tokens; "
        + ("left out: " + "; ".join(reasons) if reasons else "none left out")
    )
    _announce_split(trainer, splits)
    supervised = int(dataset.supervised[held_out].sum())
    if len(held_out) and (len(held_out) < FEWEST_HELD_OUT or supervised < FEWEST_TOKENS):
        log.warning(
            f"warning[held-out]: {len(held_out)} held-out documents with {supervised:,} "
            f"supervised tokens "
            "choose the best draft: their figures say little. In a new run, raise --validation"
        )
    for name, text in prompt_lines(trainer.dataset.manifest.identity):
        log.info(f"prompts    {name}: {text}")
    _announce_cache(dataset, trainer.config.window_tokens)
    _announce_draft(trainer)
    config, ranks = trainer.config, trainer.ranks
    parameters = sum(p.numel() for p in trainer.masters.params)
    where = "" if ranks.alone else f" in {ranks.world_size} processes ({config.sharding})"
    log.info(
        f"training   {parameters:,} parameters, steps {trainer.step} to "
        f"{trainer.total if total is None else total}, learning rate {config.lr:g}, {config.dtype} "
        f"on {config.device}{where}, output in {config.out}"
    )


def _announce_cache(dataset: Documents, window_tokens: int) -> None:
    """Warn where shards of remote datasets are downloaded again and again.

    Of a remote dataset, a window may touch its share of the tokens, and one shard more per stretch.
    """
    parts, needed, limits = parts_of(dataset), 0, []
    tokens = sum(int(part.lengths.sum()) for part in parts)
    for part in parts:
        share = window_tokens * int(part.lengths.sum()) / max(1, tokens)
        for source in part.sources:
            if source.mirror is None:
                continue
            totals = source.manifest.totals
            largest = max((record.bytes for record in source.manifest.shards), default=0)
            window = int(share * totals.bytes / max(1, totals.tokens))
            needed += min(totals.bytes, window + STRETCHES_PER_WINDOW * largest)
            limits.append(source.mirror.limit)
    if limits and needed > limits[0]:
        log.warning(
            f"warning[cache]: a window of --window-tokens {window_tokens:,} may touch "
            f"{size(needed)} of remote shards, and the local cache holds {size(limits[0])}: they "
            f"are downloaded again and again. Set {SIZE_VARIABLE} to more, or lower "
            "--window-tokens in a new run"
        )


def _announce_split(trainer: Trainer, splits: Splits) -> None:
    """Say by which rule documents are held out, where it is not the usual one, and if too many."""
    usable, wanted = len(splits.train.rows) + splits.held_out, trainer.config.validation
    if splits.rule.rule != SPLIT_RULE:
        log.info("held out   by document, as an earlier release did: the run began so")
    elif splits.common and splits.held_out:
        log.warning(
            f"warning[held-out]: {splits.common:,} of {usable:,} documents begin with the same "
            "user message, so these are held out one by one: answers to it are on both sides, and "
            "lengths are too good where they are alike"
        )
    if splits.held_out > max(FEWEST_HELD_OUT, 3 * wanted * usable):
        log.warning(
            f"warning[held-out]: {splits.held_out:,} of {usable:,} documents are held out, more "
            f"than --validation {wanted:g} asks for: many of them answer one prompt. Another "
            "split_seed holds out others"
        )


def _announce_draft(trainer: Trainer) -> None:
    """Log which captured layers the draft reads, and why; name engines that cannot serve it."""
    draft: Any = trainer.draft
    if isinstance(draft, LayersDraft):
        started = trainer.config.init_from is not None
        why = draft.why_layers(draft.options, trainer.dataset.manifest)
        log.info(
            f"layers     {', '.join(map(str, draft.config.layers))} (outputs of these blocks, from "
            f"0): {'those of the draft of --init-from' if started else why}"
        )
        recipe = recipe_layers(draft.name, trainer.dataset.manifest.target.num_layers or 0)
        given = started or draft.options.layers != "auto"
        if recipe and recipe != tuple(draft.config.layers) and not given:
            layers = ",".join(map(str, recipe))
            lacking = not set(recipe) <= set(trainer.dataset.manifest.layers)
            log.warning(
                f"warning[recipe-layers]: the recipe of {draft.name} reads layers {layers}"
                + (
                    f", which the dataset lacks: spec-data generate ... --for {draft.name}"
                    if lacking
                    else f" alone: --layers {layers}"
                )
            )
    for name in ("attention_bias", "mlp_bias"):
        if getattr(draft.config, name, False) and (engines := refusing(draft.name, name)):
            log.warning(
                f"warning[engines]: the draft has {name}, as its target or the option says. "
                f"Engines that do not load such biases in {draft.name} drafts: "
                f"{', '.join(engines)}. --{name.replace('_', '-')} false fits a draft without"
            )
    target = target_architectures(trainer.dataset.target_config())
    for line in engine_warnings([draft.name], target):
        log.warning("warning[engines]: %s", line)


def announce_vocabulary(draft: Draft, counts: Tensor, dataset: Documents) -> None:
    """Log the share of supervised training tokens, int64 [V], that a new draft can propose.

    Warn if a vocabulary of the same size, chosen on these documents, has clearly more of them.
    """
    if draft.full_vocabulary:
        return
    special = special_ids(dataset.target_config())
    coverage, best = vocabulary_coverage(counts, draft.draft_ids, special)
    log.info(
        f"vocabulary {draft.config.draft_vocab_size:,} of {draft.config.vocab_size:,} tokens: "
        f"{100 * coverage:.2f} % of the supervised tokens for training"
    )
    if best - coverage > CLEARLY_BELOW:
        log.warning(
            f"warning[vocabulary]: the draft vocabulary is not made for this data: it holds "
            f"{100 * coverage:.1f} % of the supervised tokens, and one chosen on these documents "
            f"{100 * best:.1f} %. The draft can never propose the others. Train a new draft "
            "without --init-from and --draft-vocab, or take a larger vocabulary"
        )
