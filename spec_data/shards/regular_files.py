"""Open regular files only, and read texts only up to a bound.

A folder of a stranger can have a pipe, a device or a link to one where a file is expected, or a
file of any size: reading it would never end, or take all memory.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_TEXT = 128 << 20
"""Bytes of a text that describes a model or a dataset, such as config.json or an index."""
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NoTextError(ValueError):
    """A path is no regular file, or one of more bytes than a text of its kind has."""


def special_kind(path: str | Path) -> str | None:
    """Return what a path is, in words, if that is no regular file; None: it is one, or absent."""
    try:
        return _kind(Path(path).stat().st_mode)
    except OSError:
        return None


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file to read its bytes.

    Raises:
        NoTextError: it is something else. OSError: it cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe waits for somebody who writes to it.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        number = os.open(path, flags)
    except OSError:
        if kind := special_kind(path):  # a socket cannot be opened
            raise NoTextError(f"this is {kind}, not a file") from None
        raise
    if kind := _kind(os.fstat(number).st_mode):
        os.close(number)
        raise NoTextError(f"this is {kind}, not a file")
    return os.fdopen(number, "rb")


def read_bounded(path: str | Path, most: int = MOST_TEXT) -> bytes:
    """Return the content of a regular file of at most `most` bytes; errors as `open_regular`."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise NoTextError(f"more than {most:,} bytes, which no such file has")
    return content


def _kind(mode: int) -> str | None:
    return next((name for test, name in _KINDS if test(mode)), None)
