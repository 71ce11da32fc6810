"""`--data DIR_OR_URL[@FINGERPRINT][:weight]`: a dataset, and how often it appears in an epoch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from spec_data.shards.errors import ConfigError
from spec_data.shards.pins import split_pin
from spec_data.shards.storage import normal_url, scheme_of

_WEIGHT = re.compile(r"\d+(\.\d{1,3})?")
_LIKE_A_WEIGHT = re.compile(r"[-+]?\d*\.?\d*(e[-+]?\d+)?|nan|inf", re.IGNORECASE)


@dataclass(frozen=True)
class DataSource:
    """One `--data`: a directory or URL, and how often per epoch each of its documents appears."""

    path: Path
    weight: Fraction = Fraction(1)

    @property
    def location(self) -> str:
        """The URL or the directory, as it was written."""
        return normal_url(self.path) if self.remote else str(self.path)

    @property
    def place(self) -> str:
        """The URL or the directory, without a pin."""
        return split_pin(self.location)[0]

    @property
    def remote(self) -> bool:
        """Whether it is a URL."""
        return scheme_of(self.path) is not None

    def absolute(self) -> "DataSource":
        """Return the same source for any working directory."""
        return self if self.remote else replace(self, path=self.path.absolute())

    def __str__(self) -> str:
        return self.location if self.weight == 1 else f"{self.location}:{_decimal(self.weight)}"


def parse_source(text: str) -> DataSource:
    """Read one DIR or DIR:weight; an existing directory whose name looks like that has weight 1.

    Raises:
        ConfigError: the weight is not above 0, or has more than three decimals.
    """
    folder, colon, weight = text.rpartition(":")
    if not colon or not folder or not _LIKE_A_WEIGHT.fullmatch(weight) or Path(text).is_dir():
        return DataSource(Path(text))
    if not _WEIGHT.fullmatch(weight) or not Fraction(weight):
        raise ConfigError(
            f"--data {text}: the weight after the colon is how often each document appears in an "
            "epoch: above 0, with at most 3 decimals, as 2 or 0.25"
        )
    return DataSource(Path(folder), Fraction(weight))


def parse_sources(data: str | Sequence[str]) -> tuple[DataSource, ...]:
    """Read all `--data` options.

    Raises:
        ConfigError: a weight is wrong, a directory is given twice, or none at all.
    """
    sources = tuple(map(parse_source, [data] if isinstance(data, str) else data))
    if not sources:
        raise ConfigError("--data: no dataset is given; name one")
    locations = [source.absolute().place for source in sources]
    for location in locations:
        if locations.count(location) > 1:
            raise ConfigError(
                f"--data {location}: given twice; write {location}:2 to train on it twice as often"
            )
    return sources


def _decimal(weight: Fraction) -> str:
    return f"{float(weight):.3f}".rstrip("0").rstrip(".")
