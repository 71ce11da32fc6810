"""Planned documents that capture left out, kept beside a sealed dataset.

Their states are broken, so they are no rows of it. But the plan had them, and a run that follows
generation orders its batches by the plan: with them, the same run can be started on the sealed
dataset.
"""

from pathlib import Path
from typing import Any

from spec_data.shards.follow import LEFT_OUT
from spec_data.shards.seal import file_records
from spec_data.shards.writer import write_shard
from spec_data.units import PLAN_COLUMNS, Plan


def keep_left_out(
    out: Path, plan: Plan, places: dict[int, list[int]], draft: dict[str, Any]
) -> None:
    """Write ids and masks of the documents that units left out, and say so in the manifest draft.

    `places` are those in each unit. Nothing left out: nothing is written.
    """
    found = [
        (unit, plan.units[unit][0] + place) for unit in sorted(places) for place in places[unit]
    ]
    if not found:
        return
    rows = [row for _, row in found]
    write_shard(out / LEFT_OUT, plan.documents.select(rows, PLAN_COLUMNS), PLAN_COLUMNS)
    draft["left_out"] = {"places": rows, "units": [unit for unit, _ in found]}
    draft["files"] = {**draft["files"], **file_records(out, [LEFT_OUT])}
