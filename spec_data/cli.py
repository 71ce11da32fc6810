"""The spec-data commands: parse, call, print. Heavy imports wait until a command runs."""

import argparse
import logging
import sys
from collections.abc import Sequence

import spec_data
from spec_data.config import add_options, join_values, resolve, run_cli
from spec_data.options import GenerateConfig, InspectConfig, SealConfig, VerifyConfig

_DESCRIPTION = """\
Run a target model over a corpus once and keep what its drafts need to learn in a small Arrow
dataset that proves itself. Train on it with spec-train; the target is not needed again.
"""
_EXAMPLES = """\
examples:
  spec-data estimate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/qwen3-8b
  spec-data generate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/qwen3-8b
  spec-data generate ... --workers 0/4          (and 1/4, 2/4, 3/4, then)
  spec-data seal --out data/qwen3-8b
  spec-data verify data/qwen3-8b --target Qwen/Qwen3-8B --samples 32
  spec-data inspect data/qwen3-8b --doc 0
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "spec-data", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=spec_data.__version__)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, config, text, positional in (
        ("estimate", GenerateConfig, "plan only: exact bytes, tokens, shards, free space", None),
        ("generate", GenerateConfig, "make a dataset; run again to go on after a stop", None),
        ("seal", SealConfig, "finish a dataset whose --workers are all done", None),
        ("inspect", InspectConfig, "say what is inside a dataset, or show one document", "data"),
        (
            "verify",
            VerifyConfig,
            "prove a dataset: checksums, states, logits, a fresh forward",
            "data",
        ),
    ):
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if positional:
            command.add_argument("positional", nargs="?", metavar="DIR", help="same as --data")
        add_options(command, config)
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `spec-data`; gives the exit code."""
    args = build_parser().parse_args(join_values(arguments))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "transformers", "datasets"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    if getattr(args, "positional", None):
        args.data = args.positional
    return run_cli(lambda: _COMMANDS[args.command](args), args.debug)


def _estimate(args: argparse.Namespace) -> int:
    from spec_data.generation.setup import make_plan, set_up
    from spec_data.report import estimate_text

    config = resolve(GenerateConfig, args)
    setup = set_up(config)
    print(estimate_text(setup, make_plan(setup)))
    return 0


def _generate(args: argparse.Namespace) -> int:
    config = resolve(GenerateConfig, args)
    if config.dry_run:
        return _estimate(args)
    from spec_data.generation.run import generate
    from spec_data.report import dataset_text

    manifest = generate(config)
    if manifest is not None:
        print(dataset_text(manifest))
        print(f"\nprove it:  spec-data verify {config.out}")
    return 0


def _seal(args: argparse.Namespace) -> int:
    from pathlib import Path

    from spec_data.generation.run import seal_directory
    from spec_data.report import dataset_text

    print(dataset_text(seal_directory(Path(resolve(SealConfig, args).out))))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from spec_data.report import dataset_text, document_text
    from spec_data.shards.reader import HiddenStatesDataset

    config = resolve(InspectConfig, args)
    dataset = HiddenStatesDataset(config.data)
    if config.doc is None:
        print(dataset_text(dataset.manifest))
    else:
        colour = config.color == "always" or (config.color == "auto" and sys.stdout.isatty())
        print(document_text(dataset, config.doc, colour))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from spec_data.verification.run import verify

    return verify(resolve(VerifyConfig, args))


_COMMANDS = {
    "estimate": _estimate,
    "generate": _generate,
    "seal": _seal,
    "inspect": _inspect,
    "verify": _verify,
}
