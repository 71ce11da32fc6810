"""Commands on a file system with faults: `odd_disk.c` is preloaded, and every command is forked.

One process has the library and all imports; a forked child of it runs one command, so that a trial
takes what the command itself takes. Skipped where there is no C compiler.
"""

import contextlib
import ctypes
import errno
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

SOURCE = Path(__file__).with_name("odd_disk.c")
QUIRKS = (
    "flock",
    "folder_sync",
    "symlink",
    "hardlink",
    "chmod",
    "record_lock",
    "folder_open",
    "exchange",
)
_IMPORTS = (
    *("transformers", "datasets", "tests.forked", "spec_data.generation.run", "accelerate"),
    *("spec_data.verification.run", "spec_data.views.copy", "spec_data.hub.transfer"),
    *("spec_data.regeneration.run", "spec_train.training.fit", "spec_train.evaluation.exporting"),
    *("spec_train.evaluation.evaluate", "spec_train.reports.run_page"),
    *("transformers.models.llama.modeling_llama", "spec_train.training.search"),
)
KINDS = {"none": 0, "once": 1, "lasting": 2, "kill": 3}


@dataclass
class Disk:
    """A folder and what is odd about it; `error` is what call number `at` fails with."""

    folder: Path
    kind: Literal["none", "once", "lasting", "kill"] = "none"
    at: int = 0
    error: int = errno.EIO
    quirks: dict[str, int] = field(default_factory=dict)


@dataclass
class Ended:
    """How a command ended: `calls` on the folder, and which of them was the fault."""

    code: int
    output: str
    error: str
    calls: int
    fault: str

    @property
    def said(self) -> str:
        return self.output + self.error


class Commands:
    """The process that runs commands, one after the other."""

    def __init__(self, work: Path) -> None:
        """Compile the library and start the process.

        Raises:
            pytest.skip.Exception: there is no C compiler.
        """
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None or sys.platform != "linux":
            pytest.skip("needs Linux and a C compiler")
        library = work / "odd_disk.so"
        words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(words, check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        self._work = work
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.odd_disk", str(library), str(work)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def run(self, words: Sequence[str], disk: Disk, seconds: float = 600) -> Ended:
        """Run a command: `words` begin with the program, or "writer", "lock" for `*_play`."""
        quirks = [disk.quirks.get(name, 0) for name in QUIRKS]
        asked = [list(words), str(disk.folder), KINDS[disk.kind], disk.at, disk.error, quirks]
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([*asked, seconds]) + "\n")
        self._process.stdin.flush()
        code, calls, fault = json.loads(self._process.stdout.readline())
        texts = ((self._work / name).read_text(errors="replace") for name in ("out", "err"))
        return Ended(code, *texts, calls, fault)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _serve(library: str, work: Path) -> None:
    """Run the commands that stdin names, each in a fork."""
    import torch

    import spec_data.cli
    import spec_train.cli
    from tests.faults import lock_play, writer_play

    for name in _IMPORTS:  # once, here
        importlib.import_module(name)
    torch.set_num_threads(1)
    disk = ctypes.CDLL(library)
    disk.odd_disk_fault.restype = ctypes.c_char_p
    programs = {
        "spec-data": spec_data.cli.main,
        "spec-train": spec_train.cli.main,
        "writer": writer_play.main,
        "lock": lock_play.main,
    }
    for line in sys.stdin:
        words, folder, kind, at, error, quirks, seconds = json.loads(line)
        disk.odd_disk(b"", 0, 0, 0, (ctypes.c_int * len(QUIRKS))())
        child = os.fork()
        if child == 0:
            signal.alarm(round(seconds))
            numbers = (ctypes.c_int * len(QUIRKS))(*quirks)
            begin = partial(disk.odd_disk, folder.encode(), kind, at, error, numbers)
            _run(programs[words[0]], words[1:], work, begin)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answer = code, disk.odd_disk_calls(), disk.odd_disk_fault().decode()
        print(json.dumps(answer), flush=True)


def _run(main: Any, words: list[str], work: Path, begin: Any) -> None:
    """In the child: run a command and end without the clean-up of its parent."""
    code = 99
    try:
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(work / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, number)
            os.close(file)
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
        begin()
        code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 98
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
