"""Write finished units, and read the records that say which units are finished.

A unit is finished when its record, .generate/unit-00000.json, exists. The record is written after
the shard, both atomically.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from spec_data.generation.capture import CapturedUnit
from spec_data.shards.files import dump_json, sha256_json, unit_name, write_atomically
from spec_data.shards.follow import WORK, used_marker
from spec_data.shards.likelihood import DocumentFigures
from spec_data.shards.schema import Column, ShardRecord
from spec_data.shards.writer import write_shard

SHARDS = "shards"


@dataclass(frozen=True, kw_only=True)
class FinishedUnit:
    """The record of a finished unit, as unit-00000.json holds it.

    Attributes:
        record: size and checksum of the shard.
        dropped: number of documents that were left out, by reason.
        left_out: their indices in the unit.
        figures: how well the other documents agree with the target; None if a release that did not
            measure it captured the unit.
    """

    record: ShardRecord
    dropped: dict[str, int]
    left_out: list[int]
    figures: DocumentFigures | None = None


def finished_unit(out: Path, unit: int) -> FinishedUnit | None:
    """Return the record of a finished unit, or None.

    A unit is finished if its shard is on disk, or was deleted after use.
    """
    file = out / WORK / f"{unit_name(unit)}.json"
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        checksum = raw.pop("checksum", None)  # older releases wrote none
        record = ShardRecord(**raw["record"])
        measured = raw.get("agreement")
        figures = DocumentFigures.from_json(measured) if measured else None
        dropped, left_out = raw["dropped"], raw.get("left_out", [])
        whole = sum(dropped.values()) == len(left_out) or "left_out" not in raw
        whole &= figures is None or len(figures.tokens) == record.rows
        whole &= checksum in (None, sha256_json(raw))
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
        "record": asdict(record),
        "dropped": captured.dropped,
        "left_out": captured.left_out,
        "agreement": captured.figures.to_json(),
    }
    finished["checksum"] = sha256_json(finished)
    write_atomically(out / WORK / f"{unit_name(unit)}.json", dump_json(finished))
    return record.bytes
