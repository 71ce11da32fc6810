"""Which keys a query may see: one function per draft algorithm.

A mask is a predicate over indices, so that every attention back end can use it: as a boolean table,
or as the `mask_mod` of flex_attention, which never builds the table. Padding (document id -1)
counts as one more document: every query sees at least one key, and no real token sees padding.

B packs, Q queries, T keys. The keys are the tokens of the pack, unless a function says otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Predicate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(pack, query, key) indices, int64, broadcast together -> bool: whether the query sees the key."""


@dataclass(frozen=True)
class AttentionMask:
    """A predicate over (pack, query, key) and the extents of the three."""

    sees: Predicate
    batch: int
    queries: int
    keys: int
    device: torch.device

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the table, bool [B, 1, Q, T], or only its queries [start, stop)."""
        stop = self.queries if stop is None else stop
        pack, key = (torch.arange(size, device=self.device) for size in (self.batch, self.keys))
        query = torch.arange(start, stop, device=self.device)
        # [B, 1, 1], [queries, 1] and [T] broadcast to [B, queries, T]
        return self.sees(pack[:, None, None], query[:, None], key)[:, None].expand(
            self.batch, 1, stop - start, self.keys
        )


def causal_mask(document_ids: Tensor) -> AttentionMask:
    """Tokens see themselves and earlier tokens of their document; document_ids int64 [B, T]."""
    batch, length = document_ids.shape

    def sees(pack: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (document_ids[pack, query] == document_ids[pack, key])

    return AttentionMask(sees, batch, length, length, document_ids.device)


def parallel_mask(document_ids: Tensor, anchors: Tensor, depths: Tensor) -> AttentionMask:
    """P-EAGLE (arXiv 2602.01469): elements of several depths in one forward.

    An element sees the depth-0 elements of its document up to its own anchor, and the elements of
    its own anchor that are no deeper.

    Args:
        document_ids: of every element, int64 [B, E]; -1 in padding.
        anchors: slot of the pack that the element starts from, int64 [B, E].
        depths: of every element, int64 [B, E].

    Returns:
        A mask with E queries and E keys.
    """
    batch, count = anchors.shape

    def sees(pack: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document_ids[pack, query] == document_ids[pack, key]
        mine, its = anchors[pack, query], anchors[pack, key]
        before = (depths[pack, key] == 0) & (its <= mine)
        chain = (its == mine) & (depths[pack, key] <= depths[pack, query])
        return same & (before | chain)

    return AttentionMask(sees, batch, count, count, anchors.device)


def block_mask(document_ids: Tensor, anchors: Tensor, kept: Tensor, size: int) -> AttentionMask:
    """DSpark and DFlash (arXiv 2602.06036): draft blocks over the context and their own slots.

    Queries are the slots of the N blocks. Keys are the T context tokens, then the blocks' slots. A
    block sees the context of its document strictly before its anchor, and all of its own slots, in
    both directions. A block that is not kept sees only its own slots.

    Args:
        document_ids: of the context, int64 [B, T].
        anchors: slot of the pack at which each block starts, int64 [B, N].
        kept: bool [B, N].
        size: slots per block.

    Returns:
        A mask with N * size queries and T + N * size keys.
    """
    batch, length = document_ids.shape
    slots = anchors.shape[1] * size

    def sees(pack: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Indices broadcast to [pack, query, key]; all lines below are of that shape.
        block = query // size  # the block that the query is a slot of
        anchor = anchors[pack, block]
        place = key.clamp(max=length - 1)  # a valid token index, also for keys of blocks
        same = document_ids[pack, place] == document_ids[pack, anchor]
        context = (key < length) & (place < anchor) & same & kept[pack, block]
        own = (key >= length) & ((key - length) // size == block)
        return context | own

    return AttentionMask(sees, batch, slots, length + slots, anchors.device)
