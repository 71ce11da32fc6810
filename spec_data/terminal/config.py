"""Typed, frozen configs and the command line made from them.

A command's options *are* the fields of one frozen dataclass: `option()` states a field's help text
and group, `add_options` turns the fields into argparse flags, `resolve` merges (defaults < --config
file < flags) and rejects unknown keys. Nothing here imports torch, so `--help` is instant.
"""

import argparse
import dataclasses
import json
import re
import sys
import tomllib
import types
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from spec_data.shards.errors import ConfigError, MissingError
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.checks import checked_values as annotated_values
from spec_data.terminal.console import nearest
from spec_data.terminal.paths import check_dataset_place, check_path, check_value

T = TypeVar("T")

COMMAND_LINE = "the command line"

DOCUMENT_LENGTH = 2048
"""Default of --max-length of `generate` and of --seq-len of `fit`: what one writes, the other reads
without a cut."""


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    group: str = "",
    choices: tuple = (),
    metavar: str = "",
    numbers: bool = False,
    flag: str = "",
    urls: bool = False,
    dataset: str = "",
    holds: Kind | None = None,
):
    """A dataclass field that is also a command-line option.

    `default` missing makes the option required. Tuples become repeatable options that also take
    several values (`--corpus a b --corpus c`). `group` is the heading it has in --help. `numbers`
    lets config files and Python write a text option as a number (`max-bad-rows: 5`). `flag` is the
    option's name on the command line and in config files where Python does not allow it as a name.
    `urls` accepts texts such as http://host, which every other option refuses. `dataset` ("read" or
    "write") accepts the URL of a dataset on remote storage, see `shards.urls`. `holds` is what must
    be at the path of the option: commands check it before any work, see `check_paths`.
    """
    metadata: dict[str, Any] = {"help": help, "group": group, "choices": choices, "urls": urls}
    metadata |= {"metavar": metavar, "numbers": numbers, "flag": flag, "dataset": dataset}
    metadata["holds"] = holds
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(field: dataclasses.Field) -> str:
    """Return the flag of an option."""
    return "--" + (field.metadata.get("flag") or field.name.replace("_", "-"))


def given_as(field: dataclasses.Field, where: str) -> str:
    """Return the name of an option as it was given: a flag, a keyword of Python, or a file's key.

    `where` is "the command line", "--config FILE", or another place, which has the names of Python.
    """
    if where == COMMAND_LINE:
        return flag_of(field)
    return flag_of(field)[2:] if where.startswith("--config ") else field.name


def in_words_of(message: str, cls: type, where: str, typed: Collection[str] = ()) -> str:
    """Return a message in which the flags of `cls` are named as `given_as` does.

    `typed` are options of the command line beside a file. Commands stay as they are: what is in
    backticks, and the rest of a line after a program.
    """
    named = {flag_of(f): given_as(f, where) for f in dataclasses.fields(cls) if f.name not in typed}
    parts = re.split(r"(`[^`]*`|\bspec-(?:data|train) .*)", message)
    parts[::2] = [
        re.sub(r"(?<![\w-])--[a-z][a-z-]*", lambda m: named.get(m[0], m[0]), part)
        for part in parts[::2]
    ]
    return "".join(parts)


def _scalar(annotation: Any) -> tuple[type, bool]:
    """The scalar type of an annotation, and whether it is (or may be) a tuple of that type."""
    if isinstance(annotation, types.UnionType):
        kinds = [a for a in typing.get_args(annotation) if a is not type(None)]
        annotation = next((a for a in kinds if typing.get_origin(a) is tuple), kinds[0])
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def add_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add one flag per field of the dataclass `cls`, under its group, and `--config FILE`."""
    hints = typing.get_type_hints(cls)
    own = getattr(cls, "option_group", "")  # of fields that name no group
    groups: dict[str, argparse._ArgumentGroup | argparse.ArgumentParser] = {"": parser}
    names = dict.fromkeys(f.metadata["group"] or own for f in dataclasses.fields(cls))
    for name in sorted(names, key=lambda name: name != "required"):  # those come first
        groups.setdefault(name, parser.add_argument_group(name))
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="read options from this file (.toml, .json, .yaml or .yml), one key per option, such "
        "as max-length; an option on the command line replaces the file's (default: none)",
    )
    for field in dataclasses.fields(cls):
        kind, many = _scalar(hints[field.name])
        required = field.default is dataclasses.MISSING
        default = None if required else field.default
        note = "" if required else f" (default: {_shown(default)})"
        kwargs: dict[str, Any] = {
            "dest": field.name,
            "help": f"{field.metadata['help']}{note}".replace("%", "%%"),
            "default": None,
        }
        if kind is bool:
            kwargs["action"] = argparse.BooleanOptionalAction if default else "store_true"
        else:
            kwargs["type"] = kind
            kwargs["metavar"] = field.metadata["metavar"] or kind.__name__.upper()
            if field.metadata["choices"]:
                kwargs["choices"] = field.metadata["choices"]
                kwargs["metavar"] = None
            if many:
                kwargs.update(nargs="+", action="extend")
        groups[field.metadata["group"] or own].add_argument(flag_of(field), **kwargs)


def join_values(arguments: Sequence[str] | None = None) -> list[str]:
    """The command line (default: this process's) with `--name -1,3,5` as `--name=-1,3,5`.

    argparse takes what begins with a dash for an option, unless it is a single number.
    """
    joined: list[str] = []
    for argument in sys.argv[1:] if arguments is None else arguments:
        named = joined and re.fullmatch(r"--[a-z][a-z-]*", joined[-1]) and "--" not in joined
        if named and re.fullmatch(r"-\d+(,-?\d+)+", argument):
            joined[-1] += "=" + argument
        else:
            joined.append(argument)
    return joined


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def resolve(cls: type[T], namespace: argparse.Namespace) -> T:
    """Build `cls` from parsed flags over a `--config` file over the defaults."""
    given = {k: v for k, v in vars(namespace).items() if v is not None}
    path = given.pop("config", None)
    values = read_config_file(Path(path)) if path else {}
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    typed = {k: v for k, v in given.items() if k in names}
    values |= checked_values(cls, typed, COMMAND_LINE)
    where = f"--config {path}" if path else COMMAND_LINE
    config = from_dict(cls, values, where, typed)
    check_paths(config, "data" if "positional" in vars(namespace) else "")
    return config


def check_paths(config: Any, bare: str = "") -> None:
    """Check that every path of a command is what its option wants, before torch is imported.

    `bare` is an option that is given without its flag, so errors do not name it.

    Raises:
        MissingError: one is of another kind, or nothing is there.
    """
    for field in dataclasses.fields(config):
        value, wanted = getattr(config, field.name), field.metadata.get("holds")
        if not wanted or not value:
            continue
        if isinstance(value, str):  # --prompts has several in one text
            value = value.split(",") if wanted is Kind.CORPUS else [value]
        for text in value:
            check_path("" if field.name == bare else flag_of(field), text, wanted)


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a flat TOML, JSON or YAML table; dashes in keys count as underscores.

    Raises:
        MissingError: no such file.
        ConfigError: another suffix, a file that cannot be parsed, or no table.
    """
    check_value("--config", str(path))
    if not path.is_file():
        raise MissingError(f"--config {path}: no such file")
    if path.suffix not in _PARSERS:
        raise ConfigError(
            f"--config {path}: the name must end in {', '.join(_PARSERS)}; found "
            f"{path.suffix or 'no suffix'}"
        )
    try:
        table = _PARSERS[path.suffix](path.read_text(encoding="utf-8"))
    except ValueError as error:  # of all three parsers, and of the decoding
        raise ConfigError(
            f"--config {path}: not valid {path.suffix[1:].upper()}: {error}"
        ) from None
    if not isinstance(table, dict):
        raise ConfigError(
            f"--config {path}: expected a table of options (key: value), found a "
            f"{type(table).__name__}"
        )
    return {str(key).replace("-", "_"): value for key, value in table.items()}


def _parse_yaml(text: str) -> Any:
    """Parse YAML without its tags; 1e-4 is a number, as in YAML 1.2, JSON and TOML."""
    import yaml  # only here: no other call needs it

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)  # a SafeLoader: no object is ever constructed
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


_PARSERS: dict[str, typing.Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}


def from_dict(
    cls: type[T], values: dict[str, Any], where: str = "config", typed: Collection[str] = ()
) -> T:
    """Build the config `cls` from plain values; unknown keys and wrong types are errors.

    `where` they are from, as errors name it, but for the options that were `typed` beside a file.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    named = {f.metadata["flag"]: n for n, f in fields.items() if f.metadata.get("flag")}
    values = {named.get(key, key): value for key, value in values.items()}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        names = {given_as(field, where): name for name, field in fields.items()}
        near = [f"did you mean {n}? " for n in [nearest(unknown[0], list(names))] if n]
        raise ConfigError(
            f"unknown option {', '.join(unknown)} in {where}; {''.join(near)}"
            f"known: {', '.join(sorted(names))}"
        )
    missing = [
        given_as(f, where)
        for n, f in fields.items()
        if f.default is dataclasses.MISSING and n not in values
    ]
    if missing:
        help_ = " (see --help)" if where == COMMAND_LINE else f" in {where}"
        raise ConfigError(f"missing option {', '.join(missing)}{help_}")
    checked = checked_values(cls, values, where)
    try:
        return cls(**checked)
    except ConfigError as error:
        raise type(error)(in_words_of(str(error), cls, where, typed)) from None


def checked_values(cls: type, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return values of options of `cls`, of the types that they have there.

    Raises:
        ConfigError: a value of another type; the message names `where`.
    """
    fields, hints = {f.name: f for f in dataclasses.fields(cls)}, typing.get_type_hints(cls)
    if not any("help" in field.metadata for field in fields.values()):  # a plain dataclass
        return annotated_values(cls, values, f"{where}: ")
    return {k: _checked(v, hints[k], fields[k], where) for k, v in values.items()}


def _checked(value: Any, annotation: Any, field: dataclasses.Field, where: str) -> Any:
    """Coerce one value to its field's type, or say what was expected."""
    name = given_as(field, where)
    kind, many = _scalar(annotation)
    if value is None and isinstance(annotation, types.UnionType):  # T | None: may be unset
        return None
    if value is None:
        raise ConfigError(f"{name} = null in {where}: expected {kind.__name__}")
    if many:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_one(item, kind, field, where) for item in items)
    return _one(value, kind, field, where)


def _one(value: Any, kind: type, field: dataclasses.Field, where: str) -> Any:
    name = given_as(field, where)
    exact = isinstance(value, bool) == (kind is bool)
    if kind is float and isinstance(value, int) and exact:
        value = float(value)
    if field.metadata.get("numbers") and type(value) in (int, float):
        value = str(value)
    if not isinstance(value, kind) or not exact:
        text = " ".join(repr(value).split())  # of an object, such as a model, the beginning
        found = text if len(text) <= 100 else f"{text[:100]}..."
        wanted = kind.__name__
        if kind is str and isinstance(value, list):
            wanted = f'the text "{",".join(map(str, value))}"'
        raise ConfigError(f"{name} = {found} in {where}: expected {wanted}")
    place = field.metadata.get("dataset")
    if isinstance(value, str) and place:
        check_dataset_place(name, value, place == "write")
    elif isinstance(value, str) and not field.metadata.get("urls"):
        check_value(name, value)
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{name} = {value!r} in {where}: choose from {', '.join(choices)}")
    return value


def as_flags(config: Any) -> list[str]:
    """Write a config as command-line words: every option that differs from its default."""
    words: list[str] = []
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), flag_of(field)
        if value is None or (field.default is not dataclasses.MISSING and value == field.default):
            continue
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, (tuple, list)):
            words += [flag, *map(str, value)]
        elif str(value).startswith("-"):
            words.append(f"{flag}={value}")
        else:
            words += [flag, str(value)]
    return words


def to_dict(config: Any) -> dict[str, Any]:
    """The config as JSON-ready plain values (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))
