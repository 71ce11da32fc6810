"""`spec-data report`: the page of a dataset."""

from typing import TYPE_CHECKING

from spec_data.shards.storage import scheme_of
from spec_data.terminal.command import command
from spec_data.terminal.paths import check_file_to_write
from spec_data.terminal.types import Dataset, File, Positive

if TYPE_CHECKING:
    from spec_data.pages.page import WrittenPage


@command
def write_report(
    path: Dataset,
    *,
    out: File | None = None,
    documents: Positive = 1000,
) -> "WrittenPage":
    """Write one HTML page of a dataset, which needs no network and no other file.

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
