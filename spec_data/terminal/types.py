"""Types of command arguments: what an option holds, and how it is written on the command line.

A type is a plain Python type, so that editors and mypy follow it, with notes for `command`: where a
path must lead (`Holds`), bounds (`msgspec.Meta`), and how cyclopts reads it (`Parameter`).
No torch here: `--help` is instant.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import cyclopts
from cyclopts import Group, Parameter
from msgspec import Meta

from spec_data.shards.json_texts import parse_json
from spec_data.shards.path_kinds import Kind

if TYPE_CHECKING:
    AnyPath = str | os.PathLike[str]
    Rows = Iterable[Mapping[str, Any]]
    Loaded = tuple[Any, Any]
else:
    # What a command receives: `command` has called os.fspath, or named what is in memory.
    AnyPath = Rows = Loaded = str


@dataclass(frozen=True)
class Holds:
    """What must be at the path of an argument; it is checked before any work.

    Attributes:
        kind: what must be there; None checks nothing.
        dataset: "read" or "write" where the URL of a dataset on remote storage is accepted.
        urls: a URL such as http://host, which every other argument refuses.
        loaded: in Python, a pair of a loaded model and its tokenizer is a target, too.
    """

    kind: Kind | None = None
    dataset: str = ""
    urls: bool = False
    loaded: bool = False


def more(title: str) -> Parameter:
    """Return the note of an option that only --help-all lists, under the heading `title`."""
    return Parameter(group=Group(title))


def _one_text(_: Any, tokens: Sequence[cyclopts.Token]) -> str:
    return tokens[0].value


def _joined_texts(_: Any, tokens: Sequence[cyclopts.Token]) -> str:
    return ",".join(token.value for token in tokens)


def _whole_number(_: Any, tokens: Sequence[cyclopts.Token]) -> int:
    try:
        return int(tokens[0].value)
    except ValueError:  # cyclopts would round 0.5
        raise ValueError(f'"{tokens[0].value}" is not a whole number') from None


def _json_object(_: Any, tokens: Sequence[cyclopts.Token]) -> dict[str, Any]:
    value = read_json(tokens[0].value)
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def read_json(text: str | bytes) -> Any:
    """Read JSON; ValueError: it is none, too deep, or a key is there twice."""
    return parse_json(text, each_once)


def each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of names and values; ValueError: a name is there twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice; write it once")
    return table


_SEVERAL = Parameter(consume_multiple=1)
ONE_TOKEN = Parameter(converter=_one_text, n_tokens=1, allow_leading_hyphen=True)
"""The note of a text that may begin with a dash or look like a number, such as -1."""
JOINED = Parameter(converter=_joined_texts, n_tokens=1, allow_leading_hyphen=True)
"""The note of a list with commas, such as -1,3: what is typed in several options is one list."""

Several = Annotated[Sequence[str], _SEVERAL]
"""One text or several: `--source a b`; in Python also a single text."""
Target = Annotated[AnyPath, Holds(Kind.TARGET), Parameter(metavar="MODEL")]
"""A target model: a directory or a Hub id."""
Targets = Annotated[
    Sequence[AnyPath] | AnyPath, Holds(Kind.TARGET), _SEVERAL, Parameter(metavar="MODEL")
]
LoadedTarget = Annotated[
    AnyPath | Loaded, Holds(Kind.TARGET, loaded=True), Parameter(metavar="MODEL")
]
"""The same; in Python also (model, tokenizer)."""
Corpus = Annotated[
    Sequence[AnyPath] | AnyPath | Rows, Holds(Kind.CORPUS), _SEVERAL, Parameter(metavar="SRC")
]
"""Conversations: files, directories or Hub datasets; in Python also rows in memory."""
Dataset = Annotated[AnyPath, Holds(Kind.DATASET, dataset="read"), Parameter(metavar="DIR")]
"""A sealed dataset: a directory or a URL."""
Datasets = Annotated[
    Sequence[AnyPath] | AnyPath,
    Holds(Kind.DATASET, dataset="read"),
    _SEVERAL,
    Parameter(metavar="DIR"),
]
NewDataset = Annotated[AnyPath, Holds(dataset="write"), Parameter(metavar="DIR")]
"""A dataset to write: a directory or a URL."""
Draft = Annotated[AnyPath, Holds(Kind.DRAFT), Parameter(metavar="DIR")]
"""A draft: a run (its best draft), a checkpoint or a draft directory."""
Directory = Annotated[AnyPath, Parameter(metavar="DIR")]
File = Annotated[AnyPath, Parameter(metavar="FILE")]

Text = Annotated[str | int | float, ONE_TOKEN]
"""A text that may look like a number, such as `--max-bad-rows 5` or `1%`."""
Server = Annotated[str, Holds(urls=True), Parameter(metavar="URL")]
"""An OpenAI-compatible server, such as http://localhost:8000/v1."""
Servers = Annotated[Several, Holds(urls=True), Parameter(metavar="URL")]

Layers = Annotated[str | Sequence[int], JOINED, Parameter(metavar="IDS")]
"""Layer ids: `1,3,5`, or in Python also [1, 3, 5]."""
Names = Annotated[str | Sequence[str], JOINED, Parameter(metavar="NAMES")]
"""Names: `a,b`, or in Python also ["a", "b"]."""
Columns = Annotated[
    str | dict[str, str],
    Parameter(converter=_joined_texts, n_tokens=1, accepts_keys=False, metavar="NAME=COLUMN"),
]
"""Columns by what they hold: `prompt=question,answer=reply`, or in Python also a dict."""
JsonObject = Annotated[
    dict[str, Any],
    Parameter(converter=_json_object, n_tokens=1, accepts_keys=False, metavar="JSON"),
]
WHOLE = Parameter(converter=_whole_number, n_tokens=1, metavar="N")
Count = Annotated[int, Meta(ge=0), WHOLE]
Positive = Annotated[int, Meta(ge=1), WHOLE]
Share = Annotated[float, Meta(ge=0, le=1), Parameter(metavar="SHARE")]
ON = Parameter(negative_bool="no-")
"""The note of a switch that may be on by default: `--no-NAME` turns it off."""


def path_list(value: Sequence[AnyPath] | AnyPath | Rows) -> list[str]:
    """Return one path or several as a list of texts."""
    if isinstance(value, (str, os.PathLike)):
        return [os.fspath(value)]
    return [os.fspath(cast(Any, path)) for path in value]


def plain(value: Any) -> Any:
    """Return arrays and scalars of numpy and torch, and ranges, as Python's own values."""
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return value.tolist()
    if isinstance(value, range):
        return list(value)
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value


def comma_list(value: Any) -> str:
    """Return layer ids or names as one text, such as 1,3,5; and the text of any other value."""
    value = plain(value)
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
