"""Stream the rows of JSONL, CSV and text files, plain or gzip, in bounded memory; read JSON lists.

A file that is one JSON list is read as a whole, so it may have 1 GB. Of the other kinds, a row of
more bytes than `limit` (--max-row-bytes) is never held: its end is searched for in chunks, and the
row is a `BadRow`. The limit counts decompressed bytes. Every function yields (where, row).
"""

import csv
import gzip
import json
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

from spec_data.corpus.bad_rows import BadRow, too_long
from spec_data.corpus.json_values import json_problem
from spec_data.shards.errors import CorpusError

_CHUNK = 1 << 20  # bytes
_LARGEST_LIST = 1 << 30  # bytes of a file that is one JSON list
_BOM = b"\xef\xbb\xbf"

Row = tuple[str, Any]
"""(where, the row: parsed, a JsonText, or a BadRow in its place)."""


class JsonText(bytes):
    """A row that is not parsed yet: reading is serial, and parsing can be done elsewhere."""


@contextmanager
def _opened(name: str, path: Path) -> Iterator[IO[bytes]]:
    """Open a file for its decompressed bytes."""
    try:
        raw = path.open("rb", buffering=_CHUNK)
    except OSError as error:
        raise CorpusError(f"{name}: cannot be opened: {error.strerror}") from None
    try:
        with raw, gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw as file:
            yield file  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(f"{name}: not a complete gzip file: {error}") from None
    except OSError as error:
        raise CorpusError(f"{name}: cannot be read: {error}") from None


def first_character(path: Path) -> bytes:
    """Return the first byte of a file that is no blank; empty if the first 256 bytes are blank."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(256).removeprefix(_BOM).lstrip()[:1]
    except (OSError, EOFError, zlib.error):
        return b""  # reading the rows reports what is wrong with the file


def _lines(file: IO[bytes], limit: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (number from 1, bytes, line with its end), or None for a line of more than `limit`."""
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        size = len(line)
        if size <= limit or line.endswith(b"\n"):
            yield number, size, line
            continue
        while rest := file.readline(_CHUNK):
            size += len(rest.removesuffix(b"\n"))
            if rest.endswith(b"\n"):
                break
        yield number, size, None


def json_lines(name: str, path: Path, limit: int) -> Generator[Row]:
    """Yield one row per line that is not blank."""
    with _opened(name, path) as file:
        for number, size, line in _lines(file, limit):
            where = f"{name}:{number}"
            if line is None:
                yield where, too_long(size, limit)
            elif line.removeprefix(_BOM if number == 1 else b"").strip():
                yield where, JsonText(line.removeprefix(_BOM if number == 1 else b""))


def json_list(name: str, path: Path, limit: int) -> Generator[Row]:
    """Yield one row per element of a file that holds a single list; elements count from 0.

    The size of an element is that of its JSON without blanks.
    """
    with _opened(name, path) as file:
        content = file.read(_LARGEST_LIST + 1)
    if len(content) > _LARGEST_LIST:
        raise CorpusError(
            f"{name}: more than {_LARGEST_LIST:,} bytes in one JSON list, which is read as a "
            "whole; convert it to JSON Lines, one row per line: jq -c '.[]' FILE.json > FILE.jsonl"
        )
    try:
        elements = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise CorpusError(f"{name}: not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise CorpusError(
            f"{name}:{error.lineno}: not valid JSON: {error.msg}; write one list, or one row per "
            "line"
        ) from None
    except (RecursionError, ValueError) as error:
        raise CorpusError(f"{name}: {json_problem(error)}; write one row per line") from None
    small = len(content) <= limit
    del content
    for number, element in enumerate(elements):
        size = 0 if small else _json_bytes(element)
        yield f"{name} row {number}", too_long(size, limit) if size > limit else element


def _json_bytes(element: Any) -> int:
    """Return the bytes of a JSON value without blanks; 0 if it is nested too deeply to tell."""
    try:
        text = json.dumps(element, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        return 0  # refused by its depth
    return len(text.encode("utf-8", "surrogatepass"))


def csv_rows(name: str, path: Path, limit: int) -> Generator[Row]:
    """Yield one row per record of a CSV file with a header; an empty cell is null.

    `where` has the line on which the record ends.
    """
    csv.field_size_limit(max(limit, csv.field_size_limit()))
    with _opened(name, path) as file:
        lines = _CsvLines(file, limit)
        reader, header = csv.reader(lines), None
        while True:
            lines.size = 0
            try:
                cells = next(reader, None)
            except (BadRow, csv.Error) as error:
                if header is None:
                    raise CorpusError(f"{name}:{lines.number}: not a CSV header: {error}") from None
                yield f"{name}:{lines.number}", BadRow(str(error))
                reader = csv.reader(lines)  # the next line begins a record
                continue
            if cells is None:
                return
            if header is None:
                header = cells
            elif len(cells) == len(header):
                row = {n: cell for n, cell in zip(header, cells, strict=True) if cell}
                yield f"{name}:{lines.number}", row
            elif cells:
                problem = f"{len(cells)} cells under a header of {len(header)}"
                yield f"{name}:{lines.number}", BadRow(problem)


class _CsvLines:
    """The lines of a CSV file, as text; `size` bytes of them belong to the record being read."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._lines, self._limit = _lines(file, limit), limit
        self.number = self.size = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.number, size, line = next(self._lines)
        self.size += size
        if line is None:
            raise too_long(size, self._limit)
        if self.size > self._limit:
            raise BadRow(f"{too_long(self.size, self._limit)}, or a quote that nothing closes")
        try:
            return line.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadRow(f"not UTF-8: {error}") from None


def paragraphs(name: str, path: Path, limit: int) -> Generator[Row]:
    """Yield one row per paragraph of a text: blank lines stand between them."""
    with _opened(name, path) as file:
        first = total = 0
        parts: list[bytes] = []
        for number, size, line in chain(_lines(file, limit), [(0, 0, b"")]):  # a blank one ends it
            if line is None or line.strip():
                first = first if total else number
                total += size
                if line is not None and total <= limit:
                    parts.append(line)
            elif total:
                row = too_long(total, limit) if total > limit else _text(b"".join(parts))
                yield f"{name}:{first}", row
                parts, total = [], 0


def _text(content: bytes) -> dict[str, str] | BadRow:
    try:
        return {"text": content.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")}
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8: {error}")
