"""`spec-data gc`: find and delete what killed processes left in a dataset's directory.

Only names that this project writes are ever deleted, and only where no process works: a lock
that is held anywhere in the directory stops the whole command. In a sealed dataset these are
temporary files, the folders of finished work, and shards that the manifest does not name. In an
unfinished directory these are only what a resumed command writes again: temporary files, and shards
of units that are not finished.
"""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from spec_data.shards.errors import MissingError, RunError
from spec_data.shards.files import sync_directory, temporary_files
from spec_data.shards.follow import WORK
from spec_data.shards.reader import MANIFEST, VIEW_WORK
from spec_data.shards.schema import Manifest

_LOCKS = (f"{WORK}/*.lock", f"{VIEW_WORK}/lock")
_SHARD = re.compile(r"unit-\d{5,}\.arrow")


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A file or folder that nothing needs: its path, its bytes on this disk, and why."""

    path: Path
    bytes: int
    reason: str


def find_leftovers(directory: Path) -> list[Leftover]:
    """Return what can be deleted in the directory of a dataset, sealed or not; delete nothing.

    Raises:
        MissingError: it is neither a dataset nor one that is being written.
        RunError: a process works there.
    """
    with _all_locks(directory):
        return _found(directory)


def delete_leftovers(directory: Path) -> list[Leftover]:
    """Delete what `find_leftovers` finds, and return it. The locks are held meanwhile.

    Raises:
        MissingError, RunError: as `find_leftovers`.
    """
    with _all_locks(directory):
        found = _found(directory)
        for leftover in found:
            _remove(leftover.path)
        for folder in {leftover.path.parent for leftover in found}:
            if folder.is_dir():
                sync_directory(folder)
    return found


def _all_locks(directory: Path) -> ExitStack:
    """Hold every lock of a directory, so that no process begins to work there meanwhile.

    Raises:
        RunError: a process holds one.
    """
    sealed = (directory / MANIFEST).is_file()
    if not sealed and not any((directory / n).is_dir() for n in (WORK, VIEW_WORK)):
        raise MissingError(f"{directory}: no dataset, and none that is being written")
    stack = ExitStack()
    for file in sorted(f for pattern in _LOCKS for f in directory.glob(pattern)):
        try:
            stack.enter_context(FileLock(file, timeout=0))
        except Timeout:
            stack.close()
            raise RunError(
                f"{directory}: a process works here ({file.name} is locked); nothing was "
                "deleted. Run this again when it has ended"
            ) from None
    return stack


def _found(directory: Path) -> list[Leftover]:
    sealed = (directory / MANIFEST).is_file()
    found = list(_sealed(directory) if sealed else _unsealed(directory))
    folders = [leftover.path for leftover in found if leftover.path.is_dir()]
    for file in temporary_files(directory):
        if not any(file.is_relative_to(folder) for folder in folders):
            found.append(_leftover(file, "a temporary file of a killed process"))
    return found


def _sealed(directory: Path) -> Iterator[Leftover]:
    """Yield the leftovers of a sealed dataset."""
    named = {record.file for record in Manifest.read(directory / MANIFEST).shards}
    work = directory / VIEW_WORK
    if (work / "next").is_dir():
        raise RunError(
            f"{directory}: an append was killed while its files were moved into place; "
            "run the same command again, which finishes it"
        )
    if work.is_dir():
        yield _leftover(work, "work of a view or an append that was killed")
    if (directory / WORK).is_dir():
        yield _leftover(directory / WORK, "work of the generation, which is finished")
    for file in sorted((directory / "shards").glob("*.arrow")):
        if _SHARD.fullmatch(file.name) and f"shards/{file.name}" not in named:
            yield _leftover(file, "a shard that the manifest does not name")


def _unsealed(directory: Path) -> Iterator[Leftover]:
    """Yield the leftovers of a directory that is still written: shards that are not finished."""
    for file in sorted((directory / "shards").glob("*.arrow")):
        if _SHARD.fullmatch(file.name) and not _finished(directory, file):
            yield _leftover(file, "a shard without a record: it is written again anyway")


def _finished(directory: Path, shard: Path) -> bool:
    """Return whether a shard has a readable record of a finished unit."""
    for work in (WORK, VIEW_WORK):
        file = directory / work / f"{shard.stem}.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(raw, dict):
                return True
        except (OSError, ValueError):
            continue
    return False


def _leftover(path: Path, reason: str) -> Leftover:
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    # The bytes of a hard link are freed only with its last name.
    freed = sum(f.stat().st_size for f in files if f.stat().st_nlink == 1)
    return Leftover(path=path, bytes=freed, reason=reason)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            _remove(inner)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def leftovers_text(directory: Path, found: list[Leftover], deleted: bool) -> str:
    """Return one line for each leftover, and the sum."""
    lines = [f"{item.bytes:>14,}  {item.path}: {item.reason}" for item in found]
    total = sum(item.bytes for item in found)
    verb = "deleted" if deleted else "to delete with --yes"
    return "\n".join([*lines, f"{directory}: {len(found)} leftovers, {total:,} bytes, {verb}"])
