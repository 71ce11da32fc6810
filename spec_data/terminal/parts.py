"""What a long piece of work is at: its parts by name, on a bar or in the lines of a log.

The parts of a proof or a trial take very different times, so nothing is said of the time left: only
the part, how far it is, and how long the whole has taken. On a terminal the line is redrawn every
second; in a log it comes as often as that of any bar, so that no long part is silent.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from spec_data.terminal import NOTICE
from spec_data.terminal.printable import one_line
from spec_data.terminal.progress import Bar, bar_options, width_known

_TICK = 1.0  # seconds between two drawings of the same part
_current: ContextVar["_Parts | None"] = ContextVar("parts", default=None)


class _Parts(Bar):
    """A bar that shows a part by its name."""

    level = NOTICE + 1  # shown where a trial is silent about its steps
    part = ""

    def line(self) -> str:
        """Describe what the work is at in one plain line."""
        elapsed = self.format_interval(self.format_dict["elapsed"])
        return f"{self.desc}: {self.part or 'begins'}, {elapsed} elapsed"

    @property
    def format_dict(self) -> dict[str, Any]:
        """The facts of the bar, with the part as its text."""
        return super().format_dict | {"postfix": self.part}

    @staticmethod
    def format_meter(n: Any, total: Any, elapsed: Any, ncols: Any = None, **options: Any) -> str:
        """Format the line that a terminal shows, cut to its width."""
        text = f"{options['prefix']}: {options['postfix'] or 'begins'}"
        text = one_line(f"{text} [{Bar.format_interval(elapsed)}]")
        return text[: ncols - 1] if width_known(ncols) else text


@contextlib.contextmanager
def parts(desc: str) -> Iterator[None]:
    """Show what `part` names inside the block, under the name `desc`."""
    bar = _Parts(leave=False, **bar_options(desc, "parts"))
    ended = threading.Event()

    def tick() -> None:
        with contextlib.suppress(OSError, ValueError):  # of a stderr that is closed or full
            while not ended.wait(_TICK):
                bar.refresh()

    ticking = threading.Thread(target=tick, name=f"{desc} bar", daemon=True)
    token = _current.set(bar)
    ticking.start()
    try:
        yield
    finally:
        _current.reset(token)
        ended.set()
        ticking.join()
        bar.close()


@contextlib.contextmanager
def one_part(desc: str, name: str) -> Iterator[None]:
    """Show work of one part, such as "load", "the target"; or as a part of the work around it."""
    if _current.get() is not None:
        part(f"{desc} {name}")
        yield
        return
    with parts(desc):
        part(name)
        yield


def part(name: str, done: int | None = None, of: int | None = None) -> None:
    """Say what is done now, such as "packing", 3, 16; nothing where no `parts` is open."""
    bar = _current.get()
    if bar is not None:
        bar.part = name if done is None else f"{name} {done:,}/{of:,}"
        bar.refresh()
