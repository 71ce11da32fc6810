"""`spec_train.write_report`: the page about runs and evaluations, for Python."""

from collections.abc import Sequence
from pathlib import Path

from spec_train.reports import run_page

AnyPath = str | Path


def write_report(places: AnyPath | Sequence[AnyPath], out: AnyPath | None = None) -> Path:
    """Write an HTML page about runs and evaluations; it is one file that needs no network.

    Args:
        places: a run directory or a file of `spec-train eval --json`, or several of them, which
            are shown side by side. Runs may still train.
        out: the HTML file; None: report.html in the run directory, or beside the file with its
            name. Needed for several places.

    Returns:
        The HTML file.

    Raises:
        MissingError: a place does not exist.
        ConfigError: a place is neither a run nor such a file, or `out` cannot be written.
        RunError: fit.json or run.json of a run is damaged.

    >>> spec_train.write_report("run").name
    'report.html'
    """
    several = [places] if isinstance(places, (str, Path)) else list(places)
    return run_page.write_report(several, out)
