"""Histograms: numbers to ranges of one width, which is 1, 2 or 5 times a power of ten."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_data.pages.page_parts import Axis, Bars


def whole_edges(most: int, bins: int = 24) -> np.ndarray:
    """Return the edges of at most `bins` ranges of whole numbers from 0 to `most`.

    Args:
        most: the largest number, at least 0. bins: at most so many ranges.

    Returns:
        int64 [B + 1]; range b holds the numbers from edge b to edge b + 1, without the latter.

    Raises:
        ValueError: `most` is negative.
    """
    if most < 0:
        raise ValueError("a histogram of counts begins at 0")
    width = 1
    while (most // width) + 1 > bins:
        digit = int(str(width)[0])
        width = width * 5 // 2 if digit == 2 else width * 2
    return np.arange(0, most // width + 2, dtype=np.int64) * width


def histogram(
    values: Any, title: str, x: str, y: str, name: str, note: str = "", bins: int = 24
) -> Bars:
    """Return the histogram of whole numbers of at least 0, as a bar chart.

    Args:
        values: the numbers, [N], N at least 1. title: of the chart. x, y: titles of the axes.
        name: of the series. note: a sentence below. bins: at most so many bars.

    Returns:
        A chart whose labels are ranges such as "50-99".

    Raises:
        ValueError: there are no numbers, or one is negative.
    """
    numbers = np.asarray(values, np.int64)
    if not len(numbers) or numbers.min() < 0:
        raise ValueError("a histogram needs numbers of at least 0")
    edges = whole_edges(int(numbers.max()), bins)
    counts = np.histogram(numbers, edges)[0]
    # numpy counts the last edge into the last range; no number is as large as that edge
    return Bars(
        title=title,
        x=Axis(title=x, format="text"),
        y=Axis(title=y, format="count", least=0),
        labels=range_labels(edges),
        series={name: counts.tolist()},
        note=note,
        dense=True,
    )


def range_labels(edges: Sequence[int] | np.ndarray) -> list[str]:
    """Return the ranges of whole numbers between edges as texts: "0-49", "50-99", or "3".

    Args:
        edges: ascending, [B + 1].

    Returns:
        B texts.
    """
    return [f"{a:,}" if b - a == 1 else f"{a:,}–{b - 1:,}" for a, b in itertools.pairwise(edges)]
