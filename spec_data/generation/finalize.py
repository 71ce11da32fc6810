"""Turn a directory whose units are all finished into a dataset."""

import logging
import shutil
import time
from collections import Counter
from pathlib import Path

from filelock import FileLock
from msgspec import structs

from spec_data.generation.plan import PLAN_COLUMNS, PROOF, Plan, load_plan, read_units
from spec_data.generation.proof import also_captured_with
from spec_data.generation.units import UnitRecord, finished_unit
from spec_data.generation.workers import running_workers
from spec_data.shards.errors import MissingError, RunError
from spec_data.shards.files import temporary_files
from spec_data.shards.follow import LEFT_OUT, WORK
from spec_data.shards.likelihood import DocumentFigures, summarise
from spec_data.shards.reader import MANIFEST
from spec_data.shards.records import read_json
from spec_data.shards.resumable import PATIENCE
from spec_data.shards.schema import LeftOut, Manifest
from spec_data.shards.seal import check_shard, file_records, seal
from spec_data.shards.writer import write_shard

logger = logging.getLogger(__name__)


def finalize(out: Path, checked: set[int], others: bool = False) -> Manifest | None:
    """Check every unit and turn the directory into a dataset.

    Each worker calls this after it has released its own lock. Two that finish together come here
    one after the other, so the second one sees that nobody else is running.

    Args:
        out: the directory.
        checked: units that this process wrote; their checksums are not computed again.
        others: there are other workers.

    Returns:
        The manifest, also if another worker has finalized; None if a worker that is still running,
        or has not run yet, does so later.

    Raises:
        MissingError: there is no plan, or units are not finished.
        DatasetError: a shard is not the one that was written.
    """
    work = out / WORK
    try:
        if not (out / MANIFEST).is_file():
            with FileLock(work / "seal.lock"):
                if not (out / MANIFEST).is_file():
                    return _finalize(out, work, checked, others)
    except FileNotFoundError:  # another worker has finalized, and removed the lock's folder
        if not (out / MANIFEST).is_file():
            raise
    shutil.rmtree(work, ignore_errors=True)
    return Manifest.read(out / MANIFEST)


def _finalize(out: Path, work: Path, checked: set[int], others: bool) -> Manifest | None:
    """Do the work of `finalize` while its lock is held."""
    units = {unit: finished_unit(out, unit) for unit in range(len(read_units(work)))}
    finished = {unit: record for unit, record in units.items() if record is not None}
    left = [unit for unit in units if unit not in finished]
    running = running_workers(work, PATIENCE) if others else []
    if others and (left or running):
        logger.info(
            "%s: %d of %d units are left for other workers%s; the one that finishes last seals "
            "the dataset",
            *(out, len(left), len(units), f" (running: {', '.join(running)})" if running else ""),
        )
        return None
    if not units or left or not (work / PROOF).is_file():
        raise MissingError(
            f"{out}: {len(left)} of {len(units)} units are not finished (first: {left[:3]}); run "
            "`spec-data generate` with the same options, or start the missing --workers"
        )
    plan, draft = load_plan(work), Manifest.of(read_json(work / PROOF), str(work / PROOF))
    dropped = Counter(draft.documents.dropped)
    for unit, record in finished.items():
        if unit not in checked:
            check_shard(out, record.record)
        dropped.update(record.dropped)
    shards = [r.record for r in finished.values() if r.record.rows]
    documents = structs.replace(
        draft.documents,
        dropped=dict(sorted(dropped.items())),
        stored=sum(shard.rows for shard in shards),
    )
    if documents.rendered != documents.stored + sum(dropped.values()):
        raise RunError(f"documents do not add up: {documents}; this is a bug, please report it")
    draft = draft.changed(also_captured_with=also_captured_with(work), documents=documents)
    draft = _with_agreement(plan, finished, draft)
    draft = _with_left_out(out, plan, finished, draft)
    manifest = seal(out, draft, shards, work)
    for leftover in temporary_files(out):  # of runs that were killed while writing
        leftover.unlink()
    until = time.monotonic() + PATIENCE
    while work.exists() and time.monotonic() < until:  # `status` may create a lock in it again
        shutil.rmtree(work, ignore_errors=True)
    return manifest


def _with_agreement(plan: Plan, units: dict[int, UnitRecord], draft: Manifest) -> Manifest:
    """Return the draft with the agreement of each source, and the label that follows."""
    sources = []
    for unit, record in units.items():
        first, last = plan.units[unit]
        left_out = {first + index for index in record.left_out}
        sources += [plan.documents.sources[d] for d in range(first, last) if d not in left_out]
    figures = DocumentFigures.join([record.figures for record in units.values()])
    agreement = summarise(figures, sources)
    policy = agreement.policy(draft.on_policy, draft.sampling_temperature)
    return draft.changed(agreement=agreement, policy=policy)


def _with_left_out(
    out: Path, plan: Plan, units: dict[int, UnitRecord], draft: Manifest
) -> Manifest:
    """Write ids and masks of the documents that were left out; return the draft with a record."""
    left_out = [(unit, index) for unit, record in units.items() for index in record.left_out]
    if not left_out:
        return draft
    documents = [plan.units[unit][0] + index for unit, index in left_out]
    write_shard(out / LEFT_OUT, plan.documents.select(documents), PLAN_COLUMNS)
    record = LeftOut(places=documents, units=[unit for unit, _ in left_out])
    return draft.changed(left_out=record, files={**draft.files, **file_records(out, [LEFT_OUT])})
