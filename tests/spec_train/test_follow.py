"""Laws of following: a run beside generation is, bit for bit, the run after it."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from spec_data import generate as generate_module
from spec_data.generate import generate, seal_directory
from spec_data.options import GenerateConfig
from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.follow import LEFT_OUT, WORK, FollowedDataset
from spec_data.shards.following import FollowingPlan, window_bounds
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.ring import delete_unit, start_ring, units_used
from spec_train.config import EvalConfig, FitConfig, ReplayConfig
from spec_train.drafts import DRAFTS
from spec_train.evaluate import run_eval
from spec_train.fit import count_supervised_tokens, fit, make_splits, open_data
from spec_train.options import Eagle3Options
from spec_train.replay import replay
from spec_train.trainer import Trainer
from tests.spec_data.runs import digests, options, save_target, write_corpus
from tests.spec_train.test_trainer_resume import assert_same_run
from tests.spec_train.trainer_tools import environment, metrics

OPTIONS = Eagle3Options(ttt_steps=2, draft_vocab_size=40)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A target and a corpus."""
    folder = tmp_path_factory.mktemp("source")
    return save_target(folder / "target"), write_corpus(folder / "chats.jsonl", rows=60)


def made(source, out: Path, **changes) -> dict:
    return options(*source, out, max_shard_size="30KB", **changes)


def config_of(data: Path, out: Path, **changes) -> FitConfig:
    given = dict(
        data=str(data), out=str(out), epochs=2, batch_size=2, accumulation=1, seq_len=128, lr=1e-3,
        validation=0.2, log_every=5, eval_every=7, save_every=2, device="cpu", window_tokens=300,
        follow=True, follow_timeout=60.0,
    )  # fmt: skip
    return FitConfig(**(given | changes))


def run(config: FitConfig):
    return fit("eagle3", config, OPTIONS)


class Stopped(Exception):
    """Generation dies here."""


def generate_units(source, out: Path, count: int, **changes) -> None:
    """Generate so many units and die; again: so many more."""
    original, done = generate_module.capture_unit, []

    def dying(*args, **kwargs):
        if len(done) == count:
            raise Stopped
        done.append(1)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_module, "capture_unit", dying)
        with contextlib.suppress(Stopped):
            generate(GenerateConfig(**made(source, out, **changes)))


@pytest.fixture(scope="module")
def sealed(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("sealed") / "data"
    generate(GenerateConfig(**made(source, out)))
    return out


@pytest.fixture(scope="module")
def reference(sealed, tmp_path_factory):
    """The run after generation, with the same flag."""
    out = tmp_path_factory.mktemp("reference") / "run"
    assert run(config_of(sealed, out)).finished
    return out


HELD = 8
GENERATE = """
import sys, time
from pathlib import Path
from spec_data import generate
from spec_data.cli import main
original, gate, held = generate.capture_unit, Path(sys.argv[1]), int(sys.argv[2])
def gated(target, plan, unit, *args, **kwargs):
    while unit >= held and not gate.exists():
        time.sleep(0.01)
    return original(target, plan, unit, *args, **kwargs)
generate.capture_unit = gated
sys.exit(main(["generate", *sys.argv[3:]]))
"""


def start_generate(given: dict, gate: Path) -> subprocess.Popen:
    """A process that makes HELD units, and the others once the file `gate` is there."""
    flags = [str(gate), str(HELD)]
    for name, value in given.items():
        values = value if isinstance(value, tuple) else (value,)
        flags += ["--" + name.replace("_", "-"), *map(str, values)]
    return subprocess.Popen(
        [sys.executable, "-c", GENERATE, *flags],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_until(there, process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.01)


@pytest.mark.long
def test_a_run_beside_generation_is_the_run_after_it(source, sealed, reference, tmp_path, caplog):
    """It trains before generation is over, and goes on while it is sealed."""
    caplog.set_level("INFO")
    data = tmp_path / "data"
    process = start_generate(made(source, data), tmp_path / "gate")
    try:
        wait_until((data / WORK / "plan.json").is_file, process)
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
    assert "waiting for" in caplog.text
    assert_same_run(tmp_path / "run", reference)
    assert digests(data) == digests(sealed)


@pytest.mark.long
def test_killed_and_resumed_beside_generation(source, reference, tmp_path):
    """Fit is killed, then generation; both go on, fit first and without what it waits for."""
    data, out = tmp_path / "data", tmp_path / "run"
    generator = start_generate(made(source, data), tmp_path / "gate")
    wait_until((data / WORK / "plan.json").is_file, generator)
    command = [sys.executable, "-m", "spec_train.cli", "fit", "eagle3", "--ttt-steps", "2",
               "--draft-vocab-size", "40", "--follow"]  # fmt: skip
    for name, value in dataclasses.asdict(config_of(data, out)).items():
        if value is not None and name != "follow":
            command += ["--" + name.replace("_", "-"), str(value)]
    fitting = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    wait_until((out / "last").exists, fitting)
    fitting.kill()
    fitting.wait()
    generator.kill()
    generator.communicate()
    assert not (data / "manifest.json").exists()
    fitting = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    (tmp_path / "gate").touch()
    generator = start_generate(made(source, data), tmp_path / "gate")
    _, error = fitting.communicate(timeout=200)
    generator.communicate(timeout=100)
    assert fitting.returncode == 0 and "going on from" in error, error
    assert_same_run(out, reference)


def test_sigterm_while_waiting_for_a_unit_saves_and_stops(source, sealed, reference, tmp_path):
    data = tmp_path / "data"
    generate_units(source, data, HELD)
    config = config_of(data, tmp_path / "run", save_every=1000)
    planned = FollowedDataset(data)
    assert len(planned.planned.units) - 1 > 9
    timer = threading.Timer(6.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    result = run(config)
    timer.join()
    assert result.stopped_by == signal.SIGTERM and result.step > 0
    assert (tmp_path / "run" / "last").resolve().name == f"checkpoint-{result.step:08d}"
    generate_units(source, data, 1000)
    assert run(config).finished
    last = "last/model.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (reference / last).read_bytes()


def test_nothing_comes_and_the_run_says_so(source, tmp_path):
    data = tmp_path / "data"
    with pytest.raises(MissingError, match="none in the making"):
        FollowedDataset(data)
    generate_units(source, data, 4)
    with pytest.raises(RunError, match=r"waited 0\.5 s for unit 5 of \d+; see whether"):
        run(config_of(data, tmp_path / "run", follow_timeout=0.5))


def test_a_damaged_unit_is_refused_when_it_is_reached(source, tmp_path):
    data = tmp_path / "data"
    generate_units(source, data, 8)
    shard = data / "shards" / "unit-00002.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DatasetError, match=r"unit-00002\.arrow: not the shard that was written"):
        run(config_of(data, tmp_path / "run"))


def test_an_unsealed_directory_opens_by_the_flag_alone(source, tmp_path):
    data = tmp_path / "data"
    generate_units(source, data, 3)
    with pytest.raises(MissingError, match="not sealed yet"):
        run(config_of(data, tmp_path / "run", follow=False))


def test_the_view_is_the_same_before_and_after_sealing(source, sealed, tmp_path):
    data = tmp_path / "data"
    generate_units(source, data, 2)
    before, after = FollowedDataset(data), FollowedDataset(sealed)
    stored = HiddenStatesDataset(sealed)
    assert before.manifest.raw == after.manifest.raw
    assert before.manifest.fingerprint == after.manifest.fingerprint
    assert before.doc_ids == after.doc_ids == stored.doc_ids
    for name in ("lengths", "supervised", "first_supervised"):
        assert np.array_equal(getattr(before, name), getattr(after, name))
        assert np.array_equal(getattr(before, name), getattr(stored, name))
    assert np.array_equal(before.planned.units, after.planned.units)
    counts = [
        count_supervised_tokens(d, make_splits(d, config_of(data, tmp_path)).train)
        for d in (before, after)
    ]
    assert torch.equal(*counts) and counts[0].sum() > 0


def test_documents_that_capture_leaves_out_keep_their_place(source, tmp_path, monkeypatch):
    """The run beside generation meets them as documents without a supervised token; so does the
    one after it, though the dataset no longer has them."""
    from spec_data import capture

    original, broken = capture._find_broken, {1: 1, 4: 0}
    calls: list[int] = []

    def find(values, packed, found):
        original(values, packed, found)
        for document in packed.documents:
            if broken.get(calls[-1]) == document:
                found[document] = "non-finite-states"

    capturing = generate_module.capture_unit

    def numbered(target, plan, unit, *args, **kwargs):
        calls.append(unit)
        return capturing(target, plan, unit, *args, **kwargs)

    monkeypatch.setattr(capture, "_find_broken", find)
    monkeypatch.setattr(generate_module, "capture_unit", numbered)
    data = tmp_path / "data"
    process = threading.Thread(
        target=lambda: generate(GenerateConfig(**made(source, data))), name="generate"
    )
    process.start()
    wait_until((data / WORK / "plan.json").is_file)
    assert run(config_of(data, tmp_path / "beside")).finished
    process.join()
    stored, followed = HiddenStatesDataset(data), FollowedDataset(data)
    assert len(followed) == len(stored) + 2 == 60
    raw = json.loads((data / "manifest.json").read_text())
    assert raw["left_out"]["units"] == [1, 4] and (data / LEFT_OUT).is_file()
    place = raw["left_out"]["places"][1]
    assert place == followed.planned.units[4] and followed.unit_of(place) == 4
    length = int(followed.lengths[place])
    out = {
        "input_ids": torch.ones(length, dtype=torch.int64),
        "loss_mask": torch.ones(length, dtype=torch.bool),
        "hidden.L2": torch.ones(length, followed.manifest.hidden_size),
    }
    assert followed.read_into(place, out) == length
    assert not out["loss_mask"].any() and not out["hidden.L2"].any() and out["input_ids"].any()
    neighbour = followed.read_into(place + 1, {"hidden.L2": out["hidden.L2"].new_ones(200, 32)})
    row = stored.doc_ids.index(followed.doc_ids[place + 1])
    assert neighbour == stored.lengths[row]
    assert run(config_of(data, tmp_path / "after")).finished
    assert_same_run(tmp_path / "beside", tmp_path / "after")


def test_eval_knows_the_held_out_documents_of_a_followed_run(sealed, reference):
    report = run_eval(EvalConfig(draft=str(reference), data=str(sealed), device="cpu"))["data"]
    config = config_of(sealed, reference)
    splits = make_splits(open_data(config), config)
    assert report["split"] == "validation" and report["documents"] == splits.held_out


# -- the order ------------------------------------------------------------------------------------

LENGTHS = np.random.default_rng(0).integers(4, 60, 200)
USABLE = np.arange(200) % 5 != 2
UNITS = np.array([0, 13, 40, 41, 90, 120, 170, 200])


def plan_of(**changes) -> FollowingPlan:
    given = dict(seq_len=64, rows_per_batch=3, seed=1, window_tokens=1000) | changes
    return FollowingPlan(LENGTHS, USABLE, UNITS, **given)


def test_windows_are_whole_units_in_order():
    bounds = window_bounds(LENGTHS, USABLE, UNITS, 1000).tolist()
    assert bounds[0] == 0 and bounds[-1] == 7 and len(bounds) > 3
    tokens = [
        sum(int(LENGTHS[r]) for r in range(UNITS[a], UNITS[b]) if USABLE[r])
        for a, b in itertools.pairwise(bounds)
    ]
    assert all(count >= 1000 for count in tokens[:-1])
    plan = plan_of()
    for number, rows in enumerate(plan.windows(0)):
        first, last = UNITS[bounds[number]], UNITS[bounds[number + 1]]
        assert sorted(rows.tolist()) == [r for r in range(first, last) if USABLE[r]]
        assert rows.tolist() != sorted(rows.tolist())


def test_every_epoch_has_every_document_once_and_the_first_one_never_looks_ahead():
    plan = plan_of()
    for epoch in range(3):
        rows = [r for batch in plan.iter_batches(epoch) for pack in batch for r in pack]
        assert sorted(rows) == plan.rows.tolist() and plan.documents(epoch) == len(rows)
    starts = [UNITS[b] for b in plan.bounds]
    windows = [[int(np.searchsorted(starts, r, "right")) for pack in batch for r in pack]
               for batch in plan.iter_batches(0)]  # fmt: skip
    assert all(min(b) >= max(a) - 1 and max(b) >= max(a) for a, b in itertools.pairwise(windows))


def test_visits_go_through_a_window_before_the_next():
    plan = plan_of(visits=3)
    rows = [r for batch in plan.iter_batches(0) for pack in batch for r in pack]
    assert sorted(rows) == sorted(plan.rows.tolist() * 3) and plan.documents(0) == len(rows)
    needed = plan.units_needed()
    batches = plan.batches(0)
    assert len(needed) == len(batches) + 1 and needed == sorted(needed) and needed[-1] == 7
    for done in range(len(batches)):
        later = [r for batch in batches[done:] for pack in batch for r in pack]
        assert min(later) >= UNITS[needed[done]]
    windows = list(plan.windows(0))
    assert sorted(windows[0].tolist()) == sorted(windows[1].tolist())
    assert windows[0].tolist() != windows[1].tolist()


# -- --follow-keep --------------------------------------------------------------------------------


@pytest.mark.long
def test_used_units_are_deleted_and_generation_waits_for_it(source, tmp_path):
    """Never more than N units on the disk; the run is that on a dataset that keeps all of them."""
    data, keep = tmp_path / "data", 12
    generate_units(source, data, 1)  # a plan to give away before generation fills the disk
    start_ring(data, keep)
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
    assert "every unit was captured" in error and not (data / "manifest.json").exists()
    planned = FollowedDataset(data)
    units = len(planned.planned.units) - 1
    assert keep < units and most[0] <= keep
    splits = make_splits(planned, config)
    pinned = {planned.unit_of(row) for row in splits.validation.rows.tolist()}
    left = {int(p.stem[-5:]) for p in (data / "shards").glob("unit-*.arrow")}
    assert left == pinned and units_used(data) == units - len(pinned)
    with pytest.raises(RunError, match="no dataset to seal"):
        seal_directory(data)

    whole = tmp_path / "whole"  # the same order with a ring that holds everything
    generate_units(source, whole, 1)
    start_ring(whole, 1000)
    generate(GenerateConfig(**made(source, whole)))
    assert run(dataclasses.replace(config, data=str(whole), out=str(tmp_path / "other"),
                                   follow_keep=1000)).finished  # fmt: skip
    last = "last/model.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (tmp_path / "other" / last).read_bytes()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "other")


def test_a_killed_run_goes_on_without_the_units_it_has_used(source, tmp_path, monkeypatch):
    data = tmp_path / "data"
    generate_units(source, data, 1)
    start_ring(data, 1000)
    generate(GenerateConfig(**made(source, data)))
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
    report = replay(tmp_path / "run" / "failed-step-1", ReplayConfig(device="cpu"))
    assert not report["reproduced"] and report["documents"]


@pytest.mark.parametrize("codec", ["int8c", "aux=lm4c,final=int8c"])
def test_lossy_columns_and_sparse_states_are_followed_too(source, tmp_path, codec):
    more = {"codec": codec, "final": "supervised"}
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
    with pytest.raises(ConfigError, match="a sealed dataset, of which nothing is ever deleted"):
        run(config)
    assert digests(sealed) == before
    data = tmp_path / "data"
    generate_units(source, data, 2)
    with pytest.raises(DatasetError, match="not given away"):
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
