"""Which documents a page shows: evenly spaced, so that every part of a dataset is seen."""

import numpy as np

MOST_TOKENS = 4_000_000
"""Tokens that a page embeds at most, about 3 bytes each."""


def even_numbers(count: int, wanted: int) -> np.ndarray:
    """Return `wanted` numbers from 0 to `count` - 1 at equal distances, or all of them.

    Args:
        count: how many there are. wanted: how many are taken, at most.

    Returns:
        Ascending numbers without repetition, int64 [min(count, wanted)].
    """
    taken = min(count, wanted)
    return np.arange(taken, dtype=np.int64) * count // max(taken, 1)


def shown_documents(lengths: np.ndarray, wanted: int, most_tokens: int = MOST_TOKENS) -> np.ndarray:
    """Return the numbers of evenly spaced documents of at most `most_tokens` tokens together.

    Args:
        lengths: tokens per document, int64 [D]. wanted: documents, at most.
        most_tokens: tokens, at most; one document may have more.

    Returns:
        Ascending numbers of documents, int64 [n], n at least 1 if D and `wanted` are.
    """
    found = even_numbers(len(lengths), wanted)
    while len(found) > 1 and (tokens := int(lengths[found].sum())) > most_tokens:
        fewer = min(len(found) * most_tokens // tokens, len(found) - 1)
        found = even_numbers(len(lengths), max(fewer, 1))
    return found


def affordable(found: np.ndarray, costs: np.ndarray, most: float) -> np.ndarray:
    """Return evenly spaced members of a sample whose costs together are at most `most`.

    Args:
        found: numbers of documents, int64 [n]. costs: of every document, [D]. most: a sum.

    Returns:
        Some of `found` in their order; at least one of them, also if it exceeds the limit.
    """
    taken = found
    while len(taken) > 1 and float(costs[taken].sum()) > most:
        taken = found[even_numbers(len(found), len(taken) - 1)]
    return taken


def sample_text(shown: int, total: int, option: str) -> str:
    """Say how many documents are shown of how many, and which option shows more.

    Args:
        shown, total: numbers of documents. option: such as "--documents".

    Returns:
        One or two sentences.
    """
    if shown == total:
        return f"All {total:,} documents are in this page." if total != 1 else "One document."
    return (
        f"This page holds {shown:,} of {total:,} documents, evenly spaced. "
        f"{option} N takes another number."
    )
