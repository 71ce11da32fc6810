"""`spec-data status`: how far is `generate`?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from spec_data.shards.path_kinds import Kind
from spec_data.terminal.command import command
from spec_data.terminal.types import AnyPath, Holds

if TYPE_CHECKING:
    from spec_data.generation.status import Status


Unfinished = Annotated[AnyPath, Holds(Kind.UNFINISHED), Parameter(metavar="DIR")]
"""A directory that is being generated."""


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
