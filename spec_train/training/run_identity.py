"""What identifies a run: settings that may not change when it resumes, and rules that it keeps.

run.json holds the identity.
"""

import dataclasses
from typing import Any

from spec_data.terminal.config import to_dict
from spec_train.data.mixture import Documents, Mixture
from spec_train.data.order import SPLIT_RULE
from spec_train.options.training import Training

TIMES, INTERVAL = 5, 500
"""By default a run validates and saves TIMES times, or after every INTERVAL steps if more often."""

MAY_CHANGE = (
    "preset",  # the options that it sets are still compared
    *("data", "out", "device", "log_every", "eval_every", "save_every", "keep", "track"),
    "accept_edited",  # about the files of --init-from, which is compared
    *("follow", "follow_timeout"),  # their effect on the order is compared instead
    *("batch_size", "accumulation"),  # packs_per_step, their product with the ranks, is compared
    "sharding",
    "gradient_checkpointing",
)
"""Options that a resumed run may change: locations, how often files are written, memory use."""


def run_identity(
    draft_name: str,
    dataset: Documents,
    config: Training,
    options: Any,
    border: int,
    world_size: int,
) -> dict[str, Any]:
    """Return what may not change when a run resumes.

    `border` is that of the held-out documents.
    """
    table = {**to_dict(config), **to_dict(options)}
    return {
        "draft": draft_name,
        **_data_identity(dataset),
        **({"follow": True} if config.follow else {}),
        "packs_per_step": config.packs_per_step(world_size),
        "split_rule": SPLIT_RULE,
        "split_border": border,
        **{name: value for name, value in table.items() if name not in MAY_CHANGE},
    }


def _data_identity(dataset: Documents) -> dict[str, Any]:
    """Return what identifies the run's data: fingerprints of the datasets and their weights."""
    if not isinstance(dataset, Mixture):
        return {"dataset": dataset.manifest.fingerprint}
    return {
        "dataset": [share.fingerprint for share in dataset.shares],
        "weights": [str(share.weight) for share in dataset.shares],
    }


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
