"""Laws of following: a run beside generation is, bit for bit, the run after it."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_data
from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.follow import LEFT_OUT, WORK, FollowedDataset
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.cli import main
from spec_train.data.splits import make_splits
from spec_train.drafts import DRAFTS
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.training.fit import open_data
from spec_train.training.run_directory import held_out_file
from spec_train.training.start_draft import load_start, with_shape
from spec_train.training.trainer import Trainer
from tests import forked
from tests.forked import Forked
from tests.spec_data.runs import digests, generate_with
from tests.spec_data.shards.integrity_tools import flip
from tests.spec_train.data import follow_tools
from tests.spec_train.data.follow_tools import (
    HELD,
    OPTIONS,
    config_of,
    generate_units,
    made,
    run,
    start_generate,
    wait_until,
)
from tests.spec_train.evaluation.tools import run_eval
from tests.spec_train.training.test_trainer_resume import assert_same_run
from tests.spec_train.training.tools import command

one_thread = forked.one_thread
source, sealed, reference = follow_tools.source, follow_tools.sealed, follow_tools.reference


def test_a_run_beside_generation_is_the_run_after_it(source, sealed, reference, tmp_path, caplog):
    """Training starts before generation begins, and continues while the dataset is sealed."""
    caplog.set_level("INFO")
    data = tmp_path / "data"
    process = start_generate(made(source, data), tmp_path / "gate")
    try:
        original, unsealed = Trainer._train_step, []

        def spy(self, step):
            (tmp_path / "gate").touch()
            unsealed.append(not (data / "manifest.json").is_file())
            original(self, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "_train_step", spy)
            assert run(config_of(data, tmp_path / "run")).finished
    finally:
        _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert unsealed[0]
    assert f"waiting for `spec-data generate --out {data}` to begin" in caplog.text
    assert "waiting for unit" in caplog.text or "waiting for the proof" in caplog.text
    assert_same_run(tmp_path / "run", reference)
    assert digests(data) == digests(sealed)


def test_killed_and_resumed_beside_generation(source, sealed, reference, tmp_path):
    """Fit is killed, then generation; both go on, fit first and without what it waits for."""
    data, out = tmp_path / "data", tmp_path / "run"
    generator = start_generate(made(source, data), tmp_path / "gate")
    wait_until((data / WORK / "plan.json").is_file, generator)
    fit = functools.partial(main, command(config_of(data, out, save_every=1))[3:])
    fitting = Forked(fit)
    wait_until((out / "last").exists, fitting)
    fitting.kill()
    fitting.wait()
    generator.kill()
    generator.communicate()
    assert not (data / "manifest.json").exists()
    fitting = Forked(fit)
    (tmp_path / "gate").touch()
    generator = start_generate(made(source, data), tmp_path / "gate")
    _, error = fitting.communicate(timeout=200)
    generator.communicate(timeout=100)
    assert fitting.returncode == 0, error
    assert "resuming from" in Path(f"{out}.log").read_text()
    assert_same_run(out, reference)
    assert digests(data) == digests(sealed)


@pytest.mark.long
def test_sigterm_while_waiting_for_a_unit_saves_and_stops(source, sealed, reference, tmp_path):
    data = tmp_path / "data"
    generate_units(source, data, HELD)
    config = config_of(data, tmp_path / "run", save_every=1000)
    planned = FollowedDataset(data)
    assert len(planned.units) - 1 > 9
    original, last_step = Trainer._train_step, []

    def spy(self, step):
        original(self, step)
        last_step[:] = [time.monotonic()]

    def stop_when_waiting():
        """The steps whose data exists take far less than a second."""
        wait_until(lambda: last_step and time.monotonic() - last_step[0] > 1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop_when_waiting)
    stopping.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_step", spy)
        result = run(config)
    stopping.join()
    assert result.stopped_by == signal.SIGTERM and result.step > 0
    assert (tmp_path / "run" / "last").resolve().name == f"checkpoint-{result.step:08d}"
    generate_units(source, data, 1000)
    assert run(config).finished
    last = "last/model.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (reference / last).read_bytes()


def test_nothing_comes_and_the_run_says_so(source, tmp_path):
    data = tmp_path / "data"
    with pytest.raises(MissingError, match="none is being generated there"):
        FollowedDataset(data)
    with pytest.raises(RunError, match=r"waited 0\.5 s for `spec-data generate --out .*` to begin"):
        run(config_of(data, tmp_path / "run", follow_timeout=0.5))
    assert not data.exists()
    generate_units(source, data, 4)
    with pytest.raises(RunError, match=r"waited 0\.5 s for unit [56] of \d+; see whether"):
        run(config_of(data, tmp_path / "run", follow_timeout=0.5))


def test_a_damaged_unit_is_refused_when_it_is_reached(source, tmp_path):
    data = tmp_path / "data"
    generate_units(source, data, 8)
    shard = data / "shards" / "unit-00002.arrow"
    flip(shard, shard.stat().st_size // 2)
    with pytest.raises(DatasetError, match=r"unit-00002\.arrow: not the shard that was written"):
        run(config_of(data, tmp_path / "run"))
    with pytest.raises(DatasetError, match=r"unit-00002\.arrow"):  # nor is it sealed
        generate_with(**made(source, data))


def test_a_damaged_plan_is_refused(source, tmp_path):
    data = tmp_path / "data"
    generate_units(source, data, 1)
    plan = data / WORK / "plan.arrow"
    flip(plan, plan.stat().st_size // 2)
    with pytest.raises(DatasetError, match=r"plan\.arrow: damaged"):
        FollowedDataset(data)


def test_a_directory_that_is_generated_again_is_not_followed_on(source, tmp_path):
    """Planted: another target of the same shape, before a first unit; its columns fit as well."""
    data, (target, *corpus) = tmp_path / "data", source
    generate_units(source, data, 0)
    followed = FollowedDataset(data, timeout=60)
    other = shutil.copytree(target, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    changed = {name: t + 0.01 if t.ndim == 2 else t for name, t in tensors.items()}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    for count in (1, 100):  # while it is generated, and when it is sealed
        generate_units((other, *corpus), data, count)
        with pytest.raises(DatasetError, match="generated again, with another target"):
            followed.wait_for([0], threading.Event())
    assert (data / "manifest.json").is_file()


def test_a_draft_to_start_from_is_read_before_the_directory_is_sealed(source, reference, tmp_path):
    generate_units(source, tmp_path / "data", 2)
    config = config_of(tmp_path / "data", tmp_path / "run", init_from=str(reference))
    dataset, options = FollowedDataset(tmp_path / "data"), Eagle3Options(ttt_steps=2)
    start, _ = load_start(DRAFTS["eagle3"], config, dataset)
    shape = with_shape(options, start)
    assert shape.draft_vocab_size == OPTIONS.draft_vocab_size != options.draft_vocab_size


@pytest.mark.long
def test_documents_that_capture_leaves_out_keep_their_place(source, tmp_path, monkeypatch):
    """The run beside generation meets them as documents without a supervised token; so does the
    one after it, though the dataset no longer has them."""
    from spec_data.generation import capture

    original, broken = capture.store, {1: -1, 4: 0}
    calls: list[int] = []

    def find(arrival, values, packed, columns, data, found):
        original(arrival, values, packed, columns, data, found)
        for document in packed.documents:
            place = broken.get(calls[-1])
            if place is not None and document == place % len(data.doc_ids):
                found[document] = "non-finite-states"

    forwards = capture.unit_forwards

    def numbered(plan, unit, *args):
        calls.append(unit)
        return forwards(plan, unit, *args)

    monkeypatch.setattr(capture, "store", find)
    monkeypatch.setattr(capture, "unit_forwards", numbered)
    data = tmp_path / "data"
    process = threading.Thread(target=lambda: generate_with(**made(source, data)), name="generate")
    process.start()
    wait_until((data / WORK / "plan.json").is_file)
    assert run(config_of(data, tmp_path / "beside")).finished
    process.join()
    stored, followed = HiddenStatesDataset(data), FollowedDataset(data)
    assert len(followed) == len(stored) + 2 == 60
    raw = json.loads((data / "manifest.json").read_text())
    assert raw["left_out"]["units"] == [1, 4] and (data / LEFT_OUT).is_file()
    place = raw["left_out"]["places"][1]
    assert place == followed.units[4] and followed.unit_of(place) == 4
    length = int(followed.lengths[place])
    out = {
        "input_ids": torch.ones(length, dtype=torch.int64),
        "loss_mask": torch.ones(length, dtype=torch.bool),
        "hidden.L2": torch.ones(length, followed.manifest.hidden_size),
    }
    assert followed.read_into(place, out) == length
    assert not out["loss_mask"].any() and not out["hidden.L2"].any() and out["input_ids"].any()
    assert run(config_of(data, tmp_path / "after")).finished
    assert_same_run(tmp_path / "beside", tmp_path / "after")
    held = config_of(data, tmp_path / "held", epochs=None, steps=1, validation=0.9, split_seed=1)
    measured = make_splits(open_data(held), held).measured.tolist()
    assert set(raw["left_out"]["places"]) <= set(measured)
    assert run(held).finished  # the last document of a unit has no next one to be taken for it
    counted = json.loads(held_out_file(tmp_path / "held").read_text())["documents"]
    assert counted == len(measured) - 2


def test_eval_knows_the_held_out_documents_of_a_followed_run(sealed, reference):
    report = run_eval(dict(draft=str(reference), data=str(sealed), device="cpu"))["data"]
    config = config_of(sealed, reference)
    splits = make_splits(open_data(config), config)
    assert report["split"] == "validation" and report["documents"] == splits.held_out


def test_eval_knows_a_followed_runs_held_out_documents_in_a_view(sealed, reference, tmp_path):
    """A view has no plan, whose fingerprint the run has, but the documents."""
    spec_data.select(sealed, tmp_path / "view", where="number < 20")
    given = dict(draft=str(reference), data=str(tmp_path / "view"), device="cpu")
    report = run_eval(given)["data"]
    config = config_of(sealed, reference)
    splits = make_splits(open_data(config), config)
    held_out = set(range(20)) - set(splits.train.rows.tolist())
    assert report["split"] == "validation" and report["documents"] == len(held_out) > 0


@pytest.mark.parametrize("data", [("a", "b"), "a:2"])
def test_one_dataset_without_a_weight_is_followed(tmp_path, data):
    with pytest.raises(ConfigError, match="--follow takes one --data"):
        dataclasses.replace(config_of(tmp_path, tmp_path), data=data)
