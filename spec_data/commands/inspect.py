"""`spec-data inspect`: what is inside a dataset."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_data.terminal.command import Result, command
from spec_data.terminal.types import Count, Dataset


@dataclass(frozen=True, kw_only=True)
class Inspected(Result):
    """What is inside a dataset, or a document of it: as `text`, and as plain `values`."""

    text: str
    values: Mapping[str, Any]
    next_command: Sequence[str]

    def __str__(self) -> str:
        return self.text

    def facts(self) -> Mapping[str, Any]:
        """Return the values."""
        return self.values


@command
def inspect(data: Dataset, *, doc: Count | None = None) -> Inspected:
    """Print what is inside a dataset, or one of its documents.

    Says the target and its layers, columns, codecs and sizes, and what was left out and why.

    Examples:
        spec-data inspect DIR
        spec-data inspect DIR --doc 0

    Args:
        data: the dataset: a directory or a URL.
        doc: print the text of this document with its supervised tokens marked; counted from 0.

    Returns:
        What is printed, and its figures.

    Raises:
        MissingError, DatasetError: the dataset cannot be read, or has no such document.

    >>> shown = spec_data.inspect("data", doc=0)
    >>> shown.values["document"], "«" in shown.text
    (0, True)
    """
    from spec_data.pages.report import (
        dataset_facts,
        dataset_text,
        document_facts,
        document_text,
        fit_words,
    )
    from spec_data.shards.reader import HiddenStatesDataset
    from spec_data.terminal.console import use_colour

    dataset = HiddenStatesDataset(str(data))
    if doc is None:
        return Inspected(
            text=dataset_text(dataset.manifest),
            values=dataset_facts(dataset),
            next_command=("spec-data", "inspect", str(data), "--doc", "0"),
        )
    document = document_facts(dataset, doc)
    return Inspected(
        text=document_text(document, use_colour()),
        values=document,
        next_command=fit_words(str(data)),
    )
