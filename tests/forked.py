"""A command in a forked process: it starts at once, without the seconds that imports take.

For tests that kill, stop or watch the work of a command. What only a fresh process shows (entry
points, imports, terminals) is tested with real commands elsewhere.
"""

import atexit
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch
import tqdm.std


def _use_own_lock() -> None:
    """Give the bars of libraries, too, a lock of this process alone.

    tqdm's lock is a semaphore that forked processes share: one that is killed while transformers
    draws a bar in it stops every later bar of its parent, for good.
    """
    tqdm.std.tqdm.set_lock(threading.RLock())


_use_own_lock()
os.register_at_fork(after_in_child=_use_own_lock)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Let a module compute with one thread, as its forks do: the number decides the last bits.

    Modules that compare bytes of forks with bytes of their own take it by assignment.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Forked:
    """A forked process, with those methods of `subprocess.Popen` that tests use."""

    def __init__(self, work: Callable[[], int]) -> None:
        """Fork, and run `work` in the child; what it returns is the exit code."""
        self.returncode: int | None = None
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (closed at the end)
        self._texts: list[str] = []
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(work, *(file.fileno() for file in self._files))
        atexit.register(self.kill)  # of a failed test: it holds the pipes of the test run open

    def poll(self) -> int | None:
        """Return the exit code, -N after signal N, or None while the process runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._end(status)
        return self.returncode

    def wait(self, timeout: float = 240) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds; it is killed.
        """
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                self._end(os.waitpid(self.pid, 0)[1])
                raise subprocess.TimeoutExpired("fork", timeout, *self._texts)
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        """Wait for the end and return what it wrote to stdout and to stderr."""
        self.wait(timeout)
        output, error = self._texts
        return output, error

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def _end(self, status: int) -> None:
        self.returncode = os.waitstatus_to_exitcode(status)
        for file in self._files:
            file.seek(0)
            self._texts.append(file.read().decode())
            file.close()


def fork_program(source: str, *words: str) -> Forked:
    """Run a Python program in a fork, as `python -c SOURCE WORDS` does in a fresh process."""

    def work() -> int:
        sys.argv = ["-c", *words]
        exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
        return 0

    return Forked(work)


def _become(work: Callable[[], int], output: int, error: int) -> None:
    """In the child: work, and end without pytest's clean-up."""
    code = 1
    try:
        torch.set_num_threads(1)  # a fork waits for its parent's OpenMP threads, which it has not
        os.dup2(output, 1)
        os.dup2(error, 2)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
        faulthandler.enable(sys.stderr)
        logging.getLogger().handlers.clear()  # those of pytest
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
