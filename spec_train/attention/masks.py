"""Which keys a query may see, one function per draft algorithm.

A mask is a predicate over indices, so that every attention back end can read it: as a boolean
table, or as the `mask_mod` of flex_attention, which never makes the table. Padding (document id
-1) is one more document: no row of a mask is empty, and nothing real sees it.

B rows, Q queries, T keys; T also counts the tokens of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Predicate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(row, query, key) indices, int64 that broadcast together -> whether the query sees the key."""


@dataclass(frozen=True)
class AttentionMask:
    """A predicate and its extents."""

    sees: Predicate
    batch: int
    queries: int
    keys: int
    device: torch.device

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The boolean table [B, 1, Q, T]; with a range, of these queries alone."""
        stop = self.queries if stop is None else stop
        row, key = (torch.arange(size, device=self.device) for size in (self.batch, self.keys))
        query = torch.arange(start, stop, device=self.device)
        return self.sees(row[:, None, None], query[:, None], key)[:, None].expand(
            self.batch, 1, stop - start, self.keys
        )


def causal_mask(document_ids: Tensor) -> AttentionMask:
    """Tokens see themselves and what came before in their document; document_ids [B, T]."""
    batch, length = document_ids.shape

    def sees(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (document_ids[row, query] == document_ids[row, key])

    return AttentionMask(sees, batch, length, length, document_ids.device)


def parallel_mask(document_ids: Tensor, anchors: Tensor, depths: Tensor) -> AttentionMask:
    """P-EAGLE (arXiv 2602.01469): elements of several depths in one forward.

    An element sees the depth-0 elements of its document up to its own anchor, and the elements of
    its own anchor that are no deeper.

    Args:
        document_ids: of every element, int64 [B, E]; -1 in padding.
        anchors: slot of the row that the element starts from, int64 [B, E].
        depths: int64 [B, E].
    """
    batch, count = anchors.shape

    def sees(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document_ids[row, query] == document_ids[row, key]
        mine, its = anchors[row, query], anchors[row, key]
        before = (depths[row, key] == 0) & (its <= mine)
        chain = (its == mine) & (depths[row, key] <= depths[row, query])
        return same & (before | chain)

    return AttentionMask(sees, batch, count, count, anchors.device)


def block_mask(document_ids: Tensor, anchors: Tensor, kept: Tensor, size: int) -> AttentionMask:
    """DSpark and DFlash (arXiv 2602.06036): blocks of queries over context keys and their own.

    Keys are the T context tokens followed by the blocks' own slots; queries are the blocks' slots.
    A block sees the context of its document strictly before its anchor, and all of its own slots,
    in both directions. A block that is not kept sees its own slots alone.

    Args:
        document_ids: of the context, int64 [B, T].
        anchors: slot of the row that each block starts at, int64 [B, N].
        kept: bool [B, N].
        size: slots per block; the queries are N * size.
    """
    batch, length = document_ids.shape
    slots = anchors.shape[1] * size

    def sees(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // size
        anchor = anchors[row, block]
        place = key.clamp(max=length - 1)
        same = document_ids[row, place] == document_ids[row, anchor]
        context = (key < length) & (place < anchor) & same & kept[row, block]
        own = (key >= length) & ((key - length) // size == block)
        return context | own

    return AttentionMask(sees, batch, slots, length + slots, anchors.device)
