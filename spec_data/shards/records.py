"""Records of JSON files: a type per record, checked when it is read, refused by the path of a key.

A record is a subclass of `JsonRecord`: its annotations are the rules. Unknown keys are refused.
Keys that are null, false, zero or empty by default are not written where they are; other defaults
are.
"""

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.file_heads import instead
from spec_data.shards.regular_files import read_bounded

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
LayerId = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Xxh3 = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]

_MOST = 1 << 30  # bytes of a record: a manifest of millions of shards
_LONGEST_NAME = 255  # bytes of a file's name on usual file systems
_AT_KEY = re.compile(r"(.*) - at `\$\.?(.*)`$", re.DOTALL)
_T = TypeVar("_T")


class JsonRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base class of records."""


def explicit(default: Any) -> Any:
    """Return a default value that is always written, for texts and floats.

    msgspec leaves a default out by identity: the bytes would depend on where values came from.
    """
    return msgspec.field(default_factory=lambda: default)


def as_record(value: Any, kind: type[_T], where: object, advice: str) -> _T:
    """Convert plain values, as JSON has them, to a record.

    DatasetError: they do not follow its rules. It names `where`, the key, and `advice`.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise DatasetError(f"{where}: {in_words(error)}. {advice}") from None


def in_words(error: msgspec.ValidationError) -> str:
    """Say which key is wrong: "shards[0].rows: expected int, got str"."""
    text = str(error)
    if match := _AT_KEY.match(text):
        text = f"{match[2]}: {match[1][0].lower()}{match[1][1:]}" if match[2] else match[1]
    return text.replace("`", "").encode("ascii", "backslashreplace").decode()


def read_json(file: Path | str, text: bytes | None = None) -> Any:
    """Return the value that a JSON file holds; `text` is its content where that is known.

    MissingError: no such file. DatasetError: it cannot be read, or is not valid JSON.
    """
    try:
        return msgspec.json.decode(read_bounded(file, _MOST) if text is None else text)
    except FileNotFoundError:
        raise MissingError(f"{file}: no such file") from None
    except OSError as problem:
        raise DatasetError(f"{file}: cannot be read ({problem.strerror})") from None
    except (ValueError, RecursionError) as problem:
        why = instead(Path(file), f"not valid JSON ({problem}); restore it")
        raise DatasetError(f"{file}: {why}") from None


def plain(record: Any) -> Any:
    """Return a record, or a table of records, as the plain values that its JSON has."""
    return msgspec.json.decode(msgspec.json.encode(record))


def safe_path(name: Any) -> bool:
    """Return whether `name` is a path that stays inside its directory, as manifests write it."""
    if not isinstance(name, str) or not name.isprintable() or {"\\", ":"} & set(name):
        return False
    return not any(
        part in ("", ".", "..") or len(part.encode()) > _LONGEST_NAME for part in name.split("/")
    )


def check_path(name: str) -> None:
    """Check the path of a file of a dataset; ValueError: it may lead outside."""
    if not safe_path(name):
        raise ValueError(
            f"expected a path inside the dataset, with names of up to 255 bytes, got {name[:60]!r}"
        )
