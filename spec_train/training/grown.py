"""Go on with a run on a dataset that has grown since: `spec-data merge`.

The manifest of such a dataset names the datasets of which it has all documents, in order. A run on
one of them goes on if --steps is above its number of steps. Weights, moments and steps stay; the
learning rate follows the schedule of the longer run. The order begins with the next whole epoch,
which has the documents of the grown dataset; the rest of the epoch before is skipped. The best
draft so far is forgotten, because the documents for validation are others.
"""

import dataclasses
import logging
from typing import Any

from spec_data.shards.errors import ConfigError
from spec_data.shards.resumable import differing_settings, write_record
from spec_train.data.mixture import Documents, Mixture
from spec_train.data.order import BatchPlan
from spec_train.data.splits import Splits
from spec_train.options.training import Training
from spec_train.training.checkpoint import RunDirectory
from spec_train.training.stored import RUN, Saved, read_run_json

log = logging.getLogger(__name__)

_MAY_GROW = ("dataset", "steps", "epochs")


def documents_before(fingerprint: Any, dataset: Documents) -> int | None:
    """Return how many documents `dataset` had when its fingerprint was this one; None: never.

    A mixture has a list of fingerprints, and does not grow.
    """
    if isinstance(dataset, Mixture) or not isinstance(fingerprint, str):
        return None
    known = dataset.manifest.ancestors
    return next((e.documents for e in known if e.fingerprint == fingerprint), None)


def accept_growth(
    run: RunDirectory,
    started: dict[str, Any] | None,
    identity: dict[str, Any],
    config: Training,
    dataset: Documents,
    splits: Splits,
) -> None:
    """Write the new identity of a run into run.json if only its dataset has grown.

    `started` is the identity of the run to resume, None for a new run; `identity` is the one that
    it would have now. Nothing happens if other things differ too: they are refused later.

    Raises:
        ConfigError: --steps is not above the steps of the run, or growing would move documents
            between training and validation.
    """
    documents = None if started is None else documents_before(started.get("dataset"), dataset)
    if started is None or documents is None:
        return
    before, now = (
        {name: value for name, value in table.items() if name not in _MAY_GROW}
        for table in (started, identity)
    )
    if differing_settings(before, now):
        return
    table = read_run_json(run.path)
    total, border = table["notes"].get("total_steps", 0), table["notes"].get("split_border")
    if config.steps is None or config.steps <= total:
        raise ConfigError(
            f"--out {config.out}: this run of {total} steps was made with the first "
            f"{documents:,} of the {len(dataset):,} documents of "
            f"{dataset.path}, which has grown since. To go on with all of them, pass --steps above "
            f"{total}; or start in another --out (add --init-from {config.out})"
        )
    if border != splits.border:
        raise ConfigError(
            f"--out {config.out}: in the dataset that has grown, other documents would be held out "
            "than in this run; start in another --out, with --init-from"
        )
    grown = [*table["notes"].get("grown", []), {"dataset": started["dataset"], "steps": total}]
    table["identity"] = identity
    table["notes"] |= {"total_steps": config.steps, "split_border": splits.border, "grown": grown}
    write_record(run.path / RUN, table)


def continued(saved: Saved, plan: BatchPlan, dataset: Documents) -> Saved:
    """Return a checkpoint with its position in the order of a dataset that has grown since.

    The checkpoint is returned as it is if it was written with this very dataset.
    """
    position = saved.state["stream"]
    known = documents_before(position.get("fingerprint"), dataset)
    if known is None:
        return saved
    epoch = int(position["epoch"]) + (1 if position["batches_done"] else 0)
    log.info(
        "grown      step %d was trained on the first %s of %s documents; going on with all of them "
        "from epoch %d",
        *(saved.step, f"{known:,}", f"{len(dataset):,}", epoch),
    )
    state = saved.state | {"stream": plan.state(epoch, 0), "best": None}
    return dataclasses.replace(saved, state=state)
