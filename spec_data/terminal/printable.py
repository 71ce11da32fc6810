"""Text of strangers on a terminal, in a log and in a page: no character acts, all are read.

Names of files, rows, tokens, keys of a config.json, words of a server and of a library can hold
escape sequences, which recolour, move, answer or rewrite what a terminal shows, and marks that turn
the order of a line round. They are written as escapes, such as `\\x1b`, where text is shown: by the
handlers of log lines, where a result is printed, in cells of tables, bars and pages. What makes a
message leaves its texts as they are.
"""

import json
import re

_ACTING = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but for tab and line end
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"  # order, lines, no width
    "\ud800-\udfff\U000e0000-\U000e007f"  # bytes that are no text; tags, which nobody sees
)
_RAW = re.compile(f"[{_ACTING}]")
_RAW_LINE = re.compile(f"[\t\n{_ACTING}]")


def _escape(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1] if not found[0].isprintable() else f"\\u{ord(found[0]):04x}"


def printable(text: str) -> str:
    """Return a text with an escape for each character that acts on a terminal; lines stay."""
    return _RAW.sub(_escape, text)


def one_line(text: str) -> str:
    """Return a text that stays on its line, such as a name or a cell: line ends are escapes too."""
    return _RAW_LINE.sub(_escape, text)


def printable_json(text: str) -> str:
    """Return JSON of the same value, in which no character acts on a terminal."""
    return _RAW.sub(lambda found: json.dumps(found[0])[1:-1], text)
