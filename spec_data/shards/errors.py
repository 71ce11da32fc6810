"""Errors that a user can cause. Each message says what was wrong, where, and what to do.

`SpecDataError` means bad input (exit code 2); `RunError` means a failed run (exit code 1). Each
class also derives from the builtin exception that a Python caller would expect to catch.
"""

import errno
import os


class SpecDataError(Exception):
    """Base of all errors that this project raises on purpose."""

    exit_code = 2


class ConfigError(SpecDataError, ValueError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class OptionError(ConfigError, TypeError):
    """A keyword argument that a function does not have."""


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


class FileError(RunError, OSError):
    """The system refused to write or read a file: a full disk, a quota, missing rights, ..."""


_INTACT = "Every file that was complete is intact"
_ROOM = f"{_INTACT}; free some space and run the same command again"
_RIGHTS = "Change that, or pass another path"
REFUSALS = {
    errno.ENOSPC: ("the disk is full", _ROOM),
    errno.EDQUOT: ("the disk quota is used up", _ROOM),
    errno.EFBIG: (
        "the file would be larger than its file system or `ulimit -f` allows",
        f"{_INTACT}; raise that limit, or write to another file system",
    ),
    errno.EIO: ("the disk reports an error", f"{_INTACT}; check the disk, then run this again"),
    errno.EROFS: ("the file system is read-only", _RIGHTS),
    errno.EACCES: ("this user has no permission", _RIGHTS),
    errno.EPERM: ("this user has no permission", _RIGHTS),
    errno.ENAMETOOLONG: ("a name is longer than the file system allows", "Choose a shorter one"),
}
"""What the system refuses, by errno: in words, and what is safe or to be done."""


def file_error(error: OSError, where: object = None) -> FileError:
    """Say in words what the system refused: where, what is safe, and what to do.

    Args:
        error: of the system.
        where: the path, for an error that names none: those of writing to an open file.
    """
    place = error.filename if error.filename is not None else where or "the output"
    text, advice = REFUSALS.get(error.errno or 0, (error.strerror, ""))
    place = os.fsdecode(place) if isinstance(place, bytes) else place
    found = FileError(f"{place}: {text}" + (f". {advice}" if advice else ""))
    found.errno = error.errno
    return found
