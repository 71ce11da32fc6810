"""The page at the end of `fit`. If it cannot be written, that is a warning, never an error.

Nothing here imports the evaluation or a class of a target, because `fit` never does.
"""

import logging
import os
from typing import Any

from spec_train.options.command_options import FitConfig
from spec_train.reports.run_page import PAGE, write_report
from spec_train.training import setup
from spec_train.training.result import FitResult

log = logging.getLogger(__name__)


def fit(draft_name: str, config: FitConfig, options: Any) -> FitResult:
    """Fit a draft (see `training.setup.fit`), then write report.html into the run directory.

    Raises:
        As `training.setup.fit`.
    """
    result = setup.fit(draft_name, config, options)
    if os.environ.get("RANK", "0") == "0":
        try:
            log.info("page       %s", write_report([result.directory]))
        except Exception as error:  # the run is saved, and worth more than its page
            warn_of_page(f"{result.directory / PAGE} was not written", error)
    return result


def warn_of_page(what: str, error: Exception) -> None:
    """Log that a page could not be written."""
    log.warning("warning: %s: %s: %s", what, type(error).__name__, error)
    log.debug("the page failed", exc_info=error)
