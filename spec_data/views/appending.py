"""`spec-data append`: add the documents of other datasets to a dataset, as new shards.

The shards that are there stay as they are. What changes is written to DIR/.view/next first (index,
card, manifest), and then moved into place, in a few renames. A process that is killed before them
leaves the dataset as it was, with shards that no manifest names; killed between them, it leaves an
index that the manifest does not name, which readers refuse. The same command finishes both.
"""

import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_data.options.view_options import AppendConfig
from spec_data.shards.codec_tables import TABLES
from spec_data.shards.errors import ConfigError
from spec_data.shards.files import replace_durably, sync_directory
from spec_data.shards.reader import INDEX, MANIFEST, NEXT, VIEW_WORK, HiddenStatesDataset
from spec_data.shards.schema import Manifest, ShardRecord
from spec_data.shards.seal import CARD, seal
from spec_data.terminal.paths import check_directory_to_write
from spec_data.views.joining import joined_draft, joined_parts
from spec_data.views.stored_documents import StoredDocuments
from spec_data.views.view_units import view_units
from spec_data.views.write_view import (
    View,
    ViewSizes,
    begin_view,
    begun_view,
    check_out,
    view_lock,
    view_sizes,
    write_shards,
)

logger = logging.getLogger(__name__)
_MOVED = (TABLES, INDEX, CARD, "state.json", "dataset_info.json", MANIFEST)  # in this order


@dataclass(frozen=True, kw_only=True)
class Append:
    """What an `append` does.

    Attributes:
        path: the dataset that grows.
        view: the new shards alone; None: nothing is new.
        present: documents that the dataset has already.
    """

    path: Path
    view: View | None
    present: int


def plan_append(config: AppendConfig) -> Append:
    """Return what an `append` adds, after finishing one that was killed at its end.

    Raises:
        ConfigError: fewer than two datasets, or the first is read-only or not sealed.
        DatasetError: they cannot be one dataset, or documents of the first would change.
    """
    if len(config.data) < 2:
        raise ConfigError("append: name the dataset that grows, then others: `append DIR OTHER`")
    path = Path(config.data[0])
    check_directory_to_write("append", path)
    finish_append(path)
    inputs = [StoredDocuments(HiddenStatesDataset(name)) for name in config.data]
    for other in inputs[1:]:
        check_out(path, [other])
    parts = joined_parts(inputs)
    if not parts[0].unchanged:
        raise ConfigError(
            f"{path}: its shards would have to change, because it has columns, or tokens of a "
            "column, that another dataset lacks; `spec-data merge` writes a new dataset of them"
        )
    present = sum(int((~part.keep).sum()) for part in parts)
    units = [unit for unit in view_units(parts) if unit.part]
    if not units:
        return Append(path=path, view=None, present=present)
    view = View(parts=parts, units=units, draft=joined_draft("append", parts))
    return Append(path=path, view=view, present=present)


def append_sizes(planned: Append) -> ViewSizes | None:
    """Return what would be added; None: nothing."""
    return view_sizes(planned.view) if planned.view else None


def append(planned: Append) -> Manifest:
    """Add the new shards, and return the manifest of the dataset that has grown.

    Raises:
        DatasetError: an input is damaged. RunError: the disk is full, or another process writes.
        ConfigError: another append was begun here.
    """
    path, view = planned.path, planned.view
    if view is None:
        return Manifest.read(path / MANIFEST)
    (path / VIEW_WORK).mkdir(exist_ok=True)
    with view_lock(path / VIEW_WORK):
        _forget_finished(path, view)
        own = view.parts[0].stored.manifest
        numbers = [re.fullmatch(r"shards/unit-(\d+)\.arrow", record.file) for record in own.shards]
        first = 1 + max((int(found[1]) for found in numbers if found), default=-1)
        begin_view(path, view, first)
        records = [*own.shards, *write_shards(path, view, first)]
        target = {n: r for n, r in own.files.items() if n.startswith("target/")}
        view.draft["files"] = target
        _stage(path, view.draft, records)
    return finish_append(path) or Manifest.read(path / MANIFEST)


def _stage(path: Path, draft: dict[str, Any], records: Sequence[ShardRecord]) -> None:
    """Write the files of a new manifest of a sealed dataset beside its present ones.

    `finish_append` then moves them into place. The lock of the directory is held. `draft` and
    `records` are those of `seal`.
    """
    staged = path / VIEW_WORK / "staged"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    # The index is made of the shards in their place.
    links = ["shards", "target", *(n for n in draft.get("files", {}) if "/" not in n)]
    for name in links:
        (staged / name).symlink_to(Path("..") / ".." / name)
    seal(staged, Manifest.of(draft), records)
    for name in links:
        (staged / name).unlink()
    sync_directory(staged)
    staged.rename(path / VIEW_WORK / NEXT)
    sync_directory(path / VIEW_WORK)


def _forget_finished(path: Path, view: View) -> None:
    """Remove the work of an append that is complete, if a process was killed while removing it."""
    begun = begun_view(path)
    if begun and begun["of"][0]["fingerprint"] != view.draft["view"]["of"][0]["fingerprint"]:
        for left in (path / VIEW_WORK).glob("*.json"):
            left.unlink()


def finish_append(path: Path) -> Manifest | None:
    """Move the files of a finished append into place; None: there is none to finish."""
    ready = path / VIEW_WORK / NEXT
    if not ready.is_dir():
        return None
    with view_lock(path / VIEW_WORK):
        for name in _MOVED:
            if (ready / name).is_file():
                replace_durably(ready / name, path / name)
    shutil.rmtree(path / VIEW_WORK)
    manifest = Manifest.read(path / MANIFEST)
    layers = ", ".join(map(str, manifest.layers)) or "none"
    counts = (manifest.totals.documents, layers)
    logger.info("%s has %d documents now; its layers: %s", path, *counts)
    return manifest
