"""Several processes on several datasets, and during generation."""

import os
import signal
import threading

import pytest

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.training.trainer import Trainer
from tests.spec_train.data import test_mixture
from tests.spec_train.training import ranks_tools
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.ranks_tools import fit_well
from tests.spec_train.training.tools import assert_close_runs, change, make_noisy, metrics, run

data, config = trainer_tools.data, trainer_tools.config
place = test_mixture.place
patience = ranks_tools.patience


def test_a_mixture_on_two_ranks_is_that_on_one(place, tmp_path, monkeypatch):
    """Weights, validation per dataset and random numbers are equal."""
    make_noisy(monkeypatch)
    one = test_mixture.config_of(
        place, tmp_path / "one", "a:0.5", "b:2", batch_size=2, accumulation=2, lr=1e-4
    )
    run(one)
    two = change(one, out=str(tmp_path / "two"), accumulation=1, sharding="fsdp2")
    fit_well(two)
    assert_close_runs(one.out, two.out)
    assert "loss/a" in metrics(two.out)[0]


@pytest.mark.parametrize("waiting", [{0}, pytest.param({1}, marks=pytest.mark.long)])
def test_one_rank_is_told_to_stop_while_data_is_awaited(config, tmp_path, waiting):
    """The signal reaches rank 0, rank 1 or both while data is awaited."""
    config = change(config, accumulation=1, lr=1e-4, eval_every=100, save_every=100)
    whole = change(config, out=str(tmp_path / "whole"), accumulation=2)
    run(whole)

    def prepare(rank: int) -> None:
        dry = threading.Event()
        original, wait_for = Trainer._train_step, HiddenStatesDataset.wait_for

        def stepping(self, step):
            original(self, step)
            if self.step == 3:
                dry.set()
                if rank == 1:
                    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

        def blocking(self, rows, stop):
            return wait_for(self, rows, stop) if not dry.is_set() else not stop.wait()

        Trainer._train_step = stepping
        if rank in waiting:
            HiddenStatesDataset.wait_for = blocking

    fit_well(config, prepare=prepare)
    saved = (tmp_path / "run" / "last").resolve().name
    assert 3 <= int(saved.removeprefix("checkpoint-")) < 12
    run(change(config, accumulation=2))
    assert_close_runs(whole.out, config.out)
