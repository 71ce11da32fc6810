"""Saving in a thread: files hold the state at the save, are complete, and no error is lost."""

import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from spec_data.shards.errors import ConfigError
from spec_train.training import saving as tracking
from spec_train.training.run_directory import RunDirectory
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.tools import change, metrics, run

data, config = trainer_tools.data, trainer_tools.config


def test_files_hold_the_state_at_the_save_also_on_a_slow_disk(config, tmp_path, monkeypatch):
    config = change(config, steps=3, save_every=1, eval_every=100, keep=9)
    files = ("model.safetensors", "training_state.safetensors")
    slow = tmp_path / "slow"
    run(config)
    save = RunDirectory.save
    monkeypatch.setattr(RunDirectory, "save", lambda *given: time.sleep(0.2) or save(*given))
    run(change(config, out=str(slow)))
    contents = set()
    for name in files:
        for step in (1, 2, 3):
            file = f"checkpoint-{step:08d}/{name}"
            contents.add((slow / file).read_bytes())
            assert (slow / file).read_bytes() == (Path(config.out) / file).read_bytes(), file
    assert len(contents) == 6


def test_a_tracker_that_is_not_installed_is_named(config, monkeypatch):
    accelerate = pytest.importorskip("accelerate.tracking")
    monkeypatch.setattr(accelerate, "_available_trackers", [])
    with pytest.raises(ConfigError, match=r"wandb: not installed; run: pip install wandb"):
        run(change(config, track="wandb"))
    with pytest.raises(ConfigError, match=r"--track abacus: unknown; known: .*tensorboard"):
        run(change(config, track="abacus"))


def test_gpus_that_accelerate_refuses_are_an_error_for_users(config, monkeypatch):
    """Several GPUs of the RTX 40 series with an old driver, under torchrun."""
    accelerate = pytest.importorskip("accelerate.tracking")
    monkeypatch.setattr(accelerate, "_available_trackers", ["tensorboard"])
    refusal = NotImplementedError("Using RTX 4000 series doesn't support P2P or IB.\nMore")
    monkeypatch.setattr("accelerate.Accelerator", Mock(side_effect=refusal))
    with pytest.raises(ConfigError, match=r"--track tensorboard: .*RTX 4000.*NCCL_P2P_DISABLE=1"):
        run(change(config, track="tensorboard"))


def test_trackers_get_the_numbers_of_every_line(config, monkeypatch):
    accelerate = pytest.importorskip("accelerate.tracking")
    seen, finished = [], []

    class Fake(accelerate.GeneralTracker):
        name, requires_logging_directory = "tensorboard", True

        def __init__(self, run_name, logging_dir):
            super().__init__(_blank=True)
            assert (run_name, logging_dir) == (tracking.PROJECT, config.out)

        def log(self, values, step, **more):
            seen.append((step, values))

        def finish(self):
            finished.append(True)

    monkeypatch.setattr(accelerate, "_available_trackers", [accelerate.LoggerType.TENSORBOARD])
    monkeypatch.setitem(accelerate.LOGGER_TYPE_TO_CLASS, "tensorboard", Fake)
    run(change(config, steps=3, log_every=1, eval_every=3, track="tensorboard"))
    lines = metrics(config.out, timing=True)
    assert [step for step, _ in seen] == [line["step"] for line in lines] == [0, 1, 2, 3, 3]
    for (_, values), line in zip(seen, lines, strict=True):
        assert values[f"{line['split']}/loss"] == line["loss"]
        assert all(isinstance(value, int | float) for value in values.values())
    assert finished == [True]
