"""The spec-train commands. Work modules are imported by the command that needs them."""

from spec_data import __version__
from spec_data.terminal.command import Program
from spec_train.commands.doctor import doctor
from spec_train.commands.eval import compare, evaluate
from spec_train.commands.export import export
from spec_train.commands.fit import add_fit, options_or_shape
from spec_train.commands.report import write_report
from spec_train.commands.search import kept_of, search
from spec_train.commands.vectors import vectors
from spec_train.drafts.kinds import unused_code, use_code
from spec_train.options.kinds import DEFAULT

_DESCRIPTION = "Fit speculative-decoding drafts on stored hidden states, without the target."
_EXAMPLES = f"""\
examples, in the order in which they are run:
  spec-train fit {DEFAULT} --data DATA --out RUN
  spec-train eval --draft RUN --data DATA
  spec-train export --draft RUN --format vllm --out DIR --target MODEL

Most commands name the next one. spec-train COMMAND -h shows its first options,
--help-all all.
"""

PROGRAM = Program("spec-train", _DESCRIPTION, _EXAMPLES, __version__)
PROGRAM.add_common(
    "--draft-code NAME",
    "run the code of a draft that is not part of spec-train, FILE.py:NAME or MODULE:NAME, to read "
    "such drafts; only code that you trust",
    use_code,
    unused_code,
)
add_fit(PROGRAM)
PROGRAM.add(
    search,
    usage="--data DIR --space AXIS=A,B,...",
    stopped=kept_of,
    logs=lambda given: given["training"].out,
    config=options_or_shape,
)
PROGRAM.add(
    evaluate,
    name="eval",
    usage="(--draft RUN (--data DIR | --target MODEL --prompts PATH)"
    " | --server URL --prompts PATH)",
)
PROGRAM.add(compare)
PROGRAM.add(export)
PROGRAM.add(doctor)
PROGRAM.add(write_report, name="report")
PROGRAM.add(vectors)

main = PROGRAM.main
