"""Check every file in a dataset's directory: those of the manifest, those made from it, all others.

Nothing reads a file that the manifest does not name, except in target/, from which a tokenizer
loads every file with a name that it knows.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

from spec_data.shards.files import sha256_file
from spec_data.shards.reader import INDEX, MANIFEST, HiddenStatesDataset
from spec_data.shards.remote import Mirror
from spec_data.shards.seal import CARD, datasets_files
from spec_data.shards.storage import Storage
from spec_data.terminal.progress import progress
from spec_data.verification.findings import Findings

# -- stored files ----------------------------------------------------------------------------------
# The files of a dataset as they are stored, in a directory or on remote storage, for checks.
#
# Nothing here is answered from the local copies of a remote dataset: they are not what is
# verified.


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
        self._shards = {record.file: record for record in dataset.manifest.shards}

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


# -- directory -------------------------------------------------------------------------------------


_OWN_FOLDERS = ("shards", "target")  # every file in them must be one of the manifest's


def check_files(dataset: HiddenStatesDataset, findings: Findings) -> None:
    """Compare every file with the manifest, and name those that it does not know.

    Of a view: its own, and those of every dataset that it reads.
    """
    if dataset.view is None:
        _check_stored(dataset, findings)
        return
    own = stored_files(dataset)
    record = dataset.manifest.files[INDEX]
    if own.sha256(INDEX) != record.sha256:
        findings.fail(f"{INDEX}: its SHA-256 is not that of the manifest; make the view again")
    _name_others(own, {MANIFEST, INDEX}, findings)
    for source in dataset.sources:
        findings.passed(f"reads {source.place} ({source.manifest.fingerprint[:16]})")
        _check_stored(source, findings)


def _check_stored(dataset: HiddenStatesDataset, findings: Findings) -> None:
    manifest = dataset.manifest
    expected = {r.file: r.sha256 for r in manifest.shards}
    expected |= {name: record.sha256 for name, record in manifest.files.items()}
    if manifest.codec:
        expected[manifest.codec.file] = manifest.codec.sha256
    files = stored_files(dataset)
    for name in progress(expected, desc="checksums", unit="files", leave=False):
        found = files.sha256(name) or "missing"
        if found != expected[name]:
            findings.fail(
                f"{name}: sha256 {found[:16]}, but the manifest has {expected[name][:16]}: the "
                "file was changed; copy or generate it again"
            )
    made = datasets_files(manifest)
    for name, text in made.items():
        if files.read(name) != text.encode():
            findings.fail(
                f"{name}: missing or changed, so `datasets` would open something else or nothing; "
                "copy it again"
            )
    _check_card(dataset, files, findings)
    _name_others(files, {MANIFEST, CARD, *made, *expected}, findings)
    shards = len(manifest.shards)
    others = len(expected) + len(made) - shards
    findings.passed(f"checksums of {shards} shards and {others} other files")


def _check_card(dataset: HiddenStatesDataset, files: StoredFiles, findings: Findings) -> None:
    """Warn when README.md is not the one that was sealed: anyone may edit it, nothing reads it."""
    text = files.read(CARD)
    if text is None:
        findings.warn(f"{CARD}: missing; the dataset card can be restored from another copy")
        return
    found = hashlib.sha256(text).hexdigest()
    if found != dataset.manifest.card:
        findings.warn(
            f"{CARD}: edited or damaged; it is not the card that was sealed (nothing reads it)"
        )


def _name_others(files: StoredFiles, known: set[str], findings: Findings) -> None:
    """Name every other file: a failure in shards/ and target/, else a warning by top-level name."""
    warned: Counter[str] = Counter()
    for text in files.names():
        path = PurePosixPath(text)
        if text in known:
            continue
        if path.name.startswith(".") and path.name.endswith(".tmp"):
            findings.warn(f"{path}: left by a process that was killed; delete it")
        elif path.parts[0] in _OWN_FOLDERS:
            findings.fail(
                f"{path}: not a file of this dataset, but a copy or a leftover; delete it"
            )
        else:
            warned[path.parts[0] + ("/" if len(path.parts) > 1 else "")] += 1
    for name, count in sorted(warned.items()):
        what = f"{name}: {count} files" if name.endswith("/") else f"{name}: a file"
        findings.warn(f"{what} that the manifest does not name; nothing here reads it")
