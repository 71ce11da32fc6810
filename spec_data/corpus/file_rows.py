"""Stream the rows of JSONL, CSV and text files, plain or gzip, in bounded memory; read JSON lists.

A file that is one JSON list is read as a whole, so it may have 1 GB. Of lines and paragraphs, one
of more bytes than `limit` (--max-row-bytes) is never held: its end is searched for in chunks, and
the row is a `BadRow`. The limit counts decompressed bytes. Every function yields (where, row).
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

from spec_data.corpus.bad_rows import BadRow, too_long
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
    except (RecursionError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CorpusError(
            f"{name}{line}: not valid JSON: {error}; write one list, or one row per line"
        ) from None
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

    `where` has the line on which the record ends. A cell of more than `limit` characters is never
    held, and ends there.
    """
    csv.field_size_limit(limit)
    with _opened(name, path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        reader, header = csv.reader(text), None
        while True:
            try:
                cells = next(reader, None)
                if cells is None:
                    return
                size = len(",".join(cells).encode())
            except (csv.Error, UnicodeEncodeError) as error:
                cells, size = None, 0
                problem = f"{error} (--max-row-bytes), or a quote that nothing closes"
                if isinstance(error, UnicodeError):
                    problem = "not UTF-8"
            where = f"{name}:{reader.line_num}"
            if header is None:
                if cells is None:
                    raise CorpusError(f"{where}: not a CSV header: {problem}")
                header = cells
            elif cells is None:
                yield where, BadRow(problem)
            elif size > limit:
                yield where, too_long(size, limit)
            elif len(cells) == len(header):
                yield where, {n: cell for n, cell in zip(header, cells, strict=True) if cell}
            elif cells:
                yield where, BadRow(f"{len(cells)} cells under a header of {len(header)}")


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
