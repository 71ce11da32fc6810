"""Progress of long work: a bar on a terminal or in a notebook, lines in a log.

A bar is redrawn in place and always fits the width. Elsewhere what it would show is logged: the
first lines ten seconds apart, later ones up to five minutes, so that a day of work is some three
hundred lines. No torch here.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tqdm.auto import tqdm

from spec_data.terminal import NOTICE
from spec_data.terminal.printable import one_line

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""Seconds between the first two lines about one bar in a log."""
_SLOWER, _MOST_SECONDS = 1.2, 300.0  # each pause is so many times the one before, up to this

_REDRAW_SECONDS = 0.2
_SCALED_UNITS = ("tok", "B")
_WITH_TOTAL = (
    "{desc}: {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} "
    "[{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
)
_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit} [{elapsed}, {rate_noinv_fmt}{postfix}]"
_IN_NOTEBOOK = any("notebook" in kind.__module__ for kind in tqdm.__mro__)
_NOWHERE = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - not drawn
_quiet = False


def size(count: float) -> str:
    """Format a number of bytes for people, such as 1.50 GB or 12.30 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.2f} {unit}"
        count /= 1000
    return f"{count:,.2f} TB"


def duration(seconds: float) -> str:
    """Return a duration for people, such as 45 s, 12 min or 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def live() -> bool:
    """Tell whether bars can be redrawn in place here: on a terminal or in a notebook."""
    return _IN_NOTEBOOK or (hasattr(sys.stderr, "isatty") and sys.stderr.isatty())


def width_known(columns: int | None) -> bool:
    """Tell whether a terminal has said its width: one without a size answers 0, tqdm makes -1."""
    return columns is not None and columns > 0


@contextlib.contextmanager
def bars(*, quiet: bool = False) -> Iterator[None]:
    """Draw no bars inside the block (`quiet`)."""
    global _quiet
    before, _quiet = _quiet, quiet
    try:
        yield
    finally:
        _quiet = before


class Bar(tqdm):
    """A tqdm bar that never exceeds the terminal's width and reports to the log as well."""

    level = NOTICE
    """Of its lines in a log."""
    initial = 0  # tqdm sets it only on a bar that is drawn
    # of a bar that is just being made when a signal stops the command
    disable, leave, _logged = True, False, False

    def __init__(self, *args: Any, **options: Any) -> None:
        self._pause = LINE_SECONDS
        self._next_line = time.monotonic() + self._pause
        try:
            super().__init__(*args, **options)
            self._logged = options.get("file") is _NOWHERE
        except BaseException:
            self.disable = True
            raise

    @staticmethod
    def format_meter(n: Any, total: Any, elapsed: Any, ncols: Any = None, **options: Any) -> str:
        """Format the bar; drop the last parts of the postfix where the line would be too long."""
        ncols = ncols if width_known(ncols) else None
        total = total if total and n <= total else None
        options |= {"n": n, "total": total, "elapsed": elapsed}
        options["bar_format"] = _WITH_TOTAL if total else _WITHOUT_TOTAL
        parts = (options.pop("postfix", None) or "").split(", ")
        while parts:
            options["postfix"] = ", ".join(parts)
            bare = options | {"bar_format": options["bar_format"].replace("{bar}", "")}
            parts.pop()
            if not ncols or len(tqdm.format_meter(**bare)) < ncols:
                break
        return one_line(tqdm.format_meter(ncols=ncols, **options))

    def display(self, *args: Any, **options: Any) -> Any:
        """Redraw the bar, and log a line where one is due."""
        shown = super().display(*args, **options)
        now = time.monotonic()
        # `close` logs the last line
        if self._logged and now >= self._next_line and self.n != self.total:
            self._pause = min(self._pause * _SLOWER, max(_MOST_SECONDS, LINE_SECONDS))
            self._next_line = now + self._pause
            logger.log(self.level, "%s", self.line())
        return shown

    # tqdm releases its lock only after a drawing that came to its end: after an error of stderr, or
    # Ctrl-C meanwhile, every bar of another thread would wait for ever.

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> bool | None:
        """Redraw the bar now; the lock is free again whatever happens."""
        return self._locked(super().refresh, nolock, *(lock_args or ()))

    def clear(self, nolock: bool = False) -> None:
        """Take the bar from the screen; the lock is free again whatever happens."""
        self._locked(super().clear, nolock)

    def _locked(self, draw: Callable[..., Any], nolock: bool, *lock_args: Any) -> Any:
        if nolock:
            return draw(nolock=True)
        if not self._lock.acquire(*lock_args):
            return False
        try:
            return draw(nolock=True)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the bar; a bar that stays on the screen leaves its last line in the log too."""
        if not self.disable and self.leave is not False and self._logged:
            self._logged = False
            logger.log(self.level, "%s", self.line())
        super().close()

    def line(self) -> str:
        """Describe the progress in one plain line."""
        facts = self.format_dict
        unit, n, total, elapsed = facts["unit"], facts["n"], facts["total"], facts["elapsed"]
        rate = (n - facts["initial"]) / elapsed if elapsed > 0 else 0.0
        if total and n <= total:
            parts = [f"{n:,} of {total:,}{unit} ({n / total:.0%})"]
        else:
            parts = [f"{n:,}{unit}"]
        parts += [f"{rate:,.{0 if rate >= 10 else 2}f}{unit}/s"]
        parts += [f"{self.format_interval(elapsed)} elapsed"]
        if total and rate > 0 and n < total:
            parts += [f"{self.format_interval((total - n) / rate)} left"]
        return f"{facts['prefix']}: {', '.join([*parts, *filter(None, [facts['postfix']])])}"


def _use_own_lock() -> None:
    """Give bars a lock of this process alone.

    tqdm's own lock is a semaphore that forked processes share: one that is killed while it holds
    it stops every bar of its parent, for good.
    """
    Bar.set_lock(threading.RLock())


_use_own_lock()
if hasattr(os, "register_at_fork"):  # a thread of the parent may hold the lock at the fork
    os.register_at_fork(after_in_child=_use_own_lock)


def progress(
    iterable: Iterable | None = None, *, desc: str, unit: str = "steps", **options: Any
) -> Bar:
    """Return a bar named `desc` that counts `unit`s (plural); `options` are those of tqdm."""
    return Bar(iterable, **bar_options(desc, unit) | options)


def bar_options(desc: str, unit: str) -> dict[str, Any]:
    """Return the options of a new bar, which is drawn on a terminal and in a notebook."""
    drawn = live() and not _quiet
    return {
        "desc": desc,
        "unit": f" {unit}",
        "unit_scale": unit in _SCALED_UNITS,
        "mininterval": _REDRAW_SECONDS if drawn else 1.0,
        "dynamic_ncols": drawn,
        "file": sys.stderr if drawn else _NOWHERE,
        "disable": False,  # TQDM_DISABLE is for the bars of libraries
    }


def close_bars() -> None:
    """Close every open bar, so that what is printed next begins on a line of its own."""
    for bar in list(getattr(Bar, "_instances", ())):
        bar.close()
        Bar._instances.discard(bar)  # one that was never whole is not closed, and has no place
