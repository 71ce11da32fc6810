"""Which keys a query may see: one function per draft algorithm.

A mask is a predicate over indices, so that every attention back end can use it: as a boolean table,
or as the `mask_mod` of flex_attention, which never builds the table. Padding (document id -1)
counts as one more document: every query sees at least one key, and no real token sees padding.

A layer with a window of W sees the last W positions: a query at position p sees keys at positions
p - W + 1 to p, as in transformers. `docs/windows.md` compares this with trainers and engines.

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


def causal_mask(document_ids: Tensor, window: int | None = None) -> AttentionMask:
    """Tokens see themselves and earlier tokens of their document, within the window.

    `document_ids` is int64 [B, T]; `window` is a number of positions, None: no limit.
    """
    batch, length = document_ids.shape

    def sees(pack: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document_ids[pack, query] == document_ids[pack, key]
        return (key <= query) & same & _within(query, key, window)

    return AttentionMask(sees, batch, length, length, document_ids.device)


def _within(query: Tensor, key: Tensor, window: int | None) -> Tensor | bool:
    """Whether a key's position is in the window that ends at a query's position."""
    return True if window is None else query - key < window


def parallel_mask(
    document_ids: Tensor, anchors: Tensor, depths: Tensor, window: int | None = None
) -> AttentionMask:
    """P-EAGLE (arXiv 2602.01469): elements of several depths in one forward.

    An element sees the depth-0 elements of its document up to its own anchor, and the elements of
    its own anchor that are no deeper. Its position is anchor + depth.

    Args:
        document_ids: of every element, int64 [B, E]; -1 in padding.
        anchors: slot of the pack that the element starts from, int64 [B, E].
        depths: of every element, int64 [B, E].
        window: number of positions that an element sees, None: no limit.

    Returns:
        A mask with E queries and E keys.
    """
    batch, count = anchors.shape
    positions = anchors + depths  # int64 [B, E], in the pack

    def sees(pack: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document_ids[pack, query] == document_ids[pack, key]
        mine, its = anchors[pack, query], anchors[pack, key]
        before = (depths[pack, key] == 0) & (its <= mine)
        chain = (its == mine) & (depths[pack, key] <= depths[pack, query])
        inside = _within(positions[pack, query], positions[pack, key], window)
        return same & (before | chain) & inside

    return AttentionMask(sees, batch, count, count, anchors.device)


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
    document_ids: Tensor,
    anchors: Tensor,
    kept: Tensor,
    size: int,
    window: BlockWindow | None = None,
) -> AttentionMask:
    """DSpark and DFlash (arXiv 2602.06036): draft blocks over the context and their own slots.

    Queries are the slots of the N blocks. Keys are the T context tokens, then the blocks' slots. A
    block sees the context of its document strictly before its anchor, and all of its own slots, in
    both directions; a `window` limits both. A block that is not kept sees only its own slots.

    Args:
        document_ids: of the context, int64 [B, T].
        anchors: slot of the pack at which each block starts, int64 [B, N].
        kept: bool [B, N].
        size: slots per block.
        window: of the layer; None: no limit.

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
        if window is None:
            return context | own
        ahead = key - length - query  # of a slot of the same block: its position minus the query's
        near = (ahead <= 0) if window.causal else (ahead < window.size)
        own = own & near & (ahead > -window.size)
        return (context & (anchor + query % size - place < window.size)) | own

    return AttentionMask(sees, batch, slots, length + slots, anchors.device)
