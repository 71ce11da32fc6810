"""Blocks of remote shards on the local disk, at most SPEC_DATA_REMOTE_SIZE bytes of them.

A block is a file of its own, written under a temporary name and renamed: it is whole or absent,
also after a kill, and processes need no lock to share it. Reading a block makes it the newest; the
oldest ones are deleted. A reader copies out of an open file, so a block that is deleted meanwhile
does no harm: the next reader fetches it again.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.files import CACHE_VARIABLE, cache_directory, temporary_name
from spec_data.shards.storage import Storage

BLOCK = 4 << 20
"""Bytes of a block, and so of a range request."""
THREADS = 16
"""Range requests at once, per process and dataset."""
SIZE_VARIABLE = "SPEC_DATA_REMOTE_SIZE"
_DEFAULT = "50GB"
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_LEFT_OVER = 3600.0  # seconds after which a temporary file is one of a killed process


def remote_directory() -> Path:
    """Return where everything that is read from remote storage is kept."""
    return cache_directory("remote")


def size_limit() -> int:
    """Return how many bytes of blocks are kept on disk, from SPEC_DATA_REMOTE_SIZE.

    Raises:
        ConfigError: it is no size, or too small for a few blocks.
    """
    text = os.environ.get(SIZE_VARIABLE) or _DEFAULT
    number = text.strip().upper().removesuffix("B")
    unit = _UNITS.get(number[-1:], 1)
    try:
        limit = int(float(number if unit == 1 else number[:-1]) * unit)
    except (ValueError, OverflowError):
        limit = 0
    if limit < 4 * BLOCK:
        raise ConfigError(
            f"{SIZE_VARIABLE}={text}: expected a size such as 50GB, of at least {4 * BLOCK:,} bytes"
        )
    return limit


class BlockCache:
    """The blocks of one dataset's shards. Its methods may be called from any thread."""

    def __init__(self, folder: Path, storage: Storage) -> None:
        """Keep blocks of `storage` in `folder`, which is below `remote_directory()`.

        Raises:
            ConfigError: SPEC_DATA_REMOTE_SIZE is no size.
        """
        self._folder, self._storage, self._limit = folder, storage, size_limit()
        self._lock = threading.Lock()
        self._coming: dict[Path, Future] = {}
        self._unseen = self._limit  # bytes written since the limit was checked
        self.fetched = 0  # bytes, by this process

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="range-requests")

    def read(self, name: str, size: int, start: int, stop: int, fresh: bool = False) -> np.ndarray:
        """Return bytes `start` to `stop` of an object of `size` bytes, uint8, in new memory.

        With `fresh`, blocks on disk are not used, but replaced.

        Raises:
            FileNotFoundError: there is no such object. ConfigError, RunError: as `Storage`.
        """
        out = np.empty(stop - start, np.uint8)
        if start == stop:
            return out
        numbers = range(start // BLOCK, -(-stop // BLOCK))
        if fresh:
            for number in numbers:
                self._file(name, number).unlink(missing_ok=True)
        missing = [n for n in numbers if not self._copied(name, n, out, start)]
        self.fetch_ahead(name, size, missing)  # all of them at once
        for number in missing:
            with self._lock:
                coming = self._coming.get(self._file(name, number))
            if coming is None and self._copied(name, number, out, start):
                continue
            part, skip = _cut(number, out, start), max(start - number * BLOCK, 0)
            part[:] = self._block(name, size, number, coming)[skip : skip + len(part)]
        return out

    def fetch_ahead(self, name: str, size: int, numbers: Iterable[int]) -> None:
        """Begin to fetch the blocks that are not on disk; return at once."""
        for number in numbers:
            file = self._file(name, number)
            with self._lock:
                if file not in self._coming and not file.exists():
                    task = self._pool.submit(self._fetch, name, size, number, file)
                    self._coming[file] = task

    def cancel(self) -> None:
        """Give up what was asked for and has not begun."""
        with self._lock:
            for file, task in list(self._coming.items()):
                if task.cancel():
                    del self._coming[file]

    def _file(self, name: str, number: int) -> Path:
        return self._folder / name / f"{number:06d}"

    def _copied(self, name: str, number: int, out: np.ndarray, start: int) -> bool:
        """Fill the part of `out` that is in a block from the disk; False: it is not there."""
        skip = max(start - number * BLOCK, 0)
        return _read_into(self._file(name, number), _cut(number, out, start), skip)

    def _block(self, name: str, size: int, number: int, coming: Future | None) -> np.ndarray:
        """Return a block that another thread fetches, or fetch it here; uint8."""
        data = None
        if coming is not None:
            with contextlib.suppress(CancelledError):
                data = coming.result()
        if data is None:
            data = self._fetch(name, size, number, self._file(name, number))
        return np.frombuffer(data, np.uint8)

    def _fetch(self, name: str, size: int, number: int, file: Path) -> bytes:
        """Fetch a block and keep it on disk."""
        try:
            first = number * BLOCK
            data = self._storage.read_range(name, first, min(first + BLOCK, size))
            self._keep(file, data)
            return data
        finally:
            with self._lock:
                self._coming.pop(file, None)

    def _keep(self, file: Path, data: bytes) -> None:
        temporary = temporary_name(file)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise RunError(
                    f"{self._folder}: the disk is full; lower {SIZE_VARIABLE} (now "
                    f"{self._limit:,} bytes), or set {CACHE_VARIABLE} to a folder on another disk"
                ) from None
            raise ConfigError(
                f"{self._folder}: cannot be written ({error.strerror}); set {CACHE_VARIABLE} to a "
                "folder that can be"
            ) from None
        with self._lock:
            self.fetched += len(data)
            self._unseen += len(data)
            due = self._unseen > self._limit // 16
            if due:
                self._unseen = 0
        if due:
            trim(remote_directory(), self._limit)


def _cut(number: int, out: np.ndarray, start: int) -> np.ndarray:
    """Return the part of `out` (bytes from `start` of an object) that block `number` has."""
    first = number * BLOCK - start
    return out[max(first, 0) : max(first + BLOCK, 0)]


def _read_into(file: Path, out: np.ndarray, skip: int) -> bool:
    """Fill `out` from a file and make the file the newest; False: there is no such file."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        whole = os.preadv(descriptor, [out.data], skip) == len(out)
        os.utime(descriptor)
    finally:
        os.close(descriptor)
    if not whole:  # cut by something else than this program: as if it were not there
        file.unlink(missing_ok=True)
    return whole


def trim(root: Path, limit: int) -> None:
    """Delete the oldest blocks below `root` until they are a sixteenth below `limit` bytes.

    One process does this at a time; another one that is asked to returns at once.
    """
    root.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(root / "trim.lock", timeout=0):
            found = sorted(_blocks(root), key=lambda block: block[0])
            total = sum(size for _, size, _ in found)
            for _, size, file in found:
                if total <= limit - limit // 16:
                    break
                Path(file).unlink(missing_ok=True)
                total -= size
    except Timeout:
        return


def _blocks(root: Path) -> Iterable[tuple[float, int, str]]:
    """Yield time of the last use, bytes and path of every block; delete what kills left."""
    now = time.time()
    for folder, _, names in os.walk(root):
        if f"{os.sep}blocks{os.sep}" not in folder:
            continue
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118 - a hundred thousand of them
            try:
                found: Any = os.stat(path)  # noqa: PTH116
            except FileNotFoundError:
                continue
            if not name.startswith("."):
                yield found.st_mtime, found.st_size, path
            elif now - found.st_mtime > _LEFT_OVER:
                Path(path).unlink(missing_ok=True)
