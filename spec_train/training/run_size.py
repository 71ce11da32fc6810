"""How long a run is and how large its steps are, where the user leaves that to the dataset.

With the settings for a large dataset, a small one ends after a few steps. So it gets smaller steps
first, and then more epochs, until the run has about `LEAST_STEPS` steps.
"""

import dataclasses
import logging
import math
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
TIMES, INTERVAL = 5, 500
"""By default a run validates and saves TIMES times, or after every INTERVAL steps if more often."""


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
    preset = PRESETS.get(config.preset or "", {})

    def of_preset(*names: str) -> bool:
        return all(name in preset and getattr(config, name) == preset[name] for name in names)

    free_accumulation = of_preset("batch_size", "accumulation")
    free_batch = config.batch_size is None or free_accumulation
    free_epochs = config.steps is None and (config.epochs is None or of_preset("epochs"))
    batch, accumulation, epochs = config.micro_batch, config.accumulation, config.epochs
    if started is not None:
        if free_batch:
            batch, accumulation = _started_step(config, free_accumulation, world_size, started)
        if free_epochs:
            epochs = started.get("epochs") or epochs or EPOCHS
    elif config.steps is None:
        packs = packs_of_epoch(config, dataset)
        while free_batch and packs < LEAST_PER_EPOCH * batch * accumulation * world_size:
            if free_accumulation and accumulation > 1:
                accumulation //= 2
            elif batch > 1:
                batch //= 2
            else:
                break
        steps = max(1.0, packs / (batch * accumulation * world_size))
        epochs = epochs or EPOCHS
        if free_epochs:
            epochs = max(epochs, min(MOST_EPOCHS, math.ceil(LEAST_STEPS / steps)))
        if epochs > (config.epochs or EPOCHS) or batch < config.micro_batch:
            log.info(
                "size       small dataset, about %.0f packs per epoch: %d epochs and %d packs per "
                "step and process, about %d steps (--epochs or --steps and --batch-size change it)",
                *(packs, epochs, batch * accumulation, epochs * steps),
            )
    return dataclasses.replace(config, batch_size=batch, accumulation=accumulation, epochs=epochs)


def packs_of_epoch(config: Training, dataset: Documents) -> float:
    """Return about how many full packs an epoch of the training documents fills."""
    used = np.minimum(dataset.lengths, config.seq_len) * (dataset.supervised > 0)  # int64 [N]
    tokens = float(used.sum())
    if isinstance(dataset, Mixture):
        tokens = sum(float(s.weight) * int(used[s.first : s.last].sum()) for s in dataset.shares)
    return tokens * (1 - config.validation) / config.seq_len


def _started_step(
    config: Training, free_accumulation: bool, world_size: int, started: dict[str, Any]
) -> tuple[int, int]:
    """Return the batch size and the accumulation that make the steps of the run to resume."""
    packs = started["packs_per_step"]
    share, rest = divmod(packs, world_size)
    accumulation = config.accumulation
    if free_accumulation:
        accumulation = share // math.gcd(share, config.micro_batch)
    batch, left = divmod(share, accumulation)
    if rest or left:
        raise ConfigError(
            f"--out {config.out}: this run has {packs} packs per step, which {world_size} "
            f"processes with --accumulation {accumulation} cannot share evenly; use another number "
            "of processes or another --accumulation"
        )
    return batch, accumulation


def with_intervals(config: Training, total: int) -> Training:
    """Set the steps between validations and between checkpoints where they are not given.

    A run of `total` steps then has five of each or more, and at most INTERVAL steps between two.
    """
    steps = max(1, min(INTERVAL, total // TIMES))
    return dataclasses.replace(
        config,
        eval_every=config.eval_every or steps,
        save_every=config.save_every or steps,
    )
