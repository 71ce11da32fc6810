"""A remote dataset as a local directory: small files here, shards in the cache that all share.

    $SPEC_DATA_CACHE/remote/s3/bucket/data@1f0e.../    one directory per URL and fingerprint
        remote.json           URL and fingerprint: the directory opens as the remote dataset does
        manifest.json, ...    small files, fetched when they are first needed
    $SPEC_DATA_CACHE/remote/shards/                    whole shards, see `shard_cache.py`

The manifest is read at every open, and its fingerprint names the directory. So a dataset that was
replaced has a directory of its own, and everything in a directory is compared with one manifest.
Every file is written under a temporary name and renamed: processes may share the directory, and a
kill leaves no half file.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.files import MANIFEST, dump_json, temporary_name, writing
from spec_data.shards.schema import ShardRecord
from spec_data.shards.shard_cache import ShardCache, remote_directory
from spec_data.shards.storage import Storage
from spec_data.shards.urls import scheme_of

MARKER = "remote.json"


def open_mirror(path: str | Path) -> "Mirror | None":
    """Open the remote dataset that `path` names, by its URL or by its mirror's directory.

    None: `path` is local. In the directory of a mirror the fingerprint must still be the same.

    Raises:
        As `Mirror`.
    """
    if scheme_of(path) is not None:
        return Mirror(str(path))
    marker = Path(path) / MARKER
    return Mirror(**json.loads(marker.read_text(encoding="utf-8"))) if marker.is_file() else None


class Mirror:
    """The local directory of one remote dataset with one fingerprint."""

    def __init__(self, url: str, fingerprint: str | None = None) -> None:
        """Read the manifest of the dataset at `url`, and make the directory: one request.

        Raises:
            MissingError: there is no sealed dataset. DatasetError: the manifest is damaged, or its
                fingerprint is not `fingerprint`.
            ConfigError: the URL cannot be read here. RunError: the storage does not answer.
        """
        self.storage = Storage(url)
        self.url = self.storage.url
        self._manifest = self._read_manifest()
        self.fingerprint = _fingerprint(self._manifest, self.storage.where(MANIFEST))
        if fingerprint not in (None, self.fingerprint):
            raise _replaced(self.url, fingerprint)
        scheme, _, rest = self.url.partition("://")
        place = remote_directory() / scheme / quote(rest, safe="/ ._-")
        self.directory = place.with_name(f"{place.name}@{self.fingerprint[:16]}")
        self._files = _file_records(self._manifest)
        self._keep(MANIFEST, self._manifest)
        pinned = {"url": self.url, "fingerprint": self.fingerprint}
        self._keep(MARKER, dump_json(pinned).encode())
        self.shards = ShardCache(self.storage)

    def sizes(self, shards: Sequence[ShardRecord]) -> tuple[list[str], list[str]]:
        """Return what to say about remote shards that are missing, and of another size.

        Where the storage cannot list, they are taken to be right until they are read.
        """
        if not self.storage.lists:
            return [], []
        found: dict[str, int | None] = {}
        for folder in {record.file.rpartition("/")[0] for record in shards}:
            found |= self.storage.sizes(folder)
        missing, wrong = [], []
        for record in shards:
            size = found.get(record.file)
            if size != record.bytes:  # a list may be late: ask for the object itself
                size = self.storage.size(record.file)
            if size is None:
                missing.append(f"{self.storage.where(record.file)}: shard is missing")
            elif size != record.bytes:
                wrong.append(wrong_size(self.storage.where(record.file), size, record))
        return missing, wrong

    def ensure(self, name: str) -> Path:
        """Return the local path of a small file, which is fetched if it is not there.

        Raises:
            MissingError: there is no such file. DatasetError: it is not the manifest's.
        """
        file = self.directory / name
        if not file.is_file():
            try:
                data = self.storage.read(name)
            except FileNotFoundError:
                raise self.explained(
                    MissingError(f"{self.storage.where(name)}: missing; upload the dataset again")
                ) from None
            expected = self._files.get(name)
            if expected is not None and hashlib.sha256(data).hexdigest() != expected:
                raise self.explained(
                    DatasetError(
                        f"{self.storage.where(name)}: changed or damaged: its checksum is not the "
                        "manifest's; upload it again"
                    )
                )
            self._keep(name, data)
        return file

    def ensure_target(self) -> Path:
        """Return the folder of the target, with all files but its head: it may have gigabytes."""
        for name in self._files:
            if name.startswith("target/") and not name.endswith("head.safetensors"):
                self.ensure(name)
        return self.directory / "target"

    def shard(self, record: ShardRecord) -> Path:
        """Return the local copy of a shard, which is downloaded if it is not there.

        Raises:
            MissingError: there is no such shard. DatasetError: it is not the manifest's.
        """
        try:
            return self.shards.path(record)
        except FileNotFoundError:
            where = self.storage.where(record.file)
            raise self.explained(MissingError(f"{where}: shard is missing")) from None
        except DatasetError as error:
            raise self.explained(error) from None

    def sha256(self, record: ShardRecord) -> str | None:
        """Return the SHA-256 of a remote shard, which is fetched again; None: it is missing."""
        try:
            return self.shards.fetch_again(record)
        except FileNotFoundError:
            return None

    def changed(self) -> bool:
        """Return whether the manifest at the URL is another one now."""
        return self._read_manifest() != self._manifest

    def explained(self, error: DatasetError | MissingError) -> DatasetError | MissingError:
        """Return the error to raise for data that are not the manifest's: why, where known."""
        try:
            changed = self.changed()
        except MissingError:
            return MissingError(f"{self.url}: the dataset was deleted while it was read")
        if changed:
            return _replaced(self.url, self.fingerprint)
        return error

    def _read_manifest(self) -> bytes:
        try:
            return self.storage.read(MANIFEST)
        except FileNotFoundError:
            pass
        if self.storage.lists and self.storage.size(".generate/plan.json") is not None:
            raise MissingError(
                f"{self.url}: not sealed yet; run the same `spec-data generate` again to finish it"
            )
        raise MissingError(f"{self.url}: no {MANIFEST} there, so this is not a spec-data dataset")

    def _keep(self, name: str, data: bytes) -> None:
        file = self.directory / name
        if not file.is_file() or file.read_bytes() != data:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_name(file)  # not made durable: it can be fetched again
            with writing(file, temporary):
                temporary.write_bytes(data)
                temporary.replace(file)


def wrong_size(where: str, size: int, record: ShardRecord) -> str:
    """Say that a shard has another size than its record."""
    return f"{where}: {size:,} bytes, the manifest says {record.bytes:,}: truncated or replaced"


def _replaced(url: str, fingerprint: str | None) -> DatasetError:
    return DatasetError(
        f"{url}: the dataset was replaced while it was read (its fingerprint was "
        f"{(fingerprint or '')[:16]}); nothing of the new one was mixed in. Start again"
    )


def _fingerprint(manifest: bytes, where: str) -> str:
    """Return the fingerprint in the text of a manifest, which is a part of a path.

    Raises:
        DatasetError: there is none.
    """
    try:
        found = json.loads(manifest)["fingerprint"]
        if re.fullmatch(r"[0-9a-f]{64}", found):
            return str(found)
    except (ValueError, RecursionError, TypeError, KeyError):
        pass
    raise DatasetError(f"{where}: no manifest of a sealed dataset; upload the dataset again")


def _file_records(manifest: bytes) -> dict[str, str]:
    """Return the SHA-256 of every small file that a manifest names. It is not validated yet."""
    raw = json.loads(manifest)
    try:
        return {str(name): str(record["sha256"]) for name, record in raw["files"].items()}
    except (TypeError, KeyError, AttributeError):
        return {}  # which `Manifest.read` refuses
