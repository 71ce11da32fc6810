"""Write files so that a reader finds them complete or not at all; hash files and JSON values.

Every write goes to a temporary name, then fsync, rename, and fsync of the directory.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xxhash import xxh3_64

from spec_data.shards.errors import ConfigError, DatasetError, FileError, SpecDataError
from spec_data.shards.file_heads import instead
from spec_data.shards.file_system import (
    is_alive,
    place_once,
    replace_durably,
    set_mode,
    sync,
    sync_names,
)
from spec_data.shards.json_texts import read_json_text
from spec_data.shards.records import safe_path

CACHE_VARIABLE = "SPEC_DATA_CACHE"
"""Environment variable that moves the cache directory."""
MANIFEST = "manifest.json"
"""Name of the file that makes a directory a dataset."""

_TOKEN = r"[0-9a-f]{12}(?:[0-9a-f]{4})?"  # the shorter one is of an earlier release
_TEMPORARY = re.compile(rf"\.(.+)\.({_TOKEN})\.tmp", re.DOTALL)
_TEMPORARY_PART = re.compile(rf"(?<![^/])\.([^/]+)\.{_TOKEN}\.tmp(?![^/])")  # of a path
_LONG_LEFT = 24 * 3600.0  # seconds, after which what another machine left is not being written


def cache_directory(kind: str) -> Path:
    """Return the directory of one kind of cached files; all may be deleted at any time.

    It lies in $SPEC_DATA_CACHE, else in spec-data below $HF_HOME, $XDG_CACHE_HOME or ~/.cache.
    """
    if moved := os.environ.get(CACHE_VARIABLE):
        return Path(moved).expanduser() / kind
    shared = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "spec-data" / kind


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500MB, 2GB or 1000000; ConfigError: it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not match:
        raise ConfigError(f"size {text!r}: expected something like 500MB or 2GB")
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


def unit_name(unit: int) -> str:
    """Return the name, without a suffix, of the files of unit `unit` (0-based): `unit-00000`."""
    return f"unit-{unit:05d}"


def temporary_name(path: Path) -> Path:
    """Return a unique name beside `path`, for a file or directory that is not complete yet.

    It says which process of which machine writes it.
    """
    token = f"{secrets.token_hex(3)}{os.getpid() & 0xFFFFFF:06x}{_machine()}"
    return path.with_name(f".{path.name}.{token}.tmp")


@functools.cache
def _machine() -> str:
    """Return 4 hex digits of this machine, or of this container on it."""
    try:
        processes = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        processes = ""
    return hashlib.sha256(f"{socket.gethostname()}/{processes}".encode()).hexdigest()[:4]


def is_temporary(path: Path) -> bool:
    """Return whether `temporary_name` made the name of a path."""
    return _TEMPORARY.fullmatch(path.name) is not None


def temporary_files(directory: Path) -> list[Path]:
    """Return the temporary files below a directory, sorted; killed processes leave them."""
    return sorted(p for p in directory.rglob(".*.tmp") if is_temporary(p) and p.is_file())


def remove_left_of(path: Path) -> None:
    """Remove what killed processes left of a file or directory, where no process writes it."""
    for left in path.parent.glob(".*.tmp"):
        if (name := _TEMPORARY.fullmatch(left.name)) and name[1] == path.name:
            remove(left)


def remove_dead_of(path: Path) -> None:
    """Remove what killed processes left of a file or directory that other processes may write.

    What a process of another machine began is removed after a day. What cannot be removed stays.
    """
    with contextlib.suppress(OSError):
        for left in path.parent.glob(".*.tmp"):
            if (name := _TEMPORARY.fullmatch(left.name)) and name[1] == path.name:
                with contextlib.suppress(OSError):
                    if _dead(name[2], left):
                        remove(left)


def _dead(token: str, left: Path) -> bool:
    if token[12:] != _machine():
        return time.time() - left.lstat().st_mtime > _LONG_LEFT
    return not is_alive(int(token[6:12], 16))


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there.

    A folder gets a temporary name first: a kill meanwhile leaves nothing incomplete under its name.
    """
    if path.is_dir() and not path.is_symlink():
        aside = path if is_temporary(path) else path.rename(temporary_name(path))
        try:
            shutil.rmtree(aside)
        except OSError as error:
            error.filename = str(path)  # it has the name of an entry alone
            raise
    else:
        path.unlink(missing_ok=True)


_INTACT = "Every file that was complete is intact"
_ROOM = f"{_INTACT}; free some space and run the same command again"
_RIGHTS = "Change that, or pass another path"
_AGAIN = "Bring it back, or run the same command again"
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
    errno.ESTALE: ("it is not there any more: deleted, replaced or unmounted elsewhere", _AGAIN),
    errno.EXDEV: ("two file systems meet here, and nothing can be renamed across", _RIGHTS),
    errno.EBUSY: ("it is in use, or a mount", _RIGHTS),
    errno.ENOLCK: ("the file system has no locks left", f"{_INTACT}; run the same command again"),
}
"""What the system refuses, by errno: in words, and what is safe or to be done."""
_GONE = (
    "it, or a directory above it, was deleted, renamed or unmounted while this command ran",
    _AGAIN,
)
GONE = (errno.ENOENT, errno.ENOTDIR)
"""How the system says that a path is not there."""


def file_error(error: OSError, where: object = None) -> FileError:
    """Say in words what the system refused: where, what is safe, and what to do.

    `where` is the path for an error that names none: those of writing to an open file.
    """
    names = (error.filename2, error.filename, where)  # the second one is what a copy is written to
    named = next((name for name in names if name is not None), "the output")
    gone = _GONE if error.errno in GONE else (error.strerror, "")
    text, advice = REFUSALS.get(error.errno or 0, gone)
    path = _TEMPORARY_PART.sub(r"\1", str(named))
    refused = FileError(f"{path}: {text}" + (f". {advice}" if advice else ""))
    refused.errno = error.errno
    return refused


def cause(error: BaseException) -> str:
    """Return what an error says, for a message that names the file: of the system's, no number."""
    if isinstance(error, OSError) and error.errno is not None:
        return REFUSALS.get(error.errno, (error.strerror or os.strerror(error.errno), ""))[0]
    return re.sub(r" \(os error \d+\)", "", str(error))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make a FileError that names `path` of the system's refusals to write it.

    Libraries name no path; safetensors has the number of the error in its text only.
    """
    try:
        yield
    except SpecDataError:
        raise
    except BaseException as error:
        if isinstance(error, OSError):
            gone = error.errno in GONE and not os.path.lexists(path.parent)
            if error.errno in REFUSALS or gone:
                raise file_error(error, path.parent if gone else path) from error
        if match := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(match[1])
            raise file_error(OSError(number, os.strerror(number)), path) from error
        raise


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary name for a file or a folder, which then gets the name `path`.

    What was written is fsynced before. A folder replaces only an empty one; a file replaces a file.

    Raises:
        FileError: the system refused to write; nothing is left behind.
    """
    temporary = temporary_name(path)
    try:
        with writing(path):
            yield temporary
            sync(temporary)
            _put(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            remove(temporary)


def _put(temporary: Path, path: Path) -> None:
    """Give a file or a folder its name; a folder for which that fails has it not."""
    folder = temporary.is_dir()
    try:
        replace_durably(temporary, path)
    except OSError as error:
        if folder and not temporary.exists():  # renamed, and that may not survive a power cut
            with contextlib.suppress(OSError):
                path.rename(temporary)
        taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)
        if taken and os.path.lexists(path):
            refused = FileError(
                f"{path}: exists already: it was written while this command ran, and stays as it "
                "is. Pass another path"
            )
            refused.errno = error.errno
            raise refused from error
        raise


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a small file in one step: a reader sees the old content, the new one, or no file."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def write_once(path: Path, data: bytes | str) -> None:
    """Write a small file unless it exists; of several concurrent writers, the first one wins."""
    temporary = temporary_name(path)
    try:
        with writing(path):
            temporary.write_bytes(data.encode() if isinstance(data, str) else data)
            sync(temporary)
            place_once(temporary, path)
            sync_names(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def use_default_mode(path: Path) -> None:
    """Set the permissions of a file of a library that ignores the umask to those of a new one.

    One is made to find them: so the directory's ACL counts, and `os.umask` would set the umask.
    """
    probe = temporary_name(path)
    try:
        probe.touch(exist_ok=False)
        set_mode(path, probe.stat().st_mode & 0o777)
    finally:
        probe.unlink(missing_ok=True)


def read_object(file: Path, error: type[SpecDataError] = DatasetError) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        FileNotFoundError: there is no such file. An `error`: it holds something else, more than
            128 MB, or is no regular file.
    """
    try:
        value = read_json_text(file)
    except ValueError as problem:  # ValueError: of JSON and of UTF-8
        why = instead(file, f"not valid JSON ({problem}); copy it again")
        raise error(f"{file}: {why}") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise error(f"{file}: expected a JSON object, found {kind}; copy it again")
    return value


def weight_map(index: Path, error: type[SpecDataError]) -> dict[str, Path]:
    """Return the file of each tensor, as an index of weights (*.index.json) names them.

    Raises:
        FileNotFoundError: there is no such index. An `error`: it is damaged, or names a file
            outside its directory.
    """
    names = read_object(index, error).get("weight_map")
    if not isinstance(names, dict) or not names or not all(map(safe_path, names.values())):
        raise error(
            f"{index}: not an index of weights: expected a weight_map that names files in its own "
            "directory; copy it again"
        )
    return {name: index.parent / file for name, file in names.items()}


def dump_json(value: Any) -> str:
    """Return JSON in the form of all files of a dataset: indented, stable bytes, final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def canonical_json(value: Any) -> bytes:
    """Return JSON without whitespace and with sorted keys: the form that is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of key order."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def xxh3_file(path: Path) -> str:
    """Return the xxh3_64 of a file, 16 hex digits: ten times as fast, but not safe from forgery."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxh3_64).hexdigest()
