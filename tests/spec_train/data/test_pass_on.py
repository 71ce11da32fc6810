"""Laws of --pass-on: a run that deletes what it has trained on is the run that deletes nothing."""

import functools
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import spec_data
import spec_data.cli
from spec_data.shards import passing
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.follow import WORK, FollowedDataset
from spec_data.shards.passing import Consumer, Passed, Ring, shard_file
from spec_train.cli import main
from spec_train.data.order import FollowingPlan, bytes_together
from spec_train.data.splits import make_splits
from spec_train.training.run_directory import RunDirectory
from tests import forked
from tests.forked import Forked, fork_program
from tests.spec_data.runs import estimate_with, flags, generate_with
from tests.spec_train.data import follow_tools
from tests.spec_train.data.follow_tools import config_of, generate_units, made, run, wait_until
from tests.spec_train.training.ranks_tools import fit_well
from tests.spec_train.training.test_trainer_resume import assert_same_run
from tests.spec_train.training.tools import assert_close_runs, command, metrics

one_thread, source = forked.one_thread, follow_tools.source

RING = 250_000  # bytes; all shards have 620,000
PRODUCE = """
import contextlib, sys
from pathlib import Path
from spec_data.cli import main
from spec_data.generation import run
original, peaks = run.finish_unit, Path(sys.argv[1])
def counted(out, *given):
    original(out, *given)
    held = 0
    for file in (out / "shards").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held += file.stat().st_size
    with peaks.open("a") as file:
        file.write(f"{held}\\n")
run.finish_unit = counted
sys.exit(main(["generate", *sys.argv[2:]]))
"""


def produce(source, data: Path, ring: int = RING, **changes) -> Forked:
    """Generate in another process, which notes the bytes of all shards after each."""
    given = made(source, data, pass_on=str(ring), **changes)
    return fork_program(PRODUCE, str(data.with_name("peaks")), *flags(given))


def config(data: Path, out: Path, **changes):
    given = {"epochs": None, "window_tokens": 100, "save_every": 1000, "eval_every": 5} | changes
    return config_of(data, out, **given)


@pytest.fixture(scope="module")
def passed(source, tmp_path_factory):
    """A dataset that was passed on, and the run that it was passed to."""
    folder = tmp_path_factory.mktemp("passed")
    process = produce(source, folder / "data")
    try:
        assert run(config(folder / "data", folder / "run")).finished
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    finally:
        process.kill()
    return folder


def shards(data: Path) -> set[int]:
    """Numbers of the whole shards: a producer may be writing the next one beside them."""
    return {int(file.stem.partition("-")[2]) for file in (data / "shards").glob("unit-*.arrow")}


def test_no_more_bytes_than_asked_for_and_the_run_is_the_ordinary_one(source, passed, tmp_path):
    peaks = [int(line) for line in (passed / "peaks").read_text().split()]
    ring, state = Ring.read(passed / "data" / WORK), Passed.read(passed / "data" / WORK)
    assert len(peaks) == len(ring.units) == 20 and sum(ring.units) > 2 * RING
    assert RING / 2 < max(peaks) <= RING  # bf16: sizes are exact
    # what validation reads stays, and nothing else
    assert shards(passed / "data") == set(state.kept) and state.freed == state.trained == 20
    assert not (passed / "data" / "manifest.json").exists()
    assert "250.00 kB are full: waiting for `spec-train fit" in (passed / "data.log").read_text()
    assert "passed on   20 units" in str(spec_data.status(passed / "data"))
    generate_with(**made(source, tmp_path / "data"))
    assert run(config(tmp_path / "data", tmp_path / "run", epochs=1)).finished
    runs = [passed / "run", tmp_path / "run"]
    a, b = (load_file(folder / "last" / "training_state.safetensors") for folder in runs)
    assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)
    assert metrics(runs[0]) == metrics(runs[1])


class KilledHere:
    """Calls a function and, at call number `at`, kills the process instead."""

    def __init__(self, function, at: int):
        self.function, self.left = function, at

    def __call__(self, *given):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.function(*given)


def blocked(data: Path) -> bool:
    """Whether the next shard does not fit."""
    ring, captured = Ring.read(data / WORK), len(list((data / WORK).glob("unit-*.json")))
    held = sum(file.stat().st_size for file in (data / "shards").glob("unit-*"))
    return captured < len(ring.units) and held + ring.units[captured] > ring.most


def killed(fit, name: str, function, at: int) -> None:
    """Run `fit` in a process that is killed in the call number `at` of a function."""
    with pytest.MonkeyPatch.context() as patch:
        kill = KilledHere(function, at)
        owner = RunDirectory if name == "save" else passing
        patch.setattr(owner, name, lambda *given: kill(*given))
        assert Forked(fit).wait() == -signal.SIGKILL


def test_killed_and_resumed_it_is_the_run_that_was_not(source, passed, tmp_path):
    """Once between the training on a shard and its checkpoint, and once between two deletions. The
    producer is killed as well, while it waits for room."""
    data, out = tmp_path / "data", tmp_path / "run"
    fit = functools.partial(main, command(config(data, out))[3:])
    producer = produce(source, data)
    killed(fit, "save", RunDirectory.save, 4)
    states = [check_deleted(data, out)]
    wait_until(lambda: blocked(data), producer)
    producer.kill()
    producer.wait()
    producer = produce(source, data)
    killed(fit, "shard_file", shard_file, 3)
    states.append(check_deleted(data, out))
    assert [state.freed < state.trained for state in states] == [False, True]
    fitting = Forked(fit)
    _, error = fitting.communicate(timeout=120)
    assert fitting.returncode == 0, error
    producer.communicate(timeout=120)
    assert producer.returncode == 0 and shards(data) == set(states[0].kept)
    assert_same_run(out, passed / "run")
    assert max(int(line) for line in (tmp_path / "peaks").read_text().split()) <= RING


def check_deleted(data: Path, out: Path) -> Passed:
    """Check that what the checkpoint does not contain is not deleted; return what was noted."""
    state, dataset = Passed.read(data / WORK), FollowedDataset(data)
    done = json.loads((out / "last/training_state.json").read_text())["stream"]["batches_done"]
    left = make_splits(dataset, config(data, out)).train.batches(0)[done:]
    used_later = {dataset.unit_of(row) for batch in left for pack in batch for row in pack}
    captured = {int(file.stem[5:]) for file in (data / WORK).glob("unit-*.json")}
    deleted = captured - shards(data)
    assert deleted and not deleted & {*used_later, *state.kept} and max(deleted) < state.trained
    assert 0 < state.freed <= state.trained < len(dataset.units) - 1
    return state


@pytest.mark.long
def test_two_workers_pass_on_to_two_processes(source, passed, tmp_path):
    data, out = tmp_path / "data", tmp_path / "run"
    producers = [produce(source, data, workers=f"{number}/2") for number in range(2)]
    fit_well(config(data, out, batch_size=1), 2)
    for producer in producers:
        _, error = producer.communicate(timeout=120)
        assert producer.returncode == 0, error
    state = Passed.read(data / WORK)
    assert state.freed == 20 and shards(data) == set(state.kept)
    assert max(int(line) for line in (tmp_path / "peaks").read_text().split()) <= RING
    assert_close_runs(passed / "run", out)


# -- what needs a second pass ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("spec-train fit eagle3 --data DATA --out NEW", "one `spec-train fit --follow` trains"),
        ("spec-train eval --draft RUN --data DATA", "generate without --pass-on"),
        ("spec-data verify DATA", "one `spec-train fit --follow` trains"),
        ("spec-data select DATA --out NEW", "shards are passed on"),
        ("spec-data inspect DATA", "shards are passed on"),
    ],
)
def test_other_readers_are_refused(passed, tmp_path, capsys, words, error):
    for name, path in {"DATA": "data", "RUN": "run"}.items():
        words = words.replace(name, str(passed / path))
    program, *rest = words.replace("NEW", str(tmp_path / "new")).split()
    assert {"spec-train": main, "spec-data": spec_data.cli.main}[program](rest) == 2
    assert error in " ".join(capsys.readouterr().err.split())


def test_a_second_run_and_a_second_pass_are_refused(source, passed, tmp_path):
    data, out = passed / "data", tmp_path / "run"
    with pytest.raises(ConfigError, match=r"one run .*, and .*run has begun with them: resume"):
        run(config(data, out))
    for changes in ({"epochs": 2}, {"epochs": None, "steps": 2}, {"epochs": None, "steps": 1000}):
        with pytest.raises(
            ConfigError, match=r"trained on once: in \d+ steps, not \d+\. Leave --steps"
        ):
            run(config(data, out, **changes))
    dataset = FollowedDataset(data)
    gone = min(set(range(20)) - shards(data))
    with pytest.raises(DatasetError, match="a trainer has used and deleted it"):
        dataset.wait_for([int(dataset.units[gone])], threading.Event())
    # neither does a run go on whose checkpoints were lost
    shutil.copytree(data, tmp_path / "data")
    state = Passed.read(data / WORK)
    content = {"run": str(out.resolve()), "kept": state.kept, "trained": 7, "freed": 7}
    (tmp_path / "data" / WORK / passing.PASSED).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"units 0 to 6 were deleted after a later checkpoint of"):
        run(config(tmp_path / "data", out))


def test_windows_that_do_not_fit_are_refused(source, tmp_path):
    data = tmp_path / "data"
    generate_units(source, data, 2, pass_on=str(RING))
    with pytest.raises(
        ConfigError, match=r"holds 250,000 bytes of shards, and this run needs 6\d\d,"
    ):
        run(config(data, tmp_path / "run", window_tokens=10_000))
    assert len(shards(data)) == 2
    with pytest.raises(ConfigError, match="pass_on: True -> '\\(absent\\)'"):
        generate_with(**made(source, data))
    with pytest.raises(ConfigError, match="--pass-on 90,000: a shard may have 33,168 bytes, and 3"):
        generate_with(**made(source, data, pass_on="90KB"))
    given = made(source, tmp_path / "x")
    ring, whole = (estimate_with(**given, pass_on=n).bytes_needed for n in (RING, "1GB"))
    assert ring == whole - sum(Ring.read(data / WORK).units) + RING
    for changes in ({"engine": "ray"}, {"out": "s3://bucket/data"}):
        with pytest.raises(ConfigError, match="--pass-on with --engine"):
            generate_with(**(made(source, data, pass_on="1MB") | changes))


def test_two_runs_at_once_and_one_that_is_gone(tmp_path):
    work = tmp_path / WORK
    work.mkdir()
    Consumer(tmp_path, work, tmp_path / "a", [1], 0, 9)
    with pytest.raises(ConfigError, match=r"a has begun with them.*if it is gone, delete .*passed"):
        Consumer(tmp_path, work, tmp_path / "b", [1], 0, 9)


def test_a_run_that_begins_anew_says_what_it_keeps(tmp_path):
    """Its first attempt, which was killed before a checkpoint, held other documents out."""
    work, a = tmp_path / WORK, tmp_path / "a"
    work.mkdir()
    (tmp_path / "shards").mkdir()
    for unit in range(4):
        shard_file(tmp_path, unit).touch()
    Consumer(tmp_path, work, a, [2], 0, 100)
    Consumer(tmp_path, work, a, [0, 1], 0, 90).free(3)
    assert shards(tmp_path) == {0, 1, 3} and Passed.read(work).needed == 90
    with pytest.raises(ConfigError, match="begun with other documents of validation, and some"):
        Consumer(tmp_path, work, a, [2], 3, 90)


def test_what_a_kill_after_the_last_checkpoint_left_is_deleted(passed, tmp_path):
    shutil.copytree(passed / "data", tmp_path / "data")
    shutil.copytree(passed / "run", tmp_path / "run", symlinks=True)
    kept = set(Passed.read(tmp_path / "data" / WORK).kept)
    content = {"run": str((tmp_path / "run").resolve()), "kept": [*kept]}
    file = tmp_path / "data" / WORK / passing.PASSED
    file.write_text(json.dumps(content | {"trained": 17, "freed": 17}))
    for unit in range(17, 20):
        shard_file(tmp_path / "data", unit).touch()
    assert run(config(tmp_path / "data", tmp_path / "run")).finished
    assert shards(tmp_path / "data") == kept and Passed.read(file.parent).freed == 20


def test_fewer_bytes_than_the_run_needs_are_refused(source, tmp_path):
    """Else the producer waits for the run, and the run for the producer."""
    data = tmp_path / "data"
    generate_units(source, data, 2, pass_on=str(RING))
    Consumer(data, data / WORK, tmp_path / "run", [], 0, 150_000)
    with pytest.raises(ConfigError, match=r"--pass-on 120,000: .*run .* give 150000 or more"):
        generate_with(**made(source, data, pass_on="120KB"))


def test_units_that_batches_need_by_a_slow_count():
    """Every set of units that a run holds is counted by hand, batch by batch."""
    random = np.random.default_rng(0)
    for _ in range(30):
        lengths = random.integers(1, 30, 60)
        units = np.array([0, *np.sort(random.choice(np.arange(1, 60), 11, replace=False)), 60])
        rows = np.flatnonzero(random.random(60) < random.choice([0.2, 0.9]))
        given = {"seq_len": 32, "packs_per_batch": 3, "seed": 1, "window_tokens": 70}
        plan = FollowingPlan(lengths, rows, units, **given)
        batches = [[row for pack in batch for row in pack] for batch in plan.batches(0)]
        used = [{int(np.searchsorted(units, row, "right")) - 1 for row in b} for b in batches]
        sizes, kept = (
            random.integers(1, 100, 12).tolist(),
            sorted(random.choice(12, 2, replace=False).tolist()),
        )
        spans, deleted, there, most = plan.unit_spans().tolist(), set(), set(), 0
        assert len(spans) == len(batches) + 1
        there |= set(range(kept[-1] + 1))
        most = sum(sizes[u] for u in there)
        for k, now in enumerate([*used, set()]):
            first = spans[k][0]
            deleted |= set(range(first)) - set(kept)
            assert not deleted & set().union(*used[k:]) and deleted <= there
            there |= set(range(max(now, default=0) + 1))
            assert k == len(used) or spans[k][1] == 1 + max(set().union(*used[: k + 1]))
            most = max(most, sum(sizes[u] for u in there - deleted))
        # units of validation that lie ahead count from the start
        assert (
            most
            <= bytes_together(plan.unit_spans(), sizes, kept)
            <= most + sum(sizes[u] for u in kept)
        )
