"""Remote datasets on the local disk: small files of each dataset, and a cache of whole shards.

    $SPEC_DATA_CACHE/remote/s3/bucket/data@1f0e.../    small files, fetched when first needed
    $SPEC_DATA_CACHE/remote/shards/SHA256.arrow        shards, at most SPEC_DATA_REMOTE_SIZE bytes

The fingerprint of the manifest, which is read at every open, names the folder. Shards are shared
by datasets and, through a lock per file, by processes. Those that were not used for the longest
time are deleted; an open one stays readable meanwhile. A file is whole and right, or absent.
"""

import contextlib
import hashlib
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.file_system import lock
from spec_data.shards.files import (
    CACHE_VARIABLE,
    MANIFEST,
    cache_directory,
    is_temporary,
    parse_size,
    sha256_file,
    temporary_name,
    write_atomically,
    xxh3_file,
)
from spec_data.shards.schema import Manifest, ShardRecord
from spec_data.shards.storage import DISK_FULL, Storage

THREADS = 4
"""Shards that are downloaded ahead at once, per process and dataset."""
SIZE_VARIABLE = "SPEC_DATA_REMOTE_SIZE"
_LEFT_OVER = 3600.0  # seconds after which a temporary file is one of a killed process


def size_limit() -> int:
    """Return how many bytes of shards stay on disk; ConfigError: SPEC_DATA_REMOTE_SIZE is none."""
    text = os.environ.get(SIZE_VARIABLE) or "50GB"
    with contextlib.suppress(ConfigError):
        if limit := parse_size(text):
            return limit
    raise ConfigError(f"{SIZE_VARIABLE}={text}: expected a size such as 50GB")


_LARGE = ("head.safetensors", "mtp.safetensors")


class Mirror:
    """The local files of one remote dataset with one fingerprint; for any thread.

    Attributes:
        manifest: of the dataset. directory: of its small files. limit: bytes of shards on disk.
    """

    def __init__(self, url: str) -> None:
        """Read the manifest of the dataset at `url`, and make the directory: one request.

        Raises:
            MissingError: there is no sealed dataset. DatasetError: the manifest is damaged.
            RunError: the storage does not answer.
            ConfigError: the URL or SPEC_DATA_REMOTE_SIZE is wrong, or the cache is not writable.
        """
        self.storage, self.limit = Storage(url), size_limit()
        self.url = self.storage.url
        self._text = self._read_manifest()
        self.manifest = Manifest.read(self.storage.where(MANIFEST), self._text)
        cache = cache_directory("remote")
        scheme, _, rest = self.url.partition("://")
        folder = cache / scheme / quote(rest, safe="/ ._-")
        self.directory = folder.with_name(f"{folder.name}@{self.manifest.fingerprint[:16]}")
        self._folder = cache / "shards"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self._folder}: cannot be written ({error.strerror}); set {CACHE_VARIABLE} to a "
                "folder that can be"
            ) from None
        self._store(MANIFEST, self._text)
        self._coming: dict[str, Future[Path]] = {}
        self._stop = threading.Event()

    # -- small files ------------------------------------------------------------------------------

    def fetch(self, name: str) -> Path:
        """Return the local path of a small file, which is downloaded unless it is there, intact.

        Raises:
            MissingError: there is no such file. DatasetError: it is not the manifest's.
        """
        file, where = self.directory / name, self.storage.where(name)
        if file.is_file() and not self._damaged(name):
            return file
        try:
            data = self.storage.read(name)
        except FileNotFoundError:
            raise self._explained(MissingError(f"{where}: missing; upload it again")) from None
        record = self.manifest.files.get(name)
        if record is not None and hashlib.sha256(data).hexdigest() != record.sha256:
            changed = "changed or damaged: its checksum is not the manifest's; upload it again"
            raise self._explained(DatasetError(f"{where}: {changed}"))
        self._store(name, data)
        return file

    def _damaged(self, name: str) -> bool:
        """Return whether the local copy of a small file is not the manifest's."""
        file, codec = self.directory / name, self.manifest.codec
        if (record := self.manifest.files.get(name)) is not None:
            return record.xxh3 != xxh3_file(file)
        return codec is not None and codec.file == name and codec.sha256 != sha256_file(file)

    @property
    def target_dir(self) -> Path:
        """The folder of the target, with all files but its head and MTP block: gigabytes."""
        for name in self.manifest.files:
            if name.startswith("target/") and not name.endswith(_LARGE):
                self.fetch(name)
        return self.directory / "target"

    def _store(self, name: str, data: bytes) -> None:
        file = self.directory / name
        if not file.is_file() or file.read_bytes() != data:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, data)

    def _read_manifest(self) -> bytes:
        try:
            return self.storage.read(MANIFEST)
        except FileNotFoundError:
            pass
        if self.storage.size(".generate/plan.json") is not None:
            raise MissingError(
                f"{self.url}: not sealed yet; run the same `spec-data generate` again to finish it"
            )
        raise MissingError(f"{self.url}: no {MANIFEST} there, so this is not a spec-data dataset")

    def _explained(self, error: DatasetError | MissingError) -> DatasetError | MissingError:
        """Return the error to raise for data that are not the manifest's: why, if that is clear."""
        try:
            same = self._read_manifest() == self._text
        except MissingError:
            return MissingError(f"{self.url}: the dataset was deleted while it was read")
        if same:
            return error
        return DatasetError(
            f"{self.url}: the dataset was replaced while it was read (its fingerprint was "
            f"{self.manifest.fingerprint[:16]}); nothing of the new one was mixed in. Start again"
        )

    # -- shards -----------------------------------------------------------------------------------

    @cached_property
    def _sizes(self) -> dict[str, int]:
        if self.storage.lists:
            return self.storage.sizes()
        return self.storage.sizes_of([record.file for record in self.manifest.shards])

    def size(self, record: ShardRecord) -> int:
        """Return the bytes of a remote shard.

        Raises:
            FileNotFoundError: there is no such shard.
        """
        size = self._sizes.get(record.file)
        if size is None and (size := self.storage.size(record.file)) is None:  # a list may be late
            raise FileNotFoundError(record.file)
        return size

    def shard(self, record: ShardRecord) -> Path:
        """Return the local copy of a shard, which is downloaded if it is not there.

        Raises:
            MissingError: there is no such shard. DatasetError: it is not the manifest's.
            ConfigError, RunError: as `Storage`, or the disk has no room.
        """
        try:  # a lock waits for what `fetch_ahead` has begun; if that fails, it is tried again
            return self._fetch(record, threading.Event())
        except FileNotFoundError:
            missing = MissingError(f"{self.storage.where(record.file)}: shard is missing")
            raise self._explained(missing) from None
        except DatasetError as error:
            raise self._explained(error) from None

    def sha256(self, record: ShardRecord) -> str | None:
        """Return the SHA-256 of a remote shard, which is fetched again; None: it is missing."""
        try:
            with self._locked(record):
                return self._download(record, threading.Event())
        except FileNotFoundError:
            return None

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

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="download")

    def _file(self, record: ShardRecord) -> Path:
        return self._folder / f"{record.sha256}.arrow"

    def _locked(self, record: ShardRecord) -> contextlib.AbstractContextManager[None]:
        return lock(self._file(record).with_suffix(".lock"))

    def _fetch(self, record: ShardRecord, stop: threading.Event) -> Path:
        file = self._file(record)
        with self._locked(record):
            if _used(file, record):
                return file
            for _ in range(2):  # what the way has damaged is right the second time
                if self._download(record, stop) == record.sha256:
                    return file
        raise DatasetError(
            f"{self.storage.where(record.file)}: damaged: its SHA-256 is not the manifest's; "
            "upload this shard again"
        )

    def _download(self, record: ShardRecord, stop: threading.Event) -> str:
        """Download a shard while its lock is held; return its SHA-256, and keep it if right."""
        self._make_room(record)
        temporary = temporary_name(self._file(record))
        try:
            self.storage.download(record.file, temporary, stop)
            digest = sha256_file(temporary)
            if digest == record.sha256:
                temporary.replace(self._file(record))
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
                f"{self.storage.where(record.file)} has {record.bytes:,} bytes, more than "
                f"{SIZE_VARIABLE} ({self.limit:,}); raise it"
            )
        files, total = [], record.bytes
        for file in self._folder.iterdir():
            try:
                state = file.stat()
            except FileNotFoundError:
                continue  # another process has just deleted it
            total += state.st_size
            if is_temporary(file) and time.time() - state.st_mtime > _LEFT_OVER:
                files.append((0, state.st_size, file))  # of a killed process: the first to go
            elif file.suffix == ".arrow":
                files.append((state.st_mtime_ns, state.st_size, file))
        for used, size, file in sorted(files):
            if used and total <= self.limit:
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
