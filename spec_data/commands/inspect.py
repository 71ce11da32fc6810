"""`spec-data inspect`, `status`, `verify` and `report`: what is in a dataset; is it intact?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from spec_data.models.target_options import EngineOptions
from spec_data.shards.path_kinds import Kind
from spec_data.shards.storage import scheme_of
from spec_data.terminal.command import Result, command
from spec_data.terminal.paths import check_file_to_write
from spec_data.terminal.types import AnyPath, Count, Dataset, File, Holds, Positive, Target

if TYPE_CHECKING:
    from spec_data.generation.status import Status
    from spec_data.pages.page import WrittenPage
    from spec_data.verification.findings import VerifyReport

Unfinished = Annotated[AnyPath, Holds(Kind.UNFINISHED), Parameter(metavar="DIR")]
"""A directory that is being generated."""


@dataclass(frozen=True, kw_only=True)
class Inspected(Result):
    """What is inside a dataset, or a document of it: as `text`, and as plain `values`.

    Of a dataset, `short` is printed, and the text with --verbose.
    """

    text: str
    short: str = ""
    values: Mapping[str, Any]
    next_command: Sequence[str]
    data: str = ""
    """The dataset, where it is shown as a whole."""

    def __str__(self) -> str:
        return self.short or self.text

    def details(self) -> str:
        """Return everything, where less is printed."""
        return self.text if self.short else ""

    def _repr_html_(self) -> str:
        """Return the page of the dataset, without its tokens; of a document what is printed."""
        from spec_data.pages.dataset_page import dataset_page
        from spec_data.pages.page import notebook_html

        if not self.data:
            return super()._repr_html_()
        return notebook_html(lambda: dataset_page(self.data, 0), self.text)

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
        doc: print the text of this document, counted from 0; supervised tokens are between « and ».

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
        dataset_summary,
        dataset_text,
        document_facts,
        document_text,
        fit_words,
    )
    from spec_data.shards.reader import HiddenStatesDataset

    dataset = HiddenStatesDataset(str(data))
    if doc is None:
        return Inspected(
            text=dataset_text(dataset.manifest),
            short=dataset_summary(dataset.manifest),
            values=dataset_facts(dataset),
            next_command=("spec-data", "inspect", str(data), "--doc", "0"),
            data=str(data),
        )
    document = document_facts(dataset, doc)
    return Inspected(
        text=document_text(document), values=document, next_command=fit_words(str(data))
    )


@command
def status(path: Unfinished) -> "Status":
    """Read how far `generate` is in a directory; nothing is changed.

    Finished units, tokens per second, the time that is left, and what each worker does or why
    it ended. Any machine that sees the directory can ask.

    Examples:
        spec-data status data/qwen3-8b
        watch spec-data status data/qwen3-8b
        spec-data status data/qwen3-8b --json

    Args:
        path: the directory that is being generated, or a dataset.

    Returns:
        Units, tokens, speed, time left and workers.

    Raises:
        MissingError: there is no dataset, and none is being generated.
        DatasetError: the plan or the manifest is damaged.

    >>> state = spec_data.status("data")
    >>> state.sealed, state.units_done == state.units
    (True, True)
    """
    from spec_data.generation.status import read_status

    return read_status(Path(path))


@command
def verify(
    data: Dataset,
    target: Target | None = None,
    *,
    samples: Positive = 16,
    fingerprint: Annotated[str, Parameter(metavar="HEX")] = "",
    running: EngineOptions = EngineOptions(),
) -> "VerifyReport":
    """Prove a dataset, from the checksums up to a fresh forward of its target.

    Checks every file and every stored chunk against its checksum, every state for broken values,
    and logits of sampled documents against the stored head. With --target, what the dataset says of
    its target is compared fact by fact, and sampled documents are computed again. The exit code is
    1 if anything failed.

    Examples:
        spec-data verify DIR
        spec-data verify DIR --target MODEL --samples 32
        spec-data verify DIR --fingerprint HEX

    Args:
        data: the dataset: a directory or a URL.
        target: also run this target on the sampled documents and compare every stored column: the
            strongest check, and the only one that loads a model.
        samples: documents whose logits, and with --target whose states, are computed again. Raise
            it for more certainty.
        fingerprint: the fingerprint that you expect, or its first 16 digits at least. Another one
            is a failure: the dataset is another, or was changed and sealed again.
        running: how the target runs, and the device that computes logits.

    Returns:
        What was proven and what failed; `ok` is True if nothing failed.

    Raises:
        SpecDataError: the dataset cannot be opened, or `target` is no model. Damage inside a
            dataset is no error: it is in `failures`.

    >>> report = spec_data.verify("data", target="target", samples=4)
    >>> report.ok, report.failures
    (True, [])
    """
    from spec_data.capture.processes import leading
    from spec_data.pages.report import fit_words
    from spec_data.verification.run import examine

    running.check()
    with leading(running.spread):  # of several processes, only the first comes here
        path = None if target is None else str(target)
        report = examine(str(data), path, samples=samples, fingerprint=fingerprint, running=running)
    if report.ok:
        report.next_command = fit_words(str(data))
    return report


@command
def write_report(
    path: Dataset, *, out: File | None = None, documents: Positive = 1000
) -> "WrittenPage":
    """Write one HTML page of a dataset.

    It shows the documents token by token (supervised tokens, turns, special tokens, the target's
    first choice), sources and their agreement with the target, lengths, bytes by column and their
    measured error, and what was left out. It contains texts of the dataset.
    `spec-data estimate --page` writes such a page before any capture.

    Examples:
        spec-data report data/qwen3-8b
        spec-data report data/qwen3-8b --documents 20 --out sample.html

    Args:
        path: the dataset, or its URL.
        out: the HTML file; not given: DIR.html beside the dataset, or NAME.html here for a URL.
        documents: documents that the page shows token by token at most, evenly spaced, and about
            4,000,000 tokens at most. Figures are of all documents.

    Raises:
        MissingError, DatasetError: the dataset is not sealed, or damaged.
        ConfigError: the file cannot be written.
    """
    from spec_data.pages.dataset_page import dataset_name, dataset_page
    from spec_data.pages.page import write_page
    from spec_data.pages.report import fit_words

    data = str(path)
    name = dataset_name(data)
    file = str(out) if out is not None else f"{name.name if scheme_of(data) else name}.html"
    check_file_to_write("--out", file)
    page = dataset_page(data, documents)
    return write_page(file, page, next_command=fit_words(data))
