"""Shards of remote datasets on the local disk: whole files, at most SPEC_DATA_REMOTE_SIZE bytes.

    $SPEC_DATA_CACHE/remote/shards/SHA256.arrow

A shard is downloaded under a temporary name, compared with its checksum and renamed: a file is
whole and right, or absent, also after a kill. Its name is its checksum, so that datasets that have
a shard in common share the file; processes share it through a lock per file. The files that were
not used for the longest time are deleted. One that is mapped stays readable meanwhile.
"""

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path

from filelock import FileLock

from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.files import (
    CACHE_VARIABLE,
    cache_directory,
    is_temporary,
    sha256_file,
    temporary_name,
)
from spec_data.shards.schema import ShardRecord
from spec_data.shards.storage import DISK_FULL, Storage

THREADS = 4
"""Shards that are downloaded ahead at once, per process and dataset."""
SIZE_VARIABLE = "SPEC_DATA_REMOTE_SIZE"
_DEFAULT = "50GB"
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_LEFT_OVER = 3600.0  # seconds after which a temporary file is one of a killed process


def remote_directory() -> Path:
    """Return where everything that is read from remote storage is kept."""
    return cache_directory("remote")


def size_limit() -> int:
    """Return how many bytes of shards are kept on disk, from SPEC_DATA_REMOTE_SIZE.

    Raises:
        ConfigError: it is no size.
    """
    text = os.environ.get(SIZE_VARIABLE) or _DEFAULT
    number = text.strip().upper().removesuffix("B")
    unit = _UNITS.get(number[-1:], 1)
    try:
        limit = int(float(number if unit == 1 else number[:-1]) * unit)
    except (ValueError, OverflowError):
        limit = 0
    if limit <= 0:
        raise ConfigError(f"{SIZE_VARIABLE}={text}: expected a size such as 50GB")
    return limit


class ShardCache:
    """The shards of one remote dataset. Its methods may be called from any thread."""

    def __init__(self, storage: Storage) -> None:
        """Keep shards of `storage`.

        Raises:
            ConfigError: SPEC_DATA_REMOTE_SIZE is no size.
        """
        self._storage, self.limit = storage, size_limit()
        self._folder = remote_directory() / "shards"
        self._coming: dict[str, Future[Path]] = {}
        self._stop = threading.Event()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="download")

    def path(self, record: ShardRecord) -> Path:
        """Return the local file of a shard, which is downloaded if it is not there.

        Raises:
            FileNotFoundError: there is no such shard. DatasetError: it is not the record's.
            ConfigError, RunError: as `Storage`, or the disk has no room.
        """
        coming = self._coming.pop(record.sha256, None)
        if coming is not None and not coming.cancel():
            wait((coming,))  # if it failed, the same is tried again below
        return self._fetch(record, threading.Event())

    def fetch_ahead(self, record: ShardRecord) -> int:
        """Begin to download a shard; return its bytes, or 0 where it is there or on its way."""
        coming = self._coming.get(record.sha256)
        if (coming is not None and not coming.done()) or _used(self._file(record), record):
            return 0
        self._coming[record.sha256] = self._pool.submit(self._fetch, record, self._stop)
        return record.bytes

    def stop(self) -> None:
        """Give up what `fetch_ahead` began: a run that is stopped must not wait for it."""
        self._stop.set()
        self._stop = threading.Event()
        for coming in list(self._coming.values()):
            coming.cancel()

    def fetch_again(self, record: ShardRecord) -> str:
        """Download a shard, also if it is there; return its SHA-256. It is kept if that is right.

        Raises:
            As `path`.
        """
        with self._locked(record):
            return self._download(record, threading.Event())

    def _file(self, record: ShardRecord) -> Path:
        return self._folder / f"{record.sha256}.arrow"

    def _locked(self, record: ShardRecord) -> FileLock:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return FileLock(self._file(record).with_suffix(".lock"))
        except OSError as error:
            raise ConfigError(
                f"{self._folder}: cannot be written ({error.strerror}); set {CACHE_VARIABLE} to a "
                "folder that can be"
            ) from None

    def _fetch(self, record: ShardRecord, stop: threading.Event) -> Path:
        file = self._file(record)
        with self._locked(record):
            if _used(file, record):
                return file
            for _ in range(2):  # what the way has damaged is right the second time
                if self._download(record, stop) == record.sha256:
                    return file
        raise DatasetError(
            f"{self._storage.where(record.file)}: damaged: its SHA-256 is not the manifest's; "
            "upload this shard again"
        )

    def _download(self, record: ShardRecord, stop: threading.Event) -> str:
        """Download a shard while its lock is held; return its SHA-256, and keep it if right."""
        self._make_room(record)
        file = self._file(record)
        temporary = temporary_name(file)
        try:
            self._storage.download(record.file, temporary, stop)
            digest = sha256_file(temporary)
            if digest == record.sha256:
                temporary.replace(file)
            return digest
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise RunError(
                f"{self._folder}: the disk is full; lower {SIZE_VARIABLE} (now {self.limit:,} "
                f"bytes), or set {CACHE_VARIABLE} to a folder on another disk"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)

    def _make_room(self, record: ShardRecord) -> None:
        """Delete the files that were not used for the longest time until a shard fits."""
        if record.bytes > self.limit:
            raise ConfigError(
                f"{self._storage.where(record.file)} has {record.bytes:,} bytes, more than "
                f"{SIZE_VARIABLE} ({self.limit:,}); raise it"
            )
        found, total = [], record.bytes
        for entry in os.scandir(self._folder):
            file = Path(entry.path)
            try:
                state = entry.stat()
            except FileNotFoundError:
                continue  # another process has just deleted it
            if is_temporary(file) and time.time() - state.st_mtime > _LEFT_OVER:
                file.unlink(missing_ok=True)  # of a killed process
                continue
            total += state.st_size
            if file.suffix == ".arrow":
                found.append((state.st_mtime_ns, state.st_size, file))
        for _, size, file in sorted(found):
            if total <= self.limit:
                return
            file.unlink(missing_ok=True)
            total -= size


def _used(file: Path, record: ShardRecord) -> bool:
    """Make a file the newest; return whether it is there, with the size of the record."""
    try:
        os.utime(file)
        return file.stat().st_size == record.bytes
    except FileNotFoundError:
        return False
