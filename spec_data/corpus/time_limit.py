"""Stop Python code that runs longer than allowed, such as a chat template, in any thread.

Signals reach only the main thread, and a template may be rendered in any other. So a watching
thread asks the interpreter to raise in the limited one; Python does so before its next bytecode.
Code in a C function is interrupted only after that function returns. One thread watches all blocks
and ends when there has been none for a while: starting one per block costs more than a render.
"""

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_POLL = 0.1  # seconds between two looks at the clock
_IDLE = 5.0  # seconds without a block after which the watching thread ends


class TimeIsUp(BaseException):
    """Raised in the limited block. No Exception, because the block may catch those."""


class _Watchdog:
    """Raises `TimeIsUp` in threads whose block has run for too long."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._blocks: dict[object, tuple[int, float]] = {}  # (thread, time of the end) by block
        self._watching: threading.Thread | None = None

    def enter(self, seconds: float) -> object:
        """Begin a block of the calling thread; return its key."""
        key = object()
        with self.lock:
            self._blocks[key] = threading.get_ident(), time.monotonic() + seconds
            if self._watching is None or not self._watching.is_alive():  # dead after a fork
                self._watching = threading.Thread(target=self._watch, daemon=True)
                self._watching.start()
        return key

    def leave(self, key: object) -> None:
        """End a block; an interruption that has not arrived yet is withdrawn."""
        with self.lock:
            if self._blocks.pop(key, None) is None:
                _raise_in(threading.get_ident(), None)

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_POLL)
            now = time.monotonic()
            with self.lock:
                for key, (thread, end) in list(self._blocks.items()):
                    last = now
                    if now > end:
                        del self._blocks[key]
                        _raise_in(thread, TimeIsUp)
                if now - last > _IDLE:
                    self._watching = None
                    return


_watchdog = _Watchdog()


def _forget() -> None:
    """Begin anew in a forked process: another thread may have held the lock."""
    global _watchdog
    _watchdog = _Watchdog()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Run a block for at most `seconds`, in any thread.

    Raises:
        TimeIsUp: the block did not finish in time.
    """
    key = _watchdog.enter(seconds)
    try:
        yield
    finally:
        _watchdog.leave(key)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Let the interpreter raise `error` in a thread; None withdraws what was not raised yet."""
    argument = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)
