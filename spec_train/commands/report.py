"""`spec-train report`: the page about runs and evaluations."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from spec_data.shards.path_kinds import Kind, what_is, wrong_kind
from spec_data.terminal.command import command
from spec_data.terminal.types import AnyPath, File

if TYPE_CHECKING:
    from spec_data.pages.page import WrittenPage

Runs = Annotated[
    Sequence[AnyPath] | AnyPath, Parameter(consume_multiple=1), Parameter(metavar="RUN")
]


@command
def write_report(runs: Runs, *, out: File | None = None) -> "WrittenPage":
    """Write one HTML page about runs and evaluations.

    It shows loss and acceptance length over trained tokens, acceptance by depth and source, which
    drafted tokens of sampled responses were accepted, and settings that differ. `fit` and `eval`
    write such a page at their end; this command does at any time, also while a run trains.

    Examples:
        spec-train report RUN
        spec-train report RUN-A RUN-B RUN-C --out runs.html
            curves of three runs in the same charts, and the options in which they differ
        spec-train report runs
            of the directory `runs`: all runs in it, with links to their own pages
        spec-train report RUN result.json --out both.html
            a run with an evaluation that `spec-train eval --json result.json` wrote

    Args:
        runs: runs, directories of runs, and files of `spec-train eval --json`.
        out: the HTML file, needed for several; not given: report.html in the directory, or beside
            the file with its name.

    Raises:
        MissingError: one does not exist.
        ConfigError: one is neither a run nor such a file, or the page cannot be written.
        RunError: a file of a run is damaged.
    """
    several = [runs] if isinstance(runs, (str, PathLike)) else runs
    for path in several:
        if what_is(str(path)) is Kind.NOTHING:
            raise wrong_kind(str(path), Kind.RUN)
    from spec_train.reports.run_page import write_report as write

    return write(list(map(Path, several)), None if out is None else Path(out))
