"""How long a run is and how large its steps are, where the user leaves that to the dataset.

A draft needs a number of optimizer steps more than a number of epochs: with the settings for a
large dataset, a small one ends after a few steps. So a small dataset gets smaller steps first, and
then more epochs, until the run has about `LEAST_STEPS` steps. A dataset that has enough tokens gets
what the preset says, or BATCH packs per step and EPOCHS epochs.
"""

import dataclasses
import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec_data.shards.errors import ConfigError
from spec_train.data.mixture import Documents, Mixture
from spec_train.options.presets import PRESETS
from spec_train.options.training import Training

log = logging.getLogger(__name__)

EPOCHS, MOST_EPOCHS = 3, 20
LEAST_STEPS = 1500
LEAST_PER_EPOCH = 100
"""A step is made smaller, down to one pack per process, if an epoch has fewer steps than this."""


def sized(
    config: Training, dataset: Documents, world_size: int, started: dict[str, Any] | None
) -> Training:
    """Return the config with its batch size and its epochs, if --steps does not decide them.

    Options that the user gave stay as they are, but for those that equal the preset's: the values
    of a preset are those of a dataset that has enough tokens. `started` is the identity of the run
    to resume, None for a new run: it keeps its size.

    Raises:
        ConfigError: the run to resume has a number of packs per step that these processes and
            --accumulation cannot have.
    """
    preset = PRESETS[config.preset].values if config.preset in PRESETS else {}
    whole_step = _of_preset(config, preset, "batch_size", "accumulation")
    free = Free(
        batch=config.batch_size is None or whole_step,
        accumulation=whole_step,
        epochs=config.steps is None
        and (config.epochs is None or _of_preset(config, preset, "epochs")),
    )
    if started is not None:
        return _as_started(config, free, world_size, started)
    batch, accumulation = config.micro_batch, config.accumulation
    if config.steps is not None:
        return dataclasses.replace(config, batch_size=batch)
    packs = packs_of_epoch(config, dataset)
    while free.batch and packs < LEAST_PER_EPOCH * batch * accumulation * world_size:
        if free.accumulation and accumulation > 1:
            accumulation //= 2
        elif batch > 1:
            batch //= 2
        else:
            break
    steps, epochs = packs / (batch * accumulation * world_size), config.epochs or EPOCHS
    if free.epochs:
        epochs = max(epochs, min(MOST_EPOCHS, math.ceil(LEAST_STEPS / max(1.0, steps))))
    if epochs > (config.epochs or EPOCHS) or batch < config.micro_batch:
        log.info(
            "size       small dataset, about %.0f packs per epoch: %d epochs and %d packs per "
            "step and process, about %d steps (--epochs or --steps and --batch-size change it)",
            *(packs, epochs, batch * accumulation, epochs * max(1.0, steps)),
        )
    return dataclasses.replace(config, batch_size=batch, accumulation=accumulation, epochs=epochs)


@dataclass(frozen=True)
class Free:
    """Which options the dataset decides: the user gave no value of their own."""

    batch: bool
    accumulation: bool
    epochs: bool


def packs_of_epoch(config: Training, dataset: Documents) -> float:
    """Return about how many full packs an epoch of the training documents fills."""
    used = np.minimum(dataset.lengths, config.seq_len) * (dataset.supervised > 0)  # int64 [N]
    if isinstance(dataset, Mixture):
        tokens = sum(
            float(share.weight) * int(used[share.first : share.last].sum())
            for share in dataset.shares
        )
    else:
        tokens = float(used.sum())
    return tokens * (1 - config.validation) / config.seq_len


def _of_preset(config: Training, preset: dict[str, Any], *names: str) -> bool:
    """Whether these options have the values of the preset, and it sets them."""
    return all(name in preset and getattr(config, name) == preset[name] for name in names)


def _as_started(config: Training, free: Free, world_size: int, started: dict[str, Any]) -> Training:
    """Return the config with the size of the run that it resumes, where that is free."""
    batch, accumulation, epochs = config.micro_batch, config.accumulation, config.epochs
    if free.batch:
        share, rest = divmod(started["packs_per_step"], world_size)
        if free.accumulation:
            batch = math.gcd(share, batch)
            accumulation = share // batch
        else:
            batch, left = divmod(share, accumulation)
            rest = rest or left
        if rest:
            raise ConfigError(
                f"--out {config.out}: this run has {started['packs_per_step']} packs per step, "
                f"which {world_size} processes with --accumulation {accumulation} cannot share "
                "evenly; use another number of processes or another --accumulation"
            )
    if free.epochs:
        epochs = started.get("epochs") or epochs or EPOCHS
    return dataclasses.replace(config, batch_size=batch, accumulation=accumulation, epochs=epochs)
