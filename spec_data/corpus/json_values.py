"""Parse JSON that strangers wrote, and check what templates, Arrow and UTF-8 cannot hold.

Every problem is a `BadRow`. The limit on nesting makes the result independent of how deep the stack
of the calling program is: Python alone stops at some depth near 1,000, minus that stack.
"""

import json
from typing import Any

from spec_data.corpus.bad_rows import BadRow

MAX_DEPTH = 100  # lists and objects inside each other; tool schemas have about 10


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; bytes must be UTF-8.

    Raises:
        BadRow: not UTF-8, not JSON, nested too deeply for Python, or an integer that is too long.
    """
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise BadRow(f"not valid JSON: {error}") from None
    except (RecursionError, ValueError) as error:
        raise BadRow(json_problem(error)) from None


def json_problem(error: Exception) -> str:
    """Return the words for JSON that is valid, but that Python does not parse."""
    if isinstance(error, RecursionError):
        return f"nested more than {MAX_DEPTH} levels deep"
    return "an integer has more than 4,300 digits"


def check_depth(value: Any, name: str) -> None:
    """Raise a BadRow if lists and objects are nested more than `MAX_DEPTH` levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for item in level if isinstance(item, (dict, list))]
        if not level:
            return
        level = [i for item in level for i in (item.values() if isinstance(item, dict) else item)]
    raise BadRow(f"{name} is nested more than {MAX_DEPTH} levels deep")


def check_text(value: Any, name: str) -> None:
    """Raise a BadRow if a text or a key inside a value has half of a surrogate pair."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            if not is_text(item):
                raise BadRow(f"{name} has half of a surrogate pair, which is no character")
        elif isinstance(item, dict):
            if not all(is_text(str(key)) for key in item):
                raise BadRow(f"a key in {name} has half of a surrogate pair")
            left.extend(item.values())
        elif isinstance(item, (list, tuple)):
            left.extend(item)


def is_text(text: str) -> bool:
    """Return whether a string can be written as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
