"""Run a command under a terminal of 80 columns, or into a log, and keep its raw bytes."""

import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from spec_data.terminal.command import COMMON

COLUMNS = 80
ROOT = Path(__file__).parent.parent


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: this source tree, one thread, nothing that disables bars."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TQDM", "HF_HUB_DISABLE"))}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"} | more


def on_terminal(*arguments: str, timeout: float = 240, **more: str) -> tuple[int, str]:
    """Run `python ARGUMENTS` with stdin, stdout and stderr on a pty; return exit code and bytes."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=slave, stdout=slave, stderr=slave, env=environment(**more), close_fds=True,
    )  # fmt: skip
    os.close(slave)
    read, until = b"", time.monotonic() + timeout
    try:
        while time.monotonic() < until:
            if not select.select([master], [], [], 0.2)[0]:
                if process.poll() is not None:
                    break
                continue
            try:
                part = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            read += part
    finally:
        os.close(master)
        if process.poll() is None and time.monotonic() >= until:
            process.kill()
    return process.wait(timeout=60), read.decode()


def screen(raw: str) -> list[str]:
    """The lines that a terminal shows after these bytes: a carriage return overwrites."""
    lines = []
    for line in raw.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def drawings(raw: str) -> list[str]:
    """Everything that was ever drawn on one line, bars one redraw at a time."""
    return [part for line in raw.replace("\r\n", "\n").split("\n") for part in line.split("\r")]


def flags_of(entry) -> list[str]:
    """Every option of a command of a program."""
    names = (name for a in entry.arguments for name in a.names if name.startswith("--"))
    return sorted({*names, *(words.split()[0] for words in (*COMMON, *entry.common))})


def next_command(text: str, label: str = "next") -> list[str]:
    """The words of the command that a text ends with."""
    found = re.search(rf"^{label}:  ((.*\\\n)*.*)$", text, re.MULTILINE)
    assert found, text
    return shlex.split(found[1].replace("\\\n", " "))
