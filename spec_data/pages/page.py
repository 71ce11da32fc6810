"""A page: sections of figures, tables, charts and a viewer of tokens, as one HTML file.

The file needs no network and no other file. `page.html` is the template; it escapes every text of
the data. What the scripts read is JSON inside a script element of a type that no browser runs. The
content security policy allows the scripts and the style of this file by their hashes, and nothing
else: no network, no event attributes, no frames, no forms. Equal pages have equal bytes.
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

CHART_FILE = "vendor/chart-4.6.1.umd.min.js"
_HERE = Path(__file__).parent
_NAMELESS = "\u2013"  # what stands for a value that is not known

Format = Literal["text", "count", "number", "share", "bytes"]
"""count: 1,234. number: four significant digits. share: 0.25 is shown as 25.0 %. bytes: 1.50 GB."""

Value = str | int | float | None
Points = Sequence[tuple[float, float | None]]


# -- parts -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Key figures in a row: large values with their names, as (name, value, format)."""

    kind: ClassVar[str] = "figures"
    items: Sequence[tuple[str, Value, Format]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a caption; texts are left-aligned, numbers right-aligned.

    Attributes:
        title: the caption; columns: (name, format) of each column; rows: one value per column.
        note: one sentence below, where it is needed.
    """

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[tuple[str, Format]]
    rows: Sequence[Sequence[Value]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Note:
    """A paragraph of text; with `warning`, one that stands out and starts with "Warning"."""

    kind: ClassVar[str] = "note"
    text: str
    warning: bool = False


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

    kind: ClassVar[str] = "lines"
    title: str
    x: Axis
    y: Axis
    series: Mapping[str, Points]
    note: str = ""
    points: bool = False

    def table(self) -> Table:
        """Return the data as a table: x, then one column per series."""
        columns = [dict(points) for points in self.series.values()]
        return Table(
            title="",
            columns=[(self.x.title, self.x.format), *((n, self.y.format) for n in self.series)],
            rows=[[x, *(c.get(x) for c in columns)] for x in sorted(set().union(*columns))],
        )


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A bar chart of one or several series over labels.

    Attributes:
        labels: texts below the bars. series: a number per label, by the name of the series.
        dense: bars touch, as in a histogram.
    """

    kind: ClassVar[str] = "bars"
    title: str
    x: str
    y: Axis
    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    note: str = ""
    dense: bool = False

    def table(self) -> Table:
        """Return the data as a table: the label, then one column per series."""
        return Table(
            title="",
            columns=[(self.x, "text"), *((name, self.y.format) for name in self.series)],
            rows=list(zip(self.labels, *self.series.values(), strict=True)),
        )


@dataclass(frozen=True, kw_only=True)
class Viewer:
    """The viewer of tokens, at most one per page; its data are made by `viewer.py`."""

    kind: ClassVar[str] = "viewer"
    data: dict[str, Any]


Part = Figures | Table | Lines | Bars | Note | Viewer


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

    def parts(self, *kinds: str) -> list[Any]:
        """Return all parts of some kinds, in order."""
        return [p for section in self.sections for p in section.parts if p.kind in kinds]


def histogram(values: Any, title: str, x: str, y: str, note: str = "") -> Bars:
    """Return the histogram of whole numbers of at least 0 [N], N at least 1, as a bar chart.

    Its labels are at most 24 ranges of one width, 1, 2 or 5 times a power of ten: "0", "50-99".
    """
    numbers = np.asarray(values, np.int64)
    most, width = int(numbers.max()), 1
    while most // width >= 24:
        width = width * 5 // 2 if str(width)[0] == "2" else width * 2
    edges = np.arange(0, most // width + 2) * width
    # numpy counts the last edge into the last range; no number is as large as that edge
    return Bars(
        title=title,
        x=x,
        y=Axis(title=y, format="count", least=0),
        labels=[
            f"{a:,}" if width == 1 else f"{a:,}–{b - 1:,}" for a, b in itertools.pairwise(edges)
        ],
        series={y: np.histogram(numbers, edges)[0].tolist()},
        note=note,
        dense=True,
    )


# -- values ----------------------------------------------------------------------------------------


def shown(value: Any, form: Format) -> str:
    """Return the text of a value; page.js has the same for the axes of charts."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return _NAMELESS
    if isinstance(value, str) or form == "text":
        return str(value)
    if form == "count":
        return f"{round(value):,}"
    if form == "share":
        return f"{100 * value:.1f}\u00a0%"
    if form == "bytes":
        return _bytes(value)
    return _significant(value)


def _bytes(value: float) -> str:
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:,.2f}".rstrip("0").rstrip(".") + f" {units[0]}"


def _significant(value: float) -> str:
    size = abs(value)
    if size and not 1e-3 <= size < 1e7:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits}e{int(power)}".replace("-", "\u2212")
    if value == int(value):
        return f"{int(value):,}"
    decimals = max(0, 3 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}".rstrip("0").rstrip(".") if decimals else f"{value:,.0f}"


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


# -- file ------------------------------------------------------------------------------------------


def page_bytes(page: Page) -> bytes:
    """Return the HTML file of a page; equal pages and releases have equal bytes."""
    charts, viewers = page.parts("lines", "bars"), page.parts("viewer")
    scripts = [_chart_library()] if charts else []
    scripts += [_asset("page.js")] + ([_asset("viewer.js")] if viewers else [])
    scripts.append("page.start();\n")
    style = _asset("page.css")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {_hash(style)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    data = {
        "charts": [{"kind": part.kind, **asdict(part)} for part in charts],
        "viewer": viewers[0].data if viewers else None,
    }
    text = _template().render(
        page=page,
        policy=policy,
        style=Markup(style),
        scripts=list(map(Markup, scripts)),
        data=Markup(safe_json(data)),
    )
    return text.encode("utf-8", "replace")  # a lone surrogate becomes a question mark


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


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["shown"] = shown
    return environment.get_template("page.html")


def _chart_library() -> str:
    """Return Chart.js with its licence, without the name of its source map."""
    code = _asset(CHART_FILE).split("//# sourceMappingURL=")[0].rstrip("\n")
    return f"/*\n{_asset('vendor/chart-LICENSE.md').strip()}\n*/\n{code}\n"


@cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
