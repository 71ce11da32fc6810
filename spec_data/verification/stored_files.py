"""The files of a dataset as they are stored, in a directory or on remote storage, for checks.

Nothing here is answered from the local copies of a remote dataset: they are not what is verified.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from spec_data.shards.files import sha256_file
from spec_data.shards.mirror import Mirror
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.sides import stored_records
from spec_data.shards.storage import Storage


class StoredFiles(Protocol):
    """Read and list files by their names, relative to the dataset, with slashes."""

    def sha256(self, name: str) -> str | None:
        """Return the SHA-256 of a file; None: there is none."""

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a small file; None: there is none."""

    def names(self) -> Iterator[str]:
        """Yield the names of all files."""


def stored_files(dataset: HiddenStatesDataset) -> StoredFiles:
    """Return the files of a dataset where they are stored."""
    if dataset.mirror is not None:
        return RemoteFiles(dataset.mirror, dataset)
    return LocalFiles(dataset.path)


class LocalFiles:
    """The files of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def sha256(self, name: str) -> str | None:
        """Return the SHA-256 of a file; None: there is none."""
        file = self._directory / name
        return sha256_file(file) if file.is_file() else None

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file; None: there is none."""
        file = self._directory / name
        return file.read_bytes() if file.is_file() else None

    def names(self) -> Iterator[str]:
        """Yield the names of all files."""
        for folder, _, names in os.walk(self._directory):
            for name in sorted(names):
                yield str((Path(folder) / name).relative_to(self._directory))


class RemoteFiles:
    """The objects of a remote dataset."""

    def __init__(self, mirror: Mirror, dataset: HiddenStatesDataset) -> None:
        self._mirror = mirror
        self._storage: Storage = mirror.storage
        self._shards = {record.file: record for record in stored_records(dataset.manifest)}

    def sha256(self, name: str) -> str | None:
        """Return the SHA-256 of an object, which is fetched again; None: there is none."""
        if name in self._shards:
            return self._mirror.sha256(self._shards[name])
        data = self.read(name)
        return None if data is None else hashlib.sha256(data).hexdigest()

    def read(self, name: str) -> bytes | None:
        """Return the bytes of an object; None: there is none."""
        try:
            return self._storage.read(name)
        except FileNotFoundError:
            return None

    def names(self) -> Iterator[str]:
        """Yield the names of all objects; none where the storage cannot list."""
        if self._storage.lists:
            yield from sorted(self._storage.sizes())
