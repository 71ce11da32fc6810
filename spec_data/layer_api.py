"""The Python function that adds layers to a dataset; imported as `spec_data.add_layers`."""

from pathlib import Path
from typing import Any

from spec_data.added_layers.run import add_layers as run_add_layers
from spec_data.options.layer_options import AddLayersConfig
from spec_data.terminal.keywords import from_keywords, takes_options
from spec_data.view_api import AnyPath, ViewResult, view_result


@takes_options(AddLayersConfig, without=("data", "target", "out", "dry_run"))
def add_layers(
    path: AnyPath, target: AnyPath, out: AnyPath | None = None, **options: Any
) -> ViewResult:
    """Capture further layers of a dataset; called again after an interruption, resume it.

    Args:
        path: the dataset.
        target: the target that it was captured with.
        out: write a new dataset here; None: the dataset itself gets the layers.
        options: those of `spec-data add-layers`, listed below; `layers` or `for_drafts` is needed.

    Returns:
        The dataset as it is now.

    Raises:
        ConfigError: the dataset has the layers already, or `out` holds other data.
        DatasetError: damage; or the target is not that of the dataset, by its files or its states.
        MissingError, TargetError: the target cannot be loaded, or has no such layers.
        RunError: a failed proof, a full disk, or another process that writes there.
    """
    given = {"data": path, "target": target, "out": out, **options}
    given = {name: value for name, value in given.items() if value is not None}
    config = from_keywords(AddLayersConfig, given, "add_layers")
    manifest = run_add_layers(config)
    return view_result(Path(config.out or config.data), manifest, len(manifest.shards))
