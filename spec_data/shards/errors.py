"""Errors that a user can cause. Each message says what was wrong, where, and what to do.

`SpecDataError` means bad input (exit code 2); `RunError` means a failed run (exit code 1). Each
class also derives from the builtin exception that a Python caller would expect to catch.
"""

import re


class SpecDataError(Exception):
    """Base of all errors that this project raises on purpose."""

    exit_code = 2


class ConfigError(SpecDataError, ValueError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class CorpusError(SpecDataError, ValueError):
    """A corpus cannot be read or rendered."""


class DatasetError(SpecDataError, ValueError):
    """A dataset directory is damaged, or not what its manifest describes."""


class MissingError(SpecDataError, FileNotFoundError):
    """A file or directory that the user named does not exist."""


class TargetError(SpecDataError, ValueError):
    """The states of the target cannot be captured as requested."""


class DraftError(SpecDataError, ValueError):
    """A draft checkpoint or its configuration cannot be used as requested."""


class RunError(SpecDataError, RuntimeError):
    """A run started and then failed (non-finite states, a full disk, a failed proof)."""

    exit_code = 1


class BusyError(RunError):
    """Another process holds what this one needs."""


class FileError(RunError, OSError):
    """The system refused to write or read a file: a full disk, a quota, missing rights, ..."""


_SPOKEN_AN = re.compile(
    r"(?!one|u[ns]i|eu)[aeiou]"
    r"|[mx](?=[^aeiouy])"  # spelled, or spoken as "ex"
    r"|[AEFHILMNORSX](?=[A-Z]{2})"
)


def an(word: str) -> str:
    """Return a name with its article as it is spoken: "an int", "a str", "an MLP", "a Tensor"."""
    first = word if word[:3].isupper() else word[:1].lower() + word[1:]
    return f"{'an' if _SPOKEN_AN.match(first) else 'a'} {word}"
