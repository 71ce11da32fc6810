"""A page: sections of figures, tables, charts and a viewer of tokens, as one HTML file.

`page.html` is the template; it escapes every text of the data. What the scripts read is JSON inside
a script element of a type that no browser runs. The content security policy allows the scripts and
the style of this file by their hashes, and nothing else. Equal pages have equal bytes.
"""

import base64
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import jinja2
import numpy as np
from markupsafe import Markup

from spec_data.shards.errors import ConfigError, FileError
from spec_data.shards.files import write_atomically
from spec_data.terminal.command import Result
from spec_data.terminal.progress import size

CHART_FILE = "vendor/chart-4.6.1.umd.min.js"
_HERE = Path(__file__).parent

Format = Literal["text", "count", "number", "share", "bytes"]
"""count: 1,234. number: four significant digits. share: 0.25 is shown as 25.0 %. bytes: 1.50 GB."""

Value = str | int | float | None
Column = tuple[str, Format]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Key figures in a row: large values with their names, as (name, value, format)."""

    kind: ClassVar[str] = "figures"
    items: Sequence[tuple[str, Value, Format]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a caption: one value per column in each row, and a sentence below."""

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Note:
    """A paragraph of text; with `warning`, one that stands out."""

    kind: ClassVar[str] = "note"
    text: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a chart: the quantity with its unit, and the ends of the scale, where fixed."""

    title: str
    format: Format = "number"
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Bars over `labels`, or lines over numbers where there are none; None is a gap.

    Attributes:
        series: by its name, a value per label, or (x, y) points in ascending x.
    """

    kind: ClassVar[str] = "chart"
    title: str
    x: Axis
    y: Axis
    series: Mapping[str, Sequence[Any]]
    labels: Sequence[str] = ()
    note: str = ""

    def table(self) -> Table:
        """Return the data as a table: the label or x, then one column per series."""
        names = [(name, self.y.format) for name in self.series]
        rows: list[Sequence[Value]] = list(zip(self.labels, *self.series.values(), strict=False))
        if not self.labels:
            points = [dict(line) for line in self.series.values()]
            rows = [[x, *(own.get(x) for own in points)] for x in sorted(set().union(*points))]
        first: Column = (self.x.title, "text" if self.labels else self.x.format)
        return Table(title="", columns=[first, *names], rows=rows)


@dataclass(frozen=True, kw_only=True)
class Viewer:
    """The viewer of tokens, at most one per page; `viewer.py` describes its data."""

    kind: ClassVar[str] = "viewer"
    data: dict[str, Any]


Part = Figures | Table | Chart | Note | Viewer


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with an introduction of one or two sentences, and parts."""

    title: str
    parts: Sequence[Part] = ()
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

    def parts(self, kind: str) -> list[Any]:
        """Return all parts of a kind, in order."""
        return [p for section in self.sections for p in section.parts if p.kind == kind]


def histogram(values: Any, title: str, x: str, y: str, note: str = "") -> Chart:
    """Return the histogram of whole numbers of at least 0 [N], N at least 1, as a bar chart.

    Its labels are at most 24 ranges of one width, 1, 2 or 5 times a power of ten: "0", "50-99".
    """
    numbers = np.asarray(values, np.int64)
    most, width = int(numbers.max()), 1
    while most // width >= 24:
        width = width * 5 // 2 if str(width)[0] == "2" else width * 2
    edges = np.arange(0, most // width + 2) * width
    # numpy counts the last edge into the last range; no number is as large as that edge
    return Chart(
        title=title,
        x=Axis(title=x),
        y=Axis(title=y, format="count", least=0),
        labels=[
            f"{a:,}" if width == 1 else f"{a:,}–{b - 1:,}" for a, b in itertools.pairwise(edges)
        ],
        series={y: np.histogram(numbers, edges)[0].tolist()},
        note=note,
    )


def shown(value: Any, form: Format) -> str:
    """Return the text of a value; page.js has the same for the axes of charts."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "\u2013"
    if not isinstance(value, (int, float)) or form == "text":
        return str(value)
    if form == "share":
        return f"{100 * value:.1f}\u00a0%"
    if form == "bytes":
        return size(value)
    whole = form == "count" or value == int(value) or abs(value) >= 1000
    return f"{value:,.0f}" if whole and abs(value) < 1e15 else f"{value:.4g}"


def safe_json(value: Any) -> str:
    """Return ASCII JSON that is safe inside a script element; its texts may contain markup.

    Numbers that are not finite become null.
    """
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def page_bytes(page: Page) -> bytes:
    """Return the HTML file of a page; equal pages and releases have equal bytes."""
    charts, viewers = page.parts("chart"), page.parts("viewer")
    scripts = [_asset("page.js"), *([_asset("viewer.js")] if viewers else []), "page.start();\n"]
    if charts:
        library = _asset(CHART_FILE).split("//# sourceMappingURL=")[0].rstrip("\n")
        scripts.insert(0, f"/*\n{_asset('vendor/chart-LICENSE.md').strip()}\n*/\n{library}\n")
    style = _asset("page.css")
    rules = [
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, scripts))}",
        f"style-src {_hash(style)}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    viewer = viewers[0].data if viewers else None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["shown"] = shown
    text = environment.get_template("page.html").render(
        page=page,
        policy="; ".join(rules),
        style=Markup(style),
        scripts=list(map(Markup, scripts)),
        data=Markup(safe_json({"charts": list(map(asdict, charts)), "viewer": viewer})),
    )
    return text.encode("utf-8", "replace")  # a lone surrogate becomes a question mark


@cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@dataclass(frozen=True, kw_only=True)
class WrittenPage(Result):
    """An HTML file that was written, and the command to run next."""

    path: Path
    next_command: Sequence[str] = ()

    def __str__(self) -> str:
        return f"written: {self.path}"


def write_page(file: str | Path, page: Page, next_command: Sequence[str] = ()) -> WrittenPage:
    """Write the HTML file of a page in one step; an existing file is replaced.

    Raises:
        ConfigError: the file cannot be written there.
    """
    path, data = Path(file), page_bytes(page)
    try:
        write_atomically(path, data)
    except FileError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path}: the page cannot be written: {error.strerror}; pass another file with --out"
        ) from None
    return WrittenPage(path=path, next_command=next_command)
