"""The functions of spec_data that write pages: `write_report` and `write_preview`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_data.dataset_page_commands import report_file
from spec_data.options.dataset_page_options import PreviewConfig, ReportConfig
from spec_data.pages.html_page import write_page
from spec_data.reports.dataset_page import dataset_page
from spec_data.reports.preview_page import preview_page, read_preview
from spec_data.terminal.keywords import from_keywords, takes_options
from spec_data.terminal.paths import check_file_to_write

AnyPath = str | Path


@takes_options(ReportConfig, without=("data",))
def write_report(path: AnyPath, **options: Any) -> Path:
    """Write one HTML page of a dataset; it needs no network and no other file.

    Args:
        path: a sealed dataset, or its URL.
        options: those of `spec-data report`, listed below.

    Returns:
        The file.

    Raises:
        MissingError, DatasetError: the dataset is not sealed, or damaged.
        ConfigError: the file cannot be written.

    >>> spec_data.write_report("data", out="data.html", documents=10).name
    'data.html'
    """
    config = from_keywords(ReportConfig, {"data": path, **options}, "write_report")
    out = report_file(config)
    check_file_to_write("--out", out)
    return write_page(out, dataset_page(config))


@takes_options(PreviewConfig)
def write_preview(
    corpus: AnyPath | Sequence[AnyPath],
    target: AnyPath,
    out: AnyPath = "preview.html",
    **options: Any,
) -> Path:
    """Write one HTML page of a corpus, as `generate` would render and mask it.

    Args:
        corpus: JSONL, CSV, Parquet or text files, folders, `datasets` directories or Hub names.
        target: a model directory, a Hub id, or a directory with a tokenizer alone.
        out: the HTML file.
        options: those of `spec-data preview`, listed below.

    Returns:
        The file.

    Raises:
        CorpusError, TargetError, MissingError: bad input.
        ConfigError: a bad value, or a file that cannot be written.

    >>> spec_data.write_preview("chats.jsonl", "target", "preview.html", limit=5).name
    'preview.html'
    """
    given = {"corpus": corpus, "target": target, "out": out, **options}
    config = from_keywords(PreviewConfig, given, "write_preview")
    check_file_to_write("--out", config.out)
    return write_page(config.out, preview_page(config, read_preview(config)))
