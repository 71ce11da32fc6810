"""A page: a sentence, three figures, and sections of tables, charts and a viewer of tokens.

`page.html` is the template; it escapes every text of the data. A page is one HTML file: what its
script reads is JSON inside a script element of a type that no browser runs, and the content
security policy allows the script and the style by their hashes, and nothing else. In a notebook it
is a part of the notebook (`notebook_html`), without the viewer and its script. Equal pages have
equal bytes. Charts are drawn here, so that they need no script.
"""

import base64
import csv
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal, TypeGuard
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from spec_data.shards.errors import SpecDataError
from spec_data.shards.files import remove_dead_of, write_atomically
from spec_data.shards.packing import even_sample
from spec_data.terminal.command import Result
from spec_data.terminal.paths import check_file_to_write
from spec_data.terminal.printable import printable, printable_json
from spec_data.terminal.progress import size

_HERE = Path(__file__).parent

Format = Literal["text", "count", "number", "share", "bytes"]
"""count: 1,234. number: four significant digits. share: 0.25 is shown as 25.0 %. bytes: 1.50 GB."""

Value = str | int | float | None
Column = tuple[str, Format]
Point = tuple[float, float | None]
Figure = tuple[str, Value, Format]
"""A key figure: its name, value and format."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a caption: one value per column in each row, and a sentence below.

    `best` is the number of a row that is marked. `links` are pages that lie beside this one, by the
    number of the row whose first text opens it.
    """

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    note: str = ""
    best: int | None = None
    links: Mapping[int, PurePosixPath] = field(default_factory=dict)

    def hrefs(self) -> dict[int, str]:
        """Return the addresses of `links`: always relative, whatever a directory is called."""
        return {row: f"./{quote(str(path))}" for row, path in self.links.items()}

    def texts(self) -> list[tuple[str, ...]]:
        """Return the texts of the rows; numbers of a column have equal digits."""
        columns = zip(self.columns, zip(*self.rows, strict=True), strict=True) if self.rows else ()
        return list(zip(*(_texts(values, form) for (_, form), values in columns), strict=True))


@dataclass(frozen=True, kw_only=True)
class Note:
    """A paragraph of text; with `warning`, one that stands out."""

    kind: ClassVar[str] = "note"
    text: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a chart: the quantity with its unit, and where it begins and reaches at least."""

    title: str
    format: Format = "number"
    least: float | None = None
    most: float | None = None

    def ticks(self, values: Sequence[float]) -> list[float]:
        """Return about five round numbers that enclose `values`: 1, 2 or 5 times powers of ten."""
        ends = [*values, *(end for end in (self.least, self.most) if end is not None)] or [0.0]
        low, high = min(ends) if self.least is None else self.least, max(ends)
        span = (high - low) or abs(high) or 1.0
        power = 10.0 ** math.floor(math.log10(span / 5))
        step = next(n * power for n in (1, 2, 5, 10) if span / (n * power) <= 5.001)
        if self.format == "count":
            step = max(1.0, step)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        every = [i * step for i in range(first, max(last, first + 1) + 1)]
        return [tick for tick in every if self.least is None or tick >= self.least]

    def label(self, value: float) -> str:
        """Return a short text of a tick: 20k, 1.5M, 25 %."""
        if self.format == "share":
            return f"{100 * value:g} %"
        for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= max(unit, 1e4):
                return f"{value / unit:g}{letter}"
        return f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines by name: (x, y) points in ascending x; None is a gap. Both axes are linear."""

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

    def csv(self) -> str:
        """Return the data as a link's address of a CSV file, numbers in full; None is empty."""
        table, file = self.table(), io.StringIO()
        writer = csv.writer(file)
        # a spreadsheet runs a text that begins so as a formula
        writer.writerow(f"'{n}" if n[:1] in tuple("=+-@\t\r") else n for n, _ in table.columns)
        writer.writerows(table.rows)
        data = base64.b64encode(file.getvalue().encode("utf-8", "replace")).decode()
        return f"data:text/csv;charset=utf-8;base64,{data}"

    def drawing(self) -> dict[str, Any]:
        """Return what `page.html` draws, in a space of WIDTH x HEIGHT: ticks, lines and points."""
        left, right, top, bottom = 52.0, WIDTH - 24.0, 10.0, HEIGHT - 46.0
        lines = {
            name: [(x, y) for x, y in line if _number(y)] for name, line in self.series.items()
        }
        every = [point for line in lines.values() for point in line]
        x_ticks = self.x.ticks([x for x, _ in every])
        y_ticks = self.y.ticks([y for _, y in every if y is not None])
        low, high = self.x.least if self.x.least is not None else x_ticks[0], x_ticks[-1]
        base = self.y.least if self.y.least is not None else y_ticks[0]

        def across(x: float) -> float:
            return round(left + (x - low) / (high - low) * (right - left), 1)

        def down(y: float) -> float:
            return round(bottom - (y - base) / (y_ticks[-1] - base) * (bottom - top), 1)

        series = []
        for number, (name, line) in enumerate(self.series.items()):
            parts: list[list[str]] = [[]]  # a gap ends a part
            for x, y in line:
                if y is None or not _number(y):
                    parts.append([])
                else:
                    parts[-1].append(f"{across(x)},{down(y)}")
            marks = [
                (
                    across(x),
                    down(y),
                    f"{name}: {shown(y, self.y.format)} at {shown(x, self.x.format)}",
                )
                for x, y in even_sample(lines[name], min(MARKS, len(lines[name])))
                if y is not None
            ]
            style = f"s{number % SERIES} d{(number + number // SERIES) % SERIES}"
            paths = [" ".join(part) for part in parts if len(part) > 1]
            series.append({"name": name, "style": style, "paths": paths, "marks": marks})
        return {
            "x": [(across(tick), self.x.label(tick)) for tick in x_ticks],
            "y": [(down(tick), self.y.label(tick)) for tick in y_ticks],
            "box": (left, top, right, bottom),
            "series": series,
        }


WIDTH, HEIGHT = 560, 300
SERIES = 6
"""Colours, and patterns of dashes: together they tell 36 lines apart."""
MARKS = 40
"""Points of a line that are marked, and say their values."""


def _number(value: Value) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Viewer:
    """The viewer of tokens, at most one per page; `viewer.js` describes its data."""

    kind: ClassVar[str] = "viewer"
    data: dict[str, Any]


Part = Table | Chart | Note | Viewer


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
        lead: what it is, in one sentence. figures: the three that matter.
        footer: one line, such as the program and its version.
    """

    title: str
    kind: str
    lead: str
    figures: Sequence[Figure]
    sections: Sequence[Section]
    footer: str = ""


def shown(value: Any, form: Format) -> str:
    """Return the text of a value."""
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


def _texts(values: Sequence[Value], form: Format) -> list[str]:
    """Return the texts of a column: of its numbers, the largest has four significant digits."""
    numbers = list(filter(_number, values))
    if form != "number" or all(x == int(x) for x in numbers):
        return [shown(x, form) for x in values]
    digits = max(0, 3 - math.floor(math.log10(max(map(abs, numbers)))))
    return [f"{x:,.{digits}f}" if _number(x) else shown(x, form) for x in values]


def with_rows(columns: Sequence[Column], documents: Sequence[dict[str, Any]]) -> list[Any]:
    """Return documents of the viewer: each value of their `row` with its text; nan: not known."""
    texts = Table(title="", columns=columns, rows=[one["row"] for one in documents]).texts()
    keys = [[None if isinstance(x, str) or x != x else x for x in one["row"]] for one in documents]
    rows = [list(map(list, zip(*pair, strict=True))) for pair in zip(keys, texts, strict=True)]
    return [{**one, "row": row} for one, row in zip(documents, rows, strict=True)]


def listed(names: Sequence[str]) -> str:
    """Return up to three names, or the first and how many more there are."""
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1:,} more"


def page_bytes(page: Page) -> bytes:
    """Return the HTML file of a page; equal pages and releases have equal bytes."""
    parts = [part for section in page.sections for part in section.parts]
    viewer = next((part.data for part in parts if isinstance(part, Viewer)), None)
    script, style = _asset("viewer.js") if viewer else "", _style()
    allowed = _hash(script) if script else "'none'"
    rules = f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; "
    rules += "base-uri 'none'; form-action 'none'"
    names = {"policy": rules, "script": Markup(script), "viewer": viewer}
    return _rendered(page, style, names).encode("utf-8", "replace")  # lone surrogates become "?"


def notebook_html(make: Callable[[], Page], text: str) -> str:
    """Return a page as a part of a notebook; `text` where it cannot be made any more."""
    try:
        return _rendered(make(), _style(), {"viewer": None, "policy": None})
    except SpecDataError:
        return f"<pre>{escape(printable(text))}</pre>"


def _style() -> str:
    """Return the style: nested, so that it changes nothing else of a notebook."""
    return f".spec {{\n{_asset('page.css')}}}\n"


def _rendered(page: Page, style: str, names: Mapping[str, Any]) -> str:
    given = {"page": page, "style": Markup(style), "width": WIDTH, "height": HEIGHT}
    return _template().render(given, **names)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
    )
    environment.filters["shown"] = shown
    environment.policies["json.dumps_function"] = _json
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html")


def _finalized(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _json(value: Any, **options: Any) -> str:
    return printable_json(json.dumps(value, **options))


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
    check_file_to_write("--out", file)
    remove_dead_of(Path(file))
    write_atomically(Path(file), page_bytes(page))
    return WrittenPage(path=Path(file), next_command=next_command)
