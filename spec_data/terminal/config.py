"""Tables of options: config files, and plain tables of options as JSON has them. No torch here."""

import dataclasses
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from spec_data.shards.errors import ConfigError, MissingError
from spec_data.terminal.checks import checked_values
from spec_data.terminal.console import did_you_mean
from spec_data.terminal.paths import check_value

T = TypeVar("T")

DOCUMENT_LENGTH = 2048
"""Default of --max-length of `generate` and of --seq-len of `fit`: what one writes, the other reads
without a cut."""


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
    """Parse YAML without its tags; 1e-4 stays a text, which the option's type makes a number."""
    import yaml  # only here: no other call needs it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}


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
