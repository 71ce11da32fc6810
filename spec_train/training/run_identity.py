"""What identifies a run: settings that may not change when it resumes. run.json holds it.

One thing may change: the dataset may have grown (`spec-data merge`). The manifest of a merge names
the datasets of which it has all documents, in order. A run on one of them goes on if --steps is
above its number of steps. Weights, moments and steps stay; the learning rate follows the schedule
of the longer run. The order begins with the next whole epoch, which has the documents of the grown
dataset; the rest of the epoch before is skipped. The best draft so far is forgotten, because the
documents for validation are others.
"""

import dataclasses
import logging
from typing import Any

from spec_data.shards.errors import ConfigError
from spec_data.shards.resumable import differing_settings, write_record
from spec_data.terminal.config import to_dict
from spec_train.data.mixture import Documents, Mixture
from spec_train.data.order import SPLIT_RULE, BatchPlan
from spec_train.options.training import Training
from spec_train.training.checkpoint import RunDirectory
from spec_train.training.stored import RUN, Saved, read_run_json

log = logging.getLogger(__name__)

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

_MAY_GROW = ("dataset", "steps", "epochs")


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
    data: dict[str, Any] = {"dataset": dataset.manifest.fingerprint}
    if isinstance(dataset, Mixture):
        data["dataset"] = [share.fingerprint for share in dataset.shares]
        data["weights"] = [str(share.weight) for share in dataset.shares]
    table = {**to_dict(config), **to_dict(options)}
    return {
        "draft": draft_name,
        **data,
        **({"follow": True} if config.follow else {}),
        "packs_per_step": config.packs_per_step(world_size),
        "split_rule": SPLIT_RULE,
        "split_border": border,
        **{name: value for name, value in table.items() if name not in MAY_CHANGE},
    }


def accept_growth(
    run: RunDirectory,
    started: dict[str, Any] | None,
    identity: dict[str, Any],
    config: Training,
    dataset: Documents,
) -> None:
    """Write the new identity of a run into run.json if only its dataset has grown.

    `started` is the identity of the run to resume, None for a new run; `identity` is the one that
    it would have now. Nothing happens if other things differ too: they are refused later.

    Raises:
        ConfigError: --steps is not above the steps of the run.
    """
    documents = None if started is None else _documents_before(started["dataset"], dataset)
    if started is None or documents is None:
        return
    same = {name: value for name, value in started.items() if name not in _MAY_GROW}
    if differing_settings(same, {n: v for n, v in identity.items() if n not in _MAY_GROW}):
        return
    notes = read_run_json(run.path)["notes"]
    total = notes.get("total_steps", 0)
    if config.steps is None or config.steps <= total:
        raise ConfigError(
            f"--out {config.out}: this run of {total} steps was made with the first "
            f"{documents:,} of the {len(dataset):,} documents of "
            f"{dataset.path}, which has grown since. To go on with all of them, pass --steps above "
            f"{total}; or start in another --out (add --init-from {config.out})"
        )
    notes["total_steps"] = config.steps
    write_record(run.path / RUN, {"identity": identity, "notes": notes})


def continued(saved: Saved, plan: BatchPlan, dataset: Documents) -> Saved:
    """Return a checkpoint with its position in the order of a dataset that has grown since.

    The checkpoint is returned as it is if it was written with this very dataset.
    """
    position = saved.state["stream"]
    documents = _documents_before(position.get("fingerprint"), dataset)
    if documents is None:
        return saved
    epoch = int(position["epoch"]) + (1 if position["batches_done"] else 0)
    log.info(
        "grown      step %d was trained on the first %s of %s documents; going on with all of them "
        "from epoch %d",
        *(saved.step, f"{documents:,}", f"{len(dataset):,}", epoch),
    )
    state = saved.state | {"stream": plan.state(epoch, 0), "best": None}
    return dataclasses.replace(saved, state=state)


def _documents_before(fingerprint: Any, dataset: Documents) -> int | None:
    """Return how many documents `dataset` had when its fingerprint was this one; None: never.

    A mixture has a list of fingerprints, and does not grow.
    """
    if isinstance(dataset, Mixture) or isinstance(fingerprint, list):
        return None
    ancestors = {past.fingerprint: past.documents for past in dataset.manifest.ancestors}
    return ancestors.get(fingerprint)
