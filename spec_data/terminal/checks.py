"""Check arguments of commands, and fields of options, against their annotations.

Types, choices and bounds are checked by msgspec, paths by the notes `types.Holds`. No torch here.
"""

import dataclasses
import math
import os
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from cyclopts import Parameter

from spec_data.shards.errors import ConfigError
from spec_data.terminal.console import did_you_mean
from spec_data.terminal.paths import check_dataset_place, check_path, check_value
from spec_data.terminal.types import Holds


def flag(name: str) -> str:
    """Return the option of a parameter: --max-length of max_length, --for of for_."""
    return "--" + name.rstrip("_").replace("_", "-")


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return one value as its annotation wants it; errors name its flag.

    Raises:
        ConfigError: another type, out of its bounds, or an empty text; MissingError: a path that is
            not what it should be.
    """
    value = _plain(value)
    if isinstance(value, str) and _wants_several(hint):
        value = [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if getattr(value, f.name) != f.default]
        given = {field.name: getattr(value, field.name) for field in fields}
        return dataclasses.replace(value, **checked_values(type(value), given)) if given else value
    value = _converted(name, value, hint)
    holds = next((note for note in notes_of(hint) if isinstance(note, Holds)), Holds())
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            continue
        if holds.dataset:
            check_dataset_place(flag(name), text, holds.dataset == "write")
        elif not holds.urls:
            check_value(flag(name), text)
        if holds.kind is not None:
            check_path(flag(name), text, holds.kind)
    return value


def _converted(name: str, value: Any, hint: Any) -> Any:
    """Return a value as its annotation wants it, but for its paths."""
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").partition(" - at ")[0]
        choices = _choices(hint)
        if choices:
            listed = ", ".join(choices)
            reason = f"choose from {listed}{did_you_mean(str(value), choices)}"
        text = " ".join(repr(value).split())[:100]
        raise ConfigError(f"{flag(name)} {text}: {reason[0].lower()}{reason[1:]}") from None


def check_bounds(options: Any) -> None:
    """Check types, choices and bounds of all fields of a dataclass of options.

    Raises:
        ConfigError: a value of another type, out of its bounds, or not finite.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        _converted(field.name, _plain(value), hints[field.name])
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{flag(field.name)} {value}: expected a finite number")


def checked_values(kind: type, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return values of fields of a dataclass of options as their annotations want them.

    Raises:
        ConfigError: as `checked_arguments`; the message begins with `where`.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    try:
        return {name: checked(name, value, hints[name]) for name, value in values.items()}
    except ConfigError as error:
        raise type(error)(f"{where}{error}") from None


def _plain(value: Any) -> Any:
    """Return paths as texts, scalars of numpy and torch as numbers, and sequences as lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple, range)):
        return [_plain(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def notes_of(hint: Any) -> Iterator[Any]:
    """Return all notes of an annotation, also of the parts of a union."""
    yield from getattr(hint, "__metadata__", ())
    for part in typing.get_args(hint):
        if typing.get_origin(hint) is not typing.Literal:
            yield from notes_of(part)


def _wants_several(hint: Any) -> bool:
    """Whether an annotation wants several texts, so that a single one means a list of one."""
    notes = getattr(hint, "__metadata__", ())
    return any(isinstance(note, Parameter) and note.consume_multiple for note in notes)


def _choices(hint: Any) -> list[str]:
    if typing.get_origin(hint) is typing.Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    return [choice for part in typing.get_args(hint) for choice in _choices(part)]
