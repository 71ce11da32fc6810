"""Which paths an option accepts, and where a command may write. No torch: `--help` is instant.

Checks come before any work, and create nothing: a path that cannot be written must not be found out
after an hour, and `--out s3://bucket` must not become a local directory named `s3:`.
"""

import contextlib
import os
from pathlib import Path
from urllib.parse import urlsplit

from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import ROWS, Kind, expect, like_a_path
from spec_data.shards.pins import split_pin
from spec_data.shards.regular_files import special_kind
from spec_data.shards.storage import check_dataset_url, scheme_of

_ADVICE = {
    "hf": "write a Hub id without it, such as org/name",
    "file": "write the local path without it",
    "http": "download the file and pass its local path",
    "https": "download the file and pass its local path",
}


def at_home(text: str) -> str:
    """Expand a ~ that no shell did: one in quotes, after = in a word, or in a file of options."""
    start, equals, path = text.partition("=") if text.startswith("--") else ("", "", text)
    home = path == "~" or path.startswith("~/")
    return start + equals + (str(Path(path).expanduser()) if home else path)


def check_value(flag: str, text: str) -> None:
    """Check the text of any option: not empty, no NUL, and no remote storage.

    Raises:
        ConfigError: the text is one of these.
    """
    if not text or "\0" in text:
        raise ConfigError(f"{flag} {text!r}: expected a value; is a shell variable not set?")
    if scheme := scheme_of(text):
        advice = _ADVICE.get(scheme, "pass a local path, such as that of a mount")
        raise ConfigError(f"{flag} {text}: {scheme}:// is not supported; {advice}")


def check_dataset_location(flag: str, text: str, write: bool = False) -> None:
    """Check the text of an option that takes a directory or a URL of a dataset.

    With `write`, a dataset is written there.

    Raises:
        ConfigError: it is neither, or the URL cannot be read (or written).
    """
    if text and "\0" not in text and scheme_of(text):
        check_dataset_url(flag, text if write else split_pin(text)[0], write)
    else:
        check_value(flag, text)


def check_url(flag: str, text: str) -> None:
    """Check the text of an option that takes the URL of a server.

    Raises:
        ConfigError: it is none.
    """
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an address or a port that is none
        usable = False
    if not usable:
        raise ConfigError(f"{flag} {text}: expected a URL such as http://localhost:8000/v1")


def check_path(option: str, text: str, wanted: Kind) -> None:
    """Check that a path is what an option wants; URLs and names on the Hub are left to their users.

    Raises:
        MissingError: it is something else, or nothing is there.
    """
    if scheme_of(text):
        return
    if wanted is Kind.DATASET:
        text = split_pin(text)[0]
    path = Path(text)
    if not path.exists():
        padded = wanted is Kind.DRAFT and path.name.startswith("checkpoint-")  # or with more zeros
        on_hub = wanted in (Kind.TARGET, Kind.CORPUS) and not like_a_path(text)
        on_hub = on_hub and not (wanted is Kind.CORPUS and text.endswith(ROWS))
        named = wanted is Kind.CORPUS and any(mark in text for mark in "@:")  # a split, a Hub file
        if padded or on_hub or named:
            return
    expect(text, wanted, option)


def check_directory_to_write(flag: str, path: str | Path) -> None:
    """Check that a directory is writable, or can be created; create nothing.

    Raises:
        ConfigError: the path is or lies below a file, a link to nothing, or a directory that this
            user cannot write in; or `check_value` refuses it.
    """
    check_value(flag, str(path))
    effective = os.access in os.supports_effective_ids
    problem = ""
    try:
        str(path).encode("utf-8")  # other files and the manifest may name it
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.lstat(path)  # raises where a name is too long
        present = next(
            p for p in (Path(path), *Path(path).absolute().parents) if os.path.lexists(p)
        )
        name = "this" if present == Path(path) else str(present)
        if present.is_symlink() and not present.exists():
            problem = f"{name} is a link to {present.readlink()}, which does not exist"
        elif not present.is_dir():
            problem = f"{name} is a file"
        elif not os.access(present, os.W_OK | os.X_OK, effective_ids=effective):
            problem = f"{name} is read-only for this user"
    except UnicodeEncodeError:
        raise ConfigError(f"{flag} {path!r}: not UTF-8; choose another name") from None
    except OSError as error:
        problem = f"it cannot be used: {error.strerror}"
    if problem:
        raise ConfigError(f"{flag} {path}: {problem}; pass a directory that can be written")


def check_file_to_write(flag: str, path: str | Path) -> None:
    """Check that a file can be written: it is a file, or none, and its directory exists.

    A file is written under another name and renamed: that would put it in the place of a device,
    such as /dev/null, or of a pipe.

    Raises:
        ConfigError: it cannot.
    """
    check_value(flag, str(path))
    folder, file = Path(path).parent, Path(path)
    if not folder.is_dir() or file.is_dir():
        why = "this is a directory" if file.is_dir() else f"there is no directory {folder}"
        raise ConfigError(f"{flag} {path}: pass a file name in an existing directory ({why})")
    what = special_kind(file)
    if what is None and folder.resolve().is_relative_to("/proc"):
        what = "an open file of a process"
    elif what is None and folder.resolve() == Path("/dev"):  # /dev/stdout of `> FILE`
        what = "a device"
    if what is not None:
        raise ConfigError(f"{flag} {path}: this is {what}; pass the name of a file")
    check_directory_to_write(flag, folder)


def make_parent_of_new(flag: str, path: Path) -> None:
    """Create the parents of a directory that is written in one step, in place of none or an empty.

    Raises:
        ConfigError: it has files, is a link or where the command runs, or they cannot be created.
    """
    full = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if not path.name or path.is_symlink() or full:
        raise ConfigError(f"{flag} {path}: exists already; pass a new directory")
    make_directory(flag, path.parent)


def make_directory(flag: str, path: Path) -> None:
    """Create a directory and its parents, unless it exists.

    Raises:
        ConfigError: it cannot be created.
    """
    check_directory_to_write(flag, path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # such as a file system without new directories
        raise ConfigError(f"{flag} {path}: cannot be created: {error.strerror}") from None
