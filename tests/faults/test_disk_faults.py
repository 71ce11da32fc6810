"""Every command that writes, on a disk that fails, or killed: at any call below what it writes.

What it says is in words and names the place; what has its final name is whole; the same command
then ends as on a sound disk, and nothing of the first try is left.
"""

import collections
import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from spec_data.shards.files import sha256_file
from tests.factory import tiny_dataset
from tests.faults.odd_disk import Commands, Disk
from tests.faults.tools import count, report, trials
from tests.spec_data.runs import save_target, write_corpus
from tests.spec_train.training.tools import run, small_run

ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EROFS, errno.EDQUOT, errno.EACCES)
DIFFERS = ("fit.json", "report.html", "metrics.jsonl", ".lock", "README.md")
"""Files that hold a path or a time."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a corpus, a dataset and a run."""
    folder = tmp_path_factory.mktemp("place")
    save_target(folder / "target")
    write_corpus(folder / "chats.jsonl", 12)
    tiny_dataset(folder / "data", n_docs=40)
    config = small_run(folder / "data", folder / "run")
    run(type(config)(**config.given_values() | {"steps": 2, "eval_every": 1}))
    return folder


@pytest.fixture(scope="module")
def commands(place: Path) -> Iterator[Commands]:
    (place / "commands").mkdir()
    commands = Commands(place / "commands")
    made = commands.run(command("generate", place, place / "made"), Disk(place / "made"))
    assert made.code == 0, made.said
    yield commands
    commands.close()


def command(name: str, place: Path, out: Path) -> list[str]:
    """Return a command that writes `out`."""
    data, run, to = place / "data", place / "run", ["--out", out]
    fit = f"--data {data} --steps 2 --batch-size 1 --accumulation 1 --seq-len 48 --device cpu"
    fit += " --validation 0.15 --eval-every 1 --save-every 1 --draft-vocab-size 40"
    capture = f"--target {place / 'target'} --corpus {place / 'chats.jsonl'} --device cpu"
    words = {
        "generate": f"spec-data generate {capture} --layers 0,2 --max-shard-size 60KB",
        "regenerate": f"spec-data regenerate {capture} --limit 3 --max-new-tokens 4",
        "select": f"spec-data select {data} {out} --where length>3",
        "copy": f"spec-data copy {data} {out}",
        "dataset page": f"spec-data report {place / 'made'}",
        "fit": f"spec-train fit eagle3 {fit}",
        "export": f"spec-train export --draft {run} --format vllm",
        "run page": f"spec-train report {run}",
        "json": f"spec-data inspect {data} --json={out}",
    }[name].split()
    own = name in ("select", "copy", "json")
    return [*words, *(() if own else map(str, to))]


WRITING = ["generate", "regenerate", "select", "copy", "fit", "export", "json"]
WRITING += ["dataset page", "run page"]


def tree(out: Path) -> dict[str, str]:
    """Return the digests of what a command has written, by name."""
    if out.is_file():
        return {"": str(out.stat().st_size)}
    files = [file for file in sorted(out.rglob("*")) if file.is_file()]
    return {
        str(file.relative_to(out)).replace("-again", ""): sha256_file(file)
        for file in files
        if file.name not in DIFFERS
    }


@pytest.mark.parametrize("name", WRITING)
def test_a_disk_that_fails_under_a_command(
    commands: Commands, place: Path, tmp_path: Path, name: str
) -> None:
    suffix = {"regenerate": ".jsonl", "dataset page": ".html", "run page": ".html"}.get(name, "")
    whole = tmp_path / "whole" / f"out{suffix}"
    whole.parent.mkdir()
    ended = commands.run(command(name, place, whole), Disk(whole.parent))
    assert ended.code == 0, ended.said
    wanted, calls = tree(whole), ended.calls
    outcomes: collections.Counter[str] = collections.Counter()
    for trial, rng in trials(f"disk under {name}", 1):
        trial_of(name, commands, place, tmp_path / f"t{trial}" / f"out{suffix}", calls, rng,
                 wanted, outcomes)  # fmt: skip
    report(f"disk under {name}, {calls} calls", outcomes)
    assert outcomes.total() == count(1)


def trial_of(
    name: str,
    commands: Commands,
    place: Path,
    out: Path,
    calls: int,
    rng: np.random.Generator,
    wanted: dict[str, str],
    outcomes: collections.Counter[str],
) -> None:
    """Run a command with a fault somewhere, and again without one."""
    out.parent.mkdir()
    kind = ("once", "lasting", "kill")[rng.integers(3)]
    disk = Disk(out.parent, kind, int(rng.integers(calls)), int(rng.choice(ERRORS)))  # type: ignore[arg-type]
    words = command(name, place, out)
    ended = commands.run(words, disk)
    where = f"{name}: {kind} at {disk.at}, errno {disk.error}: {ended.fault}\n{ended.said}"
    for raw in ("Traceback", "[Errno", "--debug", "os error"):
        assert raw not in ended.said, where
    if ended.code > 0:
        assert "error: " in ended.error and str(out.parent) in ended.error, where
    elif ended.code == 0 and kind != "kill":
        assert tree(out) == wanted, where
    if out.exists() and name in ("export", "select", "dataset page", "run page", "json"):
        assert tree(out) == wanted, f"incomplete under its final name: {where}"
        if ended.code and name == "export":  # whole, and the command says so
            pytest.fail(where)
    again = commands.run(words, Disk(out.parent))
    if not (ended.code == 0 and name == "export"):
        assert again.code == 0, f"{where}\nagain: {again.said}"
    assert tree(out) == wanted, where
    left = [path.name for path in out.parent.rglob(".*.tmp")]
    assert not left, f"{where}\nleft: {left}"
    outcomes["killed" if ended.code < 0 else "refused" if ended.code else "went on"] += 1
