"""Check every file in a dataset's directory: those of the manifest, those made from it, all others.

Nothing reads a file that the manifest does not name, except in target/, from which a tokenizer
loads every file with a name that it knows.
"""

import hashlib
from collections import Counter
from pathlib import PurePosixPath

from spec_data.progress import progress
from spec_data.shards.codec_tables import TABLES
from spec_data.shards.reader import MANIFEST, HiddenStatesDataset
from spec_data.shards.seal import CARD, dataset_card, datasets_files
from spec_data.shards.sides import stored_records
from spec_data.verification.findings import Findings
from spec_data.verification.stored_files import StoredFiles, stored_files

_OWN_FOLDERS = ("shards", "target")  # every file in them must be one of the manifest's


def check_files(dataset: HiddenStatesDataset, findings: Findings) -> None:
    """Compare every file with the manifest, and name those that it does not know."""
    manifest = dataset.manifest
    stored = stored_records(manifest)
    expected = {r.file: r.sha256 for r in stored}
    expected |= {name: record["sha256"] for name, record in manifest.raw["files"].items()}
    if "sha256" in manifest.codec:
        expected[manifest.codec.get("file", TABLES)] = manifest.codec["sha256"]
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
    others = len(expected) + len(made) - len(stored)
    sides = (
        f" (with {len(stored) - len(manifest.shards)} files of sides)"
        if "sides" in manifest.raw
        else ""
    )
    findings.passed(f"checksums of {len(stored)} shards{sides} and {others} other files")


def _check_card(dataset: HiddenStatesDataset, files: StoredFiles, findings: Findings) -> None:
    """Warn when README.md is not the one that was sealed: anyone may edit it, nothing reads it.

    Manifests of older releases have no hash of it; it is made again then.
    """
    record = dataset.manifest.raw.get("card")
    text = files.read(CARD)
    if text is None:
        findings.warn(f"{CARD}: missing; the dataset card can be restored from another copy")
        return
    found = hashlib.sha256(text).hexdigest()
    made = hashlib.sha256(dataset_card(dataset.manifest).encode()).hexdigest()
    if found != (record["sha256"] if record else made):
        words = "edited or damaged" if record else "edited, damaged, or of an older release"
        findings.warn(f"{CARD}: {words}; it is not the card that was sealed (nothing reads it)")


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
