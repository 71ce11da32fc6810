"""The tools whose stored states can be read, by the name of `convert --from`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from spec_data.conversion.from_automodel import AutoModelCache
from spec_data.conversion.from_deepspec import DeepSpecCache
from spec_data.conversion.from_modelopt import open_modelopt
from spec_data.conversion.from_specforge import open_specforge
from spec_data.conversion.from_speculators import SpeculatorsFiles
from spec_data.conversion.from_torchspec import open_torchspec
from spec_data.conversion.stored_samples import Layout, TargetSizes
from spec_data.shards.errors import MissingError

_OPEN: dict[str, Callable[[Path, Sequence[int] | None, TargetSizes], Layout]] = {
    "speculators": SpeculatorsFiles,
    "specforge": open_specforge,
    "deepspec": DeepSpecCache,
    "automodel": AutoModelCache,
    "modelopt": open_modelopt,
    "torchspec": open_torchspec,
}


def open_layout(
    tool: str, path: str | Path, given: Sequence[int] | None, sizes: TargetSizes
) -> Layout:
    """Open the directory that a tool wrote.

    Args:
        tool: the name of `--from`.
        path: the directory.
        given: the ids of --stored-layers, in the counting of the tool; None: not given.
        sizes: of the target.

    Raises:
        MissingError, DatasetError: it is no such directory, has no sample, or is of a release that
            is not read.
        ConfigError, TargetError: the layers are not known, or not of this target.
    """
    if not Path(path).is_dir():
        raise MissingError(f"{path}: no such directory")
    found = _OPEN[tool](Path(path), given, sizes)
    if not len(found):
        raise MissingError(f"{path}: no sample")
    return found
