"""What identifies a run: settings that may not change when it resumes, and rules that it keeps.

run.json holds the identity. A fact that an older release did not record has the value which that
release always used, so an older run resumes as it began.
"""

import dataclasses
from typing import Any

from spec_data.shards.errors import ConfigError
from spec_data.terminal.config import to_dict
from spec_train.data.mixture import Documents, Mixture
from spec_train.data.order import FILL, SPLIT_RULE
from spec_train.data.splits import SPLIT_SEED, Rules
from spec_train.options.command_options import FitConfig

TIMES, INTERVAL = 5, 500
"""By default a run validates and saves TIMES times, or after every INTERVAL steps if more often."""

FORMERLY_HELD = ("gradient_checkpointing",)  # the identity of older runs may contain it
MAY_CHANGE = (
    *("preset", "draft_config"),  # bundles: the options they set are still compared
    *("data", "out", "device", "log_every", "eval_every", "save_every", "keep", "track"),
    "check",  # decides when damage is found, not what is learnt
    "accept_edited",  # about the files of --init-from, which is compared
    *("follow", "follow_timeout", "follow_keep"),  # their effect on the order is compared instead
    *("batch_size", "accumulation"),  # packs_per_step, their product with the ranks, is compared
    "sharding",
    *FORMERLY_HELD,
)
"""Options that a resumed run may change: locations, how often files are written, memory use."""


def rules_of(
    config: FitConfig, options: Any, started: dict[str, Any] | None
) -> tuple[FitConfig, Rules]:
    """Return the config with its --split-seed, and the rules that decide the batches.

    `started` is the identity of the run to resume, None for a new run. A run of an older release
    keeps its order of batches and its split, which --seed decided.

    Raises:
        ConfigError: an older run cannot have this --split-seed, or a newer release wrote the run.
    """
    slots = getattr(options, "slots", "serving")  # drafts of blocks have no other slots
    seed = SPLIT_SEED if config.split_seed is None else config.split_seed
    if started is None:
        return dataclasses.replace(config, split_seed=seed), Rules(slots=slots)
    order = started.get("order", 1)
    if order not in FILL:
        raise ConfigError(
            f"--out {config.out}: a newer release started this run (order of batches {order}); "
            "resume with that release, or start in another --out"
        )
    if "split_seed" not in started:
        seed = started.get("seed", config.seed)
        if config.split_seed not in (None, seed):
            raise ConfigError(
                f"--split-seed {config.split_seed}: the run in {config.out} is of an older "
                f"release, in which --seed ({seed}) decided the held-out documents; resume it "
                "without --split-seed, or start in another --out"
            )
    border = started.get("split_border")
    rules = Rules(order=order, slots=slots, border=border, least=0)  # older runs had no least
    return dataclasses.replace(config, split_seed=seed), rules


def run_identity(
    draft_name: str,
    dataset: Documents,
    config: FitConfig,
    options: Any,
    rules: Rules,
    border: int,
    world_size: int,
    started: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what may not change when a run resumes.

    `border` is that of the held-out documents. `started` is the identity of the run to resume;
    facts that older releases did not record are left out where it has none of them.
    """
    table = {**to_dict(config), **to_dict(options)}
    known = {
        "draft": draft_name,
        **_data_identity(dataset),
        **({"follow": True} if config.follow else {}),
        "packs_per_step": config.packs_per_step(world_size),
        "split_rule": SPLIT_RULE,
        "order": rules.order,
        "split_border": border,
        **{name: value for name, value in table.items() if name not in MAY_CHANGE},
    }
    if started is not None:
        if "split_border" not in started:  # it follows from --validation
            del known["split_border"]
        formerly = {
            **_defaults(options),
            "order": rules.order,
            "split_seed": config.split_seed,
        }
        for name in known.keys() - started.keys():
            if name in formerly and known[name] == formerly[name]:
                del known[name]
    return known


def _defaults(options: Any) -> dict[str, Any]:
    """Return the defaults of all options that have one, as `to_dict` writes them.

    An option that is newer than a run has its default there: that is what the run did without it.
    """
    tables = (*dataclasses.fields(FitConfig), *dataclasses.fields(options))
    found = {f.name: f.default for f in tables if f.default is not dataclasses.MISSING}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}


def _data_identity(dataset: Documents) -> dict[str, Any]:
    """Return what identifies the run's data: fingerprints of the datasets and their weights."""
    if not isinstance(dataset, Mixture):
        return {"dataset": dataset.manifest.fingerprint}
    return {
        "dataset": [share.fingerprint for share in dataset.shares],
        "weights": [str(share.weight) for share in dataset.shares],
    }


def with_intervals(config: FitConfig, total: int) -> FitConfig:
    """Set the steps between validations and between checkpoints where they are not given.

    A run of `total` steps then has five of each or more, and at most INTERVAL steps between two.
    """
    steps = max(1, min(INTERVAL, total // TIMES))
    return dataclasses.replace(
        config,
        eval_every=config.eval_every or steps,
        save_every=config.save_every or steps,
    )
