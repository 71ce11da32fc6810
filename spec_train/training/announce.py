"""Log lines of a run before its first step: dataset, documents, batches, parameters."""

import logging
from itertools import islice
from typing import Any

import numpy as np

from spec_data.models.engines import engine_warnings
from spec_data.shards.layer_ids import AUTO_DRAFTS, recipe_layers
from spec_train.data.mixture import Documents, MixedPlan, Mixture
from spec_train.data.policy_masks import PolicyDataset
from spec_train.data.splits import Splits
from spec_train.drafts.config import DraftConfig, target_architectures
from spec_train.drafts.draft import LayersDraft
from spec_train.formats.preflight import refusing
from spec_train.training.trainer import Trainer

log = logging.getLogger(__name__)

CLEARLY_BELOW = 0.01
"""Warn where the draft vocabulary misses this share of supervised tokens without need."""

FEWEST_HELD_OUT, FEWEST_TOKENS = 8, 500
"""Fewer held-out documents, or supervised tokens in them, choose the best draft by luck."""

FIRST_STEPS = 64
"""Batches used to estimate an epoch; packing the whole epoch would delay the first step."""


def announce(trainer: Trainer, splits: Splits, total: int | None = None) -> None:
    """Log which draft is trained, and on which documents.

    `total` is the number of steps of the run, if the trainer only runs some of them.
    """
    dataset, config, plan = trainer.dataset, trainer.config, splits.train
    for part in dataset.datasets if isinstance(dataset, Mixture) else (dataset,):
        _announce_dataset(part)
    _announce_layers(trainer)
    warn_of_biases(trainer.draft.name, vars(trainer.draft.config))
    for line in engine_warnings(
        [trainer.draft.name], target_architectures(trainer.dataset.target_config())
    ):
        log.warning("warning: %s", line)
    if isinstance(plan, MixedPlan):
        _announce_shares(plan)
    reasons = [f"{count:,} with {reason}" for reason, count in splits.selection.left_out.items()]
    log.info(
        "documents  %s for training, %s held out (%s measured); %s cut to %d tokens; %s",
        *(f"{n:,}" for n in (len(plan.rows), splits.held_out, len(splits.validation.rows))),
        *(f"{splits.selection.cut:,}", config.seq_len),
        "left out: " + "; ".join(reasons) if reasons else "none left out",
    )
    _warn_of_few_held_out(dataset, splits.validation.rows)
    batches = plan.iter_batches(trainer.stream.epoch)
    some = [p for batch in islice(batches, FIRST_STEPS) for p in batch]
    filled = sum(int(plan.lengths[pack].sum()) for pack in some)
    log.info(
        "epoch      %s tokens in packs of %d (%.1f %% full): about %s steps of %d packs",
        *(f"{plan.tokens:,}", plan.seq_len, 100 * filled / (len(some) * plan.seq_len)),
        f"{-(-plan.tokens * len(some) // (filled * plan.packs_per_batch)):,}",
        plan.packs_per_batch,
    )
    ranks = trainer.ranks
    log.info(
        "training   %s parameters, steps %d to %d, learning rate %g, %s on %s%s, output in %s",
        *(
            f"{sum(p.numel() for p in trainer.masters.params):,}",
            trainer.step,
            trainer.total if total is None else total,
            config.lr,
        ),
        *(config.dtype, config.device),
        "" if ranks.alone else f" in {ranks.world_size} processes ({config.sharding})",
        config.out,
    )


def _warn_of_few_held_out(dataset: Documents, rows: np.ndarray) -> None:
    """Warn if documents `rows`, int64 [n], are too few to tell drafts apart."""
    tokens = int(dataset.supervised[rows].sum())
    if len(rows) and (len(rows) < FEWEST_HELD_OUT or tokens < FEWEST_TOKENS):
        log.warning(
            "warning: %d held-out documents with %s supervised tokens choose the best draft: their "
            "figures say little. In a new run, raise --validation",
            *(len(rows), f"{tokens:,}"),
        )


def _announce_dataset(dataset: Documents) -> None:
    """Log the contents of a dataset, and what its masks are."""
    log.info(
        "dataset    %s: %s documents, %s tokens, %s supervised",
        dataset.place,
        *(f"{n:,}" for n in (len(dataset), dataset.lengths.sum(), dataset.supervised.sum())),
    )
    quantised = dataset.manifest.target.quantised_as
    if quantised:
        log.info("target     captured quantised: %s", quantised)
    if isinstance(dataset, PolicyDataset):
        log.info(
            "mask       %s, from the stored turns; the dataset was generated with %s",
            *(dataset.policy, dataset.manifest.mask or "another one"),
        )


def _announce_layers(trainer: Trainer) -> None:
    """Log which captured layers the draft reads, and why; some drafts read none."""
    draft: Any = trainer.draft
    if not isinstance(draft, LayersDraft):
        return
    manifest, layers = trainer.dataset.manifest, tuple(draft.config.layers)
    if trainer.config.init_from is not None:
        why = "those of the draft of --init-from"
    else:
        why = draft.why_layers(draft.options, manifest)
    log.info(
        "layers     %s (outputs of these blocks, from 0): %s", ", ".join(map(str, layers)), why
    )
    recipe = recipe_layers(draft.name, manifest.target.num_layers or 0)
    chosen = trainer.config.init_from is not None or draft.options.layers != "auto"
    if recipe not in (None, layers) and not chosen:
        log.warning(
            "warning: the recipe of %s reads layers %s, and the dataset was not captured for it. "
            "To train on those, capture them: spec-data generate ... --for %s",
            *(draft.name, ", ".join(map(str, recipe or ()))),
            ",".join(dict.fromkeys([*(manifest.draft_layers or AUTO_DRAFTS), draft.name])),
        )


def warn_of_biases(kind: str, config: dict[str, Any]) -> None:
    """Name the engines that do not load the biases of a draft; `config` has its fields."""
    for name in ("attention_bias", "mlp_bias"):
        engines = refusing(kind, name) if config.get(name) else []
        if not engines:
            continue
        log.warning(
            "warning: the draft has %s, as its target or the option says. Engines that do not load "
            "such biases in %s drafts: %s. --%s false fits a draft without",
            *(name, kind, ", ".join(engines), name.replace("_", "-")),
        )


def _announce_shares(plan: MixedPlan) -> None:
    """Log the share of each dataset in the first epoch."""
    for share, documents in zip(plan.shares, plan.draw(0), strict=True):
        log.info(
            "share      %s, weight %g: %s documents and %.1f %% of the tokens of an epoch",
            *(share.name, float(share.weight), f"{len(documents):,}"),
            100 * int(plan.lengths[documents].sum()) / max(1, plan.tokens),
        )


def log_vocabulary(config: DraftConfig, coverage: float, best: float) -> None:
    """Log the share of supervised training tokens that a draft can propose.

    `coverage` is the share of its own vocabulary, `best` that of a vocabulary of the same size
    chosen on these documents; the two differ where the vocabulary comes from somewhere else.
    """
    log.info(
        "vocabulary %s of %s tokens: %.2f %% of the supervised tokens for training",
        *(f"{config.draft_vocab_size:,}", f"{config.vocab_size:,}", 100 * coverage),
    )
    if best - coverage > CLEARLY_BELOW:
        log.warning(
            "warning: the draft vocabulary is not made for this data: it holds %.1f %% of the "
            "supervised tokens, and one chosen on these documents %.1f %%. The draft can never "
            "propose the others. Train a new draft without --init-from and --draft-vocab, or take "
            "a larger vocabulary",
            *(100 * coverage, 100 * best),
        )
