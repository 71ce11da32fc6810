"""Log lines of a run before its first step: dataset, documents, batches, parameters."""

import logging
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.models.engines import engine_warnings
from spec_data.models.families import target_architectures
from spec_data.shards.layer_ids import recipe_layers
from spec_data.shards.remote import SIZE_VARIABLE
from spec_data.shards.serving import prompt_lines
from spec_data.terminal import NOTICE
from spec_data.terminal.progress import size
from spec_train.data.mixture import Documents, MixedPlan, Mixture, parts_of
from spec_train.data.order import SPLIT_RULE, STRETCHES_PER_WINDOW, hash_ids
from spec_train.data.splits import Splits
from spec_train.drafts import Draft
from spec_train.drafts.config import special_ids
from spec_train.drafts.draft import LayersDraft
from spec_train.drafts.teacher import TOPK, missing_mass
from spec_train.drafts.vocabulary import vocabulary_coverage
from spec_train.formats.preflight import refusing
from spec_train.training.trainer import Trainer

log = logging.getLogger(__name__)

CLEARLY_BELOW = 0.01
"""Warn where the draft vocabulary misses this share of supervised tokens without need."""

MOSTLY = 0.9
"""Warn of a draft vocabulary that holds a smaller share of the supervised tokens."""

_SAMPLED = 32  # documents that are read for a figure of the log

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
    if selection.lost > CLEARLY_BELOW:
        beyond = sum(n for reason, n in selection.left_out.items() if "--seq-len" in reason)
        log.warning(
            f"warning[seq-len]: {100 * selection.lost:.0f} % of all tokens are not trained on: "
            f"{selection.cut:,} documents are cut to --seq-len {splits.train.seq_len}, and "
            f"{beyond:,} have their first answer after it and are left out. Raise --seq-len "
            f"(the longest document has {int(dataset.lengths.max()):,} tokens)"
        )
    _announce_shares(trainer, splits)
    _announce_missing_mass(trainer, splits)
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
    for name, default in {"sharding": "ddp", "exchange": "fp32"}.items():
        if ranks.alone and name in config.given and getattr(config, name) != default:
            value = getattr(config, name)
            log.log(NOTICE, "%-10s --%s %s: there is one process", "not used", name, value)
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


def _announce_shares(trainer: Trainer, splits: Splits) -> None:
    """Log the share of each of several datasets in an epoch, and documents that several have."""
    plan, dataset = splits.train, trainer.dataset
    if not isinstance(plan, MixedPlan) or not isinstance(dataset, Mixture):
        return
    tokens = [int(plan.lengths[documents].sum()) for documents in plan.draw(0)]
    for share, count in zip(plan.shares, tokens, strict=True):
        log.info(
            f"share      {share.name}, weight {float(share.weight):g}: "
            f"{100 * count / max(1, sum(tokens)):.1f} % of the tokens of an epoch"
        )
    ids = hash_ids(dataset.id_array, 0)
    if copies := len(ids) - len(np.unique(ids)):
        log.warning(
            f"warning[mixture]: {copies:,} of {len(ids):,} documents are in several of the "
            "datasets: their weights add up. `spec-data select --not-in` leaves them out of one"
        )


def _announce_missing_mass(trainer: Trainer, splits: Splits) -> None:
    """Log how much of the target's probability the K logits of a dataset lack, on some documents.

    Every loss and acceptance with such a teacher counts the rest as one token (docs/losses.md).
    """
    dataset = trainer.dataset
    if not dataset.manifest.supervision.startswith("topk"):
        return
    rows = splits.measured[:_SAMPLED] if len(splits.measured) else splits.train.rows[:_SAMPLED]
    dataset.wait_for(rows.tolist(), threading.Event())
    width = next(c.width for c in dataset.manifest.columns if c.name == TOPK[1]) or 1
    parts = []
    for row in rows.tolist():
        count = int(dataset.lengths[row])
        mask, logits = torch.zeros(count, dtype=torch.bool), torch.zeros(count, width)
        out = {"loss_mask": mask, TOPK[1]: logits, "target_logsumexp": torch.zeros(count)}
        dataset.read_into(row, out, 0, count)
        slots = mask[1:].nonzero()[:, 0]  # each predicts the supervised token after it
        parts.append(missing_mass(logits[slots], out["target_logsumexp"][slots]))
    missing = torch.cat([torch.zeros(0), *parts]).double()
    if not len(missing):
        return
    mean, largest = float(missing.mean()), float(missing.max())
    log.log(
        NOTICE,
        f"teacher    {dataset.manifest.supervision}: the logits lack {100 * mean:.2g} % of the "
        f"target's probability on average (at most {100 * largest:.2g} %, {len(missing):,} "
        "tokens). The loss takes the rest as one token, and expected acceptance is at most that "
        "much too low",
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
    elif coverage < MOSTLY:
        log.warning(
            f"warning[vocabulary]: the draft vocabulary of {draft.config.draft_vocab_size:,} "
            f"tokens holds only {100 * coverage:.0f} % of the supervised tokens, and the draft "
            "can never propose the others: every one ends a draft. Take a larger "
            "--draft-vocab-size"
        )


def announce_places(draft: Draft, spans: np.ndarray) -> None:
    """Warn of places of a draft that the answers are too short to train.

    `spans` is int64 [N], how many runs of supervised tokens have each length. The d-th drafted
    token has a slot wherever d supervised tokens follow a known one.
    """
    lengths = np.arange(len(spans))
    slots = [int((spans * (lengths - d).clip(0)).sum()) for d in range(1, draft.depth + 1)]
    short = next((d for d, count in enumerate(slots, 1) if count < CLEARLY_BELOW * slots[0]), None)
    if short is not None and slots[0]:
        log.warning(
            f"warning[short-answers]: the draft proposes {draft.depth} tokens at a time, and the "
            f"answers are too short for it: token {short} has {slots[short - 1]:,} slots to learn "
            f"from, the first one {slots[0]:,}. Train fewer (a shorter block or unroll), or on "
            "longer answers"
        )
