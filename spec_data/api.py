"""The functions of spec_data for Python. They are imported as `spec_data.NAME`.

Each takes the options of its command as keyword arguments, with the command's defaults, and does
what the command does, without printing. Paths are `str` or `Path`. Errors are SpecDataErrors.
"""

from pathlib import Path
from typing import Any

from spec_data.conversion.export import ExportedStates
from spec_data.conversion.export import export_dataset as run_export
from spec_data.conversion.run import convert as run_conversion
from spec_data.options.conversion_options import ConvertConfig, ExportDataConfig
from spec_data.results import GenerateResult
from spec_data.terminal.keywords import from_keywords, takes_options

AnyPath = str | Path


@takes_options(ConvertConfig, without=("data", "dry_run"))
def convert(
    source: AnyPath, from_tool: str, target: AnyPath, out: AnyPath, **options: Any
) -> GenerateResult:
    """Read the hidden states that another trainer stored, and write a dataset; resume a run.

    Args:
        source: the directory that the other tool wrote.
        from_tool: "speculators", "specforge", "deepspec", "automodel", "modelopt" or "torchspec".
        target: the target whose states these are.
        out: the dataset directory.
        options: those of `spec-data convert`, listed below.

    Returns:
        What was written, as `generate` returns it.

    Raises:
        ConfigError, MissingError, DatasetError, CorpusError, TargetError: bad input.
        RunError: the states are not those of `target`, or not at their tokens.

    >>> _ = spec_data.export_dataset("data", "specforge", "stored")  # as SpecForge stores them
    >>> made = spec_data.convert("stored", "specforge", "target", "data-5", codec="bf16")
    >>> made.documents, made.layers
    (12, (0, 2, 4))
    """
    given = {"data": source, "from_tool": from_tool, "target": target, "out": out, **options}
    manifest = run_conversion(from_keywords(ConvertConfig, given, "convert"))
    return GenerateResult.of(str(out), manifest, str(target))


@takes_options(ExportDataConfig, without=("data",))
def export_dataset(path: AnyPath, to: str, out: AnyPath, **options: Any) -> ExportedStates:
    """Write a dataset in the layout of another trainer; resume a run.

    Args:
        path: the dataset directory.
        to: "speculators" or "specforge".
        out: the directory to write.
        options: those of `spec-data export`, listed below. `layers` may be a list of ids.

    Returns:
        What was written, and what the other trainer must be told.

    Raises:
        MissingError, DatasetError: the dataset cannot be read, or lacks what the layout needs.
        ConfigError: a layer that it does not have, or another export is in `out`.

    >>> done = spec_data.export_dataset("data", "speculators", "for-speculators", layers=[0, 2])
    >>> done.documents, done.lines[0][:31]
    (12, 'train with --target-layer-ids 1')
    """
    given = {"data": path, "to": to, "out": out, **options}
    config = from_keywords(ExportDataConfig, given, "export_dataset")
    return run_export(path, to, Path(out), config.layer_ids)
