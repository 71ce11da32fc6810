"""From documents to packs and samples: pure functions of lengths, used by capture and training.

A pack holds whole documents side by side: the later tokens of a split one would lose their context.
`document_ids` numbers the documents of a pack 0, 1, ... and is -1 in padding; `position_ids`
restart at 0 in every document. Nothing (attention, shift, label) crosses a boundary.

Shapes: B packs, T slots per pack, D documents.
"""

import bisect
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
PADDING = -1
"""The document id of padding slots."""


OPEN = 16
"""Open packs of training: with more of them, packs are hardly fuller."""

_PACK_BITS = 32  # an open pack is one integer: its free tokens, then its number


def pack_documents(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group documents into packs of at most `capacity` tokens, by best-fit decreasing.

    Deterministic; ties go to the lower index. Packs are ordered by their first document, and the
    documents of a pack by index, so that documents near each other in the input stay so.

    Raises:
        ValueError: a document is empty or longer than `capacity`.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packs = fill_in_order([lengths[i] for i in order], capacity, len(order))
    return sorted(sorted(order[i] for i in pack) for pack in packs)


def fill_in_order(lengths: Sequence[int], capacity: int, most: int = OPEN) -> list[list[int]]:
    """Group documents into packs of at most `capacity` tokens, by best-fit in the given order.

    Where no open pack has room and `most` packs are open, the fullest one is closed. Of equally
    full packs, the one opened first comes first. Packs are ordered by their first document, and the
    documents of a pack by index. Takes O(n log most) comparisons.

    Raises:
        ValueError: a document is empty or longer than `capacity`.
    """
    packs: list[list[int]] = []
    free: list[int] = []  # open packs, ascending by free tokens, then by number
    for index, length in enumerate(lengths):
        if not 0 < length <= capacity:
            raise ValueError(f"a document has {length} tokens; packs hold 1 to {capacity}")
        tightest = bisect.bisect_left(free, length << _PACK_BITS)
        if tightest == len(free):
            if len(free) == most:
                del free[0]
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            entry = free.pop(tightest)
            room, pack = entry >> _PACK_BITS, entry & ((1 << _PACK_BITS) - 1)
        packs[pack].append(index)
        if room > length:
            bisect.insort(free, (room - length) << _PACK_BITS | pack)
    return packs


def cut_units(
    sizes: Sequence[int] | np.ndarray, most: int, least: int = 1
) -> list[tuple[int, int]]:
    """Cut documents, in their order, into units [first, last) whose sizes add up to `most` or less.

    `sizes` [D] are positive. Where there are so many, a unit has at least `least` documents, even
    if they are larger; the last one may be larger by up to `least - 1` documents.
    """
    units, first, total = [], 0, 0
    for index, size in enumerate(np.asarray(sizes).tolist()):
        if index - first >= least and len(sizes) - index >= least and total + size > most:
            units.append((first, index))
            first, total = index, 0
        total += size
    return [*units, (first, len(sizes))] if total else units


def runs(mask: np.ndarray) -> np.ndarray:
    """Return the begin and end of each run of ones in a mask, [T]: int64 [n, 2]."""
    edges = np.diff(mask.astype(bool), prepend=False, append=False)
    return np.flatnonzero(edges).reshape(-1, 2)


def row_layout(row_lengths: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
    """Return `(document_ids, position_ids)`, int64 [B, width], of packs of document lengths."""
    document_ids = torch.full((len(row_lengths), width), PADDING)
    position_ids = torch.zeros(len(row_lengths), width, dtype=torch.long)
    for b, lengths in enumerate(row_lengths):
        start = 0
        for d, length in enumerate(lengths):
            document_ids[b, start : start + length] = d
            position_ids[b, start : start + length] = torch.arange(length)
            start += length
    return document_ids, position_ids


def shift_left(values: Tensor, document_ids: Tensor) -> Tensor:
    """Move `values` [B, T, ...] left by one inside each document, zero-filling its last slot.

    `document_ids` is int64 [B, T]; padding becomes zero. The result is a new tensor.
    """
    out = torch.zeros_like(values)
    out[:, :-1] = values[:, 1:]
    crosses = torch.ones_like(document_ids, dtype=torch.bool)
    crosses[:, :-1] = document_ids[:, 1:] != document_ids[:, :-1]
    crosses |= document_ids == PADDING
    return out.masked_fill_(crosses.view(*crosses.shape, *[1] * (values.ndim - 2)), 0)


def block_causal_mask(document_ids: Tensor, window: int | None = None) -> Tensor:
    """Return the attention mask, bool [B, 1, T, T]: True where query slot i sees key slot j.

    That is: j <= i, the same document, and i - j < `window` in layers with a sliding window.
    (Documents are contiguous, so distance in slots is distance in tokens.) Padding counts as one
    more document, so every query sees at least itself.
    """
    slots = torch.arange(document_ids.shape[1], device=document_ids.device)  # [T]
    distance = slots[:, None] - slots[None, :]  # [T, T]: i - j
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    same = document_ids[:, :, None] == document_ids[:, None, :]  # [B, T, T]
    return (same & seen)[:, None]


def even_sample(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items: the middles of equal stretches, in order."""
    count, size = len(items), min(len(items), most)
    return [items[(2 * i + 1) * count // (2 * size)] for i in range(size)]


def sample_documents(lengths: np.ndarray, budget: int) -> list[int]:
    """Return indices of an even sample of documents with about `budget` tokens, one at least.

    `lengths` are the tokens per document, int64 [D].
    """
    count = len(lengths)
    return even_sample(range(count), max(1, budget * count // max(1, int(lengths.sum()))))
