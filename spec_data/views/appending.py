"""`spec-data append`: add the documents of other datasets to a dataset, as new shards.

The shards that are there stay as they are. To a dataset with added layers (see `shards.sides`),
each new shard gets files of its sides as well. What changes is written to DIR/.view/next first
(index, card, manifest), and then moved into place, in a few renames. A process that is killed
before them leaves the dataset as it was, with shards that no manifest names; killed between them,
it leaves an index that the manifest does not name, which readers refuse. The same command finishes
both.
"""

import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_data.options.view_options import AppendConfig
from spec_data.shards.codec_tables import TABLES
from spec_data.shards.errors import ConfigError
from spec_data.shards.files import replace_durably, sync_directory, write_atomically
from spec_data.shards.reader import INDEX, MANIFEST, NEXT, VIEW_WORK, HiddenStatesDataset
from spec_data.shards.schema import WITH_SIDES, Column, Manifest, ShardRecord
from spec_data.shards.seal import CARD, check_shard, seal
from spec_data.shards.sides import shard_columns, side_file, sides_of
from spec_data.shards.writer import write_shard
from spec_data.terminal.paths import check_directory_to_write
from spec_data.views.joining import joined_draft, joined_parts, lineage
from spec_data.views.stored_documents import StoredDocuments, unit_of
from spec_data.views.view_units import Part, unit_bytes, view_units
from spec_data.views.write_view import (
    View,
    ViewSizes,
    begin_view,
    begun_view,
    check_out,
    finished_record,
    save_finished,
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
        sides: for each side of the dataset, what its new files are made of, by part of `view`.
        present: documents that the dataset has already.
    """

    path: Path
    view: View | None
    sides: Sequence[Sequence[Part]]
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
    if not _stays(parts[0]):
        raise ConfigError(
            f"{path}: its shards would have to change, because it has columns, or tokens of a "
            "column, that another dataset lacks, or format 1.0; `spec-data merge` writes a new "
            "dataset of them"
        )
    present = sum(int((~part.keep).sum()) for part in parts)
    own = inputs[0].manifest
    in_shards = _with_columns(parts, shard_columns(own))
    units = [unit for unit in view_units(in_shards) if unit.part]
    if not units:
        return Append(path=path, view=None, sides=(), present=present)
    draft = joined_draft("append", parts)
    sides = [_with_columns(parts, side.columns) for side in sides_of(own)]
    if sides:
        draft |= {"format_version": WITH_SIDES, "ancestors": lineage(own)}
    view = View(parts=in_shards, units=units, draft=draft)
    return Append(path=path, view=view, sides=sides, present=present)


def _stays(part: Part) -> bool:
    """Return whether all files of the dataset that grows can stay as they are."""
    if "sides" in part.stored.manifest.raw:
        return part.change.columns == part.stored.manifest.columns
    return part.unchanged


def _with_columns(parts: Sequence[Part], columns: tuple[Column, ...]) -> list[Part]:
    """Return parts of which only some columns are written."""
    return [replace(part, change=replace(part.change, columns=columns)) for part in parts]


def append_sizes(planned: Append) -> ViewSizes | None:
    """Return what would be added; None: nothing."""
    if planned.view is None:
        return None
    sizes = view_sizes(planned.view)
    more = [
        unit_bytes(parts, replace(unit, shard=None))
        for parts in planned.sides
        for unit in planned.view.units
    ]
    return replace(sizes, shards=sizes.shards + len(more), bytes=sizes.bytes + sum(more))


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
        target = {n: r for n, r in own.raw["files"].items() if n.startswith("target/")}
        if own.has_checksums:
            view.draft["files"] = target
        if planned.sides:
            view.draft["sides"] = _write_sides(path, planned, own, records)
        stage(path, view.draft, records)
    return finish_append(path) or Manifest.read(path / MANIFEST)


def _write_sides(
    path: Path, planned: Append, own: Manifest, records: Sequence[ShardRecord]
) -> list[dict[str, Any]]:
    """Write the files of the sides of new shards; return the manifest's `sides`.

    `records` are those of all shards, `own` is the manifest of the dataset as it was.
    """
    units = planned.view.units if planned.view else ()
    new = records[len(own.shards) :]
    found = []
    for number, (parts, entry) in enumerate(zip(planned.sides, own.raw["sides"], strict=True), 1):
        added = []
        for unit, shard in zip(units, new, strict=True):
            name = side_file(Path(shard.file).stem, number)
            record = finished_record(path, Path(name).stem)
            if record is None:
                part = parts[unit.part]
                data = unit_of(part.stored, unit.documents.tolist(), part.change)
                record = write_shard(path / name, data, part.change.columns)
                save_finished(path, Path(name).stem, record)
            else:
                check_shard(path, record)
            added.append(vars(record))
        found.append(entry | {"shards": [*entry["shards"], *added]})
    return found


def stage(
    path: Path, draft: dict[str, Any], records: Sequence[ShardRecord], tables: bytes | None = None
) -> None:
    """Write the files of a new manifest of a sealed dataset beside its present ones.

    `finish_append` then moves them into place. The lock of the directory is held.

    Args:
        path: the dataset.
        draft, records: see `seal`.
        tables: the new codec.safetensors; None: it stays as it is.
    """
    staged = path / VIEW_WORK / "staged"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    # The index is made of the shards in their place.
    links = ["shards", "target", *(n for n in draft.get("files", {}) if "/" not in n)]
    for name in links:
        (staged / name).symlink_to(Path("..") / ".." / name)
    seal(staged, draft, records)
    for name in links:
        (staged / name).unlink()
    if tables is not None:
        write_atomically(staged / TABLES, tables)
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
    counts = (manifest.raw["totals"]["documents"], layers)
    logger.info("%s has %d documents now; its layers: %s", path, *counts)
    return manifest
