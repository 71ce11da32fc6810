"""Records of JSON files: a type per record, checked when it is read, refused by the path of a key.

A record is a subclass of `Record`: its annotations are the rules. Unknown keys are refused. Keys
that are null, false, zero or empty by default are not written where they are; other defaults are.
"""

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from spec_data.shards.errors import DatasetError, MissingError, SpecDataError

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
LayerId = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Xxh3 = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]

_LONGEST_NAME = 255  # bytes of a file's name on usual file systems
_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`$", re.DOTALL)
_T = TypeVar("_T")


class Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base class of records."""


def explicit(default: Any) -> Any:
    """Return a default value that is always written, for texts and floats.

    msgspec leaves a default out by identity: an equal text of another process would be written, so
    the bytes of a file would depend on where its values came from.
    """
    return msgspec.field(default_factory=lambda: default)


def as_record(value: Any, kind: type[_T], where: object, advice: str) -> _T:
    """Convert plain values, as JSON has them, to a record.

    Raises:
        DatasetError: they do not follow its rules. It names the key `where`, what is expected, and
            `advice`.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise DatasetError(f"{where}: {in_words(error)}. {advice}") from None


def in_words(error: msgspec.ValidationError) -> str:
    """Say which key is wrong: "shards[0].rows: expected int, got str"."""
    text = str(error)
    if found := _PLACE.match(text):
        text = f"{found[2]}: {found[1][0].lower()}{found[1][1:]}" if found[2] else found[1]
    return text.replace("`", "").encode("ascii", "backslashreplace").decode()


def read_file(file: Path, error: type[SpecDataError] = DatasetError) -> bytes:
    """Return the content of a file.

    Raises:
        MissingError: no such file. An `error`: it cannot be read.
    """
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise MissingError(f"{file}: no such file") from None
    except OSError as problem:
        raise error(f"{file}: cannot be read ({problem.strerror})") from None


def parse_json(text: bytes, where: object, error: type[SpecDataError] = DatasetError) -> Any:
    """Return the value in the text of the JSON file `where`.

    Raises:
        An `error`: it is not valid JSON.
    """
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{where}: not valid JSON ({problem}); restore it") from None


def read_json(file: Path, error: type[SpecDataError] = DatasetError) -> Any:
    """Return the value that a JSON file holds.

    Raises:
        MissingError: no such file. An `error`: it cannot be read, or is not valid JSON.
    """
    return parse_json(read_file(file, error), file, error)


def plain(record: Any) -> Any:
    """Return a record, or a table of records, as the plain values that its JSON has."""
    return msgspec.json.decode(msgspec.json.encode(record))


def safe_path(name: Any) -> bool:
    """Return whether `name` is a path that stays inside its directory, as manifests write it."""
    if (
        not isinstance(name, str)
        or not name
        or "\\" in name
        or ":" in name
        or not name.isprintable()
    ):
        return False
    return not any(
        part in ("", ".", "..") or len(part.encode()) > _LONGEST_NAME for part in name.split("/")
    )


def check_path(name: str) -> None:
    """Check the path of a file of a dataset.

    Raises:
        ValueError: it may lead outside.
    """
    if not safe_path(name):
        raise ValueError(
            f"expected a path inside the dataset, with names of up to 255 bytes, got {name[:60]!r}"
        )
