"""Every command says in words which file could not be written, and clears up after a kill.

A limit of the file size stands for a full disk: the system refuses the same writes, of Python and
of libraries, with another number.
"""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import spec_data.cli
import spec_train.cli
from spec_data.shards.errors import FileError
from spec_data.shards.files import REFUSALS, write_atomically
from tests.api_workspace import make_workspace
from tests.forked import Forked
from tests.terminal_tools import environment

COMMANDS = {
    "generate": "--target target --corpus chats.jsonl --out OUT --layers 0,2,4 --device cpu",
    "regenerate": "--target target --corpus chats.jsonl --out OUT.jsonl --max-new-tokens 2 "
    "--limit 2 --device cpu",
    "select": "data --out OUT --mask last-turn",
    "merge": "data other --out OUT",
    "copy": "other --out OUT",
    "export": "data --out OUT --to speculators",
    "export.specforge": "data --out OUT --to specforge",
    "fit": "eagle3 --data data --out OUT --steps 2 --ttt-steps 2 --draft-vocab-size 64 "
    "--batch-size 1 --seq-len 128 --validation 0.4 --device cpu",
    "export.train": "--draft run --format hf --out OUT",
    "eval": "--draft run --data data --device cpu --json OUT.json",
    "report": "run --out OUT.html",
}
TRAIN = ("fit", "export.train", "eval", "report")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert spec_data.cli.main(["select", "data", "other", "--where", "length <= 40"]) == 0
        yield folder


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_cannot_be_written_is_named(workspace, command, tmp_path, capsys):
    main = spec_train.cli.main if command in TRAIN else spec_data.cli.main
    failed: list[str] = []
    for number, size in enumerate((1, 1_500, 12_000, 60_000, 300_000)):
        out = tmp_path / str(number)
        words = [command.partition(".")[0], *COMMANDS[command].replace("OUT", str(out)).split()]
        with largest_file(size):
            code = main(words)
        said = capsys.readouterr().err
        assert "[Errno" not in said and "(os error" not in said and ".tmp" not in said
        if code != 0:
            assert re.search(r"error: /\S+: (the file would be larger|cannot be written)", said), (
                said
            )
            failed = words
        assert not [p for p in tmp_path.rglob("*.tmp") if not p.is_relative_to(out)]
    assert failed
    assert main(failed) == 0, "the same command goes on where there is room"


@pytest.mark.parametrize(
    "command", ["regenerate", "export", "export.specforge", "fit", "export.train"]
)
def test_the_next_run_removes_what_a_kill_left(workspace, command, tmp_path):
    main = spec_train.cli.main if command in TRAIN else spec_data.cli.main
    words = COMMANDS[command].replace("OUT", str(tmp_path / "out")).split()
    words = [command.partition(".")[0], *words]

    def killed() -> int:
        def kill(_):
            if list(tmp_path.rglob("*.tmp")):
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = kill
        return main(words)

    for _ in range(2):
        assert Forked(killed).wait() == -signal.SIGKILL
        assert list(tmp_path.rglob("*.tmp"))
    assert main(words) == 0
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_a_refusal_names_the_path_and_what_to_do(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(FileError, match=rf"^{tmp_path}/x: .*\. [A-Z]") as refused:
        write_atomically(Path(tmp_path / "x"), "text")
    assert refused.value.errno == number and refused.value.exit_code == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.long  # a closed pipe is tried each time
def test_a_full_stdout_is_named(workspace):
    """/dev/full is a disk without room."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "spec_data", "inspect", "data"],
            env=environment(), stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: the output: the disk is full. ")
