"""The page at the end of `eval`. If it cannot be written, that is a warning, never an error."""

import logging
from pathlib import Path
from typing import Any

from spec_data.pages.page import write_page
from spec_data.terminal.paths import check_file_to_write
from spec_train.evaluation.report import measure
from spec_train.options.command_options import EvalConfig
from spec_train.options.report_options import AUTO, NONE
from spec_train.reports.results import evaluations, is_run
from spec_train.reports.run_page import report_page, short_names, warn_of_page

log = logging.getLogger(__name__)

EVAL_PAGE = "eval.html"


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """Evaluate (see `evaluation.report.measure`) and write the page of --report.

    Raises:
        As `evaluation.report.measure`. ConfigError: the file of --report cannot be written.
    """
    file = page_of(config)
    if file is not None and config.report != AUTO:
        check_file_to_write("--report", file)
    figures = measure(config)
    if file is not None:
        try:
            (name,) = short_names([Path(config.draft)])
            page = report_page([], evaluations(figures, "this evaluation", name))
            log.info("page       %s", write_page(file, page).path)
        except Exception as error:  # the figures are worth more than their page
            warn_of_page(file, error)
    return figures


def page_of(config: EvalConfig) -> Path | None:
    """Return the file that --report stands for; None: no page."""
    if config.report == NONE:
        return None
    if config.report != AUTO:
        return Path(config.report)
    if is_run(Path(config.draft)):
        return Path(config.draft) / EVAL_PAGE
    return None if config.json is None else Path(config.json).with_suffix(".html")
