"""The commands of `spec-data`. Heavy imports wait until one runs."""

from operator import itemgetter

import spec_data
from spec_data.commands.convert import convert, export_dataset
from spec_data.commands.estimate import estimate
from spec_data.commands.generate import generate, kept_units
from spec_data.commands.hub import pull, push
from spec_data.commands.inspect import inspect, status, verify, write_report
from spec_data.commands.regenerate import regenerate
from spec_data.commands.views import copy, join, merge, recode, select
from spec_data.terminal.command import Program

_DESCRIPTION = """\
Run a target model over a corpus once and keep what its drafts need to learn in
a small Arrow dataset that proves itself. Train on it with spec-train; the
target is not needed again.
"""
_EXAMPLES = """\
examples, in the order in which they are run:
  spec-data estimate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/8b
  spec-data generate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/8b
  spec-data verify data/8b --target Qwen/Qwen3-8B --samples 32
  spec-data inspect data/8b --doc 0

Most commands name the next one. spec-data COMMAND -h shows its first options,
--help-all all.
"""


PROGRAM = Program("spec-data", _DESCRIPTION, _EXAMPLES, spec_data.__version__)
PROGRAM.add(estimate)
PROGRAM.add(generate, stopped=kept_units, logs=itemgetter("out"))
PROGRAM.add(status)
PROGRAM.add(convert, stopped=kept_units, logs=itemgetter("out"))
PROGRAM.add(export_dataset, name="export")
PROGRAM.add(inspect)
PROGRAM.add(verify)
PROGRAM.add(write_report, name="report")
PROGRAM.add(
    regenerate,
    usage="(--target MODEL | --server URL) --corpus SRC [SRC ...] --out FILE",
    stopped=lambda given: f"the answers so far are kept in {given['out']}.journal",
    logs=itemgetter("out"),
)
for _function in (select, merge, join, copy, recode):
    PROGRAM.add(_function, logs=itemgetter("out"))
PROGRAM.add(push)
PROGRAM.add(pull)

main = PROGRAM.main
