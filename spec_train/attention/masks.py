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
from functools import partial

import torch
from torch import Tensor

from spec_data.shards.packing import PADDING

Predicate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(pack, query, key) indices, int64, broadcast together -> bool: whether the query sees the key."""


@dataclass(frozen=True)
class Spans:
    """The same as a predicate, as numbers: the keys that each query sees are one or two spans.

    The keys are `common` ones first, then others. A query sees the common keys `first` to `last`
    and the others `own_first` to `own_last`, counted from the first of the others; a span whose
    last key is before its first one is empty. All four are int64 [B, Q].
    """

    common: int
    first: Tensor
    last: Tensor
    own_first: Tensor
    own_last: Tensor

    def stacked(self) -> Tensor:
        """Return the four numbers of every query, int64 [B, Q, 4]."""
        return torch.stack([self.first, self.last, self.own_first, self.own_last], dim=-1)

    def of_queries(self, start: int) -> "Spans":
        """Return the spans of the queries from `start` on."""
        return Spans(self.common, *self.stacked()[:, start:].unbind(-1))


@dataclass(frozen=True)
class AttentionMask:
    """A predicate over (pack, query, key) and the extents of the three.

    `make_spans` returns the same as numbers, for back ends that cut the queries into chunks.
    """

    sees: Predicate
    batch: int
    queries: int
    keys: int
    device: torch.device
    make_spans: Callable[[], Spans]

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

    def spans() -> Spans:
        slots = torch.arange(length, device=document_ids.device).expand(batch, -1)  # [B, T]
        first = _document_starts(document_ids)  # [B, T]
        if window is not None:
            first = torch.maximum(first, slots - window + 1)
        return Spans(length, first, slots, slots, slots - 1)

    return AttentionMask(sees, batch, length, length, document_ids.device, spans)


def _document_starts(document_ids: Tensor) -> Tensor:
    """Return the first slot of each slot's document, int64 [B, T]; documents are contiguous."""
    slots = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(begins, slots, 0).cummax(dim=1).values


def _within(query: Tensor, key: Tensor, window: int | None) -> Tensor | bool:
    """Whether a key's position is in the window that ends at a query's position."""
    return True if window is None else query - key < window


def parallel_mask(
    document_ids: Tensor,
    anchors: Tensor,
    depths: Tensor,
    shallow: int,
    window: int | None = None,
) -> AttentionMask:
    """P-EAGLE (arXiv 2602.01469): elements of several depths in one forward.

    An element sees the depth-0 elements of its document up to its own anchor, and the elements of
    its own anchor that are no deeper. Its position is anchor + depth.

    Args:
        document_ids: of every element, int64 [B, E]; -1 in padding.
        anchors: slot of the pack that the element starts from, int64 [B, E].
        depths: of every element, int64 [B, E].
        shallow: so many elements of depth 0, at consecutive slots, come first; the deeper ones
            follow, sorted by anchor and then depth, padding last.
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

    spans = partial(_parallel_spans, document_ids, anchors, depths, shallow, window)
    return AttentionMask(sees, batch, count, count, anchors.device, spans)


def _parallel_spans(
    document_ids: Tensor, anchors: Tensor, depths: Tensor, shallow: int, window: int | None
) -> Spans:
    """Return the spans of `parallel_mask`; the arguments are its own.

    Padding among the deeper elements sees only itself: less than the predicate says, and the
    states of padding are never used.
    """
    count = anchors.shape[1]
    place = anchors - anchors[:, :1]  # [B, E]: the depth-0 element at the anchor
    back = depths if window is None else window - 1  # depths before its own that an element sees
    first = _document_starts(document_ids[:, :shallow]).gather(1, place.clamp(0, shallow - 1))
    if window is not None:
        first = torch.maximum(first, place + depths - back)
    # The deeper elements in the order of their anchors and depths: a chain is one span of them.
    own = torch.arange(count, device=anchors.device).expand_as(anchors) - shallow  # [B, E]
    padding = (own >= 0) & (document_ids == PADDING)
    levels = count + 1  # more than any depth
    keys = (anchors * levels + depths).masked_fill(padding, int(1e18))  # ascending from `shallow`
    least = anchors * levels + (depths - back).clamp_min(1)
    chain = torch.searchsorted(keys[:, shallow:].contiguous(), least.contiguous())  # [B, E]
    return Spans(
        shallow,
        first,
        place.masked_fill(padding, -1),
        torch.where(padding, own, chain),
        torch.where(own < 0, -1, own),
    )


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

    spans = partial(_block_spans, document_ids, anchors, kept, size, window)
    return AttentionMask(sees, batch, slots, length + slots, anchors.device, spans)


def _block_spans(
    document_ids: Tensor, anchors: Tensor, kept: Tensor, size: int, window: BlockWindow | None
) -> Spans:
    """Return the spans of `block_mask`; the arguments are its own."""
    anchor, real = (x.repeat_interleave(size, dim=1) for x in (anchors, kept))  # [B, N * S]
    first = _document_starts(document_ids).gather(1, anchor)
    slot = torch.arange(anchor.shape[1], device=anchors.device)  # [N * S]
    inside = slot % size
    begin, end = slot - inside, slot - inside + size - 1  # the slots of the block
    if window is not None:
        first = torch.maximum(first, anchor + inside - window.size + 1)
        begin = torch.maximum(begin, slot - window.size + 1)
        end = torch.minimum(end, slot if window.causal else slot + window.size - 1)
    last = (anchor - 1).masked_fill(~real, -1)
    return Spans(document_ids.shape[1], first, last, begin.expand_as(last), end.expand_as(last))
