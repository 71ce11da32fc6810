"""The elements of a P-EAGLE forward: all of a batch, or those of one segment of its rows.

Sequence partitioning (arXiv 2602.01469, Algorithm 1): depth 0 belongs to the segment of its slot,
deeper elements to that of the slot after their anchor; every segment also reads the depth-0
elements before it, of the documents that it holds a part of. An element's loss counts in its own
segment alone, and reads nothing outside, so the segments' losses and gradients add up to those of
one forward over everything.

B rows, T slots, K depths, E elements of a row in the forward, D of them deeper than 0, n elements
with a loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.shards.packing import PADDING
from spec_train.drafts.slots import document_offsets


@dataclass(frozen=True)
class Elements:
    """One forward: the slots `first` to `stop` of every row at depth 0, then deeper elements."""

    first: int
    stop: int
    document_ids: Tensor  # int64 [B, E], -1 in padding
    anchors: Tensor  # int64 [B, E]
    depths: Tensor  # int64 [B, E]
    place: Tensor  # int64 [n]: element b * E + e of those with a loss, by drafted position
    where: tuple[Tensor, Tensor, Tensor]  # their depth, row and anchor, int64 [n] each

    @property
    def deeper(self) -> int:
        """Elements of a row that are deeper than 0, padding included."""
        return self.anchors.shape[1] - (self.stop - self.first)


def segments_of(
    sample: Tensor, supervised: Tensor, document_ids: Tensor, count: int
) -> Iterator[Elements]:
    """Cut the rows into `count` segments of equal width; those without a loss are left out.

    Args:
        sample: bool [B, K, T] as `cod_sample` gives it.
        supervised: elements with a loss, bool [K, B, T], all of them in the sample.
        document_ids: int64 [B, T].
        count: segments; 1 is the flat forward.
    """
    length = document_ids.shape[1]
    width = -(-length // count)
    starts = list(range(0, length, width))
    offsets = document_offsets(document_ids).masked_fill(document_ids == PADDING, 0)
    behind = offsets[:, starts].amax(0).tolist()  # slots of a started document, over all rows
    for start, reach in zip(starts, behind, strict=True):
        stop = min(start + width, length)
        own = torch.zeros_like(sample)
        own[:, 0, start:stop] = sample[:, 0, start:stop]
        before = max(start - 1, 0)
        own[:, 1:, before : stop - 1] = sample[:, 1:, before : stop - 1]
        counted = supervised & own.transpose(0, 1)
        if counted.any():
            yield _elements(own, counted, document_ids, start - reach, stop)


def _elements(
    own: Tensor, counted: Tensor, document_ids: Tensor, first: int, stop: int
) -> Elements:
    batch, depths, length = own.shape
    device = own.device
    row, level, anchor = own[:, 1:].nonzero(as_tuple=True)
    per_row = torch.bincount(row, minlength=batch)
    column = torch.arange(len(row), device=device) - (per_row.cumsum(0) - per_row)[row]
    deeper = int(per_row.max()) if len(row) else 0

    def table(flat: torch.Tensor, empty: int, shallow: Tensor) -> Tensor:
        deep = torch.full((batch, deeper), empty, device=device)
        deep[row, column] = flat
        return torch.cat([shallow, deep], dim=1)

    slots = torch.arange(first, stop, device=device).expand(batch, -1)
    anchors = table(anchor, 0, slots)
    place = torch.zeros(depths, batch, length, dtype=torch.long, device=device)
    place[0] = torch.arange(length, device=device) - first
    place[level + 1, row, anchor] = column + (stop - first)
    place += torch.arange(batch, device=device)[:, None] * anchors.shape[1]
    d, b, t = counted.nonzero(as_tuple=True)
    order = ((b * length + t + d) * depths + d).argsort()
    where = d[order], b[order], t[order]
    return Elements(
        first=first,
        stop=stop,
        document_ids=table(document_ids[row, anchor], PADDING, document_ids[:, first:stop]),
        anchors=anchors,
        depths=table(level + 1, 0, torch.zeros_like(slots)),
        place=place[where],
        where=where,
    )
