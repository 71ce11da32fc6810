"""A run that goes on with its dataset after it has grown (`spec-data merge`).

The manifest of a merge names the datasets of which it has all documents, in order. A run on one of
them goes on if --steps is above its number of steps. Weights, moments and steps stay; the learning
rate follows the schedule of the longer run. The order begins with the next whole epoch, which has
the documents of the grown dataset. The best draft so far is forgotten, because the documents for
validation are others.
"""

import dataclasses
import logging
from typing import Any

from spec_data.shards.errors import ConfigError
from spec_data.shards.resumable import differing_settings
from spec_train.data.mixture import Documents, Mixture
from spec_train.data.order import BatchPlan
from spec_train.options.training import Training
from spec_train.training.run_directory import RunDirectory, Saved

log = logging.getLogger(__name__)

_MAY_GROW = ("dataset", "steps", "epochs")


def accept_growth(
    run: RunDirectory,
    started: dict[str, Any] | None,
    identity: dict[str, Any],
    config: Training,
    dataset: Documents,
) -> None:
    """Write the new `identity` of a run into run.json if only its dataset has grown.

    `started` is the one that it has, None for a new run. Other differences are refused later.

    Raises:
        ConfigError: --steps is not above the steps of the run.
    """
    documents = _documents_before(started["dataset"], dataset) if started else None
    if started is None or documents is None:
        return
    old, new = ({n: v for n, v in x.items() if n not in _MAY_GROW} for x in (started, identity))
    if differing_settings(old, new):
        return
    total = run.total_steps()
    if config.steps is None or config.steps <= total:
        raise ConfigError(
            f"--out {config.out}: this run of {total} steps was made with the first "
            f"{documents:,} of the {len(dataset):,} documents of "
            f"{dataset.path}, which has grown since. To go on with all of them, pass --steps above "
            f"{total}; or start in another --out (add --init-from {config.out})"
        )
    run.write_identity(identity, config.steps)


def continued(saved: Saved, plan: BatchPlan, dataset: Documents) -> Saved:
    """Return a checkpoint with its position in the order of a dataset that has grown since."""
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
