"""The option of `generate` that shares codec tables with another dataset (see config.py)."""

from typing import Any

from spec_data.options.option_values import CAPTURE
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import option


def tables_of_option() -> Any:
    """The dataset whose codec tables are used."""
    return option(
        None,
        help="take the codec's tables from this dataset of the same target, so that both can be "
        "merged; it must have all layers that are captured. Not given: make them from a sample of "
        "this corpus, which fits it best",
        group=CAPTURE,
        metavar="DIR",
        dataset="read",
        holds=Kind.DATASET,
    )
