r"""Stream the elements of a JSON file that holds one list, one element in memory at a time.

The standard library decodes each element, so a value is exactly what `json.loads` returns for it.
`ijson` is not used: its C parser replaces an escaped half of a surrogate pair (`"\ud83d"`, a cut
emoji) by "?" or by another character without an error, while here it reaches the reader, which
refuses the row. Its Python parser keeps such text, but reads 8 MB/s and refuses NaN.

An element that is too long, or that Python cannot decode (nesting, digits), is a `BadRow`. Its end
is found by its brackets and quotes, in bounded memory, and reading goes on with the next element.
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from spec_data.corpus.bad_rows import BadRow, too_long
from spec_data.corpus.json_values import json_problem
from spec_data.shards.errors import CorpusError

_CHUNK = 1 << 20  # characters per read
_OUTSIDE = re.compile(r'["\[\]{},]')  # what matters outside of a string
_INSIDE = re.compile(r'["\\]')  # and inside of one


def list_elements(stream: io.TextIOBase, name: str, limit: int) -> Iterator[tuple[int, Any]]:
    """Yield (line, element or BadRow) for each element of a JSON list; lines count from 1.

    Args:
        stream: text of the file, without a byte order mark.
        name: the file as the user wrote it, for messages.
        limit: an element of more bytes of UTF-8 is a BadRow.

    Raises:
        CorpusError: the text is not one JSON list. Reading stops there: after a syntax error it is
            not known where the next element starts.
    """
    text = _Text(stream, name)
    decoder = json.JSONDecoder()
    opened = False
    while True:
        opened = text.skip_blanks(opened)
        if text.buffer[text.at : text.at + 1] == "]":
            return _check_rest(stream, text.buffer[text.at + 1 :], text.line, name)
        line, problem = text.line, "the list is not closed"
        try:
            element, end = decoder.raw_decode(text.buffer, text.at)
        except json.JSONDecodeError as error:
            problem, end = error.msg, len(text.buffer)
        except (RecursionError, ValueError) as error:
            text.skip_element(problem)
            yield line, BadRow(json_problem(error))
            continue
        if end < len(text.buffer):  # a character follows, so the element is complete
            size = text.bytes_until(end, limit)
            text.move_to(end)
            yield line, too_long(size, limit) if size > limit else element
        elif opened and len(text.buffer) - text.at > limit:
            size = text.skip_element(problem)
            if size <= limit:  # its brackets close before the limit, so it is no long element
                raise text.error(line, problem)
            yield line, too_long(size, limit)
        elif not text.read_more():
            raise text.error(line, problem)


@dataclass
class _Text:
    """The part of the stream that is in memory; `at` is the place in it, `line` that place's line.

    Characters before `at` are dropped when more text is read.
    """

    stream: io.TextIOBase
    name: str
    buffer: str = ""
    at: int = 0
    line: int = 1

    def error(self, line: int, problem: str) -> CorpusError:
        """Return the error of a text that is not a list."""
        return CorpusError(f"{self.name}:{line}: not valid JSON: {problem}; write one row per line")

    def move_to(self, end: int) -> None:
        """Move to the index `end` of the buffer."""
        self.line += self.buffer.count("\n", self.at, end)
        self.at = end

    def skip_blanks(self, opened: bool) -> bool:
        """Move behind blanks, commas and the opening bracket; return whether the list is open."""
        at = self.at
        while at < len(self.buffer) and self.buffer[at] in (" \t\r\n," if opened else " \t\r\n["):
            opened = opened or self.buffer[at] == "["
            at += 1
        self.move_to(at)
        return opened

    def bytes_until(self, end: int, limit: int) -> int:
        """Return the length in bytes of the text up to `end`, exact if it may exceed `limit`."""
        characters = end - self.at
        if characters * 4 <= limit:
            return characters
        return len(self.buffer[self.at : end].encode("utf-8"))

    def read_more(self) -> bool:
        """Read about as much again as is left in the buffer; return False at the end."""
        left = self.buffer[self.at :]
        more = self.stream.read(max(_CHUNK, len(left)))
        self.buffer, self.at = left + more, 0
        return bool(more)

    def skip_element(self, problem: str) -> int:
        """Move behind the element that begins here; return its length in bytes.

        Raises:
            CorpusError: the text ends before the element does.
        """
        size, line, scan = 0, self.line, _Scan()
        while (end := scan.end(self.buffer, self.at)) < 0:
            size += self.bytes_until(len(self.buffer), 0)
            self.move_to(len(self.buffer))
            if not self.read_more():
                raise self.error(line, problem)
        size += self.bytes_until(end, 0)
        self.move_to(end)
        return size


@dataclass
class _Scan:
    """Find the end of a JSON value in text that arrives in pieces, by brackets and quotes alone."""

    depth: int = field(default=0, init=False)
    inside: bool = field(default=False, init=False)  # a string
    escaped: bool = field(default=False, init=False)  # the next character, by a backslash

    def end(self, text: str, at: int) -> int:
        """Scan `text` from `at`; return the index after the value, or -1 if it goes on."""
        while True:
            if self.escaped:
                if at >= len(text):
                    return -1
                at, self.escaped = at + 1, False
            found = (_INSIDE if self.inside else _OUTSIDE).search(text, at)
            if found is None:
                return -1
            at, mark = found.end(), found[0]
            if mark == "\\":
                self.escaped = True
            elif mark == '"':
                self.inside = not self.inside
            elif mark in "[{":
                self.depth += 1
            elif self.depth == 0:  # a comma or a bracket of the list ends a number
                return at - 1
            elif mark in "]}":
                self.depth -= 1
            if not self.depth and not self.inside and mark in '"]}':
                return at


def _check_rest(stream: io.TextIOBase, rest: str, line: int, name: str) -> None:
    """Check that only whitespace follows the list: a second list would be lost silently.

    Raises:
        CorpusError: something else follows.
    """
    while rest:
        if found := rest.strip():
            line += rest.count("\n", 0, rest.index(found[0]))
            raise CorpusError(
                f"{name}:{line}: {found[:20]!r} follows the end of the list; write one list, or "
                "one row per line"
            )
        line += rest.count("\n")
        rest = stream.read(_CHUNK)
