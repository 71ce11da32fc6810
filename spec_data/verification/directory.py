"""Check every file in a dataset's directory: those of the manifest, those made from it, all others.

Nothing reads a file that the manifest does not name, except in target/, from which a tokenizer
loads every file with a name that it knows.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from spec_data.shards.files import sha256_file
from spec_data.shards.reader import INDEX, MANIFEST, HiddenStatesDataset
from spec_data.shards.seal import CARD, datasets_files
from spec_data.terminal.progress import progress
from spec_data.verification.findings import VerifyReport


class StoredFiles:
    """Reads and lists the files of a dataset by their names, with slashes, where they are stored.

    Nothing is answered from the local copies of a remote dataset: they are not what is verified.
    """

    def __init__(self, dataset: HiddenStatesDataset) -> None:
        """Take a dataset in a directory or on remote storage."""
        self._directory, self._mirror = dataset.path, dataset.mirror
        self._shards = {record.file: record for record in dataset.manifest.shards}

    def sha256(self, name: str) -> str | None:
        """Return the SHA-256 of a file; None: there is none."""
        if self._mirror is None:
            file = self._directory / name
            return sha256_file(file) if file.is_file() else None
        if name in self._shards:
            return self._mirror.sha256(self._shards[name])
        data = self.read(name)
        return None if data is None else hashlib.sha256(data).hexdigest()

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a small file; None: there is none."""
        try:
            if self._mirror is not None:
                return self._mirror.storage.read(name)
            return (self._directory / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            return None

    def names(self) -> Iterator[str]:
        """Yield the names of all files; none where the storage cannot list."""
        if self._mirror is not None:
            if self._mirror.storage.lists:
                yield from sorted(self._mirror.storage.sizes())
            return
        for folder, _, names in os.walk(self._directory):
            for name in sorted(names):
                yield str((Path(folder) / name).relative_to(self._directory))


_OWN_FOLDERS = ("shards", "target")  # every file in them must be one of the manifest's


def check_files(dataset: HiddenStatesDataset, findings: VerifyReport) -> None:
    """Compare every file with the manifest, and name those that it does not know.

    Of a view: its own, and those of every dataset that it reads.
    """
    if dataset.view is None:
        _check_stored(dataset, findings)
        return
    files = StoredFiles(dataset)
    if files.sha256(INDEX) != dataset.manifest.files[INDEX].sha256:
        findings.fail(f"{INDEX}: its SHA-256 is not that of the manifest; make the view again")
    _name_others(files, {MANIFEST, INDEX}, findings)
    for source in dataset.sources:
        findings.passed(f"reads {source.place} ({source.manifest.fingerprint[:16]})")
        _check_stored(source, findings)


def _check_stored(dataset: HiddenStatesDataset, findings: VerifyReport) -> None:
    manifest = dataset.manifest
    expected = {r.file: r.sha256 for r in manifest.shards}
    expected |= {name: record.sha256 for name, record in manifest.files.items()}
    if manifest.codec:
        expected[manifest.codec.file] = manifest.codec.sha256
    files = StoredFiles(dataset)
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


def _check_card(dataset: HiddenStatesDataset, files: StoredFiles, findings: VerifyReport) -> None:
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


def _name_others(files: StoredFiles, expected: set[str], findings: VerifyReport) -> None:
    """Name every other file: a failure in shards/ and target/, else a warning by top-level name."""
    warned: Counter[str] = Counter()
    for text in files.names():
        path = PurePosixPath(text)
        if text in expected:
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
