"""The units of a plan: their shards, and the records of those that are finished.

    out/shards/unit-00000.arrow         the shard
    out/.generate/unit-00000.json       its record, written after the shard, both atomically

A unit is finished when its record exists. No file that stays holds a time or the name of a machine,
so the finished directory has the same bytes even if the run was interrupted, or resumed on another
machine.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import structs

from spec_data.generation.capture import CapturedUnit
from spec_data.shards.errors import RunError
from spec_data.shards.files import CACHE_VARIABLE, remove_left_of, unit_name, writing
from spec_data.shards.follow import WORK
from spec_data.shards.likelihood import DocumentFigures
from spec_data.shards.resumable import read_record, write_record
from spec_data.shards.schema import Column, ShardRecord
from spec_data.shards.writer import write_shard

SHARDS = "shards"


class UnitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of a finished unit, as unit-00000.json holds it.

    Attributes:
        record: size and checksum of the shard.
        dropped: number of documents that were left out, by reason.
        left_out: their indices in the unit.
        agreement: how well the other documents agree with the target, see `DocumentFigures`.
    """

    record: ShardRecord
    dropped: dict[str, int]
    left_out: list[int]
    agreement: dict[str, list[Any]]

    @property
    def figures(self) -> DocumentFigures:
        """How well the stored documents agree with the target."""
        return DocumentFigures.from_json(self.agreement)


def read_unit_record(out: Path, unit: int) -> UnitRecord | None:
    """Return the record of a unit; None: there is none, or it is damaged."""
    content = read_record(out / WORK / f"{unit_name(unit)}.json")
    return None if content is None else msgspec.convert(content, UnitRecord)


def finished_unit(out: Path, unit: int) -> UnitRecord | None:
    """Return the record of a unit if its shard is on disk; None: it must be captured again."""
    record = read_unit_record(out, unit)
    if record is None:
        return None
    shard = out / record.record.file
    stored = shard.is_file() and shard.stat().st_size == record.record.bytes
    return record if stored else None


def finish_unit(out: Path, unit: int, captured: CapturedUnit, columns: tuple[Column, ...]) -> None:
    """Write the shard of a unit, then its record."""
    record = write_shard(out / SHARDS / f"{unit_name(unit)}.arrow", captured.data, columns)
    content = {
        "record": structs.asdict(record),
        "dropped": captured.dropped,
        "left_out": captured.left_out,
        "agreement": captured.figures.to_json(),
    }
    write_record(out / WORK / f"{unit_name(unit)}.json", content)


def clear_leftovers(out: Path, units: Iterable[int]) -> None:
    """Make the folder of shards, and delete what killed processes left of `units` in it."""
    (out / SHARDS).mkdir(exist_ok=True)
    for unit in units:
        remove_left_of(out / SHARDS / f"{unit_name(unit)}.arrow")


def check_free_space(out: Path, needed: int, stage: bool = False) -> None:
    """Check that `needed` bytes fit on the disk of `out`, or of the `stage` of a remote folder.

    Raises:
        RunError: they do not.
    """
    free = shutil.disk_usage(out).free
    if needed > free and stage:
        raise RunError(
            f"{out}: {needed:,} bytes are needed for the units on their way to the storage, but "
            f"only {free:,} are free. Set {CACHE_VARIABLE} to a folder on another disk, or lower "
            "--max-shard-size in a new --out"
        )
    if needed > free:
        raise RunError(
            f"{out}: {needed:,} bytes are still to be written, but only {free:,} are free. Free "
            "some space, or use fewer --layers, a --limit or a smaller --max-length"
        )


@contextmanager
def explained_failures(out: Path) -> Iterator[None]:
    """Turn a full disk or full device memory into a RunError with advice."""
    try:
        with writing(out):
            yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"out of device memory ({str(error).splitlines()[0]}). Run the same command again with "
            "fewer --batch-tokens, a smaller --dtype, or the target on several GPUs (--device-map "
            "auto); finished shards are kept"
        ) from None
