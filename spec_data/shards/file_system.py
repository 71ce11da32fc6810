"""What file systems differ in: locks, links, modes, names that survive a power cut.

NFS without lockd has no locks; FUSE and SMB cannot fsync a folder; exFAT and SMB have no links and
no modes. What only adds safety is done without there; what is needed is done in another way: a
file with the process that holds it for a lock, a small file with a name for a link, a copy for a
second name. Nothing else in this project calls these operations.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_LACKING = {
    *(errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY),
}
"""How file systems say that they do not have an operation at all."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_NO_LINKS = _LACKING | {errno.EPERM, errno.EACCES, errno.EMLINK}
_NO_MODES = _LACKING | {errno.EPERM}
_NO_OPENED_FOLDERS = {errno.EISDIR, errno.EACCES, errno.EPERM, *_LACKING}
HELD = ".held"
"""The suffix of a file that stands for a lock."""
_ROUND = 1.0  # seconds
_SAID_AFTER = 30  # rounds
_NO_RECORD = 60.0  # seconds, after which who made a lock without a record is dead
_LINK = re.compile(rb"([A-Za-z0-9][\w.@-]{0,200})\n")

# -- names and contents on the disk ----------------------------------------------------------------


def sync(path: Path) -> None:
    """Fsync a file, or a folder with all that it holds."""
    if not path.is_dir():
        _fsync(path)
        return
    for inner in path.iterdir():
        if not inner.is_symlink():
            sync(inner)
    sync_names(path)


def sync_names(folder: Path) -> None:
    """Fsync the names in a folder, so that they survive a power cut, where that is possible."""
    try:
        _fsync(folder)
    except OSError as error:
        if error.errno not in _NO_OPENED_FOLDERS:
            raise


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
    finally:
        os.close(descriptor)


def replace_durably(temporary: Path, final: Path) -> None:
    """Rename `temporary` (already fsynced) over `final` and make the rename durable."""
    temporary.replace(final)
    sync_names(final.parent)


def set_mode(path: Path, mode: int) -> None:
    """Set the permissions of a file, where the file system has any."""
    try:
        path.chmod(mode)
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise


# -- links -----------------------------------------------------------------------------------------


def make_link(link: Path, name: str) -> None:
    """Make `link`, which is new, stand for the entry `name` of its own folder."""
    try:
        link.symlink_to(name, target_is_directory=True)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        link.write_text(f"{name}\n", encoding="utf-8")
        _fsync(link)


def linked_name(link: Path) -> str | None:
    """Return the name that a link of `make_link` stands for; None: it is no link."""
    if link.is_symlink():
        return link.readlink().name
    try:
        if not link.is_file() or link.stat().st_size > 256:
            return None
        match = _LINK.fullmatch(link.read_bytes())
    except OSError:
        return None
    return match[1].decode() if match else None


def followed(path: Path) -> Path:
    """Return a path; where a small file stands for a link, the path that it names."""
    if path.is_dir() or path.is_symlink() or (name := linked_name(path)) is None:
        return path
    there = path.with_name(name)
    return there if there.is_dir() else path


def place_once(temporary: Path, path: Path) -> None:
    """Give a file the name `path` unless that is taken: of several processes, the first one wins.

    `temporary` may stay beside it.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with lock(path.with_name(f".{path.name}.{'0' * 12}.tmp")):
            if not path.exists():
                temporary.replace(path)


def link_or_copy(source: Path, path: Path) -> None:
    """Make `path` a link to the file or folder `source`; a copy, where there are no links."""
    try:
        path.symlink_to(source)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(path.parent / source, path)


# -- locks -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def lock(file: Path, seconds: float = -1) -> Iterator[None]:
    """Hold the lock `file`, waiting `seconds` for it (-1: without end).

    It is released when the process dies. Without locks of the file system, the file FILE.held names
    the process that holds it: one of this machine that has died loses it, one of another machine
    does not.

    Raises:
        TimeoutError: another process holds it.
    """
    from filelock import FileLock  # here: it takes 0.1 s

    # of its own file in place of a lock, where the system has none at all
    warnings.filterwarnings("ignore", message="flock not supported")
    held: contextlib.AbstractContextManager[Any]
    try:
        held = FileLock(file, thread_local=False).acquire(timeout=seconds)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        held = _soft_lock(held_file(file), seconds)
    with held:
        yield


def _soft_lock(soft: Path, seconds: float) -> contextlib.AbstractContextManager[Any]:
    """Acquire the file that stands for a lock; take it from a process of this machine that died.

    filelock takes it where two names can be exchanged in one step. NFS, SMB and FUSE cannot, so
    there the lock of a run that was killed was held for ever.
    """
    from filelock import SoftFileLock

    end, tried = time.monotonic() + seconds, 0
    while True:
        # "no end" in rounds, as the holder may die meanwhile
        left = _ROUND if seconds < 0 else min(_ROUND, max(0.0, end - time.monotonic()))
        try:
            held = SoftFileLock(soft, thread_local=False).acquire(timeout=left)
        except TimeoutError:
            if not _taken_from_the_dead(soft) and seconds >= 0 and time.monotonic() >= end:
                raise
            if (tried := tried + 1) == _SAID_AFTER:
                log.warning("warning[lock]: waiting for another process%s", if_none_runs(soft))
        else:
            if _guard(soft).exists():  # of one that was killed when it had just taken it
                _taken_from_the_dead(_guard(soft))
            return held


def held_file(file: Path) -> Path:
    """Return the file that stands for the lock `file` where the file system has no locks."""
    return file.with_name(file.name + HELD)


def if_none_runs(soft: Path) -> str:
    """Return what to do about a lock of a process that died on another machine."""
    return (
        f". This file system has no locks, so the file {soft} stands for one: if no process runs, "
        "on any machine, delete that file"
    )


def _guard(soft: Path) -> Path:
    return soft.with_name(f"{soft.name}.guard")


def _taken_from_the_dead(soft: Path) -> bool:
    """Remove the file of a soft lock whose process has died on this machine.

    Those who remove do so one after the other, and read it again first: no file of a living process
    goes, as a file is never written over. What makes them wait for each other is a soft lock too,
    which is taken from the dead in the same way.
    """
    guard = _guard(soft)
    with contextlib.suppress(OSError), _soft_lock(guard, 0):
        if _is_of_the_dead(soft, guard):
            soft.unlink()
            return True
    return False


def _is_of_the_dead(soft: Path, own: Path) -> bool:
    """Whether the process of a soft lock has died on this machine; `own` is one of this process.

    The record is the number of the process, the name of its machine, and when it started, if that
    is known. A process that is killed before it writes its record leaves none; a minute by the
    clock of the file system tells, as the record is written at once.
    """
    holder, ours = (p.read_text("ascii", "replace").splitlines() for p in (soft, own))
    if not holder:
        return own.stat().st_mtime - soft.stat().st_mtime > _NO_RECORD
    if holder[1:2] != ours[1:2] or not holder[0].isdecimal():
        return False
    if holder[0] == ours[0]:  # of an earlier process, which had the number of this one
        return holder[2:] != ours[2:]
    return not is_alive(int(holder[0]))


def is_alive(process: int) -> bool:
    """Return whether this machine has a process of that id."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is of another user
        pass
    return True
