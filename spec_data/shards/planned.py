"""The documents of a plan: what is known of them before any state exists."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The documents of a plan, in order, and the rows that bound its units, int64 [U + 1]."""

    ids: pa.StringArray
    lengths: np.ndarray  # int64 [N]
    supervised: np.ndarray  # int64 [N]
    first_supervised: np.ndarray  # int64 [N]; the length where there is none
    units: np.ndarray


class PlanTokens:
    """Token ids and masks of planned documents, read from a plan.arrow."""

    def __init__(self, file: Path) -> None:
        """Read `file`, a shard with nothing but ids and masks."""
        table = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
        self.ids = pa.concat_arrays(table.column("doc_id").chunks)
        chunks = {name: table.column(name).chunks for name in ("input_ids", "loss_mask")}
        flat = {
            name: np.concatenate([c.flatten().to_numpy() for c in parts])
            for name, parts in chunks.items()
        }
        self._flat = {name: torch.from_numpy(values) for name, values in flat.items()}
        sizes = [np.diff(c.offsets.to_numpy()) for c in chunks["loss_mask"]]
        self.offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)

    def planned(self, units: np.ndarray) -> Planned:
        """The documents' figures."""
        mask = self._flat["loss_mask"].numpy()
        lengths = np.diff(self.offsets)
        total = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        count = total[self.offsets[1:]] - total[self.offsets[:-1]]
        first = np.searchsorted(total, total[self.offsets[:-1]] + 1) - 1 - self.offsets[:-1]
        return Planned(
            ids=self.ids,
            lengths=lengths,
            supervised=count,
            first_supervised=np.where(count > 0, first, lengths),
            units=units,
        )

    def read_into(self, index: int, out: dict[str, Tensor], start: int, length: int | None) -> int:
        """Copy ids and mask of document `index`."""
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        count = last - first if length is None else min(length, last - first)
        for name, values in out.items():
            values[start : start + count].copy_(self._flat[name][first : first + count])
        return count


def merged(stored: Planned, left: Planned, places: np.ndarray) -> Planned:
    """Stored documents in order with those that were left out at their `places`."""
    count = len(stored.lengths) + len(places)
    out = np.zeros(count, dtype=bool)
    out[places] = True

    def merge(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        values = np.empty(count, np.int64)
        values[~out], values[places] = a, b
        return values

    order = merge(np.arange(len(stored.lengths)), np.arange(count)[len(stored.lengths) :])
    return Planned(
        ids=pa.concat_arrays([stored.ids, left.ids]).take(pa.array(order)),
        lengths=merge(stored.lengths, left.lengths),
        supervised=merge(stored.supervised, left.supervised),
        first_supervised=merge(stored.first_supervised, left.first_supervised),
        units=stored.units,
    )
