"""Values of options: checked against their annotations, and read from config files.

Types, choices and bounds are checked by msgspec, paths by the notes `types.Holds`. No torch here.
"""

import dataclasses
import json
import math
import os
import re
import typing
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from cyclopts import Parameter

from spec_data.shards.errors import ConfigError, MissingError, SpecDataError
from spec_data.shards.file_heads import instead
from spec_data.shards.path_kinds import Kind
from spec_data.shards.regular_files import read_bounded
from spec_data.terminal import memory_models
from spec_data.terminal.console import did_you_mean
from spec_data.terminal.given import Options, changed, decided
from spec_data.terminal.memory_rows import lines_of, named
from spec_data.terminal.paths import (
    at_home,
    check_dataset_location,
    check_path,
    check_url,
    check_value,
)
from spec_data.terminal.types import Holds, comma_list, each_once, plain, read_json
from spec_data.terminal.yaml_bounds import check_yaml

T = TypeVar("T", bound=Options)

DOCUMENT_LENGTH = 2048
"""Default of --max-length of `generate` and of --seq-len of `fit`: what one writes, the other reads
without a cut."""


def flag(name: str) -> str:
    """Return the option of a parameter: --max-length of max_length, --for of for_."""
    return "--" + name.rstrip("_").replace("_", "-")


def options_text(values: Mapping[str, Any]) -> str:
    """Return options and their values as they are typed: --epochs 5 --layers 1,3 --no-qk-norm."""

    def words(name: str, value: Any) -> str:
        if isinstance(value, bool):
            return flag(name) if value else f"--no-{flag(name)[2:]}"
        return f"{flag(name)} {comma_list(value)}"

    return " ".join(words(name, value) for name, value in values.items())


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return one value as its annotation wants it; errors name its flag.

    Raises:
        ConfigError: another type, out of its bounds, or an empty text; MissingError: a path that is
            not what it should be.
    """
    notes = list(_notes_of(hint))
    if any(isinstance(note, Holds) and note.kind is Kind.CORPUS for note in notes):
        value = named(value)
    for note in notes:
        if isinstance(note, Holds) and note.kind is Kind.TARGET:
            value = memory_models.named(flag(name), value, note.loaded)
    value = _plain(value)
    if isinstance(value, dict) and isinstance(hint, type) and dataclasses.is_dataclass(hint):
        value = from_dict(cast(Any, hint), value, name)
    several = any(isinstance(note, Parameter) and note.consume_multiple for note in notes)
    if isinstance(value, str) and several:
        value = [value]
    if isinstance(value, list) and not several and not _takes_a_list(hint):
        value = comma_list(value)  # as the command line separates them
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        assert isinstance(value, Options)
        return changed(value, **_checked_values(type(value), value.given_values()))
    value = _converted(name, value, hint)
    holds = next((note for note in notes if isinstance(note, Holds)), Holds())
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            continue
        if holds.dataset:
            check_dataset_location(flag(name), text, holds.dataset == "write")
        elif holds.urls:
            check_url(flag(name), text)
        else:
            check_value(flag(name), text)
        in_memory = lines_of(text) is not None or memory_models.pair_of(text) is not None
        if holds.kind is not None and not in_memory:
            check_path(flag(name), text, holds.kind)
    return value


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


def _converted(name: str, value: Any, hint: Any) -> Any:
    """Return a value as its annotation wants it, but for its paths."""
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").partition(" - at ")[0]
        if choices := _choices(hint):
            reason = f"choose from {', '.join(choices)}{did_you_mean(str(value), choices)}"
        text = " ".join(repr(value).split())[:100]
        raise ConfigError(f"{flag(name)} {text}: {reason[0].lower()}{reason[1:]}") from None
    except TypeError:  # several dataclasses, of which the value is none
        kinds = ", ".join(f"{kind.__name__}(...)" for kind in typing.get_args(hint))
        raise ConfigError(f"{name}={value!r}: expected one of {kinds}") from None


def _checked_values(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of fields of a dataclass of options as their annotations want them."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: checked(name, value, hints[name]) for name, value in values.items()}


def _plain(value: Any) -> Any:
    """Return paths as texts, what numpy and torch hold as Python does, and sequences as lists.

    A ~ at the start of a text is the home directory.
    """
    value = plain(value)
    if isinstance(value, os.PathLike):
        return at_home(os.fspath(value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return at_home(value)
    return value


def _takes_a_list(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return True
    return any(_takes_a_list(part) for part in typing.get_args(hint))


def _notes_of(hint: Any) -> Iterator[Any]:
    """Yield all notes of an annotation, also of the parts of a union."""
    yield from getattr(hint, "__metadata__", ())
    for part in typing.get_args(hint):
        if typing.get_origin(hint) is not typing.Literal:
            yield from _notes_of(part)


def _choices(hint: Any) -> list[str]:
    if typing.get_origin(hint) is typing.Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    return [choice for part in typing.get_args(hint) for choice in _choices(part)]


# -- tables of options ------------------------------------------------------------------------

_DECODE: dict[str, Callable[..., dict[str, Any]]] = {
    ".toml": msgspec.toml.decode,  # refuses a key that is there twice
    ".json": msgspec.json.decode,
    ".yaml": msgspec.yaml.decode,
    ".yml": msgspec.yaml.decode,
}


_DEEP_KEY = re.compile(rb"""(?<![\w"'-])(?:[\w"'-]+[ \t]*\.[ \t]*){50}""")
_MOST_OPTIONS = 1 << 20  # bytes of a file of options


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a flat TOML, JSON or YAML table; dashes in keys count as underscores.

    1e-4 of YAML is a text, which the option's type makes a number.

    Raises:
        MissingError: no such file.
        ConfigError: another suffix, no regular file, one that cannot be parsed, or no table.
    """
    check_value("--config", str(path))
    if path.is_dir():
        raise MissingError(f"--config {path}: a folder; name a file in it")
    if not path.exists():
        raise MissingError(f"--config {path}: no such file")
    if path.suffix not in _DECODE:
        raise ConfigError(f"--config {path}: the name must end in {', '.join(_DECODE)}")
    try:
        content = read_bounded(path, _MOST_OPTIONS).removeprefix(BOM_UTF8)
        if path.suffix not in (".toml", ".json"):
            check_yaml(content)
        elif _DEEP_KEY.search(content):  # tomllib takes quadratic memory for it
            raise ValueError("a key of more than 50 parts, which no option has")
        table = _DECODE[path.suffix](content, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        kind = path.suffix[1:].upper()
        why = instead(path, f"not a {kind} table of options: {error}")
        raise ConfigError(f"--config {path}: {why}") from None
    try:
        if path.suffix == ".json":
            read_json(content)
        elif path.suffix != ".toml":
            _refuse_equal_keys(content)
        _refuse_huge_numbers(table)
        each_once([(flag(key)[2:], None) for key in table])  # max_length beside max-length
        return {key.replace("-", "_"): value for key, value in table.items()}
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}") from None


def _refuse_huge_numbers(table: dict[str, Any]) -> None:
    """Raise ValueError for a whole number that Python does not write out, such as 0xf...f."""
    waiting: list[Any] = [table]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int) and value.bit_length() > 64:
            raise ValueError("a whole number of more than 64 bits, which no option has")


def _refuse_equal_keys(text: bytes) -> None:
    """Raise ValueError if a table of a YAML file has a key twice; readers keep the last one."""
    import yaml

    waiting, seen = [yaml.compose(text, Loader=yaml.SafeLoader)], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            each_once([(key.value, None) for key, _ in node.value if isinstance(key.value, str)])
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def from_dict(cls: type[T], values: dict[str, Any], where: str = "config", given: bool = True) -> T:
    """Build a dataclass of options, which checks its values; unknown keys are errors.

    Without `given` they are the record of a draft or a run, in which nothing counts as given.

    Raises:
        SpecDataError: see above; the message names `where` the values are from.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    for name in sorted(values.keys() - set(names), key=str):
        raise ConfigError(f"{where}: no option {name!r}{did_you_mean(str(name), names)}")
    try:
        return cls(**values) if given else decided(cls(), **values)
    except TypeError as error:  # a missing one
        raise ConfigError(f"{where}: {error}") from None
    except SpecDataError as error:
        raise type(error)(f"{where}: {error}") from None


def to_dict(options: Any) -> dict[str, Any]:
    """Return a dataclass as JSON-ready plain values (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(options)))
