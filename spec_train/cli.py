"""The spec-train commands: parse, call, report. Work modules are imported by the command that
needs them, so that --help costs nothing."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from spec_data import __version__
from spec_data.terminal.command import Program
from spec_data.terminal.config import (
    add_options,
    join_values,
    resolve,
)
from spec_data.terminal.console import (
    Parser,
    add_common_options,
    add_completion_option,
    run_cli,
    say_next,
)
from spec_train.commands.compare import compare
from spec_train.commands.doctor import doctor
from spec_train.commands.export import export
from spec_train.commands.fit import add_fit
from spec_train.commands.replay import replay
from spec_train.commands.report import write_report
from spec_train.options.command_options import EvalConfig

_RAW = argparse.RawDescriptionHelpFormatter
_DESCRIPTION = "Fit speculative-decoding drafts on stored hidden states, without the target."
_EXAMPLES = """\
examples, in the order in which they are run:
  spec-train fit eagle3 --data DATA --out RUN
  spec-train eval --draft RUN --data DATA
  spec-train export --draft RUN --format vllm --out DIR --target MODEL

Every command prints the next one. spec-train COMMAND --help explains all options of a command,
spec-train fit DRAFT --help those of one kind of draft."""
EVAL_HELP = """\
Measure a draft: on stored states (--data, no target needed), or by real speculative decoding
with the target (--target and --prompts), which also checks that greedy output equals the target's
own."""

EVAL_EXAMPLES = """\
examples:
  spec-train eval --draft RUN --data DATA
  spec-train eval --draft RUN --target MODEL --prompts prompts.jsonl --json result.json
  spec-train eval --draft RUN --target MODEL --prompts prompts.jsonl --tree-tokens 60
      with dynamic trees instead of chains (drafts eagle and eagle3)
RUN stands for its best draft; name RUN/last or RUN/checkpoint-<step> for another."""


def build_parser() -> argparse.ArgumentParser:
    """Build the whole command line."""
    parser = Parser(
        prog="spec-train",
        usage="spec-train COMMAND [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=_RAW,
    )
    version = f"%(prog)s {__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    add_completion_option(parser)
    add_common_options(parser, top=True)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", prog=parser.prog
    )
    _add_command(
        commands, "eval", EvalConfig, _eval, "measure a draft", EVAL_HELP, EVAL_EXAMPLES,
        "--draft RUN --data DIR",
    )  # fmt: skip
    for name, text in PROGRAM.names().items():
        commands.add_parser(name, help=text.replace("%", "%%"))
    return parser


def _add_command(
    commands: Any,
    name: str,
    config: type,
    run: Callable[[argparse.Namespace], int],
    text: str,
    description: str,
    epilog: str,
    usage: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        usage=f"spec-train {name} {usage} [options]",
        help=text,
        description=description,
        epilog=epilog,
        formatter_class=_RAW,
    )
    add_options(parser, config)
    parser.set_defaults(run=run)
    add_common_options(parser)
    return parser


def _eval(arguments: argparse.Namespace) -> int:
    config = resolve(EvalConfig, arguments)
    from spec_train.evaluation.report import run_eval
    from spec_train.reports.page_after_eval import evaluate

    run_eval(config, evaluate)
    target = ["--target", config.target] if config.target else []
    say_next("spec-train", "export", "--draft", config.draft, *target)
    return 0


PROGRAM = Program("spec-train", _DESCRIPTION, _EXAMPLES, __version__)
add_fit(PROGRAM)
PROGRAM.add(compare)
PROGRAM.add(export)
PROGRAM.add(doctor)
PROGRAM.add(replay)
PROGRAM.add(write_report, name="report")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `spec-train` and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if any(word in PROGRAM.names() for word in words):
        return PROGRAM.main(words)
    arguments = build_parser().parse_args(join_values(argv))
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run_cli(lambda: run(arguments), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
