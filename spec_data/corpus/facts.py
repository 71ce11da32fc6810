"""What columns of a row and keys of a message mean, and which of them a user names otherwise.

`facts.toml` is the table: names of public data sets and other trainers, by meaning. `Layout` is
what one run adds to it: the columns of --columns, and what the chat template reads.
"""

import copy
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.images import NO_IMAGES, ImageFiles
from spec_data.shards.errors import ConfigError

TABLE = Path(__file__).with_name("facts.toml")


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of one meaning; the head of `facts.toml` says what the fields are."""

    meaning: str
    names: tuple[str, ...]
    text: str


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of `facts.toml`."""

    column: tuple[Fact, ...]
    key: tuple[Fact, ...]
    roles: dict[str, tuple[str, ...]]


FACTS = msgspec.toml.decode(TABLE.read_bytes(), type=Facts)
ROLES = {name: role for role, names in FACTS.roles.items() for name in names}
"""The role of each speaker; `call` is an answer that is a tool call as text."""


def columns(*meanings: str) -> tuple[str, ...]:
    """Return the names of columns of these meanings, in the order in which they are looked for."""
    return tuple(n for fact in FACTS.column if fact.meaning in meanings for n in fact.names)


def keys(meaning: str) -> tuple[str, ...]:
    """Return the names of keys of messages of a meaning."""
    return tuple(n for fact in FACTS.key if fact.meaning == meaning for n in fact.names)


_OF_LEARNING = re.compile(r"(?i)(^|_)(un)?(loss|train|mask|learn|supervis|weight)")
"""In a name that the table has not, it says that the user may have turned learning off."""
_OF_PROMPTS = re.compile(
    r"(?i)^(?!num_|n_).*(^|_)(prompt|instructions?|system|persona|tools|functions|messages)$"
)
"""In such a name, it says that a prompt may lack something."""


IGNORED = ("ignored", "about-tokens", "rejected")
"""Meanings of columns that decide nothing."""


@cache
def meaning_of(name: str, of_message: bool = False) -> str | None:
    """Return what a column, or a key of a message, means; None: it is not in the table."""
    table = FACTS.key if of_message else FACTS.column
    exact = next((fact.meaning for fact in table if name in fact.names), None)
    if exact is not None:
        return exact
    patterns = ((p, fact.meaning) for fact in table for p in fact.names if "*" in p)
    says = _OF_LEARNING.search(name) or _OF_PROMPTS.search(name)
    if says and not name.startswith("rejected_"):  # learning_score, chosen_system, task_prompt
        patterns = ((p, meaning) for p, meaning in patterns if meaning not in IGNORED)
    return next((meaning for p, meaning in patterns if fnmatchcase(name, p)), None)


COLUMNS = frozenset(
    name
    for fact in FACTS.column
    if fact.meaning not in IGNORED
    for name in fact.names
    if "*" not in name
)
"""Every column that is read; readers of columnar files read only these."""


def filled(value: Any) -> bool:
    """Return whether a column holds anything."""
    return value is not None and not (isinstance(value, (str, list, dict)) and not value)


# -- names that a user gives -----------------------------------------------------------------------

NAMED = {
    "messages": "messages",
    "prompt": "prompt",
    "answer": "completion",
    "text": "text",
    "input_ids": "input_ids",
    "loss_mask": "loss_mask",
    "system": "system",
    "tools": "tools",
    "reasoning": "reasoning_content",
    "chat_template_kwargs": "chat_template_kwargs",
}
"""What --columns can name, and the column that it stands for."""
_TEXTS = ("messages", "question", "answer", "calls", "context", "history", "turns", "text", "ids")
_OF_TEXT = ("messages", "prompt", "text", "input_ids")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the rows of a run are read.

    Attributes:
        columns: what --columns gives: the column of each name of `NAMED`; several with "+" between
            them are joined by a blank line.
        keys: of messages, that the chat template reads; None: any.
        variables: that the chat template reads.
        images: where the images of rows are read, or why they are not.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    keys: frozenset[str] | None = frozenset()
    variables: frozenset[str] = frozenset()
    images: ImageFiles = NO_IMAGES

    @property
    def given(self) -> frozenset[str]:
        """The columns of a row that --columns names."""
        return frozenset(c for value in self.columns.values() for c in _parts(value))

    def absent(self, row: Any, without: str = "") -> list[str]:
        """Return the named columns that a row does not have, not even as null.

        What the name `without` stands for may be missing.
        """
        named = {c for n, value in self.columns.items() if n != without for c in _parts(value)}
        return sorted(named - row.keys()) if isinstance(row, dict) else []

    def renamed(self, row: Any, needs: Iterable[str] = ()) -> Any:
        """Return a row with its named columns under the names of the table.

        What else holds a text is left out: the user chose another one.

        Raises:
            BadRow: the text, or one of `needs`, is null in it.
        """
        if not self.columns or not isinstance(row, dict):
            return row
        chosen = any(name in self.columns for name in _OF_TEXT)
        result = copy.copy(row)  # with what its reader says of it
        for name in row:
            if name in self.given or (chosen and meaning_of(name) in _TEXTS):
                del result[name]
        for name, given in self.columns.items():
            value = _value(row, given)
            if value is None and name in (*_OF_TEXT, *needs):
                found = ", ".join(sorted(k for k, v in row.items() if v is not None)) or "none"
                why = "is null" if _parts(given)[0] in row else "is not in the row"
                raise BadRow(f"the column {given!r} of --columns {why} (found: {found})")
            result[NAMED[name]] = value
        return result


PLAIN = Layout()


def _parts(name: str) -> list[str]:
    return [part.strip() for part in name.split("+")]


def _value(row: Mapping[str, Any], name: str) -> Any:
    names = _parts(name)
    if len(names) == 1:
        return row.get(names[0])
    values = [row.get(n) for n in names]
    if wrong := [n for n, v in zip(names, values, strict=True) if not isinstance(v, str | None)]:
        raise BadRow(f"{wrong[0]} is no text, so --columns cannot join it")
    return "\n\n".join(v for v in values if v) or None


def parse_columns(given: str | Mapping[str, str] | None) -> dict[str, str]:
    """Return the columns that --columns names: "prompt=question,answer=reply", JSON, or a mapping.

    Raises:
        ConfigError: it is none of these, or names what no row has.
    """
    if not given:
        return {}
    table: Any = given
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            table = json.loads(given)
        except ValueError:
            raise ConfigError(f"--columns {given}: not valid JSON") from None
    elif isinstance(given, str):
        pairs = [part.partition("=") for part in given.split(",")]
        table = {name.strip(): column.strip() for name, _, column in pairs}
        if len(table) < len(pairs):
            raise ConfigError(f"--columns {given}: a name is there twice")
    names = ", ".join(NAMED)
    for name, column in table.items():
        if not isinstance(column, str) or not all(_parts(column)):
            raise ConfigError(
                f"--columns {given}: write NAME=COLUMN, several with commas between them; NAME is "
                f"one of {names}"
            )
        if name not in NAMED:
            raise ConfigError(f"--columns {given}: {name!r} is none of {names}")
    if "answer" in table and "prompt" not in table:
        raise ConfigError(f"--columns {given}: an answer needs its question; add prompt=COLUMN")
    if sum(name in table for name in _OF_TEXT) > 1:
        raise ConfigError(f"--columns {given}: give one of {', '.join(_OF_TEXT)}")
    return dict(table)


def advice(row: Mapping[str, Any]) -> str:
    """Return the --columns that might read a row of unknown columns, with names of this row."""
    lists = [
        c
        for c, v in row.items()
        if isinstance(v, list) and v and all(isinstance(m, dict) for m in v)
    ]
    if lists:
        return f"--columns messages={lists[0]}"
    likely = ("question", "answer", None)
    texts = [c for c, v in row.items() if isinstance(v, str) and v and meaning_of(c) in likely]
    asked = next((c for c in texts if meaning_of(c) == "question"), (texts or ["COLUMN"])[0])
    others = [c for c in texts if c != asked]
    answer = next((c for c in others if meaning_of(c) == "answer"), (others or ["COLUMN"])[0])
    return f"--columns prompt={asked},answer={answer}"
