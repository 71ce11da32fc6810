"""The option `--data DIR[:weight]`: a dataset, and how often its documents appear in an epoch.

This module must not import torch, as the command line uses it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from spec_data.shards.errors import ConfigError

_WEIGHT = re.compile(r"\d+(\.\d{1,3})?")
_LIKE_A_WEIGHT = re.compile(r"[-+]?\d*\.?\d*(e[-+]?\d+)?|nan|inf", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """One `--data`: a directory, and how often per epoch each of its documents appears."""

    path: Path
    weight: Fraction = Fraction(1)

    def __str__(self) -> str:
        return str(self.path) if self.weight == 1 else f"{self.path}:{_decimal(self.weight)}"


def parse_source(text: str) -> Source:
    """Read one DIR or DIR:weight; an existing directory whose name looks like that has weight 1.

    Raises:
        ConfigError: the weight is not above 0, or has more than three decimals.
    """
    folder, colon, weight = text.rpartition(":")
    if not colon or not folder or not _LIKE_A_WEIGHT.fullmatch(weight) or Path(text).is_dir():
        return Source(Path(text))
    if not _WEIGHT.fullmatch(weight) or not Fraction(weight):
        raise ConfigError(
            f"--data {text}: the weight after the colon is how often each document appears in an "
            "epoch: above 0, with at most 3 decimals, as 2 or 0.25"
        )
    return Source(Path(folder), Fraction(weight))


def parse_sources(data: str | Sequence[str]) -> tuple[Source, ...]:
    """Read all `--data` options.

    Raises:
        ConfigError: a weight is wrong, or a directory is given twice.
    """
    sources = tuple(map(parse_source, [data] if isinstance(data, str) else data))
    paths = [source.path.absolute() for source in sources]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(
                f"--data {path}: given twice; write {path}:2 to train on it twice as often"
            )
    return sources


def _decimal(weight: Fraction) -> str:
    return f"{float(weight):.3f}".rstrip("0").rstrip(".")
