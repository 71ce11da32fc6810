"""Stream the elements of a file that is one JSON list.

`json.loads` would hold the whole file, and some twenty times its bytes as Python objects. Here a
window of the text moves along the file, and one element after the other is decoded from it. An
element that ends nowhere within the bound is passed by, piece by piece.
"""

import io
import json
import re
from collections.abc import Generator
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TextIO

from spec_data.corpus.bad_rows import BadRow, too_long
from spec_data.corpus.file_rows import Row, opened
from spec_data.corpus.records import check_depth
from spec_data.shards.errors import CorpusError

_CHUNK = 1 << 20  # characters that are read at once
_DECODER = json.JSONDecoder()
_UNCLOSED = "Unterminated string"
_LONGEST_WORD = 16  # characters of what JSON writes without quotes, but numbers: -Infinity
_CUT_NUMBER = 3  # characters: of 1.5e-7 that is cut in its end, 1.5 is a number
_BLANKS = re.compile(r"[ \t\n\r]*")
_OUTSIDE, _INSIDE = re.compile(r'["\[\]{},]'), re.compile(r'["\\]')  # of a string


class _Window:
    """A part of the text of a file; `at` is the first character that is not read yet."""

    def __init__(self, name: str, file: TextIO) -> None:
        self.text, self.at, self.ended = "", 0, False
        self._name, self._file, self._lines = name, file, 0

    def more(self) -> bool:
        """Drop what is read, and add at least as much as is left; return whether there is any."""
        self._lines += self.text.count("\n", 0, self.at)
        self.text, self.at = self.text[self.at :], 0
        added = self._file.read(max(_CHUNK, len(self.text)))
        self.text, self.ended = self.text + added, not added
        return bool(added)

    def next(self) -> str:
        """Move to the next character that is no blank, and return it; "" at the end."""
        while True:
            blanks = _BLANKS.match(self.text, self.at)
            self.at = blanks.end() if blanks else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def error(self, message: str, at: int | None = None) -> CorpusError:
        """Return the error about what is no JSON at `at`, by its line."""
        line = 1 + self._lines + self.text.count("\n", 0, self.at if at is None else at)
        return CorpusError(
            f"{self._name}:{line}: not valid JSON: {message}; write one list, or one row per line"
        )


def json_list(name: str, path: Path, limit: int) -> Generator[Row]:
    """Yield one row per element of a file that holds a single list; elements count from 0.

    The size of an element is that of its JSON without blanks; one of more than four times `limit`
    characters, as they are written, is too long in any case.
    """
    with opened(name, path) as file:
        window = _Window(name, io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline=""))
        window.next()
        window.at += 1  # the bracket by which the file is known as a list
        number = 0
        if window.next() == "]":
            window.at += 1
        else:
            mark = ","
            while mark == ",":
                yield f"{name} row {number}", _element(window, limit)
                number += 1
                if (mark := window.next()) not in (",", "]"):
                    raise window.error("Expecting ',' delimiter")
                window.at += 1
        if window.next():
            raise window.error("Extra data")


def _element(window: _Window, limit: int) -> Any:
    """Return the element at which a window is, or a BadRow, and move behind it."""
    most = 4 * limit + 4096
    window.next()
    while True:
        try:
            value, end = _DECODER.raw_decode(window.text, window.at)
        except JSONDecodeError as error:
            left = len(window.text) - error.pos
            if left > _LONGEST_WORD and not error.msg.startswith(_UNCLOSED):
                raise window.error(error.msg, error.pos) from None
            if len(window.text) - window.at > most:
                return too_long(_pass_by(window), limit)
            if not window.more():
                raise window.error(error.msg, len(window.text) - left) from None
            continue
        except (RecursionError, ValueError) as error:
            _pass_by(window)
            return BadRow(f"not valid JSON: {error}")
        if end + _CUT_NUMBER > len(window.text) and not window.ended:
            window.more()
            continue
        start, written, window.at = window.at, end - window.at, end
        try:
            check_depth(value, window.text, start, end)
        except BadRow as error:
            return error
        if written * 8 <= limit:  # no form of it has more
            return value
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        size = len(text.encode("utf-8", "surrogatepass"))
        return too_long(size, limit) if size > limit else value


def _pass_by(window: _Window) -> int:
    """Move a window behind its element without holding it; return the characters of it."""
    depth, size, inside = 0, 0, False
    while True:
        found = (_INSIDE if inside else _OUTSIDE).search(window.text, window.at)
        mark, end = (found[0], found.end()) if found else ("", len(window.text))
        if mark == "\\" and end == len(window.text):
            mark, end = "", end - 1  # what it escapes comes next
        elif mark == "\\":
            end += 1
        elif mark == '"':
            inside = not inside
        elif mark and mark in "[{":
            depth += 1
        elif mark and depth == 0:
            size, window.at = size + end - 1 - window.at, end - 1
            return size
        elif mark and mark in "]}":
            depth -= 1
        size, window.at = size + end - window.at, end
        if not mark and not window.more():
            raise window.error("an element of the list does not end")
