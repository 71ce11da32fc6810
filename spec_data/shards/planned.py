"""The documents of a generation plan: what is known about them before any state exists."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from spec_data.shards.checksums import read_batches
from spec_data.shards.errors import DatasetError


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The documents of a generation plan, in order; unit u has documents units[u] to units[u+1]."""

    ids: pa.StringArray
    lengths: np.ndarray  # int64 [N]
    supervised: np.ndarray  # int64 [N]
    first_supervised: np.ndarray  # int64 [N]; the length where there is none
    units: np.ndarray  # int64 [U + 1]


class PlanTokens:
    """Token ids and loss masks of planned documents, read from plan.arrow or left_out.arrow."""

    def __init__(self, file: Path) -> None:
        """Read `file`, a shard with the columns doc_id, input_ids and loss_mask.

        Raises:
            DatasetError: it is none, also where its checksum was computed again.
        """
        table = _whole_table(file)
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
        """Count tokens and supervised tokens of the documents; `units` as in Planned."""
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

    def read_into(
        self,
        index: int,
        out: Mapping[str, Tensor | np.ndarray],
        start: int,
        length: int | None,
    ) -> int:
        """Copy ids and mask of document `index`, at most `length` tokens, to `start` in `out`.

        `out` maps "input_ids" and "loss_mask" to CPU tensors or arrays [T]. Returns the number of
        tokens copied.
        """
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        count = last - first if length is None else min(length, last - first)
        for name, values in out.items():
            values[start : start + count] = self._flat[name][first : first + count]
        return count


def _whole_table(file: Path) -> pa.Table:
    """Read a table of planned documents, and check all that reading its values relies on."""
    try:
        schema, batches, _ = read_batches(file)
        table = pa.Table.from_batches(batches, schema)
        table.validate(full=True)
        kinds = {f.name: f.type for f in table.schema}
        known = {"doc_id": pa.string(), "input_ids": pa.int32(), "loss_mask": pa.uint8()}
        for name, kind in known.items():
            found = kinds.get(name)
            values = found.value_type if isinstance(found, pa.LargeListType) else found
            if values != kind or table.column(name).null_count:
                raise pa.ArrowInvalid(f"column {name} is missing, null or of another type")
        offsets = [
            [c.offsets.to_numpy() for c in table.column(name).chunks]
            for name in ("input_ids", "loss_mask")
        ]
        if not all(map(np.array_equal, *offsets)) or any(o[0] for o in offsets[0]):
            raise pa.ArrowInvalid("ids and masks have other lengths")
        return table
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise DatasetError(f"{file}: damaged ({error}); copy or generate it again") from None


def merged(stored: Planned, left: Planned, places: np.ndarray) -> Planned:
    """Return all planned documents in order: stored ones, and left-out ones at their `places`.

    `places` int64 [K] are ascending numbers of documents in the generation plan.
    """
    count = len(stored.lengths) + len(places)
    out = np.zeros(count, dtype=bool)  # True at the places of left-out documents
    out[places] = True

    def merge(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # [N - K] and [K] to int64 [N]
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
