"""What both programs do on a terminal: parse, log, report errors, stop, name the next command.

Results go to stdout. Log lines, bars, errors and the next command go to stderr. Nothing here
imports torch, so `--help` is instant.
"""

import argparse
import contextlib
import difflib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from spec_data.shards.errors import SpecDataError
from spec_data.shards.files import REFUSALS, file_error

log = logging.getLogger(__name__)

_NOISY = (
    *("httpx", "httpx2", "openai", "transformers", "datasets", "huggingface_hub"),
    *("botocore", "aiobotocore"),
)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""What stops a command as Ctrl-C does: a scheduler, and a terminal that is closed."""


class Terminated(KeyboardInterrupt):
    """A stop signal as an exception in the main thread: code that handles Ctrl-C handles it too."""


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return "; did you mean X?" of the one of `names` that is nearest to `name`, or ""."""
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.65)
    return f"; did you mean {near[0]}?" if near else ""


class _ConsoleHandler(logging.StreamHandler):
    """Log lines on stderr that never glue to a bar: bars step aside while a line is written."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record on a line of its own."""
        from spec_data.terminal.progress import Bar, live

        if not live():
            super().emit(record)
        else:
            with Bar.external_write_mode(file=sys.stderr):
                super().emit(record)


@contextlib.contextmanager
def console_logging(quiet: bool, debug: bool) -> Iterator[None]:
    """Send log lines to stderr (warnings only if `quiet`) while this is open."""
    from spec_data.terminal.progress import bars, live

    logging.raiseExceptions = debug  # a closed stderr is no traceback
    if quiet or not live():  # bars of the libraries would leave carriage returns
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.ERROR)
    console = _ConsoleHandler(sys.stderr)
    console.setLevel(logging.WARNING if quiet else logging.INFO)
    root = logging.getLogger()
    level = root.level
    root.setLevel(min(logging.INFO, level or logging.INFO))
    root.addHandler(console)
    try:
        with bars(quiet=quiet):
            yield
    finally:
        root.removeHandler(console)
        root.setLevel(level)


def run_cli(
    main: Callable[[], int | None],
    options: argparse.Namespace,
    when_stopped: Callable[[], str] = lambda: "interrupted",
) -> int:
    """Run one command and return its exit code; report every error in one message.

    `options` has `quiet` and `debug`. `when_stopped` says what an interrupted command keeps.
    """
    from spec_data.terminal.progress import close_bars

    with (
        console_logging(options.quiet, options.debug),
        handled_signals(STOP_SIGNALS, _raise_terminated),
    ):
        try:
            code = main() or 0
            print(end="", flush=True)  # also where stdout is closed
            return code
        except BaseException as error:
            close_bars()
            code, message = _in_words(error, when_stopped)
            if options.debug and not isinstance(error, KeyboardInterrupt):
                raise
            if message:
                log.error("%s", message)
            return code


def print_text(text: str) -> int:
    """Print a text as a command does, but import nothing for it; return the exit code."""
    try:
        print(text, flush=True)
    except OSError as error:
        code, message = _in_words(error, str)
        print(message, end="\n" if message else "", file=sys.stderr)
        return code
    return 0


def _in_words(error: BaseException, when_stopped: Callable[[], str]) -> tuple[int, str]:
    """Return the exit code and the message of an error; raise what is no error."""
    if isinstance(error, KeyboardInterrupt):
        number = error.args[0] if isinstance(error, Terminated) else signal.SIGINT
        return 128 + number, when_stopped()
    if isinstance(error, SpecDataError):
        return error.exit_code, f"error: {error}"
    refused = isinstance(error, OSError) and error.errno in REFUSALS
    if isinstance(error, BrokenPipeError) or (refused and getattr(error, "filename", "") is None):
        # of stdout: the interpreter must not complain at its last flush
        with contextlib.suppress(OSError):  # a stdout of a Python caller
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # its reader is gone
        return 128 + signal.SIGPIPE, ""
    hint = "run again with --debug for the traceback"
    if isinstance(error, OSError):
        words = file_error(error) if refused or error.filename is not None else error
        return 1, f"error: {words}" + ("" if refused else f" ({hint})")
    if isinstance(error, Exception):
        return 1, f"error: {type(error).__name__}: {error} ({hint})"
    raise error


def _raise_terminated(number: int, _frame: Any) -> NoReturn:
    raise Terminated(number)


@contextlib.contextmanager
def handled_signals(numbers: Sequence[int], handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle signals while this is open, unless they are ignored; in the main thread only."""
    before: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # another thread
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not of Python
