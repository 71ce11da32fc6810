"""Read JSON of anybody: from a text, or from a regular file of bounded size.

What is wrong with it is a ValueError; each caller says in words of its own what the file is.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spec_data.shards.regular_files import MOST_TEXT, read_bounded

Pairs = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def parse_json(text: str | bytes, pairs: Pairs | None = None) -> Any:
    """Return the value of a JSON text; `pairs` makes the dict of an object, not given: as usual.

    Raises:
        ValueError: it is no JSON or no UTF-8, or too deep.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("too many brackets in one another") from None


def read_json_text(file: Path, most: int = MOST_TEXT, pairs: Pairs | None = None) -> Any:
    """Return the value that a regular file of at most `most` bytes holds; see `parse_json`.

    Raises:
        OSError: the file cannot be read. ValueError: it holds something else, or too much.
    """
    return parse_json(read_bounded(file, most), pairs)
