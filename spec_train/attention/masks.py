"""Which keys a query may see: one function per draft algorithm.

A mask is four numbers per query, so that every attention back end can use it: as a boolean table,
as chunks of queries with the keys that they see, or as the blocks of flex_attention, which needs no
table. Padding (document id -1) counts as one more document: every query sees at
least one key, and no real token sees padding.

A layer with a window of W sees the last W positions: a query at position p sees keys at positions
p - W + 1 to p, as in transformers. `docs/windows.md` compares this with trainers and engines.

B packs, Q queries, T keys. The keys are the tokens of the pack, unless a function says otherwise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.shards.packing import PADDING


@dataclass(frozen=True)
class AttentionMask:
    """The keys that each query sees: two spans without a common key.

    The first is of keys that queries of several blocks or chains see, the second of those of its
    own. A span whose last key is before its first one is empty.
    """

    keys: int  # T
    ends: Tensor  # int64 [B, Q, 4]: first and last key of the one span, and of the other

    def dense(self) -> Tensor:
        """Return the table, bool [B, 1, Q, T]."""
        key = torch.arange(self.keys, device=self.ends.device)
        return seen_between(key, *self.ends[..., None].unbind(-2))[:, None]


def seen_between(
    key: Tensor, first: Tensor, last: Tensor, other_first: Tensor, other_last: Tensor
) -> Tensor:
    """Return whether keys are in one of two spans; the arguments broadcast together."""
    return ((key >= first) & (key <= last)) | ((key >= other_first) & (key <= other_last))


def span_mask(first: Tensor, last: Tensor, keys: int) -> AttentionMask:
    """Each query sees the keys `first` to `last`, int64 [B, Q] each."""
    nothing = torch.zeros_like(last)
    return AttentionMask(keys, torch.stack([first, last, nothing, nothing - 1], dim=-1))


def causal_mask(document_ids: Tensor, window: int | None = None) -> AttentionMask:
    """Tokens see themselves and earlier tokens of their document, within the window.

    `document_ids` is int64 [B, T]; `window` is a number of positions, None: no limit.
    """
    slots = _slots(document_ids).expand_as(document_ids)
    first = document_starts(document_ids)  # [B, T]
    if window is not None:
        first = torch.maximum(first, slots - window + 1)
    return span_mask(first, slots, document_ids.shape[1])


def _slots(x: Tensor) -> Tensor:
    """Return 0, 1, ... for the second dimension of `x`."""
    return torch.arange(x.shape[1], device=x.device)


def document_starts(document_ids: Tensor) -> Tensor:
    """Return the first slot of each slot's document, int64 [B, T]; documents are contiguous."""
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(begins, _slots(document_ids), 0).cummax(dim=1).values


def parallel_mask(
    document_ids: Tensor,  # of every element, int64 [B, E]; -1 in padding
    anchors: Tensor,  # slot of the pack that the element starts from, int64 [B, E]
    depths: Tensor,  # of every element, int64 [B, E]
    # so many elements of depth 0, at consecutive slots, come first; the deeper ones follow, sorted
    # by anchor and then depth, padding last
    shallow: int,
    window: int | None = None,  # number of positions that an element sees, None: no limit
) -> AttentionMask:
    """P-EAGLE (arXiv 2602.01469): elements of several depths in one forward.

    An element sees the depth-0 elements of its document up to its own anchor, and the elements of
    its own anchor that are no deeper. Its position is anchor + depth. Padding among the deeper
    elements sees itself.

    Returns:
        A mask with E queries and E keys.
    """
    count = anchors.shape[1]
    index = anchors - anchors[:, :1]  # [B, E]: the depth-0 element at the anchor
    back = depths if window is None else window - 1  # depths before its own that an element sees
    first = document_starts(document_ids[:, :shallow]).gather(1, index.clamp(0, shallow - 1))
    if window is not None:
        first = torch.maximum(first, index + depths - back)
    # The deeper elements in the order of their anchors and depths: a chain is one span of them.
    first_deeper = _slots(anchors).expand_as(anchors) - shallow  # [B, E]
    padding = (first_deeper >= 0) & (document_ids == PADDING)
    levels = count + 1  # more than any depth
    order = (anchors * levels + depths).masked_fill(padding, int(1e18))  # ascending from `shallow`
    least = anchors * levels + (depths - back).clamp_min(1)
    chain = torch.searchsorted(order[:, shallow:].contiguous(), least.contiguous())  # [B, E]
    ends = (
        *(first, index.masked_fill(padding, -1)),
        *(
            shallow + torch.where(padding, first_deeper, chain),
            shallow + first_deeper.clamp_min(-1),
        ),
    )
    return AttentionMask(count, torch.stack(ends, dim=-1))


@dataclass(frozen=True)
class BlockWindow:
    """The window of a block draft's layer.

    Slots of a block are at the positions anchor, anchor + 1, ... A slot at position p sees context
    at positions >= p - size + 1. Of its own block it sees the same positions up to p if `causal`,
    else those from p - size + 1 to p + size - 1.
    """

    size: int  # positions
    causal: bool


def block_mask(
    document_ids: Tensor,  # of the context, int64 [B, T]
    anchors: Tensor,  # slot of the pack at which each block starts, int64 [B, N]
    real: Tensor,  # bool [B, N]: the block is one
    size: int,  # slots per block
    window: BlockWindow | None = None,  # of the layer; None: no limit
) -> AttentionMask:
    """DSpark and DFlash (arXiv 2602.06036): draft blocks over the context and their own slots.

    Queries are the slots of the N blocks. Keys are the T context tokens, then the blocks' slots. A
    block sees the context of its document strictly before its anchor, and all of its own slots, in
    both directions; a `window` limits both. A block that is not real sees only its own slots.

    Returns:
        A mask with N * size queries and T + N * size keys.
    """
    anchor, counted = (x.repeat_interleave(size, dim=1) for x in (anchors, real))  # [B, N * S]
    first = document_starts(document_ids).gather(1, anchor)
    slot = _slots(anchor)  # [N * S]
    inside = slot % size
    begin, end = slot - inside, slot - inside + size - 1  # the slots of the block
    if window is not None:
        first = torch.maximum(first, anchor + inside - window.size + 1)
        begin = torch.maximum(begin, slot - window.size + 1)
        end = torch.minimum(end, slot if window.causal else slot + window.size - 1)
    last = (anchor - 1).masked_fill(~counted, -1)
    length = document_ids.shape[1]
    own = (length + x.expand_as(last) for x in (begin, end))
    return AttentionMask(length + anchor.shape[1], torch.stack([first, last, *own], dim=-1))
