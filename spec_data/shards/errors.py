"""Errors a user can cause: what was wrong, where, and what to do.

`SpecDataError` is bad input (exit code 2); `RunError` is a run that failed (exit code 1).
Each is also the builtin a Python caller would expect to catch.
"""


class SpecDataError(Exception):
    """Base of every error this project raises on purpose."""

    exit_code = 2


class ConfigError(SpecDataError, ValueError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class CorpusError(SpecDataError, ValueError):
    """A corpus cannot be read or rendered."""


class DatasetError(SpecDataError, ValueError):
    """A dataset directory is not what it claims to be."""


class MissingError(SpecDataError, FileNotFoundError):
    """A file or directory that the user named does not exist."""


class TargetError(SpecDataError, ValueError):
    """The target cannot be captured as asked."""


class DraftError(SpecDataError, ValueError):
    """A draft checkpoint or its configuration cannot be used as asked."""


class RunError(SpecDataError, RuntimeError):
    """A run started well and failed (non-finite states, a full disk, a failed proof)."""

    exit_code = 1
