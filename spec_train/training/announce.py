"""Log lines of a run before its first step: dataset, documents, batches, parameters."""

import logging
from typing import Any

from torch import Tensor

from spec_data.models.engines import engine_warnings
from spec_data.models.families import target_architectures
from spec_data.shards.layer_ids import recipe_layers
from spec_train.data.mixture import Documents, parts_of
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
        counts = len(part), part.lengths.sum(), part.supervised.sum()
        quantised = part.manifest.target.quantised_as
        log.info(
            "dataset    %s: %s documents, %s tokens, %s supervised%s",
            *(part.location, *(f"{count:,}" for count in counts)),
            f"; the target was quantised: {quantised}" if quantised else "",
        )
    reasons = [f"{count:,} with {reason}" for reason, count in selection.left_out.items()]
    numbers = len(splits.train.rows), splits.held_out, len(held_out), selection.cut
    log.info(
        "documents  %s for training, %s held out (%s measured); %s cut to %d tokens; %s",
        *(f"{number:,}" for number in numbers),
        splits.train.seq_len,
        "left out: " + "; ".join(reasons) if reasons else "none left out",
    )
    supervised = int(dataset.supervised[held_out].sum())
    if len(held_out) and (len(held_out) < FEWEST_HELD_OUT or supervised < FEWEST_TOKENS):
        log.warning(
            "warning: %d held-out documents with %s supervised tokens choose the best draft: their "
            "figures say little. In a new run, raise --validation",
            *(len(held_out), f"{supervised:,}"),
        )
    _announce_draft(trainer)
    config, ranks = trainer.config, trainer.ranks
    log.info(
        "training   %s parameters, steps %d to %d, learning rate %g, %s on %s%s, output in %s",
        f"{sum(p.numel() for p in trainer.masters.params):,}",
        *(trainer.step, trainer.total if total is None else total),
        *(config.lr, config.dtype, config.device),
        "" if ranks.alone else f" in {ranks.world_size} processes ({config.sharding})",
        config.out,
    )


def _announce_draft(trainer: Trainer) -> None:
    """Log which captured layers the draft reads, and why; name engines that cannot serve it."""
    draft: Any = trainer.draft
    if isinstance(draft, LayersDraft):
        why = draft.why_layers(draft.options, trainer.dataset.manifest)
        if trainer.config.init_from is not None:
            why = "those of the draft of --init-from"
        layers = ", ".join(map(str, draft.config.layers))
        log.info("layers     %s (outputs of these blocks, from 0): %s", layers, why)
        target = trainer.dataset.manifest.target
        recipe = recipe_layers(draft.name, target.num_layers or 0)
        chosen = trainer.config.init_from is not None or draft.options.layers != "auto"
        if recipe not in (None, tuple(draft.config.layers)) and not chosen:
            log.warning(
                "warning: the recipe of %s reads layers %s, which the dataset lacks; to have "
                "them: spec-data generate ... --for %s",
                *(draft.name, ", ".join(map(str, recipe or ())), draft.name),
            )
    for name in ("attention_bias", "mlp_bias"):
        if getattr(draft.config, name, False) and (engines := refusing(draft.name, name)):
            log.warning(
                "warning: the draft has %s, as its target or the option says. Engines that do not "
                "load such biases in %s drafts: %s. --%s false fits a draft without",
                *(name, draft.name, ", ".join(engines), name.replace("_", "-")),
            )
    for line in engine_warnings(
        [draft.name], target_architectures(trainer.dataset.target_config())
    ):
        log.warning("warning: %s", line)


def announce_vocabulary(draft: Draft, counts: Tensor, dataset: Documents) -> None:
    """Log the share of supervised training tokens, int64 [V], that a new draft can propose.

    Warn if a vocabulary of the same size, chosen on these documents, has clearly more of them.
    """
    if draft.full_vocabulary:
        return
    special = special_ids(dataset.target_config())
    coverage, best = vocabulary_coverage(counts, draft.draft_ids, special)
    log.info(
        "vocabulary %s of %s tokens: %.2f %% of the supervised tokens for training",
        *(f"{draft.config.draft_vocab_size:,}", f"{draft.config.vocab_size:,}", 100 * coverage),
    )
    if best - coverage > CLEARLY_BELOW:
        log.warning(
            "warning: the draft vocabulary is not made for this data: it holds %.1f %% of the "
            "supervised tokens, and one chosen on these documents %.1f %%. The draft can never "
            "propose the others. Train a new draft without --init-from and --draft-vocab, or take "
            "a larger vocabulary",
            *(100 * coverage, 100 * best),
        )
