r"""Stream the elements of a JSON file that holds one list, one element in memory at a time.

The standard library decodes each element, so a value is exactly what `json.loads` returns for it.
`ijson` is not used: its C parser replaces an escaped half of a surrogate pair (`"\ud83d"`, a cut
emoji) by "?" or by another character without an error, while here it reaches the reader, which
refuses the row. Its Python parser keeps such text, but reads 8 MB/s and refuses NaN.
"""

import io
import json
from collections.abc import Iterator
from typing import Any

from spec_data.shards.errors import CorpusError

_CHUNK = 1 << 20  # characters per read
_MAX_ELEMENT = 1 << 28  # characters; a longer element is taken for a list that is not closed


def list_elements(stream: io.TextIOBase, name: str) -> Iterator[tuple[int, Any]]:
    """Yield (line, element) for each element of a JSON list; lines count from 1.

    Args:
        stream: text of the file, without a byte order mark.
        name: the file as the user wrote it, for messages.

    Raises:
        CorpusError: the text is not one JSON list. Reading stops there: after a syntax error it is
            not known where the next element starts.
    """
    decoder = json.JSONDecoder()
    buffer, at, line, opened = "", 0, 1, False
    while True:
        start = at
        while at < len(buffer) and buffer[at] in (" \t\r\n," if opened else " \t\r\n["):
            opened = opened or buffer[at] == "["
            at += 1
        line += buffer.count("\n", start, at)
        if buffer[at : at + 1] == "]":
            return _check_rest(stream, buffer[at + 1 :], line, name)
        problem = "the list is not closed"
        try:
            element, end = decoder.raw_decode(buffer, at)
        except json.JSONDecodeError as error:
            element, end, problem = None, len(buffer), error.msg
        except RecursionError:
            raise CorpusError(f"{name}:{line}: this element is nested too deeply") from None
        if end < len(buffer):  # a character follows, so the element is complete
            yield line, element
            line += buffer.count("\n", at, end)
            at = end
            continue
        more = stream.read(max(_CHUNK, len(buffer) - at)) if len(buffer) < _MAX_ELEMENT else ""
        if not more:
            raise CorpusError(f"{name}:{line}: not valid JSON: {problem}; write one row per line")
        buffer, at = buffer[at:] + more, 0


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
