"""Conditional drop sampling (COD, arXiv 2602.01469): which elements a P-EAGLE step trains on.

In: supervised slots, document ids and random numbers. Out: a sample of elements. An element is
(anchor slot, depth) and is at slot anchor + depth. Depth 0 keeps every slot. Depth d keeps
int((n - d) * max(r ** d, floor)) of a document's n supervised slots. Its candidates are the
supervised slots that directly follow, in the same document, a slot that depth d - 1 kept. So the
depths of an anchor are 0, 1, .. without gaps, and the first slot of a document holds no element of
depth 1 or more. Each document is sampled for itself: the result does not depend on its pack.

B packs, T slots, K depths.
"""

import torch
from torch import Tensor

from spec_data.shards.packing import PADDING, shift_left
from spec_train.drafts.slots import document_offsets


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
    offsets = document_offsets(document_ids)  # [B, T], index in the document
    starts = torch.arange(document_ids.shape[1], device=document_ids.device) - offsets
    # starts: [B, T], first slot of the document of each slot
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


class Draws:
    """Keeps the samples drawn by `slot_counts` for the losses that divide by those counts.

    An optimizer step counts all its micro-batches before the first loss, so it needs one sample per
    micro-batch. When counting starts again, the samples that a loss has used are dropped. The key
    of a sample is made of the documents and the shape of its batch.
    """

    def __init__(self) -> None:
        """Start without samples."""
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._used: set[tuple[object, ...]] = set()

    def keep(self, key: tuple[object, ...], sample: Tensor) -> None:
        """Keep a sample, bool [B, K, T], for the loss of its batch; drop the used ones."""
        for used in self._used:
            self._kept.pop(used, None)
        self._used.clear()
        self._kept[key] = sample

    def take(self, key: tuple[object, ...]) -> Tensor | None:
        """Return a batch's sample, bool [B, K, T], or None; it stays until counting restarts."""
        self._used.add(key)
        return self._kept.get(key)
