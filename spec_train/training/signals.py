"""SIGTERM and Ctrl-C ask the run to finish the current step and save."""

import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yield a list that receives SIGTERM and SIGINT; a second Ctrl-C interrupts at once."""
    caught: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)
        log.warning("signal %d: finishing this step, then saving", number)

    old: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        for stop in (signal.SIGTERM, signal.SIGINT):
            old[stop] = signal.signal(stop, handle)
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
