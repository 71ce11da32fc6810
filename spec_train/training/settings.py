"""The settings of a run: what the user leaves open, and what may not change when it resumes.

With the settings for a large dataset, a small one ends after a few steps. So it gets smaller steps
first, and then more epochs, until the run has about `LEAST_STEPS` steps.
"""

import logging
import math
from pathlib import Path
from typing import Any, cast

import numpy as np

from spec_data.models.devices import compute_dtype_name, usable_device
from spec_data.shards.errors import ConfigError
from spec_data.terminal.config import options_text, to_dict
from spec_data.terminal.given import Options, changed
from spec_train.data.mixture import Documents, Mixture
from spec_train.data.splits import Splits
from spec_train.options.data_option import parse_sources
from spec_train.options.draft_options import AUTO, PATHS, RANDOM, VOCABULARY_CHOICES, DraftOptions
from spec_train.options.loss_function import identity
from spec_train.options.training import Training

log = logging.getLogger(__name__)

MOST_EPOCHS = 20
LEAST_STEPS = 1500
LEAST_PER_EPOCH = 100
"""A step is made smaller, down to one pack per process, if an epoch has fewer steps than this."""
TIMES, INTERVAL = 5, 500
"""By default a run validates and saves TIMES times, or after every INTERVAL steps if more often."""

MAY_CHANGE = (
    *("preset", "shape_of"),  # the options that they set are still compared
    *("data", "out", "device", "log_every", "eval_every", "save_every", "keep", "track"),
    "accept_edited",  # about the files of --init-from, which is compared
    *("follow", "follow_timeout"),  # their effect on the order is compared instead
    *("batch_size", "accumulation"),  # packs_per_step, their product with the ranks, is compared
    "sharding",
    "gradient_checkpointing",
)
"""Options that a resumed run may change: locations, how often files are written, memory use."""
_STEP = ("batch_size", "accumulation")
_PLACES = ("data", "out", "init_from", "draft_vocab", "device", "dtype")
"""Options that are made absolute, or follow the machine: nothing of a run is filled by them."""


def resolve_config(config: Training, dataset: Documents) -> Training:
    """Replace each automatic option by its value, so that fit.json alone repeats the run."""
    device = usable_device(config.device)
    sources = parse_sources(config.data)
    return changed(
        config,
        data=tuple(str(source.absolute()) for source in sources),  # fit.json is read from anywhere
        init_from=_absolute(config.init_from),
        device=str(device),
        dtype=cast(Any, compute_dtype_name(config.dtype, device)),
        lr=config.lr or default_lr(dataset.manifest.hidden_size, config.optimizer),
    )


def with_absolute_paths(options: DraftOptions) -> DraftOptions:
    """Return the options of a draft, whose files are found from anywhere."""
    given = {name: getattr(options, name, None) for name in PATHS}
    changes: dict[str, Any] = {name: _absolute(path) for name, path in given.items() if path}
    return changed(options, **changes)


def _absolute(path: str | None) -> str | None:
    """Return a path of an option from the root: it is compared when a run resumes."""
    return None if path is None else str(Path(path).expanduser().absolute())


def default_lr(hidden_size: int, optimizer: str) -> float:
    """Peak learning rate by draft width, to two digits.

    1e-4 with AdamW and 1e-3 with Muon are what public trainers use at 4096 and more. A matrix's
    rate goes with 1/width under Adam (maximal-update parametrisation, arXiv 2203.03466). Muon's
    step has a spectral norm that grows with the root of the width, the weights' own has none.
    """
    if optimizer == "muon":
        return float(f"{min(5e-3, 1e-3 * math.sqrt(4096 / hidden_size)):.1e}")
    return float(f"{min(4e-3, 1e-4 * 4096 / hidden_size):.1e}")


SHORT, MOST = 400, 4.0
"""A fresh draft of fewer steps than SHORT has a higher rate, up to MOST times the usual one."""


def short_run_factor(steps: float) -> float:
    """Return how many times the usual peak rate a fresh draft of so few steps trains with.

    It is inverse to the steps: a short run ends before the usual rate has moved random weights far.
    Measured (docs/training.md) on two targets from 50 to 400 steps.
    """
    return min(MOST, max(1.0, SHORT / max(1.0, steps)))


def with_rate(
    config: Training,
    options: DraftOptions,
    steps: float,
    started: dict[str, Any] | None,
) -> Training:
    """Return the config with the peak rate for so many steps, if none was given.

    A run that resumes keeps its own. A draft that is trained already has the usual one.
    """
    if "lr" in config.given:
        return config
    if started is not None:
        return changed(config, lr=started.get("lr") or config.lr)
    if config.init_from is not None or options.starts_trained or not config.lr:
        return config
    return changed(config, lr=float(f"{config.lr * short_run_factor(steps):.2g}"))


def sized(
    config: Training, dataset: Documents, world_size: int, started: dict[str, Any] | None
) -> Training:
    """Return the config with its batch size and its epochs, if --steps does not decide them.

    Options that the user gave stay as they are. The values of a preset are those of a dataset that
    has enough tokens. `started` is the identity of the run to resume, None for a new run: it keeps
    its size.

    Raises:
        ConfigError: the run to resume has a number of packs per step that these processes,
            --batch-size and --accumulation cannot have.
    """
    free_batch, free_accumulation, free_epochs = (
        name not in config.given for name in ("batch_size", "accumulation", "epochs")
    )
    free_epochs = free_epochs and config.steps is None
    if free_epochs and dataset.growing is not None and dataset.growing.passed_on:
        config, free_epochs = changed(config, epochs=1), False
    batch, accumulation, epochs = config.batch_size, config.accumulation, config.epochs
    if started is not None:
        if free_batch or free_accumulation:
            batch, accumulation = _started_step(config, world_size, started)
        if free_epochs:
            epochs = started.get("epochs") or epochs
    elif epochs is not None:
        packs = packs_of_epoch(config, dataset)
        while packs < LEAST_PER_EPOCH * batch * accumulation * world_size:
            if free_accumulation and accumulation > 1:
                accumulation //= 2
            elif free_batch and batch > 1:
                batch //= 2
            else:
                break
        steps = max(1.0, packs / (batch * accumulation * world_size))
        if free_epochs:
            epochs = max(epochs, min(MOST_EPOCHS, math.ceil(LEAST_STEPS / steps)))
    return changed(config, batch_size=batch, accumulation=accumulation, epochs=epochs)


def filled(before: Options, after: Options) -> dict[str, Any]:
    """Return the options that something filled with other values; not those about places."""
    old = before.values()
    return {n: v for n, v in after.values().items() if v != old[n] and n not in _PLACES}


def packs_of_epoch(config: Training, dataset: Documents) -> float:
    """Return about how many full packs an epoch of the training documents fills."""
    used = np.minimum(dataset.lengths, config.seq_len) * (dataset.supervised > 0)  # int64 [N]
    tokens = float(used.sum())
    if isinstance(dataset, Mixture):
        tokens = sum(float(s.weight) * int(used[s.first : s.last].sum()) for s in dataset.shares)
    return tokens * (1 - config.validation) / config.seq_len


def _started_step(config: Training, world_size: int, started: dict[str, Any]) -> tuple[int, int]:
    """Return the batch size and the accumulation that make the steps of the run to resume."""
    packs = started["packs_per_step"]
    share, rest = divmod(packs, world_size)
    batch, accumulation = config.batch_size, config.accumulation
    if "accumulation" not in config.given and (accumulation > 1 or "batch_size" in config.given):
        accumulation = share // math.gcd(share, batch)
    if "batch_size" not in config.given:
        batch = share // accumulation
    if rest or batch * accumulation != share:
        named = {n: v for n, v in config.given_values().items() if n in _STEP}
        raise ConfigError(
            f"--out {config.out}: this run has {packs} packs per step, which {world_size} "
            f"processes{' with ' * bool(named)}{options_text(named)} cannot share evenly; use "
            "another number of processes, or other values of --batch-size and --accumulation"
        )
    return batch, accumulation


def repeatable(config: Training, options: DraftOptions) -> dict[str, Any]:
    """Return fit.json: every option, so that `--config RUN/fit.json` repeats the run.

    There all of them are given; so what another one replaces is null.
    """
    table = {**to_dict(config), **to_dict(options)}
    if any(table.get(name) is not None for name in VOCABULARY_CHOICES):
        table["draft_vocab_size"] = None
    if table["loss_fn"] is None:
        del table["loss_fn"]
    del table["shape_of"]  # its options are there
    if table.get("position_weights", AUTO) != AUTO and "step_decay" in table:
        table["step_decay"] = None
    if not config.validation:
        table["eval_every"] = None
    return table


def with_intervals(config: Training, total: int) -> Training:
    """Set the steps between validations and between checkpoints where they are not given.

    A run of `total` steps then has five of each or more, and at most INTERVAL steps between two.
    """
    steps = max(1, min(INTERVAL, total // TIMES))
    return changed(
        config, eval_every=config.eval_every or steps, save_every=config.save_every or steps
    )


def total_steps(config: Training, splits: Splits) -> int:
    """Return the number of steps of a run.

    Raises:
        ConfigError: its epochs have none: the weights of --data take less than a document.
    """
    if config.steps is not None:
        return config.steps
    steps = sum(splits.train.count_batches(epoch) for epoch in range(config.epochs or 0))
    if not steps:
        raise ConfigError(
            "--data: by its weights, no epoch takes a document; raise them, or give --steps"
        )
    return steps


def run_identity(
    draft_name: str,
    dataset: Documents,
    config: Training,
    options: DraftOptions,
    splits: Splits,
    world_size: int,
) -> dict[str, Any]:
    """Return what may not change when a run resumes: run.json holds it."""
    data: dict[str, Any] = {"dataset": dataset.manifest.fingerprint}
    if isinstance(dataset, Mixture):
        data["dataset"] = [share.fingerprint for share in dataset.shares]
        data["weights"] = [str(share.weight) for share in dataset.shares]
    table = {**to_dict(config), **to_dict(options)}
    own_loss = table.pop("loss_fn")
    if table.get("start_fc") == RANDOM:
        del table["start_fc"]  # as runs of earlier releases, which had no other start
    return {
        "draft": draft_name,
        **({"loss_fn": identity(own_loss)} if own_loss else {}),
        **data,
        **({"follow": True} if config.follow else {}),
        "packs_per_step": config.packs_per_step(world_size),
        **splits.rule.to_json(),
        **{name: value for name, value in table.items() if name not in MAY_CHANGE},
    }
