"""How the shuffled documents of a group become packs, by the version of the order.

Version 2 puts each document, in shuffled order, into the fullest open pack that has room for it. At
most OPEN packs are open, so neighbouring packs hold documents that are neighbours in the shuffled
order, and a batch is a random sample. With more open packs, the last ones of a group would hold the
documents for which nothing was left to fill up with.

Version 1 sorted the documents by length first (best-fit decreasing). Its packs are slightly fuller,
but each holds documents of nearly one length, so a batch holds few lengths, and few sources where
the length depends on the source. Only runs that began with it still use it.
"""

import bisect
from collections.abc import Callable, Sequence

from spec_data.shards.packing import pack_documents

ORDER = 2
"""The version that new runs use and record; an order without a version is version 1."""

OPEN = 16
"""Most open packs: with more of them, packs are hardly fuller."""

_PACK_BITS = 32  # an open pack is one integer: its free tokens, then its number


def fill_in_order(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group documents into packs of at most `capacity` tokens, by best-fit in the given order.

    Where no open pack has room and OPEN packs are open, the fullest one is closed. Of equally full
    packs, the one opened first comes first. Packs are ordered by their first document, and the
    documents of a pack by index. Takes O(n log OPEN) comparisons.

    Raises:
        ValueError: a document is empty or longer than `capacity`.
    """
    packs: list[list[int]] = []
    free: list[int] = []  # open packs, ascending by free tokens, then by number
    for index, length in enumerate(lengths):
        if not 0 < length <= capacity:
            raise ValueError(f"document {index} has {length} tokens; packs hold 1 to {capacity}")
        tightest = bisect.bisect_left(free, length << _PACK_BITS)
        if tightest == len(free):
            if len(free) == OPEN:
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


FILL: dict[int, Callable[[Sequence[int], int], list[list[int]]]] = {
    1: pack_documents,
    ORDER: fill_in_order,
}
"""Returns the packs of documents of these lengths, by the version of the order."""
