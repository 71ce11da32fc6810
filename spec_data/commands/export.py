"""`spec-data export`: a dataset in the layout of another trainer."""

from typing import TYPE_CHECKING, Literal

from spec_data.terminal.command import command
from spec_data.terminal.types import Dataset, Directory, Layers

if TYPE_CHECKING:
    from spec_data.conversion.export import ExportedStates


@command
def export_dataset(
    data: Dataset,
    to: Literal["speculators", "specforge"],
    out: Directory,
    *,
    layers: Layers | None = None,
) -> "ExportedStates":
    """Write a dataset in the layout of another trainer, so that one capture serves it, too.

    An interrupted run goes on when the same command is run again.

    Examples:
        spec-data export DIR --to speculators --out OTHER

    Args:
        data: the dataset: a directory or a URL.
        to: the trainer that is to read it.
        out: the directory to write.
        layers: layer ids of the dataset to write, such as 1,17,32; not given: all of them.

    Returns:
        What was written, and what the other trainer must be told.

    Raises:
        MissingError, DatasetError: the dataset cannot be read, or lacks what the layout needs.
        ConfigError: a layer that it does not have, or another export is in `out`.

    >>> done = spec_data.export_dataset("data", "speculators", "for-speculators", layers=[0, 2])
    >>> done.documents, done.lines[0][:31]
    (12, 'train with --target-layer-ids 1')
    """
    from pathlib import Path

    from spec_data.conversion.export import write_dataset
    from spec_data.shards.errors import ConfigError
    from spec_data.terminal.types import comma_list

    chosen = None
    if layers is not None:
        text = comma_list(layers)
        try:
            chosen = [int(part) for part in text.split(",")]
        except ValueError:
            raise ConfigError(f"--layers {text!r}: expected ids such as 1,3,5") from None
    return write_dataset(str(data), to, Path(str(out)), chosen)
