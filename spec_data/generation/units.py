"""The units of a plan: their shards, the records of finished ones, and the dataset they make.

    out/shards/unit-00000.arrow         the shard
    out/.generate/unit-00000.json       its record, written after the shard, both atomically

A unit is finished when its record exists. No file that stays holds a time or the name of a machine,
so the finished directory has the same bytes even if the run was interrupted, or resumed on another
machine.
"""

import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import structs

from spec_data.corpus.documents import EDITED
from spec_data.generation.plan import ALSO, PLAN_COLUMNS, PROOF, Plan, load_plan, read_units
from spec_data.generation.workers import running_workers
from spec_data.models.devices import SMALLER_PIECES, is_memory_error, memory_error_text
from spec_data.shards.errors import MissingError, RunError
from spec_data.shards.file_system import lock
from spec_data.shards.files import (
    CACHE_VARIABLE,
    MANIFEST,
    remove_left_of,
    temporary_files,
    unit_name,
    write_atomically,
    writing,
)
from spec_data.shards.follow import LEFT_OUT, WORK
from spec_data.shards.likelihood import SUMS, summarise
from spec_data.shards.passing import Passed
from spec_data.shards.pictures import IMAGES
from spec_data.shards.records import read_json
from spec_data.shards.resumable import PATIENCE, read_record, write_record
from spec_data.shards.schema import Column, LeftOut, Manifest, ShardRecord
from spec_data.shards.seal import check_shard, file_records, seal
from spec_data.shards.writer import write_shard

if TYPE_CHECKING:  # else `inspect` and `status` would import all that runs a target
    from spec_data.generation.capture import CapturedUnit

logger = logging.getLogger(__name__)

SHARDS = "shards"


class UnitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of a finished unit, as unit-00000.json holds it.

    Documents that were `left_out` (indices in the unit) are counted in `dropped`, by reason;
    `agreement` has the `document_sums` of the others.
    """

    record: ShardRecord
    dropped: dict[str, int]
    left_out: list[int]
    agreement: list[list[float]]


def read_unit_record(out: Path, unit: int) -> UnitRecord | None:
    """Return the record of a unit; None: there is none that can be read."""
    try:
        return msgspec.convert(read_record(out / WORK / f"{unit_name(unit)}.json"), UnitRecord)
    except msgspec.ValidationError:
        return None


def finished_unit(out: Path, unit: int) -> UnitRecord | None:
    """Return the record of a unit if its shard is on disk, or a trainer has used and deleted it.

    None: it must be captured again.
    """
    record = read_unit_record(out, unit)
    if record is None:
        return None
    shard = out / record.record.file
    stored = shard.is_file() and shard.stat().st_size == record.record.bytes
    return record if stored or Passed.read(out / WORK).gone(unit) else None


def finish_unit(
    out: Path, unit: int, captured: "CapturedUnit", columns: tuple[Column, ...]
) -> None:
    """Write the shard of a unit, then its record."""
    record = write_shard(out / SHARDS / f"{unit_name(unit)}.arrow", captured.data, columns)
    content = {
        "record": structs.asdict(record),
        "dropped": captured.dropped,
        "left_out": captured.left_out,
        "agreement": captured.figures.tolist(),
    }
    write_record(out / WORK / f"{unit_name(unit)}.json", content)


def clear_leftovers(out: Path, units: Iterable[int]) -> None:
    """Make the folder of shards, and delete what killed processes left of `units` in it."""
    (out / SHARDS).mkdir(exist_ok=True)
    for unit in units:
        remove_left_of(out / SHARDS / f"{unit_name(unit)}.arrow")


def check_free_space(out: Path, needed: int, stage: bool = False) -> None:
    """Raise RunError if `needed` bytes do not fit on the disk of `out`, perhaps a `stage`."""
    free = shutil.disk_usage(out).free
    if needed <= free:
        return
    why = "are still to be written"
    advice = "Free some space, or write less: fewer documents or layers, or a smaller --codec"
    if stage:
        why = "are needed for the units on their way to the storage"
        advice = (
            f"Set {CACHE_VARIABLE} to a folder on another disk, or lower --max-shard-size in a new "
            "--out"
        )
    raise RunError(f"{out}: {needed:,} bytes {why}, but only {free:,} are free. {advice}")


@contextmanager
def explained_failures(out: Path) -> Iterator[None]:
    """Turn a full disk or full device memory into a RunError with advice."""
    try:
        with writing(out):
            yield
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        raise RunError(
            f"{memory_error_text(error)}. Run the same command again with "
            "fewer --batch-tokens, a smaller --dtype, or the target on several GPUs (--device-map "
            f"auto); finished shards are kept. {SMALLER_PIECES} in the environment helps where "
            "free memory lies in pieces"
        ) from None


# -- the end ---------------------------------------------------------------------------------------


def finalize(out: Path, checked: set[int], others: bool = False) -> Manifest | None:
    """Check every unit and turn the directory into a dataset.

    Each worker calls this after it has released its own lock. Of two that finish together, the
    second one sees that nobody else is running.

    Checksums of the units `checked`, which this process wrote, are not computed again. Return the
    manifest, also if another worker has finalized; None if one of `others` does so later.

    Raises:
        MissingError: there is no plan, or units are not finished.
        DatasetError: a shard is not the one that was written.
    """
    work = out / WORK
    try:
        if not (out / MANIFEST).is_file():
            with lock(work / "seal.lock"):
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
    shards = [r.record for r in finished.values()]
    documents = structs.replace(
        draft.documents,
        dropped=dict(sorted(dropped.items())),
        stored=sum(shard.rows for shard in shards),
    )
    if documents.rendered != documents.stored + sum(dropped.values()):
        raise RunError(f"documents do not add up: {documents}; this is a bug, please report it")
    draft = draft.changed(
        also_captured_with=[read_json(file) for file in sorted(work.glob(ALSO))],
        documents=documents,
        **_agreement(plan, finished, draft),
    )
    draft = _with_left_out(out, plan, finished, draft)
    draft = _with_images(out, work, draft)
    left_out = draft.left_out.places
    prompts = np.delete(plan.documents.prompts, np.array(left_out, np.int64))
    manifest = seal(out, draft, shards, work, prompts)
    for leftover in temporary_files(out):  # of runs that were killed while writing
        leftover.unlink()
    until = time.monotonic() + PATIENCE
    while work.exists() and time.monotonic() < until:  # `status` may create a lock in it again
        shutil.rmtree(work, ignore_errors=True)
    return manifest


def _agreement(plan: Plan, units: dict[int, UnitRecord], draft: Manifest) -> dict[str, Any]:
    """Return the agreement of each source, and the label that follows."""
    sources: list[str] = []
    for unit, record in units.items():
        of_unit = plan.documents.sources[slice(*plan.units[unit])]
        left_out = set(record.left_out)
        sources += [source for d, source in enumerate(of_unit) if d not in left_out]
    rows = [row for record in units.values() for row in record.agreement]
    agreement = summarise(np.array(rows).reshape(-1, SUMS), sources)
    policy = agreement.policy(draft.on_policy, draft.sampling_temperature)
    if EDITED in draft.documents.rendering:  # nobody knows which tokens are the target's
        policy = "off-policy"
    return {"agreement": agreement, "policy": policy}


def _with_images(out: Path, work: Path, draft: Manifest) -> Manifest:
    """Write which images the documents hold, if they do; return the draft with a record."""
    if not (work / IMAGES).is_file():
        return draft
    write_atomically(out / IMAGES, (work / IMAGES).read_bytes())
    return draft.changed(files={**draft.files, **file_records(out, [IMAGES])})


def _with_left_out(
    out: Path, plan: Plan, units: dict[int, UnitRecord], draft: Manifest
) -> Manifest:
    """Write ids and masks of the documents that were left out; return the draft with a record."""
    left_out = [(unit, index) for unit, record in units.items() for index in record.left_out]
    if not left_out:
        return draft
    documents = [plan.units[unit][0] + index for unit, index in left_out]
    write_shard(out / LEFT_OUT, plan.documents.select(documents), PLAN_COLUMNS)
    prompts = [f"{int(plan.documents.prompts[document]):016x}" for document in documents]
    record = LeftOut(places=documents, units=[unit for unit, _ in left_out], prompts=prompts)
    return draft.changed(left_out=record, files={**draft.files, **file_records(out, [LEFT_OUT])})
