"""Try a stranger's chat template and tokenizer in a child process, with bounds.

A template is a program, and so is a tokenizer: one line can ask for 10 GB, never end, or abort the
process. What it does with short chats and with the first rows is tried in a fork of this process,
which loads nothing again and takes some hundredths of a second. Where processes do not fork
(Windows, macOS), nothing is tried: rows have the bounds of `in_order` and `template` alone.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from spec_data.shards.errors import TargetError

_SECONDS, _BYTES = 60, 4 << 30
_MEMORY, _PANIC = 3, 4  # exit status of a child without memory, and of one that panicked


def check_in_child(work: Callable[[], Any], name: str) -> None:
    """Run `work` in a child process and forget its result; exceptions are left to the real run.

    Raises:
        TargetError: it did not end in 60 s, needed more than 4 GB, or ended the process. `name` is
            what it was tried on.
    """
    if fault := fault_in_child(work, _SECONDS, _BYTES):
        raise TargetError(
            f"{name}: the chat template or the tokenizer {fault}. No server could use it either: "
            "look at chat_template.jinja and tokenizer.json, or take them from their maker"
        )


def fault_in_child(work: Callable[[], Any], seconds: float, most: int) -> str:
    """Return what ended `work` in a child process, in words; "": nothing, or it was not tried."""
    if sys.platform != "linux":
        return ""
    child = os.fork()
    if child == 0:
        _run(work, seconds, most)
    try:
        status = _waited(child, seconds)
    except BaseException:
        _end(child)
        raise
    if status is None:
        _end(child)
        return f"does not end in {seconds:g} s"
    code = os.waitstatus_to_exitcode(status)
    if code == _MEMORY or code == -signal.SIGKILL:
        return f"needs more than {most:,} bytes of memory"
    if code == -signal.SIGXCPU:
        return f"does not end in {seconds:g} s"
    if code == _PANIC:
        return "ends in a panic of the library tokenizers"
    return f"ends the process ({signal.Signals(-code).name})" if code < 0 else ""


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust, such as tokenizers, met what it had not foreseen.

    The class of such errors has no module to import it from, and is no `Exception`.
    """
    return type(error).__name__ == "PanicException"


def _run(work: Callable[[], Any], seconds: float, most: int) -> None:
    """Run `work` within bounds, as a child, and leave without what this process does at its end."""
    code = 0
    try:
        import resource

        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)  # what a library says when it aborts
        size = _mapped_bytes() + most
        whole = int(seconds) + 1
        for kind, bound in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, whole),
            (resource.RLIMIT_AS, size),
        ):
            hard = resource.getrlimit(kind)[1]
            bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
            resource.setrlimit(kind, (bound, hard))
        _watch_folding()
        work()
    except (MemoryError, _NoMemory):
        code = _MEMORY
    except BaseException as error:  # of a template: rendering the row says it
        code = _PANIC if is_panic(error) else 0
    finally:
        os._exit(code)


def _mapped_bytes() -> int:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


class MemoryBound:
    """Lets this process take no more than `most` further bytes while it is open: MemoryError.

    The bound is of the whole process, for the time in which some rows are rendered, or a file is
    read: on Linux alone, and not above a bound that the process has. Several may be open at once,
    and each adds what it may take; the last one that is closed takes the bound away. Close it from
    outside where a thread that renders never ends: the
    process would keep it for ever.
    """

    _lock = threading.Lock()
    _open: ClassVar[set["MemoryBound"]] = set()
    _before = 0

    def __init__(self, most: int) -> None:
        self.most, self._closed = most, False

    def __enter__(self) -> "MemoryBound":
        if sys.platform != "linux":
            return self
        import resource

        with MemoryBound._lock:
            if self._closed:
                return self
            now, hard = resource.getrlimit(resource.RLIMIT_AS)
            if not MemoryBound._open:
                MemoryBound._before = now
            MemoryBound._open.add(self)
            bounds = [
                _mapped_bytes() + sum(bound.most for bound in MemoryBound._open),
                MemoryBound._before,
                hard,
            ]
            size = min(bound for bound in bounds if bound != resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_AS, (size, hard))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bound away, unless others are open; once."""
        with MemoryBound._lock:
            self._closed = True
            if self not in MemoryBound._open:
                return
            import resource

            MemoryBound._open.remove(self)
            if not MemoryBound._open:
                hard = resource.getrlimit(resource.RLIMIT_AS)[1]
                resource.setrlimit(resource.RLIMIT_AS, (MemoryBound._before, hard))


class _NoMemory(BaseException):
    """Memory was lacking where jinja would go on without a word."""


def _watch_folding() -> None:
    """Notice constants of a template that take all memory: jinja computes them when it compiles.

    It tries again at runtime what fails there, and the real run would have the memory.
    """
    from jinja2 import nodes

    def watched(as_const: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **options: Any) -> Any:
            try:
                return as_const(*args, **options)
            except MemoryError:
                raise _NoMemory from None
            except nodes.Impossible as error:
                if isinstance(error.__cause__ or error.__context__, MemoryError):
                    raise _NoMemory from None
                raise

        return watch

    for kind in vars(nodes).values():
        if isinstance(kind, type) and "as_const" in vars(kind):
            kind.as_const = watched(kind.as_const)  # type: ignore[attr-defined]


def _waited(child: int, seconds: float) -> int | None:
    """Return the status of a child when it ends; None: it is still at work."""
    end, pause = time.monotonic() + seconds, 0.001
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return None


def _end(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
