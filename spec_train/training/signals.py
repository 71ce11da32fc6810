"""Ctrl-C, SIGTERM and SIGHUP ask the run to finish the current step and save."""

import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import Any

from spec_data.console import STOP_SIGNALS, handled_signals

log = logging.getLogger(__name__)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yield a list that receives these signals; a second Ctrl-C interrupts at once."""
    caught: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)
        log.warning("%s: finishing this step, then saving", signal.Signals(number).name)

    with handled_signals((*STOP_SIGNALS, signal.SIGINT), handle):
        yield caught
