"""Stream the rows of JSONL, CSV and text files, plain or gzip; read JSON lists.

A file that is one JSON list is read as a whole, so it may have 1 GB. A row of more bytes than
`limit` (--max-row-bytes), decompressed, is a `BadRow`. Every function yields (where, row).
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from spec_data.corpus.bad_rows import BadRow, too_long
from spec_data.shards.errors import CorpusError

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
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise CorpusError(f"{name}: cannot be read, or no complete gzip file: {error}") from None


def first_character(path: Path) -> bytes:
    """Return the first byte of a file that is no blank; empty if the first 256 bytes are blank."""
    try:
        with _opened("", path) as file:
            return file.read(256).removeprefix(_BOM).lstrip()[:1]
    except CorpusError:
        return b""  # reading the rows reports what is wrong with the file


def json_lines(name: str, path: Path, limit: int) -> Generator[Row]:
    """Yield one row per line that is not blank."""
    with _opened(name, path) as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(_BOM) if number == 1 else line
            size = len(line.removesuffix(b"\n"))
            if size > limit:
                yield f"{name}:{number}", too_long(size, limit)
            elif text.strip():
                yield f"{name}:{number}", JsonText(text)


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
    except (RecursionError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CorpusError(
            f"{name}{line}: not valid JSON: {error}; write one list, or one row per line"
        ) from None
    small = len(content) <= limit
    del content
    for number, element in enumerate(elements):
        size = 0
        if not small:
            text = json.dumps(element, ensure_ascii=False, separators=(",", ":"))
            size = len(text.encode("utf-8", "surrogatepass"))
        yield f"{name} row {number}", too_long(size, limit) if size > limit else element


def csv_rows(name: str, path: Path, limit: int) -> Generator[Row]:
    """Yield one row per record of a CSV file with a header; an empty cell is null.

    `where` has the line on which the record ends. A cell ends after `limit` characters. What is not
    UTF-8 becomes half of a surrogate pair, which makes the row bad when it is parsed.
    """
    csv.field_size_limit(limit)
    with _opened(name, path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text)
        header = next(reader, [])
        while True:
            row: Any
            try:
                if (cells := next(reader, None)) is None:
                    return
                if not cells:  # a blank line
                    continue
                size = len(",".join(cells).encode("utf-8", "surrogateescape"))
                if size > limit:
                    row = too_long(size, limit)
                elif len(cells) != len(header):
                    row = BadRow(f"{len(cells)} cells under a header of {len(header)}")
                else:
                    row = {n: cell for n, cell in zip(header, cells, strict=True) if cell}
            except csv.Error as error:
                row = BadRow(f"{error} (--max-row-bytes), or a quote that nothing closes")
            yield f"{name}:{reader.line_num}", row


def paragraphs(name: str, path: Path, limit: int) -> Generator[Row]:
    """Yield one row per paragraph of a text: blank lines stand between them."""
    with _opened(name, path) as file:
        for filled, group in groupby(enumerate(file, 1), key=lambda line: bool(line[1].strip())):
            if filled:
                numbers, lines = zip(*group, strict=True)
                content = b"".join(lines)
                row: Any = too_long(len(content), limit)
                if len(content) <= limit:
                    try:
                        text = content.decode("utf-8-sig")
                        row = {"text": text.removesuffix("\n").removesuffix("\r")}
                    except UnicodeDecodeError as error:
                        row = BadRow(f"not UTF-8: {error}")
                yield f"{name}:{numbers[0]}", row
