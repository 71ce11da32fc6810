"""The spec-train commands: parse, call, report. Work modules are imported by the command that
needs them, so that --help costs nothing."""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spec_data import __version__
from spec_data.config import (
    add_options,
    join_values,
    read_config_file,
    resolve,
    run_cli,
)
from spec_train.draft_options import DRAFT_OPTIONS
from spec_train.options import (
    EvalConfig,
    ExportConfig,
    ReplayConfig,
    fit_config,
    resolve_fit,
    split_config,
)
from spec_train.presets import preset_help

_RAW = argparse.RawDescriptionHelpFormatter
FIT_HELP = """\
Fit a draft to a dataset made by `spec-data generate`. The target is never opened: its embeddings
and head are part of the dataset. RUN gets fit.json (every option, resolved), metrics.jsonl,
checkpoint-<step>/ directories that resume, and two links: `best` (the draft with the longest
simulated acceptance on held-out documents) and `last`. Both are Hugging Face directories that
inference engines load.

Stop it whenever you like: Ctrl-C or SIGTERM finishes the step and saves; after a crash the newest
whole checkpoint counts. The same command goes on from there, in the middle of an epoch."""

FIT_EXAMPLES = """\
examples:
  spec-train fit {draft} --data DATA --out RUN
  spec-train fit {draft} --data DATA --out RUN --preset smoke
      a minute to see that everything works; then --preset 50k --out ANOTHER
  spec-train fit {draft} --data OWN:2 CHATS CODE:0.25 --out RUN
      three datasets of one target: each document of OWN twice per epoch, of CODE every 4th time
  spec-train fit {draft} --data DATA --out RUN --follow
      beside `spec-data generate --out DATA`: begins with the first units, waits for the others
  spec-train fit {draft} --data DATA --out RUN --steps 2000 --batch-size 2 --accumulation 4
      a step of 8 packs, two at a time in memory; the result is that of one batch of 8
  spec-train fit {draft} --config RUN/fit.json --out AGAIN
      the same run once more, bit for bit on a CPU; with --epochs 1, a shorter one
  spec-train fit {draft} --data NEW --out MORE --init-from RUN
      begin with what RUN has learned
  torchrun --nproc-per-node 8 -m spec_train fit {draft} --data DATA --out RUN --batch-size 1
      on 8 GPUs: a step of 8 packs; --sharding fsdp2 splits weights and optimizer among them
  spec-train fit {draft} --data DATA --out ZERO --steps 0
      the untrained draft, to compare with"""

EVAL_HELP = """\
Measure a draft: on stored states (--data, no target needed), or by real speculative decoding
against the target (--target and --prompts), which also checks that greedy output is the target's
own."""

EVAL_EXAMPLES = """\
examples:
  spec-train eval --draft RUN --data DATA
  spec-train eval --draft RUN --target MODEL --prompts prompts.jsonl --json result.json
  spec-train eval --draft RUN --target MODEL --prompts prompts.jsonl --tree-tokens 60
      with dynamic trees instead of chains (drafts eagle and eagle3)
RUN stands for its best draft; name RUN/last or RUN/checkpoint-<step> for another."""

EXPORT_HELP = """\
Write a draft in the form that an engine or another trainer reads, or only say what each of them
would make of it. Every export is checked before it is written (will it load there, and be read as
it was trained?) and read back afterwards: it must be the same draft, bit for bit.

The formats are read too, whoever wrote them: `--draft` here, and `--init-from` of `spec-train fit`.
What a form or an engine cannot represent is refused in words."""

EXPORT_EXAMPLES = """\
examples:
  spec-train export --draft RUN --format vllm --out my-eagle3 --target MODEL
  spec-train export --draft RUN --format speculators --out my-eagle3-spec --target Qwen/Qwen3-8B
      the form that vLLM serves as a model: it names its target
  spec-train export --draft RUN --check --target MODEL
      a report on all engines, nothing is written; with --format, exit code 2 if that one refuses
  spec-train export --draft PUBLISHED --format hf --out DRAFT --target MODEL
      someone else's draft as a checkpoint of spec-train, for `eval` and `fit --init-from`"""

REPLAY_HELP = """\
Run a batch that stopped a run again: a loss or gradient was not finite, and `spec-train fit` saved
the batch with the draft of that moment as RUN/failed-step-<n>. Says which stored states, weights,
modules and gradients are not finite, the first ones first, and what every document adds to the
loss. Works on any machine; of the dataset only the target's head is read."""

REPLAY_EXAMPLES = """\
examples:
  spec-train replay RUN/failed-step-1200
  spec-train replay failed-step-1200 --data COPY --device cpu
      COPY holds manifest.json and target/ of the dataset"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spec-train",
        description="Fit speculative-decoding drafts on stored hidden states, without the target.",
        epilog="spec-train fit eagle3 --data DATA --out RUN\n"
        "spec-train eval --draft RUN --data DATA\n"
        "spec-train export --draft RUN --format vllm --out DIR",
        formatter_class=_RAW,
    )
    parser.add_argument("--version", action="version", version=f"spec-train {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    metavar = "{fit,eval,export,replay}"
    commands = parser.add_subparsers(dest="command", required=True, metavar=metavar)
    fit = commands.add_parser(
        "fit", help="train a draft", description=FIT_HELP, formatter_class=_RAW
    )
    drafts = fit.add_subparsers(dest="draft", required=True, metavar="DRAFT")
    for name, options in DRAFT_OPTIONS.items():
        leaf = drafts.add_parser(
            name,
            help=(options.__doc__ or "").splitlines()[0],
            description=FIT_HELP,
            epilog=FIT_EXAMPLES.format(draft=name)
            + "\n\n"
            + preset_help([field.name for field in dataclasses.fields(fit_config(name))]),
            formatter_class=_RAW,
        )
        add_options(leaf, fit_config(name))
        leaf.set_defaults(run=_fit)
        _add_debug(leaf)
    evaluate = commands.add_parser(
        "eval",
        help="measure a draft",
        description=EVAL_HELP,
        epilog=EVAL_EXAMPLES,
        formatter_class=_RAW,
    )
    add_options(evaluate, EvalConfig)
    evaluate.set_defaults(run=_eval)
    _add_debug(evaluate)
    export = commands.add_parser(
        "export",
        help="write a draft for an engine, or check it for all",
        description=EXPORT_HELP,
        epilog=EXPORT_EXAMPLES,
        formatter_class=_RAW,
    )
    add_options(export, ExportConfig)
    export.set_defaults(run=_export)
    _add_debug(export)
    again = commands.add_parser(
        "replay",
        help="run a batch that failed again",
        description=REPLAY_HELP,
        epilog=REPLAY_EXAMPLES,
        formatter_class=_RAW,
    )
    again.add_argument("failed", metavar="RUN/failed-step-N", help="what the failed run left")
    add_options(again, ReplayConfig)
    again.set_defaults(run=_replay)
    _add_debug(again)
    return parser


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def _resolve_fit(arguments: argparse.Namespace) -> Any:
    """Flags over --config over --preset over defaults (see `resolve_fit`)."""
    names = {field.name for field in dataclasses.fields(fit_config(arguments.draft))}
    flags = {k: v for k, v in vars(arguments).items() if k in names and v is not None}
    table = read_config_file(Path(arguments.config)) if arguments.config else {}
    where = arguments.config or "the command line"
    return resolve_fit(arguments.draft, flags, table, where)


def _fit(arguments: argparse.Namespace) -> int:
    joined = _resolve_fit(arguments)
    config, options = split_config(arguments.draft, joined)
    from spec_train.training.setup import fit

    result = fit(arguments.draft, config, options)
    if result.stopped_by is not None:
        return 128 + result.stopped_by
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    config = resolve(EvalConfig, arguments)
    from spec_train.evaluation.report import run_eval

    run_eval(config)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    config = resolve(ExportConfig, arguments)
    from spec_train.exporting import run_export

    run_export(config)
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    config = resolve(ReplayConfig, arguments)
    from spec_train.replay import replay

    replay(Path(arguments.failed), config)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `spec-train`; gives the exit code."""
    arguments = _parser().parse_args(join_values(argv))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run_cli(lambda: run(arguments), arguments.debug)


if __name__ == "__main__":
    raise SystemExit(main())
