"""--follow-keep: units are deleted after their use, and nothing else is ever deleted."""

import dataclasses
import math
import shutil
import threading

import pytest

from spec_data.generation.finalize import finalize
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.follow import WORK, FollowedDataset
from spec_data.shards.reclaim import allow_deletion, delete_unit, units_used
from spec_train.drafts import DRAFTS
from spec_train.training.replay import replay_step
from spec_train.training.setup import make_splits
from spec_train.training.trainer import Trainer
from tests import forked
from tests.spec_data.runs import digests, generate_with
from tests.spec_train.data import follow_tools
from tests.spec_train.data.follow_tools import (
    HELD,
    Stopped,
    config_of,
    generate_units,
    made,
    run,
    start_generate,
)
from tests.spec_train.training.test_trainer_resume import assert_same_run
from tests.spec_train.training.tools import metrics

one_thread = forked.one_thread
source, sealed, reference = follow_tools.source, follow_tools.sealed, follow_tools.reference


@pytest.mark.long
def test_used_units_are_deleted_and_generation_waits_for_it(source, tmp_path):
    """Never more than N units on the disk; the run is that on a dataset that keeps all of them."""
    data, keep = tmp_path / "data", 12
    generate_units(source, data, 1)  # so that the plan exists when --follow-keep starts
    allow_deletion(data, keep)
    (tmp_path / "gate").touch()
    process = start_generate(made(source, data), tmp_path / "gate")
    most, going = [0], threading.Event()

    def watch():
        while not going.wait(0.002):
            most[0] = max(most[0], len(list((data / "shards").glob("unit-*.arrow"))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        config = config_of(data, tmp_path / "run", follow_keep=keep, validation_documents=2)
        result = run(config)
    finally:
        going.set()
        watcher.join()
        _, error = process.communicate(timeout=120)
    assert result.finished and process.returncode == 0, error
    assert (
        "every unit of this worker was captured" in error and not (data / "manifest.json").exists()
    )
    planned = FollowedDataset(data)
    units = len(planned.planned.units) - 1
    assert keep < units and most[0] <= keep
    splits = make_splits(planned, config)
    pinned = {planned.unit_of(row) for row in splits.validation.rows.tolist()}
    left = {int(p.stem[-5:]) for p in (data / "shards").glob("unit-*.arrow")}
    assert left == pinned and units_used(data) == units - len(pinned)
    assert finalize(data, set()) is None

    whole = tmp_path / "whole"  # the same order with a ring that holds everything
    generate_units(source, whole, 1)
    allow_deletion(whole, 1000)
    generate_with(**made(source, whole))
    assert run(dataclasses.replace(config, data=str(whole), out=str(tmp_path / "other"),
                                   follow_keep=1000)).finished  # fmt: skip
    last = "last/model.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (tmp_path / "other" / last).read_bytes()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "other")


def test_a_killed_run_goes_on_without_the_units_it_has_used(source, tmp_path, monkeypatch):
    data = tmp_path / "data"
    generate_units(source, data, 1)
    allow_deletion(data, 1000)
    generate_with(**made(source, data))
    shutil.copytree(data, tmp_path / "copy")
    config = config_of(data, tmp_path / "run", follow_keep=1000, validation_documents=2)
    whole = config_of(tmp_path / "copy", tmp_path / "whole", follow_keep=1000,
                      validation_documents=2)  # fmt: skip
    assert run(whole).finished
    original = Trainer._train_step

    def crash(self, step):
        if units_used(data) > 3:
            raise Stopped
        original(self, step)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Trainer, "_train_step", crash)
        run(config)
    assert 3 < units_used(data) < len(FollowedDataset(data).planned.units) - 1
    assert run(config).finished
    last = "last/model.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()
    with pytest.raises(RunError, match="was used up and deleted"):
        run(dataclasses.replace(config, out=str(tmp_path / "another")))


def test_a_batch_that_fails_beside_generation_can_be_replayed(source, tmp_path, monkeypatch):
    data = tmp_path / "data"
    generate_units(source, data, HELD)
    original = DRAFTS["eagle3"].loss

    def failing(self, batch, head, counts):
        result = original(self, batch, head, counts)
        factor = math.nan if self.training else 1.0
        return dataclasses.replace(result, loss=result.loss * factor)

    with monkeypatch.context() as patch, pytest.raises(RunError, match="loss is nan"):
        patch.setattr(DRAFTS["eagle3"], "loss", failing)
        run(config_of(data, tmp_path / "run"))
    report = replay_step(tmp_path / "run" / "failed-step-1", device="cpu").facts()
    assert not report["reproduced"] and report["documents"]


def test_lossy_columns_and_sparse_states_are_followed_too(source, tmp_path):
    more = {"codec": "aux=lm4c,final=int8c", "final": "supervised"}
    generate_units(source, tmp_path / "data", 1000, **more)
    beside = tmp_path / "beside"
    generate_units(source, beside, 1, **more)
    thread = threading.Thread(target=generate_units, args=(source, beside, 1000), kwargs=more)
    thread.start()
    assert run(config_of(beside, tmp_path / "run")).finished
    thread.join()
    assert run(config_of(tmp_path / "data", tmp_path / "after")).finished
    assert_same_run(tmp_path / "run", tmp_path / "after")


def test_nothing_is_deleted_of_a_sealed_dataset_or_without_the_flag(sealed, source, tmp_path):
    before = digests(sealed)
    config = config_of(sealed, tmp_path / "run", follow_keep=1000)
    with pytest.raises(ConfigError, match="units of a sealed dataset are never deleted"):
        run(config)
    assert digests(sealed) == before
    data = tmp_path / "data"
    generate_units(source, data, 2)
    with pytest.raises(DatasetError, match="no --follow-keep run may delete units here"):
        delete_unit(data, 0)
    assert len(list((data / "shards").glob("*.arrow"))) == 2


def test_a_ring_that_is_too_small_is_refused_with_the_number(source, tmp_path):
    data = tmp_path / "data"
    generate_units(source, data, 2)
    with pytest.raises(ConfigError, match=r"--follow-keep 2: \d+ units are needed at once"):
        run(config_of(data, tmp_path / "run", follow_keep=2))
    assert not (data / WORK / "follow-keep.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ("a", "b")}, "--follow takes one --data"),
        ({"data": "a:2"}, "--follow takes one --data"),
        ({"follow": False, "follow_keep": 9}, "needs --follow"),
        ({"follow_keep": 9, "steps": 5, "epochs": None}, "--epochs rather than --steps"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(config_of(tmp_path, tmp_path), **changes)
