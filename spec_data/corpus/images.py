"""The images of a row: found, read, bounded, and named in the text by a mark.

A message with an image has a mark with the digest of the file where the image stands. So whatever
reads the texts of messages reads which image it is: the number of the prompt does, too. The mark is
made of code points that are no characters. `corpus.template` hands the chat template an image part
in its place. No pixels leave this module, only the bytes of files.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.corpus.bad_rows import BadRow
from spec_data.models.vision import decode

MOST_BYTES = 32 << 20
"""Of an image file."""
PARTS = ("image", "image_url", "input_image")
"""Types of the parts of a message that are images."""
SOURCES = ("path", "url", "base64", "image", "image_url", "bytes", "data")
_MARK = re.compile("\ufdd0([0-9a-f]{64})\ufdd1")
_WRITTEN = "<image>"  # of data sets with a column of images beside the text
_LINK = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image file of a row: its SHA-256, its bytes, its size in pixels, and its path in the row.

    The path of an image that is part of the row is "".
    """

    digest: str
    data: bytes = field(repr=False, default=b"")
    width: int
    height: int
    path: str = ""

    @property
    def mark(self) -> str:
        """What stands for it in the text of a message."""
        return f"\ufdd0{self.digest}\ufdd1"


def marked(text: str) -> list[str]:
    """Return the digests of the images in a text."""
    return _MARK.findall(text) if "\ufdd0" in text else []


def parts_of(text: str) -> Iterator[dict[str, str]]:
    """Yield a text with marks as the parts that chat templates read."""
    for number, piece in enumerate(_MARK.split(text)):
        if number % 2:
            yield {"type": "image"}
        elif piece:
            yield {"type": "text", "text": piece}


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """Where images of rows may be read, and how large they may be.

    Attributes:
        refused: why rows with images are bad here; "": they are read.
        folder: paths are relative to it, and nothing outside it is read; None: that of the corpus
            file.
        most_pixels: of an image.
    """

    refused: str = ""
    folder: Path | None = None
    most_pixels: int = 1 << 25

    def of_row(self, where: str) -> "RowImages":
        """Return what reads the images of the row `where`: `path:line`, or `path row N`."""
        file = Path(re.sub(r"(:\d+| row \d+)$", "", where))
        return RowImages(self, self.folder or file.parent)


@dataclass
class RowImages:
    """The images of one row, as they are found; `pictures` by their digests."""

    files: ImageFiles
    folder: Path
    pictures: dict[str, Picture] = field(default_factory=dict)
    waiting: list[Any] = field(default_factory=list)  # of the row's column, without a place yet
    of_column: bool = False  # the row has such a column
    by_part: bool = False  # a part without a source took one of them

    def take(self, row: Mapping[str, Any]) -> None:
        """Take the images of the columns `image` and `images` of a row."""
        for name in ("images", "image"):
            value = row.get(name)
            if value:
                self._check()
                self.of_column = True
                self.waiting += value if isinstance(value, list | tuple) else [value]

    def part(self, part: Mapping[str, Any], name: str) -> str:
        """Return the mark of the image part of a message."""
        self._check()
        sources = [part[n] for n in SOURCES if part.get(n) is not None]
        if len(sources) > 1:
            raise BadRow(f"{name} holds an image part with several images: give each a part")
        given = sources[0] if sources else None
        if isinstance(given, Mapping) and "url" in given:
            given = given["url"]
        if given is None:
            if not self.waiting:
                raise BadRow(f"{name} holds an image part without an image (path, url or base64)")
            given, self.by_part = self.waiting.pop(0), True
        return self._mark(given, name, part.get("base64") is given)

    def text(self, text: str, name: str) -> str:
        """Return a text whose `<image>` marks are those of the images of the row's column."""
        if not self.of_column or _WRITTEN not in text:
            return text
        if self.by_part:
            raise BadRow(f"{name} has {_WRITTEN} beside image parts without an image; use one form")
        first, *rest = text.split(_WRITTEN)
        for piece in rest:
            if not self.waiting:
                raise BadRow(f"{name} has more {_WRITTEN} than the row has images")
            first += self._mark(self.waiting.pop(0), name, False) + piece
        return first

    def finish(self) -> None:
        """Refuse images of the row that have no place in its messages."""
        if self.waiting:
            raise BadRow(
                f"{len(self.waiting)} images of the row have no place in its messages: give image "
                f"parts, or write {_WRITTEN} where an image stands"
            )

    def _check(self) -> None:
        if self.files.refused:
            raise BadRow(f"the row has images; {self.files.refused}")

    def _mark(self, given: Any, name: str, coded: bool) -> str:
        picture = self._read(given, name, coded)
        self.pictures.setdefault(picture.digest, picture)
        return picture.mark

    def _read(self, given: Any, name: str, coded: bool) -> Picture:
        path = ""
        if isinstance(given, Mapping):  # as `datasets` stores images: the bytes, or a path
            given = given.get("bytes") or given.get("path") or given.get("url") or ""
        if isinstance(given, bytes | bytearray | memoryview):
            data = bytes(given)
        elif not isinstance(given, str) or not given:
            raise BadRow(f"the image of {name} is neither a path nor the bytes of a file")
        elif given.startswith("data:"):
            head, _, body = given.partition(",")
            if not head.endswith(";base64"):
                raise BadRow(f"the data: URL of {name} is not base64")
            data = _decoded(body, name)
        elif coded:
            data = _decoded(given, name)
        elif given.startswith("file://") or not _LINK.match(given):
            path = given.removeprefix("file://")
            data = self._file(path, name)
        else:
            raise BadRow(
                f"the image of {name} is a URL ({given[:80]}), and none is fetched: download it, "
                "and give its path"
            )
        if len(data) > MOST_BYTES:
            raise BadRow(f"the image of {name} has {len(data):,} bytes (at most {MOST_BYTES:,})")
        width, height = size_of(data, self.files.most_pixels, name)
        digest = hashlib.sha256(data).hexdigest()
        return Picture(digest=digest, data=data, width=width, height=height, path=path)

    def _file(self, path: str, name: str) -> bytes:
        try:
            file, root = (self.folder / path).resolve(), self.folder.resolve()
            if not file.is_relative_to(root):
                raise BadRow(
                    f"the image of {name} ({path}) lies outside {root}; --image-folder names "
                    "another folder"
                )
            if not file.is_file():
                raise BadRow(f"the image of {name} is not there: {path} (in {root})")
            if file.stat().st_size > MOST_BYTES:
                raise BadRow(f"the image of {name} ({path}) has over {MOST_BYTES:,} bytes")
            return file.read_bytes()
        except (OSError, ValueError) as error:
            if isinstance(error, BadRow):
                raise
            raise BadRow(f"the image of {name} ({path[:200]}) cannot be read: {error}") from None


def _decoded(text: str, name: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise BadRow(f"the image of {name} is not base64") from None


def size_of(data: bytes, most_pixels: int, name: str) -> tuple[int, int]:
    """Return width and height of an image file that can be decoded; else raise BadRow."""
    try:
        width, height = decode(data, most_pixels).size
    except ValueError as error:
        raise BadRow(f"the image of {name}: {error}") from None
    return int(width), int(height)


NO_IMAGES = ImageFiles(refused="only text can be rendered here")


def in_order(messages: Sequence[Mapping[str, Any]], pictures: Mapping[str, Picture]) -> list[str]:
    """Return the digests of the images of messages, in the order of the text."""
    texts = (m["content"] for m in messages if isinstance(m.get("content"), str))
    return [digest for text in texts for digest in marked(text) if digest in pictures]
