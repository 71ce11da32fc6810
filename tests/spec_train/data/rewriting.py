"""Datasets written anew with other values, by other code than that of generation."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.seal import seal
from spec_data.shards.writer import UnitData, write_shard


def rewritten(source: Path, out: Path, change: Callable[[dict], dict], **changes: Any) -> Path:
    """Copy a dataset with `change(document)` for every document, and with other manifest fields."""
    old = HiddenStatesDataset(source)
    columns = changes.setdefault("columns", old.manifest.columns)
    (out / "shards").mkdir(parents=True)
    shutil.copytree(source / "target", out / "target")
    records, first = [], 0
    for record in old.manifest.shards:
        rows = [change(old[first + row]) for row in range(record.rows)]
        first += record.rows
        unit = UnitData.allocate(
            columns,
            [row["doc_id"] for row in rows],
            [row["source"] for row in rows],
            [[(t["role"], t["start"], t["end"]) for t in row["turns"]] for row in rows],
            [len(row["input_ids"]) for row in rows],
            np.concatenate([row["loss_mask"].numpy() for row in rows]),
        )
        for column in columns:
            values = torch.cat([row[column.name] for row in rows])
            unit.tokens[column.name][:] = column.coder.encode(values)
        records.append(write_shard(out / record.file, unit, columns))
    seal(out, old.manifest.changed(files={}, **changes), records)
    return out
