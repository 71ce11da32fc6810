"""Campaign of kills: `fit` on one and on two processes, killed (SIGKILL) at any event of a run.

An event is a training step, or an operation on files. The run is killed again and again, resumed
by the same call, and ends with the bytes of a run that was never killed.
"""

import collections
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_data.shards import files
from spec_train.options.training import Training
from spec_train.training import run_directory
from spec_train.training.run_directory import RunDirectory
from spec_train.training.trainer import Trainer
from tests.factory import tiny_dataset
from tests.faults.tools import report, trials
from tests.spec_train.training.ranks_tools import fit_on_ranks, fit_well
from tests.spec_train.training.tools import change, metrics

STEPS, KILLS = 8, 3
EVENTS: tuple[tuple[Any, str], ...] = (
    (Trainer, "_train_step"),
    (RunDirectory, "_written"),
    (RunDirectory, "_link"),
    (RunDirectory, "append_metrics"),
    (run_directory, "use_default_mode"),
    (run_directory, "save_file"),
    (files, "replace_durably"),
    (run_directory, "write_atomically"),
    (run_directory, "remove"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dataset(tmp_path_factory.mktemp("kills") / "data", n_docs=40)


def config_of(data: Path, out: Path) -> Training:
    return Training(
        data=str(data), out=str(out), steps=STEPS, batch_size=1, accumulation=1, seq_len=48,
        lr=1e-3, validation=0.15, log_every=3, eval_every=4, save_every=2, keep=2, device="cpu",
    )  # fmt: skip


def killed_at(event: int, rank: int) -> Callable[[int], None]:
    """Kill process `rank` before its event number `event`, counted from 0."""

    def prepare(own: int) -> None:
        if own != rank:
            return
        seen = iter(range(event + 1))

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                if next(seen, event) == event:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **options)

            return call

        for owner, name in EVENTS:
            setattr(owner, name, counted(getattr(owner, name)))

    return prepare


def last_files(out: str) -> dict[str, bytes]:
    """Return the bytes of the last checkpoint and of the best draft."""
    return {
        f"{link}/{file.name}": file.read_bytes()
        for link in ("last", "best")
        for file in sorted((Path(out) / link).iterdir())
    }


TWO = pytest.param(2, 1, marks=pytest.mark.long, id="2 processes")


@pytest.mark.parametrize(("world", "runs"), [pytest.param(1, 2, id="1 process"), TWO])
def test_a_run_that_is_killed_anywhere_ends_with_the_same_bytes(
    data: Path, tmp_path: Path, world: int, runs: int
) -> None:
    whole = config_of(data, tmp_path / "whole")
    fit_well(whole, world)
    wanted, outcomes = last_files(whole.out), collections.Counter()
    for trial, rng in trials(f"kills of fit on {world}", runs):
        config = change(whole, out=str(tmp_path / f"run-{trial}"))
        for _ in range(KILLS):
            kill(config, world, rng, outcomes)
        fit_well(config, world)
        assert last_files(config.out) == wanted
        assert not list(Path(config.out).glob("damaged-*"))
        assert metrics(config.out) == metrics(whole.out)
        state = json.loads((Path(config.out) / "last" / "training_state.json").read_text())
        assert state["step"] == STEPS
        outcomes["runs with equal bytes"] += 1
    report(f"kills of fit on {world}", outcomes)
    assert any(what.startswith("killed") for what in outcomes)


def kill(
    config: Training, world: int, rng: np.random.Generator, outcomes: collections.Counter
) -> None:
    """Run until a random event of a random process, or to the end if there are fewer."""
    rank = int(rng.integers(world))
    event = int(rng.integers(30 if rank == 0 else STEPS))
    ended = fit_on_ranks(config, world, killed_at(event, rank))
    codes = [end.code for end in ended]
    if codes[rank] == -signal.SIGKILL:
        outcomes[f"killed rank {rank}"] += 1
    else:
        assert codes == [0] * world, "\n".join(end.text for end in ended)
        outcomes["ended before the kill"] += 1
