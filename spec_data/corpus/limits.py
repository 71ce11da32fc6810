"""Run code of strangers, such as chat templates, in processes with limits of time and memory.

A template is a program: `'a' * 9999999999` takes all memory, and `10**10000000` does not return to
the interpreter for hours, so that nothing inside of the process can stop it. A `Child` is a forked
process whose `limited` blocks have a timer of the kernel, which ends the process, and a limit of
the memory that they may add, above which Python raises MemoryError. The parent then names the input
that ended it, and goes on with a new process.

Where processes are not forked (macOS), code that would be limited runs without limits.
"""

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from spec_data.shards.errors import CorpusError, RunError

SECONDS = 10.0  # of computing in one block; a template takes milliseconds
MEMORY = 1 << 30  # bytes that a block may add
FORKS = sys.platform == "linux"
_TIMEOUTS = 3  # inputs in a row that do not end: the next ones would not end either

Work = Callable[[Any], Any]

_active = False  # this process is a child, which may be ended
_hard = -1  # bytes of addresses that the system lets it have
_most = -1  # bytes of addresses that it may have in a limited block


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Limit a block in a child; other processes run it without limits.

    Raises:
        MemoryError: the block needs too much.
    """
    if not _active:
        yield
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_most, _hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (_hard, _hard))


def limited_call(function: Callable[..., Any], *args: Any) -> Any:
    """Return what one call returns, made in a child of its own, or here if this is a child.

    Raises:
        CorpusError: it ended the child. Any exception of `function` itself.
    """
    if _active or not FORKS:
        with limited():
            return function(*args)
    child = Child(_limited, (function,))
    try:
        return child.call(args)
    except TimeoutError as error:
        raise CorpusError(str(error)) from None
    finally:
        child.end()


def _limited(function: Callable[..., Any]) -> Work:
    def call(args: Sequence[Any]) -> Any:
        with limited():
            return function(*args)

    return call


class Child:
    """A process that maps inputs, one after the other, with what `make(*args)` returns there."""

    def __init__(self, make: Callable[..., Work], args: tuple[Any, ...]) -> None:
        self._make, self._args = make, args
        self._in_a_row = 0  # inputs that ended the process
        self._closed = False
        self._start()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("fork" if FORKS else "spawn")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads do not survive a fork
        with _starting:  # another process must not inherit the other end of the pipe
            self._pipe, theirs = context.Pipe()
            given = theirs, os.getpid(), self._make, self._args
            self._process = context.Process(target=_serve, args=given, daemon=True)
            self._process.start()
            theirs.close()
        self._ready = False
        self._finalizer = weakref.finalize(self, _end, self._process, self._pipe)

    def call(self, given: Any) -> Any:
        """Return the result of one input.

        Raises:
            TimeoutError: the input ended the process. Otherwise as `map`, and what the work raises.
        """
        results, error = self.map([given])
        if error is None and isinstance(results[0], TimeoutError):
            error = results[0]
        if error is not None:
            raise error
        return results[0]

    def map(self, inputs: Sequence[Any]) -> tuple[list[Any], Exception | None]:
        """Return the results of inputs, up to the first exception, and the exception.

        The result of an input that ended the process is a TimeoutError with the reason.

        Raises:
            CorpusError: the process cannot begin, or several inputs in a row ended it.
            RunError: something else ended it.
        """
        results: list[Any] = []
        while len(results) < len(inputs):
            try:
                if not self._ready:
                    _, error = self._pipe.recv()
                    if error is not None:
                        return results, error
                    self._ready = True
                self._pipe.send(inputs[len(results) :])
                while len(results) < len(inputs):
                    result, error = self._pipe.recv()
                    if error is not None:
                        return results, error
                    results.append(result)
                    self._in_a_row = 0
            except (EOFError, OSError):
                if self._closed:
                    break
                results.append(TimeoutError(self._reason()))
                self._start()
        return results, None

    def _reason(self) -> str:
        """Return why the process ended, in words."""
        self._process.join()
        self._finalizer()
        if self._process.exitcode != -signal.SIGPROF:
            raise RunError(
                "a process that rendered documents ended: out of memory, or killed. Run the same "
                "command again with fewer processes (--num-proc), or with a smaller --max-row-bytes"
            )
        reason = f"the chat template did not finish in {SECONDS:g} s of computing"
        self._in_a_row += 1
        if self._in_a_row == _TIMEOUTS or not self._ready:
            times = f", {_TIMEOUTS} times in a row" if self._ready else ""
            raise CorpusError(f"{reason}{times}; correct the template of the target's tokenizer")
        return reason

    def end(self) -> None:
        """End the process, whatever it does."""
        self._closed = True
        self._finalizer()


_starting = threading.Lock()


def _end(process: Any, pipe: Connection) -> None:
    process.kill()
    process.join()
    pipe.close()


# -- in the child ----------------------------------------------------------------------------------


def _serve(pipe: Connection, parent: int, make: Callable[..., Work], args: tuple[Any, ...]) -> None:
    """Map what comes through the pipe. Leave signals to the parent, and end when it does.

    A forked process has the handlers of its parent, which raise exceptions.
    """
    global _active
    for number in (signal.SIGTERM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to the parent as well
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    logging.disable(logging.CRITICAL)  # the parent has said it all
    if _active := FORKS:
        gc.freeze()  # collecting what is shared with the parent would copy it
        _measure()
    try:
        work = make(*args)
    except Exception as error:
        pipe.send((None, error))
        return
    pipe.send((None, None))
    logging.disable(logging.NOTSET)
    while True:
        inputs = pipe.recv()
        if FORKS:
            _measure()
        try:
            for given in inputs:
                pipe.send((work(given), None))
        except Exception as error:
            pipe.send((None, error))


def _measure() -> None:
    """Set the limit of memory: what the process has now, and some more."""
    global _most, _hard
    import resource

    _hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    _most = most if _hard == resource.RLIM_INFINITY else min(most, _hard)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
