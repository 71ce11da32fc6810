"""Turn a directory whose units are all finished into a dataset."""

import json
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import structs

from spec_data.generation.capture import CapturedUnit
from spec_data.generation.plan import PLAN_COLUMNS, Plan, load_plan, read_units
from spec_data.generation.running import also_captured_with
from spec_data.generation.worker_locks import PATIENCE, running_workers
from spec_data.shards.errors import MissingError, RunError
from spec_data.shards.files import (
    dump_json,
    sha256_json,
    temporary_files,
    unit_name,
    write_atomically,
)
from spec_data.shards.follow import LEFT_OUT, WORK, used_marker
from spec_data.shards.likelihood import DocumentFigures, summarise
from spec_data.shards.reader import MANIFEST
from spec_data.shards.reclaim import seal_lock, units_to_keep
from spec_data.shards.records import read_json
from spec_data.shards.schema import Column, LeftOut, Manifest, ShardRecord
from spec_data.shards.seal import check_shard, file_records, seal
from spec_data.shards.writer import write_shard
from spec_data.terminal.paths import check_directory_to_write

# -- unit records ----------------------------------------------------------------------------------
# Write finished units, and read the records that say which units are finished.
#
# A unit is finished when its record, .generate/unit-00000.json, exists. The record is written after
# the shard, both atomically.


SHARDS = "shards"


@dataclass(frozen=True, kw_only=True)
class FinishedUnit:
    """The record of a finished unit, as unit-00000.json holds it.

    Attributes:
        record: size and checksum of the shard.
        dropped: number of documents that were left out, by reason.
        left_out: their indices in the unit.
        figures: how well the other documents agree with the target.
    """

    record: ShardRecord
    dropped: dict[str, int]
    left_out: list[int]
    figures: DocumentFigures


def finished_unit(out: Path, unit: int) -> FinishedUnit | None:
    """Return the record of a finished unit, or None.

    A unit is finished if its shard is on disk, or was deleted after use.
    """
    file = out / WORK / f"{unit_name(unit)}.json"
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        checksum = raw.pop("checksum")
        record = msgspec.convert(raw["record"], ShardRecord)
        figures = DocumentFigures.from_json(raw["agreement"])
        dropped, left_out = raw["dropped"], raw["left_out"]
        whole = sum(dropped.values()) == len(left_out)
        whole &= len(figures.tokens) == record.rows
        whole &= checksum == sha256_json(raw)
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        return None  # not a record of this program: the unit is captured again
    shard = out / record.file
    there = shard.is_file() and shard.stat().st_size == record.bytes
    if not there and not used_marker(out, unit).is_file():
        return None
    return FinishedUnit(record=record, dropped=dropped, left_out=left_out, figures=figures)


def finish_unit(out: Path, unit: int, captured: CapturedUnit, columns: tuple[Column, ...]) -> int:
    """Write the shard of a unit, then its record; return the bytes written."""
    record = write_shard(out / SHARDS / f"{unit_name(unit)}.arrow", captured.data, columns)
    finished = {
        "record": structs.asdict(record),
        "dropped": captured.dropped,
        "left_out": captured.left_out,
        "agreement": captured.figures.to_json(),
    }
    finished["checksum"] = sha256_json(finished)
    write_atomically(out / WORK / f"{unit_name(unit)}.json", dump_json(finished))
    return record.bytes


# -- sealing ---------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


def seal_directory(out: Path, checked: set[int] | None = None) -> Manifest:
    """Check every unit and turn the directory into a dataset.

    The checksums of shards in `checked` (units that this process wrote) are not computed again.

    Raises:
        ConfigError: the directory is read-only.
        MissingError: there is no plan, or units are not finished.
        DatasetError: a shard is not the one that was written.
        RunError: units of this directory are deleted after use (`--follow-keep`).
    """
    if (out / MANIFEST).is_file():
        shutil.rmtree(out / WORK, ignore_errors=True)
        return Manifest.read(out / MANIFEST)
    work = out / WORK
    if not (work / "plan.json").is_file():
        raise MissingError(f"{out}: no plan here; run `spec-data generate` first")
    check_directory_to_write("--out", out)
    with seal_lock(work):
        if units_to_keep(out):
            raise RunError(
                f"{out}: there is no dataset to seal, because `spec-train fit --follow-keep` "
                "deletes the units after use"
            )
        return _seal(out, work, checked)


def seal_if_last(out: Path, checked: set[int]) -> Manifest | None:
    """Seal a directory of several workers, unless units are missing or a worker is still running.

    Each worker calls this after it has released its own lock. Two that finish together come here
    one after the other, so the second one sees that nobody else is running.

    Returns:
        The manifest, also if another worker has sealed; None if a worker that is still running, or
        has not run yet, seals later.

    Raises:
        As `seal_directory`.
    """
    try:
        if not (out / MANIFEST).is_file():
            with seal_lock(out / WORK):
                if not (out / MANIFEST).is_file():
                    return None if _others(out) else _seal(out, out / WORK, checked)
    except FileNotFoundError:  # another worker has sealed, and removed the lock's folder
        if not (out / MANIFEST).is_file():
            raise
    return seal_directory(out)


def _others(out: Path) -> bool:
    """Tell whether other workers still have to run, and log it; the caller holds the seal lock."""
    work = out / WORK
    units = read_units(work)
    left = sum(finished_unit(out, unit) is None for unit in range(len(units)))
    running = running_workers(work, PATIENCE)
    if not left and not running:
        return False
    logger.info(
        "%s: %d of %d units are left for other workers%s; the one that finishes last seals the "
        "dataset",
        *(out, left, len(units), f" (running: {', '.join(running)})" if running else ""),
    )
    return True


def _seal(out: Path, work: Path, checked: set[int] | None) -> Manifest:
    """Do the work of `seal_directory` while its lock is held."""
    plan = load_plan(work)
    units = {u: finished_unit(out, u) for u in range(len(plan.units))}
    left = [u for u, finished in units.items() if finished is None]
    if left or not (work / "target.json").is_file():
        raise MissingError(
            f"{out}: {len(left)} of {len(units)} units are not finished (first: {left[:3]}); run "
            "`spec-data generate` with the same options, or start the missing --workers"
        )
    draft = Manifest.of(read_json(work / "target.json"), str(work / "target.json"))
    records, dropped = [], dict(draft.documents.dropped)
    for unit, finished in sorted(units.items()):
        if finished is None:
            continue
        if unit not in (checked or ()):
            check_shard(out, finished.record)
        if finished.record.rows:
            records.append(finished.record)
        for reason, count in finished.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    counts = structs.replace(
        draft.documents,
        dropped=dict(sorted(dropped.items())),
        stored=sum(r.rows for r in records),
    )
    draft = draft.changed(also_captured_with=also_captured_with(work), documents=counts)
    draft = with_agreement(plan, {u: f for u, f in units.items() if f}, draft)
    draft = save_left_out(out, plan, {u: f.left_out for u, f in units.items() if f}, draft)
    manifest = seal(out, draft, records, work)
    check_counts(manifest)
    for leftover in temporary_files(out):  # of runs that were killed while writing
        leftover.unlink()
    _delete(work)
    return manifest


def _delete(work: Path) -> None:
    """Delete .generate, also while a reader of worker locks creates one of them again."""
    until = time.monotonic() + PATIENCE
    while work.exists() and time.monotonic() < until:
        shutil.rmtree(work, ignore_errors=True)
    if work.exists():
        shutil.rmtree(work)


def with_agreement(plan: Plan, units: dict[int, FinishedUnit], draft: Manifest) -> Manifest:
    """Return the draft with the agreement of each source, and the label that follows."""
    parts, sources = [], []
    for unit, finished in sorted(units.items()):
        parts.append(finished.figures)
        first, last = plan.units[unit]
        left_out = {first + place for place in finished.left_out}
        own = plan.documents.sources[first:last]
        sources += [source for d, source in enumerate(own, first) if d not in left_out]
    agreement = summarise(DocumentFigures.join(parts), sources)
    policy = agreement.policy(draft.on_policy, draft.sampling_temperature)
    return draft.changed(agreement=agreement, policy=policy)


def check_counts(manifest: Manifest) -> None:
    """Check that rendered documents == stored documents + documents counted as dropped.

    Raises:
        RunError: they differ.
    """
    counts = manifest.documents
    if counts.rendered != counts.stored + sum(counts.dropped.values()):
        raise RunError(f"documents do not add up: {counts}; this is a bug, please report it")


def save_left_out(out: Path, plan: Plan, places: dict[int, list[int]], draft: Manifest) -> Manifest:
    """Write ids and masks of the documents that were left out; return the draft with a record.

    `places` maps a unit to the indices, in that unit, of its left out documents. Nothing is written
    if there are none.
    """
    # (unit, index of the document in the plan)
    found = [
        (unit, plan.units[unit][0] + place) for unit in sorted(places) for place in places[unit]
    ]
    if not found:
        return draft
    documents = [document for _, document in found]
    write_shard(out / LEFT_OUT, plan.documents.select(documents), PLAN_COLUMNS)
    left_out = LeftOut(places=documents, units=[unit for unit, _ in found])
    return draft.changed(left_out=left_out, files={**draft.files, **file_records(out, [LEFT_OUT])})
