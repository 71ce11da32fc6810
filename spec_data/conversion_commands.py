"""The commands `spec-data convert` and `spec-data export`. Heavy imports wait until one runs."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from spec_data.options.conversion_options import ConvertConfig, ExportDataConfig
from spec_data.terminal.config import as_flags, resolve
from spec_data.terminal.console import say_next

_CONVERT = """\
Read the hidden states that another trainer stored, and write a dataset. What the states are
(layers and their order, norm, masks) is found by comparison with the target before anything is
written; states of other tokens or of another target are refused. Run the same command again to
resume."""
_EXPORT = """\
Write a dataset in the layout of another trainer, so that one capture serves it, too."""

CONVERT_TEXTS = (
    "--from TOOL SRC --target MODEL --out DIR",
    "read what another trainer stored",
    *(_CONVERT, ""),
)
"""Usage, short help, description and epilog of `convert`."""

EXPORT_TEXTS = (
    "--to TOOL DIR --out OTHER",
    "write a dataset for another trainer",
    *(_EXPORT, ""),
)
"""Those of `export`."""


def run_convert(args: argparse.Namespace, show_sealed: Callable[[Any], None]) -> int:
    """Run `convert` and return its exit code; `show_sealed` prints a manifest."""
    config = resolve(ConvertConfig, args)
    from spec_data.conversion.run import convert, plan_conversion

    if config.dry_run:
        print(plan_conversion(config))
        say_next("spec-data", "convert", *as_flags(dataclasses.replace(config, dry_run=False)))
        return 0
    show_sealed(convert(config))
    say_next("spec-data", "verify", config.out, "--target", config.target)
    return 0


def kept_conversion(args: argparse.Namespace) -> str:
    """Say what an interrupted `convert` keeps and how it is resumed."""
    import shlex
    from pathlib import Path

    config = resolve(ConvertConfig, args)
    from spec_data.report import kept_text

    command = shlex.join(["spec-data", "convert", *as_flags(config)])
    return f"stopped: {kept_text(Path(config.out))}\nresume:  {command}"


def run_export(args: argparse.Namespace) -> int:
    """Run `export` and return its exit code."""
    config = resolve(ExportDataConfig, args)
    from pathlib import Path

    from spec_data.conversion.export import export_dataset

    print(export_dataset(config.data, config.to, Path(config.out), config.layer_ids))
    return 0
