"""Ranges of positions: acceptance may fall with the length of the answer, or of the context.

The *position* of a verification step is the number of tokens that its answer has before it, the
*context* that of all tokens before it, the prompt's included. Both are counted in ranges that
double, because texts have very different lengths.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

EDGES = (0, *(1 << power for power in range(4, 18)))
"""First value of every range; the last range has no end."""


def range_of(value: int) -> int:
    """Return the number of the range that holds a value of at least 0."""
    return bisect_right(EDGES, value) - 1


def range_json(
    number: int, rounds: int, length: float | None, interval: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return the line of a range: `start`, `end` (None: no end), `rounds`, the length, `interval`.

    The interval is None where too few prompts or documents reach the range.
    """
    end = EDGES[number + 1] if number + 1 < len(EDGES) else None
    figures = {"rounds": rounds, "acceptance_length": length, "interval": interval}
    return {"start": EDGES[number], "end": end, **figures}


def range_text(start: int, end: int | None) -> str:
    """Return a range in words: 16 to 31; of the last one, 131,072 or more."""
    return f"{start:,} to {end - 1:,}" if end else f"{start:,} or more"


# -- ranges that training had ----------------------------------------------------------------------


def contexts_of(first: np.ndarray, lengths: np.ndarray) -> dict[str, int]:
    """Return how many documents have supervised tokens behind contexts of each range, by its start.

    `first` are their first supervised tokens, and `lengths` their tokens as they are trained on,
    int64 [N] each. A document has all ranges from its first answer to its end.
    """
    ends = (*EDGES[1:], np.iinfo(np.int64).max)
    counts = (
        (str(start), int(((first < end) & (lengths > start)).sum()))
        for start, end in zip(EDGES, ends, strict=True)
    )
    return {start: count for start, count in counts if count}


def joined_contexts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the documents of several trainings by range."""
    found: dict[int, int] = {}
    for part in parts:
        for start, count in part.items():
            found[int(start)] = found.get(int(start), 0) + count
    return {str(start): count for start, count in sorted(found.items())}


def unseen_contexts(
    trained: Mapping[str, int] | None, measured: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return a warning about ranges that were measured, and that no training document has.

    `trained` are those of the draft, see `contexts_of`; None: not known. `measured` are lines of
    `range_json`.
    """
    if not trained:
        return None
    spans: list[tuple[int, int | None]] = []
    rounds = 0
    for line in measured:
        if not line["rounds"] or str(line["start"]) in trained:
            continue
        rounds += line["rounds"]
        if spans and spans[-1][1] == line["start"]:
            spans[-1] = (spans[-1][0], line["end"])
        else:
            spans.append((line["start"], line["end"]))
    if not spans:
        return None
    total = sum(line["rounds"] for line in measured)
    ranges = " and ".join(range_text(*span) for span in spans)
    return (
        f"{rounds:,} of {total:,} verifications have a context of {ranges} tokens, and no training "
        "document has an answer there: this draft learned nothing about them. Train on documents "
        "of such lengths, with a --seq-len that does not cut them"
    )
