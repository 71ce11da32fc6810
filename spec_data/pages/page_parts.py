"""What a page consists of, as plain values: the parts, and the JSON that the page's script reads.

Numbers stay numbers: the script formats them, so a test (or a reader) finds the figures themselves
in the page. A `format` is one of `FORMATS`.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Format = Literal["text", "count", "number", "share", "bytes", "seconds"]
FORMATS = ("text", "count", "number", "share", "bytes", "seconds")
"""count: 1,234. number: four significant digits. share: 0.25 is shown as 25.0 %. bytes: 1.50 GB."""

Value = str | int | float | None


def plain(value: Any) -> Any:
    """Return a value as JSON allows it: numbers that are not finite become None.

    Args:
        value: texts, numbers (also of numpy), None, and mappings and sequences of them.

    Returns:
        The same of dict, list, str, int, float, bool and None.

    Raises:
        TypeError: another type is inside.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(own) for name, own in value.items()}
    if hasattr(value, "tolist"):  # numpy arrays and numbers, tensors
        return plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(own) for own in value]
    raise TypeError(f"a page cannot hold {type(value).__name__}")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Key figures in a row: large values with their names.

    Attributes:
        items: (name, value, format) of each figure.
    """

    items: Sequence[tuple[str, Value, Format]]

    def to_json(self) -> dict[str, Any]:
        """Return what the script reads."""
        return {"kind": "figures", "items": [list(item) for item in self.items]}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a caption. The first column is left-aligned, numbers are right-aligned.

    Attributes:
        title: the caption; columns: (name, format) of each column; rows: one value per column.
        note: one sentence below, where it is needed.
    """

    title: str
    columns: Sequence[tuple[str, Format]]
    rows: Sequence[Sequence[Value]]
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what the script reads."""
        return {
            "kind": "table",
            "title": self.title,
            "columns": [list(column) for column in self.columns],
            "rows": [list(row) for row in self.rows],
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a chart.

    Attributes:
        title: the quantity with its unit, such as "tokens per document".
        format: how its numbers are written. log: a logarithmic scale.
        least, most: the ends of the scale; None: from the data.
    """

    title: str
    format: Format = "number"
    log: bool = False
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A line chart of one or several series over numbers. A y of None is a gap.

    Attributes:
        series: (x, y) points by the name of the series, in ascending x.
        points: mark each point; for series of few points.
    """

    title: str
    x: Axis
    y: Axis
    series: Mapping[str, Sequence[tuple[float, float | None]]]
    note: str = ""
    points: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what the script reads."""
        own = [{"name": n, "points": [list(p) for p in v]} for n, v in self.series.items()]
        return {
            "kind": "lines",
            **{name: getattr(self, name) for name in ("title", "note", "points")},
            **{name: vars(getattr(self, name)) for name in ("x", "y")},
            "series": own,
        }


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A bar chart of one or several series over labels; a histogram if the labels are ranges.

    Attributes:
        labels: one per bar; series: one number per label, by the name of the series.
        stacked: series on top of each other. dense: bars touch, as in a histogram.
    """

    title: str
    x: Axis
    y: Axis
    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    note: str = ""
    stacked: bool = False
    dense: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what the script reads."""
        own = [{"name": name, "values": list(v)} for name, v in self.series.items()]
        plain_fields = ("title", "note", "labels", "stacked", "dense")
        return {
            "kind": "bars",
            **{name: getattr(self, name) for name in plain_fields},
            **{name: vars(getattr(self, name)) for name in ("x", "y")},
            "series": own,
        }


@dataclass(frozen=True, kw_only=True)
class Note:
    """A paragraph of text; with `warning`, one that stands out and starts with "Warning"."""

    text: str
    warning: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what the script reads."""
        return {"kind": "note", "text": self.text, "warning": self.warning}


@dataclass(frozen=True, kw_only=True)
class Viewer:
    """A part that a script of its own builds, such as the viewer of tokens.

    The script is the text of a file of this project. It sets `page.viewers[name]` to a function of
    (element, data, tools) that fills the element; `tools` is described in page.js. It must write
    texts with `textContent` or `tools.make` only.

    Attributes:
        name: as in the script. data: what the function receives.
        script, style: JavaScript and CSS; equal texts are part of a page once.
    """

    name: str
    data: Any
    script: str
    style: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what the script reads."""
        return {"kind": "viewer", "name": self.name, "data": self.data}


Part = Figures | Table | Lines | Bars | Note | Viewer


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with an introduction of one or two sentences, and parts.

    Attributes:
        title, text: heading and introduction. parts: in the order in which they are shown.
    """

    title: str
    parts: Sequence[Part] = field(default_factory=tuple)
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole page.

    Attributes:
        title: such as "data/qwen3-8b". kind: what it is a page of, such as "Dataset".
        sections: in order. footer: one line, such as the program and its version.
    """

    title: str
    kind: str
    sections: Sequence[Section]
    footer: str = ""


# -- binning ---------------------------------------------------------------------------------------
# Histograms: numbers to ranges of one width, which is 1, 2 or 5 times a power of ten.


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
