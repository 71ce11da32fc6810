"""The options of `spec-train compare`. No torch here: `--help` is instant."""

from dataclasses import dataclass

from spec_data.terminal.config import option
from spec_train.options.fit_options import at_least


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Options of `spec-train compare`: two evaluations on the same prompts."""

    json: str | None = option(None, help="write the figures to this file", metavar="FILE")
    seed: int = option(0, help="seed of the resamples")

    def __post_init__(self) -> None:
        """Refuse a seed that numpy does not take."""
        at_least(self, 0, "seed")
