"""Ranges of positions: acceptance may fall with the length of the answer, or of the context.

The *position* of a verification step is the number of tokens that its answer has before it, the
*context* that of all tokens before it, the prompt's included. Both are counted in ranges that
double, because texts have very different lengths.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

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
