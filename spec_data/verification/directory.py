"""Check every file in a dataset's directory: those of the manifest, those made from it, all others.

Nothing reads a file that the manifest does not name, except in target/, from which a tokenizer
loads every file with a name that it knows.
"""

import hashlib
import os
from collections import Counter
from pathlib import Path, PurePosixPath

from spec_data.shards.dataset_card import CARD
from spec_data.shards.files import sha256_file
from spec_data.shards.reader import INDEX, MANIFEST, HiddenStatesDataset
from spec_data.shards.regular_files import NoTextError, read_bounded
from spec_data.shards.seal import datasets_files
from spec_data.terminal.progress import progress
from spec_data.verification.findings import VerifyReport

_CLOSED_FOLDERS = ("shards", "target")  # every file in them must be one of the manifest's


def check_files(dataset: HiddenStatesDataset, findings: VerifyReport) -> None:
    """Compare every file with the manifest, and name those that it does not know.

    Of a view: its own, and those of every dataset that it reads.
    """
    if dataset.view is None:
        _check_stored(dataset, findings)
        return
    if _sha256(dataset, INDEX) != dataset.manifest.files[INDEX].sha256:
        findings.fail(f"{INDEX}: its SHA-256 is not that of the manifest; make the view again")
    _name_others(dataset, {MANIFEST, INDEX}, findings)
    for source in dataset.sources:
        findings.passed(f"reads {source.location} ({source.manifest.fingerprint[:16]})")
        _check_stored(source, findings)


def _check_stored(dataset: HiddenStatesDataset, findings: VerifyReport) -> None:
    manifest = dataset.manifest
    expected = manifest.checksums()
    for name in progress(expected, desc="checksums", unit="files", leave=False):
        digest = _sha256(dataset, name) or "missing"
        if digest != expected[name]:
            findings.fail(
                f"{name}: sha256 {digest[:16]}, but the manifest has {expected[name][:16]}: the "
                "file was changed; copy or generate it again"
            )
    made = datasets_files(manifest)
    for name, text in made.items():
        if _read(dataset, name) != text.encode():
            findings.fail(
                f"{name}: missing or changed, so `datasets` would open something else or nothing; "
                "copy it again"
            )
    card = _read(dataset, CARD)
    if card is None or hashlib.sha256(card).hexdigest() != manifest.card:
        what = "missing" if card is None else "edited or damaged"
        findings.warn(f"{CARD}: {what}; it is not the card that was sealed (nothing reads it)")
    _name_others(dataset, {MANIFEST, CARD, *made, *expected}, findings)
    others = len(expected) + len(made) - len(manifest.shards)
    findings.passed(f"checksums of {len(manifest.shards)} shards and {others} other files")


# Local copies of a remote dataset are not what is verified: its files are read where they are.


def _sha256(dataset: HiddenStatesDataset, name: str) -> str | None:
    """Return the SHA-256 of a stored file; None: there is none."""
    if dataset.mirror is None:
        file = dataset.path / name
        return sha256_file(file) if file.is_file() else None
    if shard := next((r for r in dataset.manifest.shards if r.file == name), None):
        return dataset.mirror.sha256(shard)
    data = _read(dataset, name)
    return None if data is None else hashlib.sha256(data).hexdigest()


def _read(dataset: HiddenStatesDataset, name: str) -> bytes | None:
    """Return the bytes of a small stored file; None: there is none, or something else."""
    try:
        if dataset.mirror is not None:
            return dataset.mirror.storage.read(name)
        return read_bounded(dataset.path / name)
    except (FileNotFoundError, NoTextError):  # a pipe would be waited for
        return None


def _names(dataset: HiddenStatesDataset) -> list[str]:
    """Return the names of all stored files, with slashes."""
    if dataset.mirror is not None:
        return sorted(dataset.mirror.storage.sizes())
    walked = os.walk(dataset.path)
    files = (Path(folder) / name for folder, _, names in walked for name in sorted(names))
    return [str(file.relative_to(dataset.path)) for file in files]


def _name_others(dataset: HiddenStatesDataset, expected: set[str], findings: VerifyReport) -> None:
    """Name every other file: a failure in shards/ and target/, else a warning by top-level name."""
    others: Counter[str] = Counter()
    for text in _names(dataset):
        path = PurePosixPath(text)
        if text in expected:
            continue
        if path.name.startswith(".") and path.name.endswith(".tmp"):
            findings.warn(f"{path}: left by a process that was killed; delete it")
        elif path.parts[0] in _CLOSED_FOLDERS:
            findings.fail(
                f"{path}: not a file of this dataset, but a copy or a leftover; delete it"
            )
        else:
            others[path.parts[0] + ("/" if len(path.parts) > 1 else "")] += 1
    for name, count in sorted(others.items()):
        what = f"{name}: {count} files" if name.endswith("/") else f"{name}: a file"
        findings.warn(f"{what} that the manifest does not name; nothing here reads it")
