"""The elements of a P-EAGLE forward pass: all of a batch, or those of one segment of its packs.

In: a sample of elements. Out: index tables of one forward pass per segment.

Sequence partitioning (arXiv 2602.01469, Algorithm 1): an element of depth 0 belongs to the segment
of its slot, a deeper element to the segment of the slot after its anchor. Every segment also reads
the depth-0 elements before it that belong to documents it holds a part of. The invariant: the loss
of an element is counted in its own segment only, and depends on nothing outside the segment's
forward pass. So the losses and gradients of the segments add up to those of one forward pass over
all elements.

B packs, T slots, K depths, E elements of a pack in the forward pass, D of them deeper than 0,
P elements of a segment deeper than 0 over all packs, n elements that count.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.shards.packing import PADDING
from spec_train.drafts.slots import document_offsets


@dataclass(frozen=True)
class Elements:
    """One forward pass: slots `first` to `stop` - 1 of every pack at depth 0, then deeper elements.

    E = stop - first + D. The deeper ones are sorted by anchor, then depth, padding last.
    """

    first: int
    stop: int
    document_ids: Tensor  # int64 [B, E], -1 in padding
    anchors: Tensor  # int64 [B, E]
    depths: Tensor  # int64 [B, E]
    place: Tensor  # int64 [n]: flat element b * E + e of those that count, by drafted position
    where: tuple[Tensor, Tensor, Tensor]  # their depth, pack and anchor, int64 [n] each

    @property
    def deeper(self) -> int:
        """D: elements of a pack that are deeper than 0, padding included."""
        return self.anchors.shape[1] - (self.stop - self.first)


def segments_of(
    sample: Tensor, drafted: Tensor, document_ids: Tensor, count: int, reach: int | None = None
) -> Iterator[Elements]:
    """Cut the packs into `count` segments of equal width; skip those in which nothing counts.

    Args:
        sample: bool [B, K, T], as `cod_sample` returns it.
        drafted: elements that count, bool [K, B, T]; a subset of the sample.
        document_ids: int64 [B, T], -1 in padding.
        count: number of segments; 1 is one forward pass over all elements.
        reach: no element depends on inputs further back than this many positions; None: any may.
            With windows in all layers it is the sum of W - 1 over the layers.
    """
    length = document_ids.shape[1]
    width = -(-length // count)
    starts = list(range(0, length, width))
    offsets = document_offsets(document_ids).masked_fill(document_ids == PADDING, 0)  # [B, T]
    # Per segment: slots before its start that belong to a document it continues, over all packs.
    behind = offsets[:, starts].amax(0).tolist()  # [segments]
    for start, held in zip(starts, behind, strict=True):
        stop = min(start + width, length)
        own = torch.zeros_like(sample)  # [B, K, T]: elements of this segment
        own[:, 0, start:stop] = sample[:, 0, start:stop]
        before = max(start - 1, 0)  # the anchor of a deeper element is one slot to the left
        own[:, 1:, before : stop - 1] = sample[:, 1:, before : stop - 1]
        counted = drafted & own.transpose(0, 1)  # [K, B, T]
        if counted.any():
            first = start - (held if reach is None else min(held, reach))
            yield _elements(own, counted, document_ids, first, stop)


def _elements(
    own: Tensor, counted: Tensor, document_ids: Tensor, first: int, stop: int
) -> Elements:
    """Return the forward pass of a segment.

    Args:
        own: elements of the segment, bool [B, K, T].
        counted: those that count, bool [K, B, T].
        document_ids: int64 [B, T].
        first: the first slot that the segment reads at depth 0.
        stop: the slot after its last one.
    """
    batch, depths, length = own.shape
    device = own.device
    # The P deeper elements, pack by pack, anchor by anchor, so that neighbours see nearly the same;
    # depth = level + 1.
    row, anchor, level = own[:, 1:].transpose(1, 2).nonzero(as_tuple=True)  # [P] each
    per_row = own[:, 1:].flatten(1).sum(1)  # [B]
    before = per_row.cumsum(0) - per_row  # [B]: deeper elements of earlier packs
    column = torch.arange(len(row), device=device) - before[row]  # [P], in 0..D-1
    deeper = int(per_row.max()) if len(row) else 0  # D

    def table(flat: Tensor, empty: int, shallow: Tensor) -> Tensor:
        """Append values of the deeper elements [P] to those of depth 0 [B, E - D]: [B, E]."""
        deep = torch.full((batch, deeper), empty, device=device)  # [B, D]
        deep[row, column] = flat
        return torch.cat([shallow, deep], dim=1)

    slots = torch.arange(first, stop, device=device).expand(batch, -1)  # [B, E - D]
    anchors = table(anchor, 0, slots)  # [B, E]
    # The flat element b * E + e of every (depth, pack, anchor); only elements of `own` are read.
    place = torch.zeros(depths, batch, length, dtype=torch.long, device=device)  # [K, B, T]
    place[0] = torch.arange(length, device=device) - first
    place[level + 1, row, anchor] = column + (stop - first)
    place += torch.arange(batch, device=device)[:, None] * anchors.shape[1]
    # The n elements that count, sorted by pack, then drafted position, then depth.
    d, b, t = counted.nonzero(as_tuple=True)  # [n] each
    order = ((b * length + t + d) * depths + d).argsort()  # [n]
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
