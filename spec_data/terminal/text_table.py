"""Tables of plain text, aligned for a terminal."""

from collections.abc import Iterable, Sequence
from typing import Any


def text_table(rows: Iterable[Sequence[Any]], align: str = "<>") -> str:
    """Return rows of equal length as aligned lines, two spaces between columns.

    Args:
        rows: cells, converted by `str`. align: "<" (left) or ">" (right) per column; the last one
            holds for all columns after it.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = align.ljust(len(widths), align[-1])
    lines = (
        "  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
