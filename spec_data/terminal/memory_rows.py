"""Rows of a corpus that a Python program holds in memory, instead of a file.

Commands pass names of sources on, so rows get a name: `memory:` and the hash of what they say. They
are kept under it, as lines of JSON, while the command runs.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from spec_data.shards.errors import ConfigError, an
from spec_data.terminal.kept import Kept

PREFIX = "memory:"
_kept: Kept[list[bytes]] = Kept()


def named(value: Any) -> Any:
    """Return a value of `corpus` with names in place of its rows; names and paths stay.

    Rows are an iterable of mappings, such as a list or a `datasets.Dataset`, or a table of pandas,
    polars or Arrow.

    Raises:
        ConfigError: one row alone, a row that JSON cannot hold, or a dataset of several splits.
    """
    if (rows := _of_table(value)) is not None:
        return [_keep(rows)]
    if isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Iterable):
        return value
    if isinstance(value, Mapping):
        splits = ", ".join(value) if hasattr(value, "column_names") else ""
        advice = f"choose one of the splits {splits}" if splits else "write a list of rows: [row]"
        raise ConfigError(f"--corpus: this is {an(type(value).__name__)}; {advice}")
    if hasattr(value, "column_names"):
        return [_keep(value)]
    parts = list(value)
    if parts and all(isinstance(part, Mapping) for part in parts):
        return [_keep(parts)]
    return [_keep(part) if hasattr(part, "column_names") else part for part in parts]


def lines_of(name: str) -> list[bytes] | None:
    """Return the rows that are kept under a name, as lines of JSON; None: it is no such name."""
    return _kept.get(name)


def _keep(rows: Iterable[Any]) -> str:
    plain = rows.with_format(None) if hasattr(rows, "with_format") else rows
    lines = []
    for number, row in enumerate(plain):
        try:
            lines.append(json.dumps(row, default=_as_json).encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"--corpus: row {number} is no JSON: {error}") from None
    return _kept.keep(PREFIX + hashlib.sha256(b"\n".join(lines)).hexdigest(), lines)


def _of_table(value: Any) -> list[Any] | None:
    """Return the rows of a table of pandas, polars or Arrow; None: it is none.

    Iterated, such a table gives its columns. What pandas has in cells that are missing is no value.
    """
    if hasattr(value, "to_pylist") and hasattr(value, "column_names"):  # Arrow
        rows: list[Any] = value.to_pylist()
        return rows
    if hasattr(value, "to_dicts"):  # polars
        rows = value.to_dicts()
        return rows
    if hasattr(value, "iterrows"):  # pandas
        rows = value.to_dict("records")
        return [{str(k): v for k, v in row.items() if not _is_missing(v)} for row in rows]
    return None


def _is_missing(cell: Any) -> bool:
    no_number = isinstance(cell, float) and math.isnan(cell)
    return no_number or type(cell).__name__ in ("NAType", "NaTType")


def _as_json(value: Any) -> Any:
    """Return a table as a dict, and numbers and arrays of numpy and torch as Python's own."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):  # a date
        return value.isoformat()
    raise TypeError(f"it holds {an(type(value).__name__)}")
