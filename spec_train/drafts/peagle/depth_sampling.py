"""Conditional drop sampling (COD, arXiv 2602.01469): which elements a P-EAGLE step trains on.

An element is (anchor slot, depth). Depth 0 keeps every slot. Depth d keeps
int((n - d) * max(r ** d, floor)) of a document's n supervised slots; its candidates are the
successors, inside the document, of the slots that depth d - 1 kept, if they are supervised. So an
anchor has depths 0..some depth without gaps, and the first slot of a document is no element of
depth 1 or deeper. Documents are sampled one by one: what one gets does not depend on its pack.

B rows, T slots, K depths.
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
        uniforms: random numbers in [0, 1), float64 [K - 1, B, T]: at every depth the candidates
            with the smallest ones are kept.
        ratio, floor: r and the least share kept.

    Returns:
        bool [B, K, T]: entry (b, d, t) is whether element (anchor t, depth d), which stands at
        slot t + d, is in the sample.
    """
    offsets = document_offsets(document_ids)
    starts = torch.arange(document_ids.shape[1], device=document_ids.device) - offsets
    supervised = supervised & (document_ids != PADDING)
    total = torch.zeros_like(document_ids).scatter_add_(1, starts, supervised.long())
    total = total.gather(1, starts)  # supervised slots of the document, at every slot of it
    kept = document_ids != PADDING
    depths = [kept]
    for d, u in enumerate(uniforms, start=1):
        candidates = _shift_right(kept, offsets) & supervised
        quota = ((total - d).clamp_min(0).double() * max(ratio**d, floor)).long()
        # By document, then candidates before others, then by number: place - start is the rank.
        key = starts.double() + (u + ~candidates) / 2
        order = key.argsort(dim=1, stable=True)
        rank = torch.empty_like(order).scatter_(1, order, offsets)
        kept = candidates & (rank < quota)
        anchored = kept
        for _ in range(d):
            anchored = shift_left(anchored, document_ids)
        depths.append(anchored)
    return torch.stack(depths, dim=1)


def _shift_right(values: Tensor, offsets: Tensor) -> Tensor:
    """Move booleans [B, T] right by one inside each document."""
    out = torch.zeros_like(values)
    out[:, 1:] = values[:, :-1]
    return out & (offsets > 0)


class Draws:
    """Samples that were drawn for counting, until the losses that divide by the counts use them.

    A step counts all its micro-batches before the first loss, so there are as many samples to keep
    as a step has micro-batches; those that a loss has used go when counting starts again. They are
    found by the documents and shape of their batch.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._used: set[tuple[object, ...]] = set()

    def keep(self, key: tuple[object, ...], sample: Tensor) -> None:
        """Remember a sample for the loss of its batch."""
        for used in self._used:
            self._kept.pop(used, None)
        self._used.clear()
        self._kept[key] = sample

    def take(self, key: tuple[object, ...]) -> Tensor | None:
        """The sample of a batch, if one was drawn; it stays until counting starts again."""
        self._used.add(key)
        return self._kept.get(key)
