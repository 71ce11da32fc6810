"""`spec-train fit DRAFT`: train a draft on a dataset, without its target.

The story: check what was asked (here, before torch is imported), open the documents and make the
draft (`training.fit`), take its steps (`training.trainer`: read packs of documents, `data.stream`,
and lower their loss, `training.loss`), and write the page of the run (`reports.run_page`).
"""

import inspect
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from spec_data.shards.draft_code import is_code
from spec_data.shards.errors import DraftError
from spec_data.shards.path_kinds import Kind, what_is
from spec_data.shards.pins import split_pin
from spec_data.terminal import NOTICE
from spec_data.terminal.command import Program, Result, command
from spec_data.terminal.config import options_text
from spec_data.terminal.paths import check_path
from spec_train.drafts.kinds import Kind as DraftKind
from spec_train.drafts.kinds import installed_names, kind_named, kind_of_options
from spec_train.options.data_option import parse_sources
from spec_train.options.draft_options import DraftOptions
from spec_train.options.kinds import DEFAULT, DRAFT_OPTIONS, draft_options
from spec_train.options.presets import PRESETS, of_draft, preset_help, with_preset
from spec_train.options.training import RunOptions, Training

log = logging.getLogger(__name__)
_OF_MODELS = {"architectures", "model_type", "speculators_model_type"}
"""Keys by which the config.json of a model is no table of options."""
_LENGTH = ("steps", "epochs")
"""Options that replace a preset's length, whichever it sets."""

if TYPE_CHECKING:
    from spec_train.training.result import FitResult
    from spec_train.training.run_cost import DryRun


_DEFAULT = draft_options(DEFAULT)()


@command
def fit(
    training: Training, draft: DraftOptions = _DEFAULT, *, callbacks: Sequence[Any] = ()
) -> "FitResult":
    """Train a draft on a dataset.

    The target is never opened: its embeddings and head are part of the dataset. RUN receives
    fit.json (every option), metrics.jsonl, report.html, checkpoint-*/ directories to resume
    from, and two links: `best` (longest product-limit acceptance length on held-out documents)
    and `last`, both Hugging Face directories that inference engines load. `best` is a trained
    draft: step 0 is measured, but never `best`. RUN stands for `best`, and before there is one for
    `last`.

    Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2 and a closed terminal finish the step and save `last`, without
    a validation; the same command resumes. In Python, the signal is raised again afterwards.

    Examples:
        spec-train fit eagle3 --data DATA --out RUN --preset smoke
        spec-train fit eagle3 --data OWN:2 CHATS CODE:0.25 --out RUN --epochs 3
        torchrun --nproc-per-node 8 -m spec_train fit eagle3 --data DATA --out RUN

    Args:
        training: data, run directory, length, learning rate, ...
        draft: the kind of draft, and its own options.
        callbacks: objects with methods such as `on_step_end` and `on_evaluate`, as transformers
            calls them (docs/own-loop.md).

    Returns:
        The step that the run has reached, its `best` draft, and its figures as lists of dicts:
        `training` and `validation`.

    Raises:
        DraftError: a bad value of an option of the draft.
        ConfigError: a bad value, or a run directory that holds another run.
        DatasetError, MissingError: the dataset cannot be read.
        RunError: training failed, such as with a loss that is not finite.

    >>> import spec_train as st
    >>> result = st.fit(
    ...     st.Training(data="data", out="run-2", preset="smoke", steps=4, eval_every=2,
    ...                 seq_len=128, validation=0.2),
    ...     st.Eagle3Options(ttt_steps=2, draft_vocab_size=0),
    ... )
    >>> result.finished, result.step
    (True, 4)
    >>> [line["step"] for line in result.validation]
    [0, 2, 4]
    >>> result.validation[-1]["loss"] > 0
    True
    """
    result = _fit(training, draft, callbacks)
    if result.stopped_by is not None:  # what follows this call is not for a draft of some steps
        signal.raise_signal(result.stopped_by)
    return result


def _fit(training: Training, draft: DraftOptions, callbacks: Sequence[Any] = ()) -> "FitResult":
    """Train, then write the page of the run."""
    name, training, draft = settled(training, draft)
    from spec_data.pages.page import notebook_html
    from spec_train.reports.run_page import PAGE, leave_page, page_of
    from spec_train.training.fit import fit as train

    result = train(name, training, draft, callbacks=callbacks)
    page = partial(page_of, [result.directory])
    if _is_main():
        leave_page(result.directory / PAGE, page)
    return replace(result, html=partial(notebook_html, page))


def _is_main() -> bool:
    """Whether this process is the one that writes, of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def settled(training: Training, draft: DraftOptions) -> tuple[str, Training, DraftOptions]:
    """Return the name of the draft, and both sets of options with --preset, which is named.

    Raises:
        DraftError: an option of the draft was given that does nothing beside the others.
        MissingError: --data or another path is not what it should be.
    """
    begun = (Kind.NOTHING, Kind.EMPTY, Kind.UNFINISHED, Kind.PASSED_ON)
    for source in parse_sources(training.data):
        if not (training.follow and what_is(source.place) in begun):
            check_path("--data", source.location, Kind.DATASET)
    name = kind_of_options(draft).name
    if training.preset is not None and _is_main():
        line = preset_line(training, of_draft(draft, training.preset), draft.given_values())
        log.log(NOTICE, "%s", line)
    draft = with_preset(draft, training.preset)
    draft.check_needless()
    return name, training, draft


def preset_line(training: RunOptions, own: dict[str, Any], given: Mapping[str, Any]) -> str:
    """Return what --preset fills in, and which of its values were given instead.

    `own` and `given` are what it fills of the options of the draft, and which of these were given.
    """
    filled = options_text(training.of_preset | own) or "nothing"
    names = {*PRESETS[str(training.preset)], *_LENGTH}
    given = {n: v for n, v in {**training.given_values(), **given}.items() if n in names}
    more = f"; given: {options_text(given)}" if given else ""
    return f"{'preset':<10} {training.preset}: {filled}{more}"


@command
def dry_run(training: Training, draft: DraftOptions = _DEFAULT) -> "DryRun":
    """Prepare a run, train a few of its steps, and return what all of it will cost.

    Nothing is written; what would be trained is logged by the logger `spec_train`.

    Args:
        training: as for `fit`.
        draft: as for `fit`.

    Raises:
        ConfigError: `follow`, or several processes; and what `fit` raises.

    >>> import spec_train as st
    >>> cost = st.dry_run(
    ...     st.Training(data="data", out="run", preset="smoke", seq_len=128, validation=0.2)
    ... )
    >>> cost.steps, cost.seconds > 0
    (10, True)
    """
    return _dry_run(training, draft)


def _dry_run(training: Training, draft: DraftOptions) -> "DryRun":
    name, training, draft = settled(training, draft)
    from spec_train.training.run_cost import dry_run

    return dry_run(name, training, draft)


# -- the command line ------------------------------------------------------------------------------


_DRY_RUN = """\
prepare the run, train a few steps that are thrown away, and print what would be trained, how long
            it takes, and how much memory and disk it needs; write nothing"""


@dataclass
class _Ended(Result):
    """How `fit` ended, on the command line."""

    text: str = ""
    fitted: "FitResult | None" = None

    def __str__(self) -> str:
        return self.text

    def facts(self) -> dict[str, Any]:
        """Return the state of the run, and its last figures on held-out documents."""
        if self.fitted is None:
            return {}
        names = ("directory", "step", "finished", "stopped_by", "best")
        found = {name: getattr(self.fitted, name) for name in names}
        return found | {"validation": next(iter(self.fitted.validation[-1:]), None)}


def _fit_command(training: Training, draft: Any, dry_run: bool) -> Result:
    if dry_run:
        return _dry_run(training, draft)
    fitted, ended = _fit(training, draft), _Ended()
    if _is_main():
        from spec_train.training.result import result_table

        ended.text, ended.fitted = result_table(fitted), fitted
    if fitted.stopped_by is not None:
        ended.exit_code = 128 + fitted.stopped_by
        ended.again = "" if "RANK" in os.environ else "resume"  # else torchrun's own words
    elif _is_main():
        data = parse_sources(training.data)[0].location
        code = kind_of_options(draft).code
        ended.next_command = ["spec-train", "eval", "--draft", training.out, "--data", data]
        ended.next_command += [] if fitted.validation else ["--split", "all"]  # none is held out
        if what_is(split_pin(data)[0]) is Kind.PASSED_ON:  # its documents are not there any more
            ended.next_command = ["spec-train", "export", "--draft", training.out]
        ended.next_command += [] if code is None else ["--draft-code", code]
    return ended


def options_or_shape(table: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the options of a file of --config, which may be the config.json of a draft.

    Such a file, which names a class, is that of --shape-of.
    """
    return {"shape_of": path} if _OF_MODELS & table.keys() else table


def add_fit(program: Program) -> None:
    """Add `fit` to a program: a command for every kind of draft, and for those a user names."""
    for name in DRAFT_OPTIONS:
        _add_kind(program, kind_named(name))

    def named(name: str) -> bool:
        if name.endswith(".py"):
            raise DraftError(f"{name}: add the class of the draft in it, as in {name}:NAME")
        if not is_code(name) and name not in installed_names():
            return False
        _add_kind(program, kind_named(name))
        return True

    program.add_others("fit", named, installed_names)


def _add_kind(program: Program, kind: DraftKind) -> None:
    default = kind.options()

    def fit_one(training: Training, draft: Any = default, *, dry_run: bool = False) -> Result:
        return _fit_command(training, draft, dry_run)

    fit_one.__annotations__["draft"] = kind.options
    fit_one.__doc__ = str(fit.__doc__).replace("Args:\n", f"Args:\n        dry_run: {_DRY_RUN}\n")
    summary = (inspect.getdoc(kind.options) or kind.name).partition("\n\n")[0]
    program.add(
        *(command(fit_one), f"fit {kind.typed}"),
        summary=summary.removeprefix("Options of the "),
        usage="--data DIR --out RUN",
        epilog=preset_help(),
        config=options_or_shape,
        logs=lambda given: given["training"].out if _is_main() else None,
    )
