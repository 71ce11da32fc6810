"""A page: sections of figures, tables, charts and a viewer of tokens, as one HTML file.

`page.html` is the template; it escapes every text of the data. What the scripts read is JSON inside
a script element of a type that no browser runs. The content security policy allows the scripts and
the style of this file by their hashes, and nothing else. Equal pages have equal bytes.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import jinja2
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
Point = tuple[float, float | None]


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
    """One axis of a chart: the quantity with its unit, and the least value, where it is fixed."""

    title: str
    format: Format = "number"
    least: float | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines by name: (x, y) points in ascending x; None is a gap."""

    kind: ClassVar[str] = "chart"
    title: str
    x: Axis
    y: Axis
    series: Mapping[str, Sequence[Point]]
    note: str = ""

    def table(self) -> Table:
        """Return the data as a table: x, then one column per series."""
        points = [dict(line) for line in self.series.values()]
        return Table(
            title="",
            columns=[(self.x.title, self.x.format), *((n, self.y.format) for n in self.series)],
            rows=[[x, *(line.get(x) for line in points)] for x in sorted(set().union(*points))],
        )


@dataclass(frozen=True, kw_only=True)
class Viewer:
    """The viewer of tokens, at most one per page; `viewer.js` describes its data."""

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
        footer: one line, such as the program and its version.
    """

    title: str
    kind: str
    sections: Sequence[Section]
    footer: str = ""


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


def page_bytes(page: Page) -> bytes:
    """Return the HTML file of a page; equal pages and releases have equal bytes."""
    parts = [part for section in page.sections for part in section.parts]
    charts = [asdict(part) for part in parts if isinstance(part, Chart)]
    viewer = next((part.data for part in parts if isinstance(part, Viewer)), None)
    scripts = [_asset("page.js"), *([_asset("viewer.js")] if viewer else []), "page.start();\n"]
    if charts:
        library = _asset(CHART_FILE).split("//# sourceMappingURL=")[0].rstrip("\n")
        scripts.insert(0, f"/*\n{_asset('vendor/chart-LICENSE.md').strip()}\n*/\n{library}\n")
        charts = json.loads(json.dumps(charts), parse_constant=lambda _: None)  # NaN is no JSON
    style = _asset("page.css")
    rules = [
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, scripts))}",
        f"style-src {_hash(style)}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["shown"] = shown
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    text = environment.get_template("page.html").render(
        page=page,
        policy="; ".join(rules),
        style=Markup(style),
        scripts=list(map(Markup, scripts)),
        data={"charts": charts, "viewer": viewer},
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
