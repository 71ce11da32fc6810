"""The page about runs and evaluations, and `spec-train report`, which writes it."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_data import __version__
from spec_data.pages.html_page import write_page
from spec_data.pages.page_parts import Page
from spec_data.shards.errors import ConfigError, MissingError
from spec_data.terminal.paths import check_file_to_write
from spec_train.options.command_options import FitConfig
from spec_train.reports.acceptance_sections import acceptance_sections, forecast_section
from spec_train.reports.run_sections import run_sections
from spec_train.reports.stored_figures import (
    ON_DATASET,
    Measured,
    Run,
    is_run,
    read_evaluation,
    read_run,
)
from spec_train.training import setup
from spec_train.training.result import FitResult

# -- names -----------------------------------------------------------------------------------------
# Short names of runs and files that a page tells apart.


def short_names(places: Sequence[Path]) -> list[str]:
    """Return a name for every path: its last parts, as many as tell it apart from the others.

    Args:
        places: runs and files; one that is there twice gets a number.
    """
    whole = [place.absolute().parts for place in places]
    names = []
    for i, parts in enumerate(whole):
        others = [other for k, other in enumerate(whole) if k != i and other != parts]
        count = 1
        while count < len(parts) and any(o[-count:] == parts[-count:] for o in others):
            count += 1
        name = "/".join(part.strip("/") for part in parts[-count:])
        earlier = sum(other == parts for other in whole[:i])
        names.append(f"{name} ({earlier + 1})" if earlier else name)
    return names


# -- run page --------------------------------------------------------------------------------------


PAGE = "report.html"


def report_page(runs: Sequence[Run], found: Sequence[Measured]) -> Page:
    """Return the page about runs and evaluations; at least one of them.

    Args:
        runs: in the order in which their curves are listed. found: evaluations.
    """
    sections = run_sections(runs, found) if runs else []
    found = [*(run.held_out for run in runs if run.held_out is not None), *found]
    after_depths = min(3, len(sections))
    sections[after_depths:after_depths] = [
        *acceptance_sections(found, alone=not runs),
        *forecast_section(runs, found),
    ]
    names = [run.name for run in runs] or list(
        dict.fromkeys(one.name.removesuffix(ON_DATASET) for one in found)
    )
    if len(names) > 1:
        title = f"{names[0]} and {len(names) - 1} more" if len(names) > 3 else ", ".join(names)
    else:
        title = names[0]
    kind = ("Run" if len(runs) == 1 else "Runs") if runs else "Evaluation"
    return Page(title=title, kind=kind, sections=sections, footer=f"spec-train {__version__}")


def write_report(places: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page about run directories and files of `eval --json`.

    Args:
        places: at least one; runs may still train. out: the HTML file; None: report.html in the
            run directory, or beside the file with its name, if there is one place.

    Returns:
        The file.

    Raises:
        MissingError: a place does not exist. ConfigError: a place is neither a run nor such a file,
            or the page cannot be written there. RunError: a run's files are damaged.
    """
    paths = [Path(place) for place in places]
    if not paths:
        raise ConfigError("nothing to report: name run directories, or files of `eval --json`")
    file = Path(out) if out is not None else _beside(paths)
    check_file_to_write("--out", file)
    runs: list[Run] = []
    found: list[Measured] = []
    for path, name in zip(paths, short_names(paths), strict=True):
        if not path.exists():
            raise MissingError(f"{path}: no such file or run directory; check the path")
        if path.is_dir() and not is_run(path):
            raise ConfigError(
                f"{path}: not a run of `spec-train fit` (it has no fit.json and no metrics.jsonl); "
                "pass the directory of --out"
            )
        if path.is_dir():
            runs.append(read_run(path, name))
        else:
            found += read_evaluation(path, name)
    return write_page(file, report_page(runs, found))


def _beside(paths: Sequence[Path]) -> Path:
    if len(paths) > 1:
        raise ConfigError(
            f"--out is needed for a page about {len(paths)} places: name an HTML file"
        )
    (path,) = paths
    return path / PAGE if path.is_dir() else path.with_suffix(".html")


# -- page after fit --------------------------------------------------------------------------------
# The page at the end of `fit`. If it cannot be written, that is a warning, never an error.
#
# Nothing here imports the evaluation or a class of a target, because `fit` never does.


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
