"""Options that several commands have alike: how many rows may be bad, which dataset is read."""

from typing import Any

from spec_data.options.option_values import DOCUMENTS, REQUIRED
from spec_data.shards.path_kinds import Kind
from spec_data.terminal.config import option


def max_bad_rows_option(
    more: str = "rows of a --corpus are bad", unit: str = "rows", group: str = DOCUMENTS
) -> Any:
    """The option --max-bad-rows: `more` than how many stop the run; `unit` is what is counted."""
    return option(
        "auto",
        help=f"stop if more {more}: a count such as 5, or a share such as 1% or 0.01. auto is 1 %; "
        f"below 1,000 {unit} it is 10 {unit}, but not more than 10 %",
        group=group,
        metavar="N|SHARE",
        numbers=True,
    )


def read_data_option() -> Any:
    """The option --data of commands that read a dataset, here or on remote storage."""
    return option(
        help="the dataset: a directory, or a URL such as s3://bucket/data (docs/remote.md); may be "
        "given without --data",
        group=REQUIRED,
        metavar="DIR",
        dataset="read",
        holds=Kind.DATASET,
    )
