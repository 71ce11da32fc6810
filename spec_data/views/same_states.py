"""Can documents of several datasets be one dataset? Same target, same columns, same decoding.

A dataset has one folder of target files and one table per lossy column, so everything that decides
the meaning of a stored number must be equal. What differs is refused by name; nothing is encoded a
second time, because the error of a codec would be added to an error that is already there.
"""

import logging
from collections.abc import Sequence

import torch
from msgspec import structs

from spec_data.shards.errors import DatasetError
from spec_data.shards.identity import compare
from spec_data.shards.lossy import Tables
from spec_data.shards.records import plain
from spec_data.shards.resumable import differing_settings
from spec_data.shards.schema import (
    FINAL,
    SUPERVISED,
    TEACHERS,
    Column,
    Manifest,
    layer_column,
)
from spec_data.views.stored_documents import StoredDocuments

logger = logging.getLogger(__name__)
_KWARGS = "chat_template_kwargs"  # counted per document, so they may differ
_FILES = ("target/head.safetensors", "target/positions.safetensors")


def check_same_target(first: StoredDocuments, other: StoredDocuments) -> None:
    """Check that two datasets have states, token ids and prompts of one and the same target.

    Raises:
        DatasetError: they do not; the message lists how they differ.
    """
    ours, theirs = first.manifest, other.manifest
    compared = compare(
        ours.identity,
        theirs.identity,
        of_recorded=f"{first.dataset.path} has",
        of_found=f"{other.dataset.path} has",
        states=True,
    )
    found = [d.text for d in compared.differences if d.name != _KWARGS]
    found += differing_settings(plain(ours.head), plain(theirs.head))
    for name in _FILES:
        hashes = [m.files[name].sha256 if name in m.files else None for m in (ours, theirs)]
        if None not in hashes and hashes[0] != hashes[1]:
            found.append(f"{name}: other bytes")
    found += differing_settings(_meaning(ours), _meaning(theirs))
    if found:
        raise DatasetError(
            f"{other.dataset.path} and {first.dataset.path} cannot be one dataset:\n  "
            + "\n  ".join(dict.fromkeys(found))
            + "\n`spec-train fit --data A B` trains on several datasets, where only the target and "
            "its head must be the same"
        )
    if compared.not_compared:
        logger.warning(
            "%s: not compared, because an older release recorded less: %s",
            *(other.dataset.path, compared.not_compared),
        )


def _meaning(manifest: Manifest) -> dict[str, object]:
    """Return what decides the values of a dataset's columns."""
    return {
        "dtype": manifest.target.dtype,
        "quantised_as": manifest.target.quantised_as,
        "supervision": manifest.supervision,
    }


def common_columns(manifests: Sequence[Manifest]) -> tuple[Column, ...]:
    """Return the columns that all datasets have, stored at the tokens at which all store them.

    Raises:
        DatasetError: they have no layer in common, or a column with several codecs.
    """
    first = manifests[0]
    layers = set.intersection(*(set(m.layers) for m in manifests))
    if not layers and first.layers:
        raise DatasetError(
            "no layer is in all datasets: "
            + "; ".join(f"{m.where} has {list(m.layers)}" for m in manifests)
        )
    dropped = {layer_column(k) for k in first.layers if k not in layers}
    columns = [column for column in first.columns if column.name not in dropped]
    for manifest in manifests[1:]:
        own = {column.name: column for column in manifest.columns}
        for column in columns:
            if own[column.name].codec != column.codec:
                raise DatasetError(
                    f"{manifest.where}: column {column.name} has the codec "
                    f"{own[column.name].codec}, and {column.codec} in {first.where}. Capture "
                    "both with --codec bf16, merge them, and `spec-data recode` the result"
                )
    sparse = {FINAL} if any(m.final == SUPERVISED for m in manifests) else set()
    if any(m.teacher == SUPERVISED for m in manifests):
        sparse |= set(TEACHERS)
    return tuple(structs.replace(c, tokens=SUPERVISED) if c.name in sparse else c for c in columns)


def check_same_tables(inputs: Sequence[StoredDocuments], columns: Sequence[Column]) -> None:
    """Check that lossy columns are decoded by the same tables everywhere.

    Raises:
        DatasetError: they are not.
    """
    first = inputs[0].dataset
    for other in (stored.dataset for stored in inputs[1:]):
        for column in columns:
            if column.lossy and not _same_tables(
                first.tables[column.name], other.tables[column.name]
            ):
                raise DatasetError(
                    f"{other.path}: column {column.name} ({column.codec}) is decoded by other "
                    f"tables than in {first.path}, because each `generate` makes its own; a "
                    "dataset has one table per column, and encoding again would add a second "
                    "error. Generate both with --codec bf16, merge them and `spec-data recode` the "
                    "result; or generate from both corpora in one run: --corpus A B; or train on "
                    "both as they are: `spec-train fit --data A B`"
                )


def _same_tables(ours: Tables, theirs: Tables) -> bool:
    """Return whether two tables decode equally; limits of the encoder may differ."""
    pairs = ((ours.mean, theirs.mean), (ours.std, theirs.std), (ours.levels, theirs.levels))
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in pairs
    )
