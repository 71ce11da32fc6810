"""Tables of plain text, aligned for a terminal."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from spec_data.terminal import WIDTH
from spec_data.terminal.printable import one_line


def text_table(rows: Iterable[Sequence[Any]], align: str = "<>") -> str:
    """Return rows of equal length as aligned lines, two spaces between columns.

    Text of a last column on the left is wrapped, so that lines fit a terminal.

    Args:
        rows: cells, converted by `str`. align: "<" (left) or ">" (right) per column; the last one
            holds for all columns after it.
    """
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    if not cells:
        return ""
    *widths, last = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = align.ljust(len(cells[0]), align[-1])
    before, lines = sum(widths) + 2 * len(widths), []
    for *row, text in cells:
        start = "".join(f"{c:{s}{w}}  " for c, s, w in zip(row, sides, widths, strict=False))
        parts = [f"{text:>{last}}"]
        if sides[-1] == "<" and before + len(text) > WIDTH and before < WIDTH - 20:
            width = WIDTH - before
            parts = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        elif sides[-1] == "<":
            parts = [text]
        lines += [f"{start}{parts[0]}".rstrip()]
        lines += [" " * before + part for part in parts[1:]]
    return "\n".join(lines)
