"""Stops at bad moments: while a bar is made, and while the first stop is reported."""

import argparse
import logging
import os
import signal
import sys
import types
from functools import partial
from typing import Any

import pytest

from spec_data.terminal.console import run_cli
from spec_data.terminal.progress import Bar, close_bars

COMMON = argparse.Namespace(quiet=False, verbose=False, debug=False)


def stopped_at(event: int, work: Any) -> bool:
    """Do work, with a stop before line number `event` of it; return whether it has so many."""
    seen = iter(range(event + 1))

    def trace(frame: types.FrameType, what: str, value: Any) -> Any:
        if "tqdm" not in frame.f_code.co_filename and "progress" not in frame.f_code.co_filename:
            return None
        if what == "line" and next(seen, None) == event:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)


def make(made: list[Bar]) -> None:
    made.append(Bar(total=5, desc="x", unit=" steps", file=sys.stderr, disable=False))


def test_a_stop_at_any_line_while_a_bar_is_made_leaves_bars_that_close() -> None:
    close_bars()
    for event in range(0, 4000, 11):
        made: list[Bar] = []
        if not stopped_at(event, partial(make, made)):
            break
        with Bar.external_write_mode(file=sys.stderr):  # as a log line does
            pass
        close_bars()
        assert not list(Bar._instances)
    assert 60 < event < 3900
    made[0].close()


def test_a_second_stop_while_the_first_is_reported_changes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    def said() -> str:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        return "stopped: half is kept"

    before = signal.getsignal(signal.SIGINT)
    assert run_cli(interrupted, COMMON, said) == 128 + signal.SIGINT
    assert "stopped: half is kept" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) == before and logging.getLogger()
