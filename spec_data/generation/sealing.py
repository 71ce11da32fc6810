"""Turn a directory whose units are all finished into a dataset."""

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

from spec_data.generation.plan import PLAN_COLUMNS, Plan, load_plan, read_units
from spec_data.generation.running import also_captured_with
from spec_data.generation.unit_records import FinishedUnit, finished_unit
from spec_data.generation.worker_locks import PATIENCE, running_workers
from spec_data.paths import check_directory_to_write
from spec_data.shards.errors import MissingError, RunError
from spec_data.shards.files import temporary_files
from spec_data.shards.follow import LEFT_OUT, WORK
from spec_data.shards.likelihood import DocumentFigures, measured_policy, summarise
from spec_data.shards.reader import MANIFEST
from spec_data.shards.reclaim import seal_lock, units_to_keep
from spec_data.shards.schema import Manifest
from spec_data.shards.seal import check_shard, file_records, seal
from spec_data.shards.writer import write_shard

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
    draft = json.loads((work / "target.json").read_text(encoding="utf-8"))
    records, dropped = [], dict(draft["documents"]["dropped"])
    for unit, finished in sorted(units.items()):
        if finished is None:
            continue
        if unit not in (checked or ()):
            check_shard(out, finished.record)
        if finished.record.rows:
            records.append(finished.record)
        for reason, count in finished.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    others = also_captured_with(work)
    if others:
        draft["also_captured_with"] = others
    draft["documents"]["dropped"] = dict(sorted(dropped.items()))
    draft["documents"]["stored"] = sum(r.rows for r in records)
    record_agreement(plan, {u: f for u, f in units.items() if f}, draft)
    save_left_out(out, plan, {u: f.left_out for u, f in units.items() if f}, draft)
    manifest = seal(out, draft, records)
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


def record_agreement(plan: Plan, units: dict[int, FinishedUnit], draft: dict[str, Any]) -> None:
    """Add to the draft how well each source agrees with the target, and the label that follows.

    Nothing is added if a release that did not measure it captured one of the units.
    """
    parts, sources = [], []
    for unit, finished in sorted(units.items()):
        if finished.figures is None:
            return
        parts.append(finished.figures)
        first, last = plan.units[unit]
        left_out = {first + place for place in finished.left_out}
        own = plan.documents.sources[first:last]
        sources += [source for d, source in enumerate(own, first) if d not in left_out]
    draft["agreement"] = summarise(DocumentFigures.join(parts), sources)
    draft["policy"] = measured_policy(draft)


def check_counts(manifest: Manifest) -> None:
    """Check that rendered documents == stored documents + documents counted as dropped.

    Raises:
        RunError: they differ.
    """
    counts = manifest.raw["documents"]
    if counts["rendered"] != counts["stored"] + sum(counts["dropped"].values()):
        raise RunError(f"documents do not add up: {counts}; this is a bug, please report it")


def save_left_out(
    out: Path, plan: Plan, places: dict[int, list[int]], draft: dict[str, Any]
) -> None:
    """Write ids and masks of the documents that were left out, and record them in the draft.

    `places` maps a unit to the indices, in that unit, of its left out documents. Nothing is written
    if there are none.
    """
    # (unit, index of the document in the plan)
    found = [
        (unit, plan.units[unit][0] + place) for unit in sorted(places) for place in places[unit]
    ]
    if not found:
        return
    documents = [document for _, document in found]
    write_shard(out / LEFT_OUT, plan.documents.select(documents), PLAN_COLUMNS)
    draft["left_out"] = {"places": documents, "units": [unit for unit, _ in found]}
    draft["files"] = {**draft["files"], **file_records(out, [LEFT_OUT])}
