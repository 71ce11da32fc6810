"""images.jsonl: which images the documents of a dataset hold; their pixels are stored nowhere.

A line is a document: `doc_id`, and `images` in the order of their tokens, each with `sha256` of its
file, `width` and `height` in pixels, `path` as the corpus has it ("": it was part of its row), and
the tokens [`start`, `end`) that stand for it. The first line has `processor`, the hash of the image
processor that made the inputs of the target.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.follow import WORK

if TYPE_CHECKING:
    from spec_data.shards.reader import HiddenStatesDataset

IMAGES = "images.jsonl"
"""In a plan's folder, and in a dataset; a dataset without images has none."""
FOLDER = "images"
"""In a plan's folder: the files of the images by their SHA-256, while states are captured."""


class Placed(NamedTuple):
    """An image of a document; see the module."""

    sha256: str
    width: int
    height: int
    path: str
    start: int
    end: int


def line(doc_id: str, images: Iterable[Placed]) -> str:
    """Return a line of images.jsonl."""
    listed = [image._asdict() for image in images]
    return json.dumps({"doc_id": doc_id, "images": listed}, ensure_ascii=False) + "\n"


def first_line(processor: str) -> str:
    """Return the first line of images.jsonl."""
    return json.dumps({"processor": processor}) + "\n"


def read_images(file: Path) -> tuple[str, dict[str, list[Placed]]]:
    """Return the hash of the processor, and the images of each document that has some.

    Raises:
        DatasetError: the file is damaged.
    """
    if not file.is_file():
        return "", {}
    try:
        first, *lines = file.read_bytes().splitlines()
        processor = str(json.loads(first)["processor"])
        return processor, dict(map(_document, lines))
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{file}: damaged ({error}); copy or generate it again") from None


def _document(text: bytes) -> tuple[str, list[Placed]]:
    value: dict[str, Any] = json.loads(text)
    fields = ("sha256", "width", "height", "path", "start", "end")
    return value["doc_id"], [Placed(*(image[n] for n in fields)) for image in value["images"]]


def has_images(dataset: "HiddenStatesDataset") -> bool:
    """Return whether documents of a dataset, or of a view, or of their captures have images."""
    return any(
        IMAGES in source.manifest.files or (source.path / WORK / IMAGES).is_file()
        for source in dataset.sources
    )


def refuse_images(sources: "Iterable[HiddenStatesDataset]", what: str) -> None:
    """Raise ConfigError where a command would lose which images the documents hold."""
    for source in sources:
        if has_images(source):
            raise ConfigError(
                f"{source.location}: it has documents with images, of which no {what} is made; "
                "fit on it as it is, or generate from a smaller corpus"
            )


def images_of(dataset: "HiddenStatesDataset") -> dict[str, list[Placed]]:
    """Return the images of each document of a dataset, or of a view, that has some, by its id."""
    images: dict[str, list[Placed]] = {}
    for source in dataset.sources:
        if IMAGES in source.manifest.files:
            images |= read_images(source.file(IMAGES))[1]
    return images
