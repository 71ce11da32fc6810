"""Stream the rows of JSONL, CSV and text files, plain or compressed; read JSON lists.

A file that is one JSON list is read as a whole, so it may have 1 GB. A row of more bytes than
`limit` (--max-row-bytes), decompressed, is a `BadRow`. Every function yields (where, row).
"""

import csv
import io
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from spec_data.corpus.bad_rows import BadRow, too_long
from spec_data.shards.errors import CorpusError
from spec_data.shards.path_kinds import PACKED

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
        with path.open("rb") as raw, decompressed(path, raw) as file:
            yield file
    except (OSError, csv.Error) as error:
        raise CorpusError(f"{name}: cannot be read, or is cut off: {error}") from None


def decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    """Return the bytes behind those of an open file, by the suffix of its path."""
    if path.suffix not in PACKED:
        return raw
    return io.BufferedReader(pa.CompressedInputStream(raw, pa.Codec.detect(path).name))


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


class _TooLong(csv.Error):
    """A record goes on beyond what is read of one."""


class _Lines:
    """The lines of a CSV file, counted by record; one of far more than `limit` bytes is given up.

    `csv.reader` would take the rest of a cell that it gives up for records.
    """

    def __init__(self, text: Iterator[str], limit: int) -> None:
        self._text, self._most, self.number = text, 4 * limit + 4096, 0
        self.begin()

    def begin(self) -> None:
        """Begin a record."""
        self.count = self.size = 0
        self.unclosed = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.size > self._most:
            raise _TooLong("more than a record may have")
        if (line := self._read()) is None:
            raise StopIteration
        return line

    def skip(self) -> None:
        """Read what is left of the record, from within a quoted cell."""
        while (line := self._read()) is not None:
            rest = iter(['"' + line, ""])
            next(csv.reader(rest))
            if next(rest, None) is not None:  # the cell does not go on
                return

    def _read(self) -> str | None:
        if (line := next(self._text, None)) is None:
            self.unclosed = self.count > 0
            return None
        self.number, self.count, self.size = self.number + 1, self.count + 1, self.size + len(line)
        return line


def csv_rows(name: str, path: Path, limit: int) -> Generator[Row]:
    """Yield one row per record of a CSV file with a header; an empty cell is null.

    `where` has the line on which the record ends. What is not UTF-8 becomes half of a surrogate
    pair, which makes the row bad when it is parsed. Each line after a quote that nothing closes is
    a bad row.
    """
    csv.field_size_limit((1 << 31) - 1)
    with _opened(name, path) as file:
        lines = _Lines(io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline=""), limit)
        reader = csv.reader(lines)
        try:
            header = next(reader, [])
        except _TooLong:
            header, lines.unclosed = [], True
        if lines.unclosed:
            raise CorpusError(f"{name}:1: no header of a CSV file: nothing closes its quote")
        if (size := len(",".join(header))) > limit:
            raise CorpusError(f"{name}:1: no header of a CSV file: {too_long(size, limit)}")
        while True:
            lines.begin()
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
            except _TooLong:
                lines.skip()
                row = too_long(lines.size, limit)
            if lines.unclosed:
                first = lines.number - lines.count + 1
                row = BadRow(f"after a quote, on line {first}, that nothing closes")
                for number in range(first, lines.number):
                    yield f"{name}:{number}", row
            yield f"{name}:{lines.number}", row


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
