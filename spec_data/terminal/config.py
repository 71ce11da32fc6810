"""Tables of options: config files, and plain tables of options as JSON has them. No torch here."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from spec_data.shards.errors import ConfigError, MissingError
from spec_data.terminal.checks import checked_values
from spec_data.terminal.console import did_you_mean
from spec_data.terminal.paths import check_value

T = TypeVar("T")

DOCUMENT_LENGTH = 2048
"""Default of --max-length of `generate` and of --seq-len of `fit`: what one writes, the other reads
without a cut."""


_DECODE: dict[str, Callable[..., dict[str, Any]]] = {
    ".toml": msgspec.toml.decode,
    ".json": msgspec.json.decode,
    ".yaml": msgspec.yaml.decode,
    ".yml": msgspec.yaml.decode,
}


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a flat TOML, JSON or YAML table; dashes in keys count as underscores.

    1e-4 of YAML is a text, which the option's type makes a number.

    Raises:
        MissingError: no such file.
        ConfigError: another suffix, a file that cannot be parsed, or no table.
    """
    check_value("--config", str(path))
    if not path.is_file():
        raise MissingError(f"--config {path}: no such file")
    if path.suffix not in _DECODE:
        raise ConfigError(f"--config {path}: the name must end in {', '.join(_DECODE)}")
    try:
        table = _DECODE[path.suffix](path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError) as error:
        kind = path.suffix[1:].upper()
        raise ConfigError(f"--config {path}: not a {kind} table of options: {error}") from None
    return {key.replace("-", "_"): value for key, value in table.items()}


def from_dict(cls: type[T], values: dict[str, Any], where: str = "config") -> T:
    """Build a dataclass of options from plain values; unknown keys and wrong types are errors.

    Raises:
        ConfigError: see above; the message names `where` the values are from.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields))
    if unknown:
        hint = did_you_mean(unknown[0], list(fields))
        known = ", ".join(sorted(fields))
        raise ConfigError(f"unknown option {', '.join(unknown)} in {where}; known: {known}{hint}")
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in values
    ]
    if missing:
        raise ConfigError(f"missing option {', '.join(missing)} in {where}")
    return cls(**checked_values(cls, values, f"{where}: "))


def to_dict(options: Any) -> dict[str, Any]:
    """Return a dataclass as JSON-ready plain values (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(options)))
