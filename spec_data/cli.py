"""The spec-data commands: parse, call, print. Heavy imports wait until a command runs."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import spec_data
from spec_data.commands.estimate import estimate
from spec_data.commands.generate import generate, kept_units
from spec_data.commands.hub import pull, push
from spec_data.commands.inspect import inspect
from spec_data.commands.regenerate import regenerate
from spec_data.commands.report import write_report
from spec_data.commands.status import status
from spec_data.commands.verify import verify
from spec_data.commands.views import copy, join, merge, recode, select
from spec_data.conversion_commands import (
    CONVERT_TEXTS,
    EXPORT_TEXTS,
    kept_conversion,
    run_convert,
    run_export,
)
from spec_data.options.conversion_options import ConvertConfig, ExportDataConfig
from spec_data.shards.errors import ConfigError, RunError
from spec_data.terminal.command import Program
from spec_data.terminal.config import add_options, join_values
from spec_data.terminal.console import (
    Parser,
    add_common_options,
    add_completion_option,
    run_cli,
)

_RAW = argparse.RawDescriptionHelpFormatter
_DESCRIPTION = """\
Run a target model over a corpus once and keep what its drafts need to learn in a small Arrow
dataset that proves itself. Train on it with spec-train; the target is not needed again.
"""
_EXAMPLES = """\
examples, in the order in which they are run:
  spec-data estimate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/qwen3-8b
  spec-data generate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/qwen3-8b
  spec-data verify data/qwen3-8b --target Qwen/Qwen3-8B --samples 32
  spec-data inspect data/qwen3-8b --doc 0

Every command prints the next one. spec-data COMMAND --help explains all options of a command.
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the whole command line."""
    parser = Parser(
        "spec-data",
        usage="spec-data COMMAND [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=_RAW,
    )
    version = f"%(prog)s {spec_data.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    add_completion_option(parser)
    add_common_options(parser, top=True)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", prog=parser.prog
    )
    for name, config, usage, text, description, epilog in (
        ("convert", ConvertConfig, *CONVERT_TEXTS),
        ("export", ExportDataConfig, *EXPORT_TEXTS),
    ):
        command = commands.add_parser(
            name,
            usage=f"spec-data {name} {usage} [options]",
            help=text,
            description=description,
            epilog=epilog,
            formatter_class=_RAW,
        )
        if "data" in config.__dataclass_fields__:
            many = config.__dataclass_fields__["data"].type is not str
            nargs = "*" if many else "?"
            command.add_argument(
                "positional", nargs=nargs, metavar="DIR", help="same as --data DIR"
            )
        add_options(command, config)
        add_common_options(command)
    for name, text in PROGRAM.names().items():
        commands.add_parser(name, help=text.replace("%", "%%"))
    return parser


PROGRAM = Program("spec-data", _DESCRIPTION, _EXAMPLES, spec_data.__version__)
PROGRAM.add(estimate)
PROGRAM.add(generate, stopped=kept_units)
PROGRAM.add(status)
PROGRAM.add(inspect)
PROGRAM.add(verify)
PROGRAM.add(write_report, name="report")
PROGRAM.add(
    regenerate,
    usage="--target MODEL --corpus SRC [SRC ...] --out FILE",
    stopped=lambda given: f"the answers so far are kept in {given['out']}.journal",
)
for _function in (select, merge, join, copy, recode, push, pull):
    PROGRAM.add(_function)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `spec-data` and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if any(word in PROGRAM.names() for word in words):
        return PROGRAM.main(words)
    args = build_parser().parse_args(join_values(arguments))
    _sort_out_directory(args)
    kept = _KEPT.get(args.command)
    stopped = (lambda: kept(args)) if kept else None
    return run_cli(lambda: _run(args), args, stopped)


def _run(args: argparse.Namespace) -> int:
    """Run the command, after checking that DIR is given.

    Raises:
        ConfigError: it is not.
    """
    if hasattr(args, "positional") and not args.data and not args.config:
        raise ConfigError(f"which directory? write it after the command: {args.command} DIR")
    return _COMMANDS[args.command](args)


def _sort_out_directory(args: argparse.Namespace) -> None:
    """Set --data from the bare DIR."""
    if hasattr(args, "positional"):
        args.data = args.positional or args.data


def _show_sealed(manifest: Any) -> None:
    """Print what is inside a dataset that was just sealed.

    Raises:
        RunError: the data contradict the label --on-policy; the dataset is complete all the same.
    """
    from spec_data.report import dataset_text, refused_label

    print(dataset_text(manifest))
    refused = refused_label(manifest)
    if refused:
        raise RunError(refused)


_KEPT = {"convert": kept_conversion}
_COMMANDS = {
    "convert": lambda args: run_convert(args, _show_sealed),
    "export": run_export,
}
