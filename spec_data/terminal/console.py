"""What both programs do on a terminal: parse, log, report errors, stop, name the next command.

Results go to stdout. Log lines, bars, errors and the next command go to stderr. Nothing here
imports torch, so `--help` is instant.
"""

import argparse
import contextlib
import difflib
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from spec_data.shards.errors import ConfigError, SpecDataError
from spec_data.shards.files import REFUSALS, file_error
from spec_data.terminal.paths import check_value

log = logging.getLogger(__name__)

_PROGRESS = "spec_data.terminal.progress"
_NOISY = (
    *("httpx", "httpx2", "openai", "transformers", "datasets", "huggingface_hub"),
    *("botocore", "aiobotocore"),
)
_FILES = ("FILE", "SRC", "MODEL", "RUN/failed-step-N")
_DIRECTORIES = ("DIR", "RUN", "DIR[:WEIGHT]")


STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""What stops a command as Ctrl-C does: a scheduler, and a terminal that is closed."""


class Terminated(KeyboardInterrupt):
    """A stop signal as an exception in the main thread: code that handles Ctrl-C handles it too."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


# -- parsing ----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest flag or choice and prints its own usage line.

    Options are written out: a shortened one (`--ttt-step`) would mean another option, or none, as
    soon as a release adds an option with the same beginning.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)
        self.elsewhere: dict[str, str] = {}
        """Options of other commands, and whose they are."""

    def parse_known_args(self, args=None, namespace=None):
        """Parse; what is left over is an error here, where the usage line is the right one."""
        first = next(iter(args or ()), "")
        inner = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        if inner and first.startswith("--") and first not in self._option_string_actions:
            name, known = inner[0].metavar, ", ".join(inner[0].choices)
            self.error(f"{name} is missing; write it before the options: {known}")
        found, left = super().parse_known_args(args, namespace)
        if left:
            flags = [word for word in left if word.startswith("-")]
            self.error("; ".join(map(self._unknown, flags)) or f"unexpected: {' '.join(left)}")
        return found, left

    def _unknown(self, word: str) -> str:
        flag = word.partition("=")[0]
        if flag in self.elsewhere:
            return f"unknown option {flag}; it is an option of {self.elsewhere[flag]}"
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = nearest(flag, known)
        return f"unknown option {flag}" + (f"; did you mean {near}?" if near else "")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = nearest(str(value), [str(choice) for choice in action.choices or ()])
            if near is None:
                raise
            raise argparse.ArgumentError(action, f"{error.message}; did you mean {near}?") from None

    def error(self, message: str) -> NoReturn:
        """Print the usage line of this very command, what is wrong, and where help is."""
        self.print_usage(sys.stderr)
        self.exit(2, f"error: {message}\nAll options: {self.prog} --help\n")


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that `name` most likely stands for, or None; `--` may lead both."""
    plain = {word.lstrip("-").replace("_", "-"): word for word in known}
    wanted = name.lstrip("-").replace("_", "-").lower()
    # one digit for another is the likeliest mistake: eagle4 means eagle3, not eagle
    digitless = {re.sub(r"\d", "0", word): word for word in reversed(plain)}
    found = difflib.get_close_matches(re.sub(r"\d", "0", wanted), digitless, n=1, cutoff=0.65)
    return plain[digitless[found[0]]] if found else None


def add_common_options(parser: argparse.ArgumentParser, top: bool = False) -> None:
    """Add the options that every command has; those of a subcommand leave the top one's alone."""
    group = parser.add_argument_group("output and errors")
    default: Any = False if top else argparse.SUPPRESS
    group.add_argument(
        "--quiet",
        action="store_true",
        default=default,
        help="print results, warnings and errors only: no bars and no log lines (default: off)",
    )
    group.add_argument(
        "--log-file",
        metavar="FILE",
        default=None if top else argparse.SUPPRESS,
        help="append every log line with its time to FILE, also with --quiet (default: none)",
    )
    group.add_argument(
        "--debug",
        action="store_true",
        default=default,
        help="show the Python traceback of an error; add it to a bug report (default: off)",
    )


class PrintCompletion(argparse.Action):
    """--print-completion SHELL: print the completion script of a whole program and exit."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        import shtab  # only here: it costs every other call nothing

        _mark_files(parser, shtab)
        print(shtab.complete(parser, shell=values))
        parser.exit(0)


def add_completion_option(parser: argparse.ArgumentParser) -> None:
    """Add --print-completion to the top parser of a program."""
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes commands and options in this shell, and exit; "
        'for bash: eval "$(%(prog)s --print-completion bash)"',
    )


def _mark_files(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Let the shell complete paths where an option or argument takes one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _mark_files(child, shtab)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]


# -- logging ----------------------------------------------------------------------------------


class _ConsoleHandler(logging.StreamHandler):
    """Log lines on stderr that never glue to a bar: bars step aside while a line is written."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        from spec_data.terminal.progress import Bar, live

        self._bar, self._live = Bar, live()

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass a record on; a progress line only where no bar shows the same."""
        return not (self._live and record.name == _PROGRESS) and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record on a line of its own."""
        if not self._live:
            super().emit(record)
            return
        with self._bar.external_write_mode(file=sys.stderr):
            super().emit(record)


@contextlib.contextmanager
def console_logging(quiet: bool, log_file: str | None, debug: bool) -> Iterator[None]:
    """Send log lines to stderr (warnings only if `quiet`) and to `log_file` while this is open.

    Raises:
        ConfigError: the log file cannot be written.
    """
    from spec_data.terminal.progress import live, set_up_progress

    logging.raiseExceptions = debug  # a closed stderr is no traceback
    if quiet or not live():  # bars of the libraries would leave carriage returns
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.ERROR)
    console = _ConsoleHandler()
    console.setLevel(logging.WARNING if quiet else logging.INFO)
    console.setFormatter(logging.Formatter("%(message)s"))
    handlers: list[logging.Handler] = [console]
    if log_file is not None:
        check_value("--log-file", log_file)
        try:
            file = logging.FileHandler(log_file, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigError(f"--log-file {log_file}: {error.strerror}") from None
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handlers.append(file)
    root = logging.getLogger()
    level = root.level
    root.setLevel(min(logging.INFO, level or logging.INFO))
    for handler in handlers:
        root.addHandler(handler)
    set_up_progress(quiet=quiet, lines=log_file is not None)
    try:
        yield
    finally:
        set_up_progress()
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)


def use_colour(choice: str = "auto", stream: TextIO | None = None) -> bool:
    """Tell whether to colour what goes to `stream` (default: stdout).

    "auto" colours a terminal only, and none that is dumb or where NO_COLOR is set (no-color.org).
    """
    if choice != "auto":
        return choice == "always"
    stream = stream or sys.stdout
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and stream.isatty()


# -- running ----------------------------------------------------------------------------------


def run_cli(
    main: Callable[[], int | None],
    options: argparse.Namespace,
    when_stopped: Callable[[], str] | None = None,
) -> int:
    """Run one command and return its exit code; report every error in one message.

    `options` has what `add_common_options` adds. `when_stopped` says what an interrupted command
    keeps.
    """
    try:
        with (
            console_logging(options.quiet, options.log_file, options.debug),
            _raise_stop_signals(),
        ):
            try:
                code = main() or 0
                sys.stdout.flush()
                return code
            except BaseException as error:
                _close_bars()
                code, message = _in_words(error, when_stopped)
                if options.debug and not isinstance(error, KeyboardInterrupt):
                    raise
                if message:
                    log.error("%s", message)
                return code
    except ConfigError as error:  # of the logging itself
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _in_words(
    error: BaseException, when_stopped: Callable[[], str] | None = None
) -> tuple[int, str]:
    """Return the exit code and the message of an error; raise what is no error."""
    if isinstance(error, KeyboardInterrupt):
        code = 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)
        return code, when_stopped() if when_stopped else "interrupted"
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


def _close_bars() -> None:
    """End open bars, so that an error message begins on a line of its own."""
    from spec_data.terminal.progress import close_bars

    close_bars()


@contextlib.contextmanager
def _raise_stop_signals() -> Iterator[None]:
    """Raise stop signals as exceptions in the main thread; `nohup` has them ignored."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise Terminated(number)

    with handled_signals(STOP_SIGNALS, stop):
        yield


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


def say_next(*words: str, label: str = "next") -> None:
    """Name the command to run next, ready to be copied into a shell."""
    log.info("\n%s:  %s", label, shlex.join(words))
