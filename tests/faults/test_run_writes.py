"""Every call on the disk of the thread that writes a run fails once, or the process is killed.

As sqlite's tests do it. Whatever happens, `eval` and `export` take the draft that the run's words
and files say, with its own figures; the next run goes on to the bytes of an undisturbed one.
"""

import collections
import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_data.shards.errors import MissingError
from spec_data.shards.files import sha256_file
from spec_train.training.run_directory import (
    best_step,
    checkpoints_of,
    chosen_draft_dir,
    held_out_file,
    step_of,
)
from tests.factory import tiny_dataset
from tests.faults.odd_disk import Commands, Disk, Ended
from tests.faults.tools import report
from tests.faults.writer_play import STEPS
from tests.spec_train.training.tools import run, small_run

ERRORS = (errno.EIO, errno.ENOSPC, errno.EPERM, errno.ESTALE, errno.EROFS, errno.EDQUOT)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    config = small_run(tiny_dataset(folder / "data", n_docs=40), folder / "run")
    config = type(config)(
        **config.given_values() | {"steps": 1, "validation": 0.0, "eval_every": None}
    )
    run(config)
    return folder / "run" / "last"


@pytest.fixture(scope="module")
def whole(commands: Commands, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """An undisturbed run: how many calls there are."""
    return play(commands, draft, Disk(tmp_path_factory.mktemp("whole") / "run"))


def play(commands: Commands, draft: Path, disk: Disk) -> Ended:
    return commands.run(["writer", str(disk.folder), str(draft)], disk)


def weights(folder: Path) -> set[float]:
    """Return what the trained weights of a draft are: the step, everywhere."""
    from safetensors.torch import load_file

    return set(load_file(folder / "model.safetensors")["fc.weight"].flatten().tolist())


def assert_true_words(out: Path, ended: Ended) -> None:
    """What commands would take of a run is what its files say, and what its words said."""
    try:
        taken = chosen_draft_dir(out)
    except MissingError:
        assert not checkpoints_of(out) and not (out / "best").exists()
        taken = None
    best = None
    if taken is not None:
        assert weights(taken) == {step_of(taken)}
        if taken.resolve().name.startswith("best-"):
            best = step_of(taken)
            figures = held_out_file(out)
            assert figures is not None, "the figures of the best draft are lost"
            assert json.loads(figures.read_text())["samples"] == [best]
    said = best_step(out)
    assert said is None or (best is not None and best >= said)
    if ended.code == 0:
        assert json.loads(ended.output) == {"best": STEPS} and best == STEPS
    elif ended.code > 0:
        assert ended.error.startswith("error: ") and str(out) in ended.error, ended.error
        assert "Traceback" not in ended.error and "Errno" not in ended.error, ended.error
        if "On the disk" in ended.error:
            newest = checkpoints_of(out)[-1:]
            assert (newest[0].name if newest else "no checkpoint yet") in ended.error
            assert ("`best`" in ended.error) == (best is not None)
            assert best is None or f"`best` is of step {best}" in ended.error


def tree(out: Path) -> dict[str, str]:
    """Return the digest of every file of a run but the settings of its place."""
    return {
        str(file.relative_to(out)).replace("-again", ""): sha256_file(file)
        for file in sorted(out.rglob("*"))
        if file.is_file() and file.name not in (".lock", "fit.json")
    }


LONG = [pytest.param(kind, 1, marks=pytest.mark.long) for kind in ("once", "kill", "lasting")]


@pytest.mark.parametrize(("kind", "apart"), [("once", 37), ("kill", 93), *LONG])
def test_every_call_of_the_writer_in_turn(
    commands: Commands, draft: Path, whole: Ended, tmp_path: Path, kind: str, apart: int
) -> None:
    """Every call with -m long; else calls that lie `apart`."""
    wanted = tmp_path / "wanted"
    assert play(commands, draft, Disk(wanted)).code == 0
    points = range(0, whole.calls, apart)
    outcomes: collections.Counter[str] = collections.Counter()
    for point in points:
        out = tmp_path / f"run-{point}"
        disk = Disk(out, kind, point, ERRORS[point % len(ERRORS)])  # type: ignore[arg-type]
        ended = play(commands, draft, disk)
        assert ended.fault, "the call was not reached"
        try:
            assert_true_words(out, ended)
            again = play(commands, draft, Disk(out))
            assert again.code == 0, again.error
            assert_true_words(out, again)
            assert tree(out) == tree(wanted)
        except AssertionError as error:
            raise AssertionError(f"call {point}, {disk.error}: {ended.fault}\n{error}") from error
        outcomes["went on" if ended.code == 0 else "killed" if ended.code < 0 else "refused"] += 1
    report(f"calls of the writer, {kind}", outcomes)
    assert set(outcomes) == ({"killed"} if kind == "kill" else {"refused", "went on"})
