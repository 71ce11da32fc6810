"""What both programs do on a terminal: parse, log, report errors, stop, name the next command.

Results go to stdout; bars, warnings, errors and the next command to stderr. Lines of level INFO go
there only with --verbose; a command that makes something also writes them to a log file beside it.
A warning is "warning[CODE]: ...", explained in docs/warnings.md, and shown once. Nothing here
imports torch, so `--help` is instant.
"""

import argparse
import contextlib
import difflib
import logging
import os
import re
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from spec_data.shards.errors import SpecDataError
from spec_data.shards.files import GONE, REFUSALS, file_error
from spec_data.shards.storage import scheme_of
from spec_data.terminal import NOTICE, WIDTH
from spec_data.terminal.printable import printable

log = logging.getLogger(__name__)

logging.addLevelName(NOTICE, "NOTICE")
logging.addLevelName(NOTICE + 1, "NOTICE")  # of parts
_LOGIN = re.compile(r"://[^/\s@]+@")
_LONG = 40  # a warning of more characters, before its values are set, is recognised by them

_NOISY = (
    *("httpx", "httpx2", "openai", "transformers", "datasets", "huggingface_hub"),
    *("botocore", "aiobotocore"),
)

ANNOUNCED = (signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send some time before the end, such as SLURM's --signal=USR1@90."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, *ANNOUNCED)
"""What stops a command as Ctrl-C does: a scheduler, and a terminal that is closed."""


def without_logins(text: str) -> str:
    """Return a text with `http://host` for `http://user:password@host`: records are shared."""
    return _LOGIN.sub("://", text)


class Terminated(KeyboardInterrupt):
    """A stop signal as an exception in the main thread: code that handles Ctrl-C handles it too."""


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return "; did you mean X?" of the one of `names` that is nearest to `name`, or ""."""
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.65)
    # eagle4 is eagle3, rather than eagle or peagle
    near.sort(key=lambda o: (o[:1] != name[:1].lower(), o[-1:].isdigit() != name[-1:].isdigit()))
    return f"; did you mean {near[0]}?" if near else ""


class _ConsoleHandler(logging.StreamHandler):
    """Log lines on stderr: on a terminal they fit its width and never glue to a bar."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.seen: set[str] = set()
        self.repeated = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Leave out a warning that was shown before, with other names or numbers."""
        if record.levelno == logging.WARNING and self.level > logging.INFO:
            warning = str(record.msg)
            if len(warning) <= _LONG:
                warning += str(record.args)
            if warning in self.seen:
                self.repeated += 1
                return False
            self.seen.add(warning)
        return bool(super().filter(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines; on a terminal, long ones are wrapped."""
        from spec_data.terminal.progress import live

        text = printable(super().format(record))
        if not live() or record.exc_info or "\\\n" in text:  # a command is pasted as it is
            return text
        return "\n".join(map(wrapped, text.split("\n")))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record on a line of its own."""
        from spec_data.terminal.progress import Bar, live

        if not live():
            super().emit(record)
        else:
            with Bar.external_write_mode(file=sys.stderr):
                super().emit(record)


def wrapped(line: str, hang: int = 2) -> str:
    """Return a line broken before column 80; what follows the first line is `hang` further in."""
    indent = " " * (hang + len(line) - len(line.lstrip()))
    return textwrap.fill(
        *(line, WIDTH - 1),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


class LogFile(logging.Handler):
    """Appends every line to the file OF.log, once OF exists, until the command ends. Names and
    passwords are taken out of URLs.

    A file that cannot be written is no error: the lines are on the console with --verbose, and
    `written`, whether the file has all lines, is False.
    """

    def __init__(self, of: Path) -> None:
        super().__init__()
        self.of, self.path = of, of.with_name(of.name + ".log")
        self._lines: list[str] = []
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    @property
    def written(self) -> bool:
        return not self._lines and self.path.is_file()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, and those before it."""
        try:
            self._lines.append(printable(without_logins(self.format(record))) + "\n")
            if self.of.exists():
                with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write("".join(self._lines))
                self._lines = []
        except OSError:
            pass
        except Exception:  # a library's record that cannot be formatted
            self.handleError(record)


def start_log_file(of: str | os.PathLike[str] | None) -> LogFile | None:
    """Append all log lines of this command, errors too, to OF.log. None, or a URL: no file."""
    if of is None or scheme_of(str(of)):
        return None
    path = Path(of).expanduser()
    log_file = LogFile(path if path.name.strip(".") else path.resolve())  # "." and ".."
    logging.getLogger().addHandler(log_file)
    return log_file


@contextlib.contextmanager
def console_logging(level: int, debug: bool) -> Iterator[None]:
    """Send log lines from `level` on to stderr while this is open; draw bars up to `NOTICE`."""
    logging.raiseExceptions = debug  # a closed stderr is no traceback
    quiet = level > NOTICE
    if quiet or not (hasattr(sys.stderr, "isatty") and sys.stderr.isatty()):
        # bars of the libraries would leave carriage returns; read when tqdm is imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
    from spec_data.terminal.progress import bars

    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.ERROR)
    for library in ("HF_HUB", "DATASETS"):  # its import would lower the level again
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    console = _ConsoleHandler()
    console.setLevel(level)
    root = logging.getLogger()
    before = root.level
    root.setLevel(min(logging.INFO, before or logging.INFO))
    root.addHandler(console)
    formatted = warnings.formatwarning
    warnings.formatwarning = lambda *a, **k: printable(formatted(*a, **k))  # of libraries
    try:
        with bars(quiet=quiet):
            yield
    finally:
        warnings.formatwarning = formatted
        if console.repeated:
            log.log(NOTICE, "repeated warnings: %d (see --verbose)", console.repeated)
        for handler in root.handlers[:]:
            if handler is console or isinstance(handler, LogFile):
                root.removeHandler(handler)
        root.setLevel(before)


def run_cli(
    main: Callable[[], int | None],
    options: argparse.Namespace,
    when_stopped: Callable[[], str] = lambda: "interrupted",
) -> int:
    """Run one command and return its exit code; report every error in one message.

    `options` has `quiet`, `verbose` and `debug`. `when_stopped` says what an interrupted command
    keeps.
    """
    from spec_data.terminal.progress import close_bars

    level = logging.WARNING if options.quiet else logging.INFO if options.verbose else NOTICE
    with console_logging(level, options.debug), handled_signals(STOP_SIGNALS, _raise_terminated):
        try:
            code = main() or 0
            print(end="", flush=True)  # also where stdout is closed
            return code
        except BaseException as error:
            # a second Ctrl-C, of somebody who is in a hurry, must not end what the first one says
            with handled_signals((*STOP_SIGNALS, signal.SIGINT), _already_stopping):
                close_bars()
                code, message = in_words(error, when_stopped)
                if options.debug and not isinstance(error, KeyboardInterrupt):
                    sys.excepthook = _traceback  # also of a library's words
                    raise
                if message:
                    log.error("%s", message)
                return code


@contextlib.contextmanager
def lenient_streams() -> Iterator[None]:
    """While this is open, stdout and stderr replace what their encoding lacks: an ascii terminal.

    Half of a surrogate pair, as in names of files that are no text, is in no encoding.
    """
    before: list[tuple[Any, str]] = []
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            before.append((stream, "strict"))
            stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        for stream, errors in before:
            with contextlib.suppress(OSError, ValueError):  # closed, or its reader is gone
                stream.reconfigure(errors=errors)


def print_text(text: str) -> int:
    """Print a text as a command does, but import nothing for it; return the exit code."""
    try:
        print(printable(text), flush=True)
    except OSError as error:
        code, message = in_words(error, str)
        print(printable(message), end="\n" if message else "", file=sys.stderr)
        return code
    return 0


def in_words(error: BaseException, when_stopped: Callable[[], str]) -> tuple[int, str]:
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
        worded = refused or error.errno in GONE
        return 1, f"error: {words}" + ("" if worded else f" ({hint})")
    if isinstance(error, Exception):
        return 1, f"error: {type(error).__name__}: {error} ({hint})"
    raise error


def _traceback(*error: Any) -> None:
    print(printable("".join(traceback.format_exception(*error))), end="", file=sys.stderr)


def _already_stopping(_number: int, _frame: Any) -> None:
    """Do nothing: the command ends already."""


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
