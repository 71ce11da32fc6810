"""Stream the rows of JSONL, CSV and text files, plain or compressed.

A row of more bytes than `limit` (--max-row-bytes), decompressed, is a `BadRow`. Of one that is far
longer, no more than a few times `limit` is ever in memory. Every function yields (where, row).
"""

import csv
import io
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from spec_data.corpus.bad_rows import BadRow, too_long
from spec_data.shards.errors import CorpusError
from spec_data.shards.files import cause
from spec_data.shards.path_kinds import PACKED

_PIECE = 1 << 16  # bytes that are read at once of what no row holds
_BOM = b"\xef\xbb\xbf"

Row = tuple[str, Any]
"""(where, the row: parsed, a JsonText, or a BadRow in its place)."""


class JsonText(bytes):
    """A row that is not parsed yet: reading is serial, and parsing can be done elsewhere."""


@contextmanager
def opened(name: str, path: Path) -> Iterator[IO[bytes]]:
    """Open a file for its decompressed bytes."""
    try:
        with path.open("rb") as raw, decompressed(path, raw) as file:
            yield file
    except (OSError, csv.Error) as error:
        raise CorpusError(f"{name}: cannot be read, or is cut off: {cause(error)}") from None


def decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    """Return the bytes behind those of an open file, by the suffix of its path."""
    if path.suffix not in PACKED:
        return raw
    return io.BufferedReader(pa.CompressedInputStream(raw, pa.Codec.detect(path).name))


def first_character(path: Path) -> bytes:
    """Return the first byte of a file that is no blank; empty if the first 256 bytes are blank."""
    try:
        with opened("", path) as file:
            return file.read(256).removeprefix(_BOM).lstrip()[:1]
    except CorpusError:
        return b""  # reading the rows reports what is wrong with the file


def _lines(file: IO[bytes], limit: int) -> Iterator[tuple[bytes, int, bool]]:
    """Yield every line, its bytes, and whether a newline ends it.

    Of a line of more than `limit` bytes only a part is returned, blank if all of it is.
    """
    while line := file.readline(limit + 2):
        piece, size = line, len(line)
        while not piece.endswith(b"\n") and (more := file.readline(_PIECE)):
            piece, size = more, size + len(more)
            line = line if line.strip() else piece
        yield line, size, piece.endswith(b"\n")


def json_lines(name: str, path: Path, limit: int) -> Generator[Row]:
    """Yield one row per line that is not blank."""
    with opened(name, path) as file:
        for number, (line, size, ended) in enumerate(_lines(file, limit), 1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if size - ended > limit:
                yield f"{name}:{number}", too_long(size - ended, limit)
            elif text.strip():
                yield f"{name}:{number}", JsonText(text)


class _TooLong(csv.Error):
    """A record goes on beyond what is read of one."""


_CELL_PARTS = re.compile(r'"+|,+|[^",]+')


class _Lines:
    """The lines of a CSV file, counted by record; one of far more than `limit` bytes is given up.

    `csv.reader` would take the rest of a cell that it gives up for records.
    """

    def __init__(self, text: io.TextIOWrapper, limit: int) -> None:
        self._text, self._most, self.number = text, 4 * limit + 4096, 0
        self.begin()

    def begin(self) -> None:
        """Begin a record."""
        self.count = self.size = 0
        self.unclosed = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Return the next line; what is beyond the bound is left to `skip`."""
        self._piece, self._quoted = "", self.count > 0
        if self.size > self._most:
            raise _TooLong("more than a record may have")
        if not (line := self._read()):
            self.unclosed = self._quoted
            raise StopIteration
        self._count(line)
        if len(line) > self._most:
            self._piece = line
            raise _TooLong("a line of more than a record may have")
        return line

    def skip(self) -> None:
        """Read what is left of the record, piece by piece, by the rules of `csv.reader`.

        A quote opens a cell at its start only. Two in a row within it are one of its characters.
        """
        state = "quoted" if self._quoted else "start"
        piece = self._piece
        while True:
            for part in _CELL_PARTS.findall(piece):
                if part[0] == '"' and state != "plain":
                    # One opens the cell, or ends it; each further pair is a character.
                    odd = len(part) % 2 == 1
                    state = "quoted" if odd == (state != "quoted") else "closed"
                elif part[0] == "," and state != "quoted":
                    state = "start"
                elif part[0] not in '",' and state != "quoted":
                    state = "plain"
            if piece.endswith(("\n", "\r")) and state != "quoted":
                return
            new_line = not piece or piece.endswith(("\n", "\r"))
            if not (piece := self._read()):
                self.unclosed = state == "quoted"
                return
            self._count(piece, new_line)

    def _read(self) -> str:
        """Return the next line, or the part of it that is within the bound; "" at the end."""
        return self._text.readline(self._most + 1)

    def _count(self, line: str, new_line: bool = True) -> None:
        self.number += new_line
        self.count += new_line
        self.size += len(line)


def csv_rows(name: str, path: Path, limit: int) -> Generator[Row]:
    """Yield one row per record of a CSV file with a header; an empty cell is null.

    `where` has the line on which the record ends. What is not UTF-8 becomes half of a surrogate
    pair, which makes the row bad when it is parsed. Each line after a quote that nothing closes is
    a bad row.
    """
    csv.field_size_limit((1 << 31) - 1)
    with opened(name, path) as file:
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
    with opened(name, path) as file:
        first, size, content = 0, 0, bytearray()
        for number, (line, length, _) in enumerate(chain(_lines(file, limit), [_END]), 1):
            if line.strip():
                first, size = first or number, size + length
                if size <= limit:
                    content += line
            elif first:
                yield f"{name}:{first}", _paragraph(content, size, limit)
                first, size, content = 0, 0, bytearray()


_END = b"", 0, True  # behind the last line, as a blank one


def _paragraph(content: bytearray, size: int, limit: int) -> Any:
    """Return the row of a paragraph of `size` bytes; `content` is all of it up to the limit."""
    if size > limit:
        return too_long(size, limit)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8: {error}")
    return {"text": text.removesuffix("\n").removesuffix("\r")}
