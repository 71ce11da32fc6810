"""Markdown of cards (README.md) with texts of strangers: names, licences, sources.

Nothing that such a text holds becomes YAML, markup, a link or a cell of its own.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#~&!|])")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,59}")  # an identifier, as the Hub lists them


def front_matter(values: Mapping[str, Any]) -> str:
    """Return the YAML header of a card, with its lines of dashes.

    Every text is put on one line: readers look for the next line of dashes before they read YAML.
    """
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": math.inf}
    return f"---\n{yaml.safe_dump(_one_line(values), **options)}---\n"


def _one_line(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return {name: _one_line(item) for name, item in value.items()}
    return [_one_line(item) for item in value] if isinstance(value, list) else value


def licence_fields(licences: Iterable[str | None]) -> dict[str, str]:
    """Return the fields of the header for the licences of all corpora."""
    stated = sorted({licence for licence in licences if licence})
    if len(stated) != 1:
        return {"license": "other"}
    if _LICENCE.fullmatch(stated[0]):
        return {"license": stated[0]}
    return {"license": "other", "license_name": stated[0]}


def plain(text: object) -> str:
    """Return a text of one line that Markdown shows as it is."""
    return _MARKUP.sub(r"\\\1", " ".join(str(text).split()))


def code(text: object) -> str:
    """Return a text of one line as code."""
    line = " ".join(str(text).split())
    fence, space = _fence(line, 1), " " if "`" in line else ""
    return f"{fence}{space}{line}{space}{fence}"


def code_block(language: str, lines: Sequence[str]) -> str:
    """Return lines of code as a block of their own."""
    text = "\n".join(lines)
    fence = _fence(text, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def _fence(text: str, least: int) -> str:
    """Return backticks that are more than any in a row of the text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are Markdown, in which a bar or a new line ends no cell."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(re.sub(r"(?<!\\)\|", r"\\|", text).split())
