"""The options of the spec-data commands on a dataset directory (see config.py)."""

from dataclasses import dataclass

from spec_data.options.option_values import REQUIRED
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import option


@dataclass(frozen=True, kw_only=True)
class SealConfig:
    """Options of `seal`."""

    out: str = option(
        help="the dataset directory whose workers are all done",
        group=REQUIRED,
        metavar="DIR",
        holds=Kind.UNFINISHED,
    )


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Options of `status`."""

    data: str = option(
        help="the dataset directory; may be given without --data",
        group=REQUIRED,
        metavar="DIR",
        holds=Kind.UNFINISHED,
    )
    watch: bool = option(
        False,
        help="print the status again every two seconds, until the dataset is sealed or Ctrl-C; "
        "with --json one JSON object per line",
        group="what is shown",
    )
