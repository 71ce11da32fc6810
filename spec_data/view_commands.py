"""The commands that make views of datasets and edit them: what they say, and what they call.

The command line adds them to its own; see `cli`. Heavy imports wait until a command runs.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_data.options.view_options import (
    AppendConfig,
    DropColumnsConfig,
    GcConfig,
    MergeConfig,
    RecodeConfig,
    SelectConfig,
)
from spec_data.terminal.config import resolve
from spec_data.terminal.console import say_next

if TYPE_CHECKING:
    from spec_data.views.write_view import View

_SELECT = """\
Write a dataset of some of the documents of another, without the target: by source, length,
likelihood, id, as a sample, without duplicates of other datasets, without overlap with a benchmark;
and with another loss mask. Shards of which every document is kept are hard links. Stop it whenever
you like: the same command resumes."""
_SELECT_EXAMPLES = """\
examples:
  spec-data select data/all --out data/short --max-length 1024 --sample 10% --seed 1
  spec-data select data/all --out data/clean --decontaminate gsm8k_test.jsonl
  spec-data select data/all --out data/own --min-first-choice 0.75
  spec-data select data/all --out data/last --mask last-turn"""
_DROP = """\
Write a dataset with fewer layers of another, or with states of the teacher only where the next
token is supervised, as if it had been generated so. Stop it whenever you like: the same command
resumes."""

_MERGE = """\
Write the documents of several datasets of one target as one dataset: the columns that all have,
each document once. Shards that do not change are hard links. Stop it whenever you like: the same
command resumes."""
_APPEND = """\
Add the documents of other datasets of the same target to a dataset, as new shards. The shards that
are there are not touched. Stop it whenever you like: the same command resumes. No `fit` may be
running on the dataset meanwhile."""
_RECODE = """\
Write a dataset with its bf16 states in a smaller codec. The error is measured on held-out documents
and must keep the bound of the codec, as in `generate`. States that are lossy already are not
encoded again. Stop it whenever you like: the same command resumes."""
_GC = """\
List what killed processes left in a dataset's directory: temporary files, shards that no manifest
names, folders of finished work. Nothing is deleted without --yes, and nothing while a process is at
work there."""


def _select(args: argparse.Namespace) -> int:
    config = resolve(SelectConfig, args)
    from spec_data.views.select_view import plan_select

    return _write(plan_select(config), config)


def _drop_columns(args: argparse.Namespace) -> int:
    config = resolve(DropColumnsConfig, args)
    from spec_data.views.drop_columns import plan_drop_columns

    return _write(plan_drop_columns(config), config)


def _merge(args: argparse.Namespace) -> int:
    config = resolve(MergeConfig, args)
    from spec_data.views.joining import plan_merge

    return _write(plan_merge(config), config)


def _recode(args: argparse.Namespace) -> int:
    config = resolve(RecodeConfig, args)
    from spec_data.views.recoding import plan_recode

    return _write(plan_recode(config), config)


def _append(args: argparse.Namespace) -> int:
    config = resolve(AppendConfig, args)
    from spec_data.report import dataset_text
    from spec_data.views.appending import append, append_sizes, plan_append

    planned = plan_append(config)
    print(f"documents that are there already: {planned.present:,}")
    if planned.view is None:
        print("nothing is new")
    elif config.dry_run:
        print(append_sizes(planned))
        return 0
    else:
        print(dataset_text(append(planned)))
    say_next("spec-data", "verify", config.data[0])
    return 0


def _gc(args: argparse.Namespace) -> int:
    config = resolve(GcConfig, args)
    from spec_data.views.leftovers import delete_leftovers, find_leftovers, leftovers_text

    directory = Path(config.data)
    found = delete_leftovers(directory) if config.yes else find_leftovers(directory)
    print(leftovers_text(directory, found, config.yes))
    if found and not config.yes:
        say_next("spec-data", "gc", config.data, "--yes")
    else:
        say_next("spec-data", "status", config.data)
    return 0


def _write(view: "View", config: Any) -> int:
    """Write a view and print it, or print its sizes for --dry-run."""
    from spec_data.report import dataset_text
    from spec_data.views.write_view import view_sizes, write_view

    print(left_out_text(view.draft["documents"]["dropped"]))
    if config.dry_run:
        print(view_sizes(view))
        return 0
    print(dataset_text(write_view(Path(config.out), view)))
    say_next("spec-data", "verify", config.out)
    return 0


def left_out_text(dropped: dict[str, int]) -> str:
    """Return one line that says which documents are left out, by reason."""
    counts = ", ".join(f"{name} {count:,}" for name, count in dropped.items())
    return f"documents left out since the corpus was read: {counts or 'none'}"


Entry = tuple[str, Any, str, str, str, str]

VIEW_COMMANDS: tuple[Entry, ...] = (
    (
        *("select", SelectConfig, "DIR --out DIR", "write some documents of a dataset"),
        *(_SELECT, _SELECT_EXAMPLES),
    ),
    (
        *("drop-columns", DropColumnsConfig, "DIR --out DIR", "write fewer columns of a dataset"),
        *(_DROP, ""),
    ),
    ("merge", MergeConfig, "DIR DIR [DIR ...] --out DIR", "join datasets", _MERGE, ""),
    ("append", AppendConfig, "DIR OTHER [OTHER ...]", "add datasets to a dataset", _APPEND, ""),
    (
        *("recode", RecodeConfig, "DIR --out DIR --codec NAME", "store bf16 states smaller"),
        *(_RECODE, ""),
    ),
    ("gc", GcConfig, "DIR [--yes]", "delete what killed processes left", _GC, ""),
)
"""Name, options, usage, one line, description and examples of each command."""

VIEW_FUNCTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "select": _select,
    "drop-columns": _drop_columns,
    "merge": _merge,
    "append": _append,
    "recode": _recode,
    "gc": _gc,
}
"""What each command calls."""
