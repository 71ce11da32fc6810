"""Which elements a P-EAGLE step trains on, and in which forward passes (arXiv 2602.01469).

An element is (anchor slot t, depth d) and is at slot t + d. Everything here is index tensors; the
draft and its loss are in `peagle.draft`.

B packs, T slots, K depths, E elements of a pack in a forward pass, D of them deeper than 0,
P elements of a segment deeper than 0 over all packs, n elements that count.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.packing import PADDING, shift_left
from spec_train.attention.masks import document_starts
from spec_train.drafts.slots import document_offsets, step_masks

# -- depth sampling --------------------------------------------------------------------------------
# Conditional drop sampling (COD, arXiv 2602.01469): which elements a P-EAGLE step trains on.
#
# Depth 0 keeps every slot. Depth d keeps int((n - d) * max(r ** d, floor)) of a document's n
# supervised slots. Its candidates are the supervised slots that directly follow, in the same
# document, a slot that depth d - 1 kept. So the depths of an anchor are 0, 1, .. without gaps, and
# the first slot of a document holds no element of depth 1 or more. Each document is sampled for
# itself: the result does not depend on its pack.


def cod_sample(
    supervised: Tensor, document_ids: Tensor, uniforms: Tensor, *, ratio: float, floor: float
) -> Tensor:
    """Sample elements by conditional drop.

    Args:
        supervised: the slot mask of depth 0, bool [B, T].
        document_ids: int64 [B, T], -1 in padding; documents are contiguous.
        uniforms: random numbers in [0, 1), float64 [K - 1, B, T]; every depth keeps the candidates
            with the smallest numbers.
        ratio: r.
        floor: the smallest share that a depth keeps.

    Returns:
        bool [B, K, T]: entry (b, d, t) is whether element (anchor t, depth d) is in the sample.
    """
    offsets, starts = document_offsets(document_ids), document_starts(document_ids)  # [B, T] each
    supervised = supervised & (document_ids != PADDING)
    total = torch.zeros_like(document_ids).scatter_add_(1, starts, supervised.long())
    total = total.gather(1, starts)  # [B, T], supervised slots of the document of each slot
    kept = document_ids != PADDING  # [B, T], by the element's own slot
    depths = [kept]
    for d, u in enumerate(uniforms, start=1):
        candidates = _shift_right(kept, offsets) & supervised  # [B, T]
        quota = ((total - d).clamp_min(0).double() * max(ratio**d, floor)).long()  # [B, T]
        # Sort by document, then candidates before others, then by random number.
        key = starts.double() + (u + ~candidates) / 2  # [B, T], in [start, start + 1)
        order = key.argsort(dim=1, stable=True)  # [B, T], slots in sorted order
        # The sorted place minus the document's start is the rank within the document.
        rank = torch.empty_like(order).scatter_(1, order, offsets)  # [B, T]
        kept = candidates & (rank < quota)
        anchored = kept
        for _ in range(d):  # from the element's slot to its anchor
            anchored = shift_left(anchored, document_ids)
        depths.append(anchored)
    return torch.stack(depths, dim=1)  # [B, K, T]


def _shift_right(values: Tensor, offsets: Tensor) -> Tensor:
    """Move booleans [B, T] right by one inside each document; `offsets` is int64 [B, T]."""
    out = torch.zeros_like(values)
    out[:, 1:] = values[:, :-1]
    return out & (offsets > 0)


# -- elements --------------------------------------------------------------------------------------
# Sequence partitioning (arXiv 2602.01469, Algorithm 1): an element of depth 0 belongs to the
# segment of its slot, a deeper element to the segment of the slot after its anchor. Every segment
# also reads the depth-0 elements before it that belong to documents it holds a part of. The
# invariant: the loss of an element is counted in its own segment only, and depends on nothing
# outside the segment's forward pass. So the losses and gradients of the segments add up to those of
# one forward pass over all elements.


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
    sample: Tensor,  # bool [B, K, T], as `cod_sample` returns it
    drafted: Tensor,  # elements that count, bool [K, B, T]; a subset of the sample
    document_ids: Tensor,  # int64 [B, T], -1 in padding
    count: int,  # number of segments; 1 is one forward pass over all elements
    # no element depends on inputs further back than this many positions; None: any may. With
    # windows in all layers it is the sum of W - 1 over the layers
    reach: int | None = None,
) -> Iterator[Elements]:
    """Cut the packs into `count` segments of equal width; skip those in which nothing counts."""
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
    own: Tensor,  # elements of the segment, bool [B, K, T]
    counted: Tensor,  # those that count, bool [K, B, T]
    document_ids: Tensor,  # int64 [B, T]
    first: int,  # the first slot that the segment reads at depth 0
    stop: int,  # the slot after its last one
) -> Elements:
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


def element_masks(
    mask: Tensor, rows: Tensor, choice: Tensor, document_ids: Tensor, sample: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sampled elements in the slot mask, and those with a loss; each bool [K, B, T].

    The others are misses: the target's choice is outside the draft vocabulary. `mask`, `rows`,
    `choice` and `document_ids` are those of a `Frame`; `sample` is bool [B, K, T].
    """
    inside = torch.zeros_like(mask)  # [B, T]
    inside.view(-1)[rows] = choice >= 0
    sampled, depths = sample.transpose(0, 1), sample.shape[1]  # [K, B, T]
    drafted = step_masks(mask, document_ids, depths) & sampled
    return drafted, step_masks(inside, document_ids, depths) & sampled


class InTurn(torch.autograd.Function):
    """The sum of losses, each computed and differentiated before the next one starts."""

    @staticmethod
    def forward(ctx: Any, losses: Sequence[Callable[[], Tensor]], *parameters: Tensor) -> Tensor:
        total, gradients = None, [torch.zeros_like(p) for p in parameters]
        for loss in losses:
            with torch.enable_grad():
                value = loss()
            # The backward pass of a training loop runs outside autocast, so this one does too.
            with torch.autocast(value.device.type, enabled=False):
                parts = torch.autograd.grad(value, parameters)
            for gradient, part in zip(gradients, parts, strict=True):
                gradient += part
            total = value.detach() if total is None else total + value.detach()
        ctx.save_for_backward(*gradients)
        assert total is not None  # there is at least one loss
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient * grads[0].to(gradient.dtype) for gradient in ctx.saved_tensors)
