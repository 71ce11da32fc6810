"""The spec-data commands: parse, call, print. Heavy imports wait until a command runs."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import spec_data
from spec_data.commands.hub import pull, push
from spec_data.commands.inspect import inspect
from spec_data.commands.regenerate import regenerate
from spec_data.commands.report import write_report
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
from spec_data.options.dataset_options import SealConfig, StatusConfig
from spec_data.options.generate_options import EstimateConfig, GenerateConfig
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.urls import scheme_of
from spec_data.terminal.command import Program
from spec_data.terminal.config import add_options, as_flags, join_values, resolve
from spec_data.terminal.console import (
    Parser,
    add_common_options,
    add_completion_option,
    run_cli,
    say_next,
)
from spec_data.terminal.paths import check_file_to_write

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
_ESTIMATE = """\
Read and render the corpus and print what `generate` would write: documents, tokens, shards, and
bytes: of the shards exactly, of all other files to within 1 % and 64 KB. It needs the config and
the tokenizer of the target, but not its weights, unless --probe is given. Exit code 1 where the
disk is too small."""
_GENERATE = """\
Run the target over the corpus and write a dataset. Stop it whenever you like: Ctrl-C, SIGTERM
and a closed terminal lose at most the shard in work, and the same command resumes. A resumed run
writes the same bytes as an uninterrupted one."""
_GENERATE_EXAMPLES = """\
examples:
  spec-data generate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/qwen3-8b
  spec-data generate --target MODEL --corpus chats.jsonl --out DIR --workers 0/4
      one of four workers; run 1/4, 2/4 and 3/4 as well: the last one to finish seals DIR
  srun spec-data generate --target MODEL --corpus chats.jsonl --out DIR --workers auto
      one worker per task of SLURM; torchrun, job arrays and Kubernetes Jobs work as well
  spec-data generate --config generate.yaml --limit 100
      options from a file; those on the command line replace them"""
_SEAL = """\
Check every shard and write the index and the manifest that make a directory a dataset. `generate`
does it itself; only needed if a worker was killed after its last shard."""
_STATUS = """\
Print how far `generate` is in a directory: finished units, tokens per second, the time that is
left, what each worker does, and what failed. It reads files of the directory, so it runs on any
machine that sees them, and changes nothing."""


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
    required = "--target MODEL --corpus SRC [SRC ...] --out DIR"
    for name, config, usage, text, description, epilog in (
        ("estimate", EstimateConfig, required, "print sizes, run nothing", _ESTIMATE, ""),
        ("generate", GenerateConfig, required, "write a dataset", _GENERATE, _GENERATE_EXAMPLES),
        ("convert", ConvertConfig, *CONVERT_TEXTS),
        ("seal", SealConfig, "--out DIR", "finish the dataset of several workers", _SEAL, ""),
        ("status", StatusConfig, "DIR", "print how far a generation is", _STATUS, ""),
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
        if name in _JSON:
            _add_json(command)
        add_common_options(command)
    for name, text in PROGRAM.names().items():
        commands.add_parser(name, help=text.replace("%", "%%"))
    return parser


_JSON = ("estimate", "status")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the result as JSON to FILE; without FILE, print JSON instead of text "
        "(default: text only)",
    )


PROGRAM = Program("spec-data", _DESCRIPTION, _EXAMPLES, spec_data.__version__)
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
    """Run the command, after checking that DIR is given and that --json FILE can be written.

    Raises:
        ConfigError: one of them is not so.
    """
    if hasattr(args, "positional") and not args.data and not args.config:
        raise ConfigError(f"which directory? write it after the command: {args.command} DIR")
    file = getattr(args, "json", None)
    if file and file != "-":
        check_file_to_write("--json", file)
    return _COMMANDS[args.command](args)


def _sort_out_directory(args: argparse.Namespace) -> None:
    """Set --data from the bare DIR; in `--json DIR` the directory is no file to write."""
    if not hasattr(args, "positional"):
        return
    file = getattr(args, "json", None)
    if file and args.positional is None and args.data is None and Path(file).is_dir():
        args.positional, args.json = file, "-"
    args.data = args.positional or args.data


def _show(args: argparse.Namespace, text: str, facts: Callable[[], dict[str, Any]]) -> None:
    """Print a result as text or JSON, and write it to the file of --json."""
    wanted = getattr(args, "json", None)
    found = json.dumps(facts(), indent=2, ensure_ascii=False, default=str) if wanted else ""
    print(found if wanted == "-" else text)
    if wanted and wanted != "-":
        try:
            Path(wanted).write_text(found + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {wanted}: {error.strerror}") from None


def _estimate(args: argparse.Namespace) -> int:
    config = resolve(EstimateConfig, args)
    from spec_data.estimation import estimate_size, estimate_text
    from spec_data.terminal.progress import size

    found = estimate_size(config)
    _show(args, estimate_text(found), found.facts)
    needed, free = found.needed, found.free
    if needed > free:
        raise RunError(
            f"the dataset does not fit: it needs {size(needed)}, and the disk of {config.out} has "
            f"{size(free)} free: {size(needed - free)} too little. Free some space, lower --limit "
            "or --max-length, or capture fewer --layers"
        )
    say_next("spec-data", "generate", *as_flags(_to_generate(config)))
    return 0


def _to_generate(config: EstimateConfig) -> GenerateConfig:
    """Return the options of the `generate` that an `estimate` was made for."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(GenerateConfig)}
    return GenerateConfig(**values | {"dry_run": False})


def _generate(args: argparse.Namespace) -> int:
    config = resolve(GenerateConfig, args)
    if config.dry_run:
        return _estimate(args)
    from spec_data.generation.run import generate

    manifest = generate(config)
    if manifest is not None:
        _show_sealed(manifest)
        say_next("spec-data", "verify", config.out, "--target", config.target)
    elif not scheme_of(config.out):  # what is on remote storage was logged
        say_next("spec-data", "status", config.out)
    return 0


def _kept(args: argparse.Namespace) -> str:
    """Say what an interrupted `generate` keeps and how it is resumed."""
    import shlex

    config = resolve(GenerateConfig, args)
    if "spec_data.generation.run" not in sys.modules:
        kept = "nothing was captured yet"
    else:
        from spec_data.report import kept_text

        kept = kept_text(config.out)
    command = shlex.join(["spec-data", "generate", *as_flags(config)])
    return f"stopped: {kept}\nresume:  {command}"


def _seal(args: argparse.Namespace) -> int:
    config = resolve(SealConfig, args)
    from spec_data.generation.sealing import seal_directory

    _show_sealed(seal_directory(Path(config.out)))
    say_next("spec-data", "verify", config.out)
    return 0


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


def _status(args: argparse.Namespace) -> int:
    config = resolve(StatusConfig, args)
    from spec_data.generation.status import StatusReader

    reader = StatusReader(Path(config.data))
    status = reader.read()
    while config.watch and not status.sealed:
        if args.json:
            _append(args.json, json.dumps(status.facts()))
        else:
            print(("\x1b[2J\x1b[H" if sys.stdout.isatty() else "") + str(status), flush=True)
        time.sleep(_WATCH_SECONDS)
        status = reader.read()
    if config.watch and args.json:
        _append(args.json, json.dumps(status.facts()))
    else:
        _show(args, str(status), status.facts)
    if status.sealed:
        say_next("spec-data", "verify", config.data)
    elif not config.watch:
        say_next("spec-data", "status", config.data, "--watch")
    return 0


def _append(file: str, line: str) -> None:
    """Print a line, or append it to the file of --json."""
    if file == "-":
        print(line, flush=True)
        return
    with Path(file).open("a", encoding="utf-8") as target:
        target.write(line + "\n")


_WATCH_SECONDS = 2.0


_KEPT = {"generate": _kept, "convert": kept_conversion}
_COMMANDS = {
    "estimate": _estimate,
    "generate": _generate,
    "convert": lambda args: run_convert(args, _show_sealed),
    "export": run_export,
    "seal": _seal,
    "status": _status,
}
