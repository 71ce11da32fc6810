"""`spec-train replay`: the batch that stopped a run, once more."""

from typing import TYPE_CHECKING

from spec_data.shards.path_kinds import Kind, what_is, wrong_kind
from spec_data.terminal.command import command
from spec_data.terminal.types import Directory

if TYPE_CHECKING:
    from spec_train.training.replay import Replayed


@command
def replay(failed: Directory, data: Directory | None = None, *, device: str = "auto") -> "Replayed":
    """Run a batch that stopped a run again.

    A loss or gradient was not finite, and `spec-train fit` saved the batch with the draft of that
    moment as RUN/failed-step-N. Says which stored states, weights, modules and gradients are not
    finite, the first ones first. Works on any machine; of the dataset only the target's head is
    read.

    Examples:
        spec-train replay RUN/failed-step-1200
        spec-train replay failed-step-1200 --data COPY --device cpu

    Args:
        failed: what the failed run saved, RUN/failed-step-N.
        data: the run's dataset, where it has moved; its manifest.json and target/ are enough. Not
            given: the path that the run used.
        device: cpu, cuda, cuda:1, ...; auto: a GPU where there is one. Compare cpu with the GPU.

    Raises:
        MissingError, DatasetError, DraftError: the directory or the dataset's head is absent, or
            is not the one of the run.
    """
    from pathlib import Path

    if what_is(str(failed)) is Kind.NOTHING:
        raise wrong_kind(str(failed), Kind.RUN)
    from spec_train.training.replay import replay_step

    return replay_step(Path(str(failed)), None if data is None else Path(str(data)), device)
