"""`spec-train search`: which draft, of which layers and shape, is worth a whole run."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.shards.errors import ConfigError
from spec_data.shards.path_kinds import Kind
from spec_data.terminal import NOTICE
from spec_data.terminal.command import Result, command
from spec_data.terminal.paths import check_path
from spec_data.terminal.text_table import text_table
from spec_train.commands.fit import preset_line
from spec_train.options.data_option import parse_sources
from spec_train.options.presets import OF_DRAFTS, PRESETS
from spec_train.training.search_space import (
    DEFAULT_BUDGET,
    SearchTraining,
    Space,
    read_budget,
    read_space,
)

_ROWS = 7
"""Drafts that are printed; the page has all."""


@dataclass(frozen=True, kw_only=True)
class SearchResult(Result):
    """The drafts that a search measured, the best one first.

    `rows` have the name of a draft, its kind, `steps`, held-out `length` with its 95 % `interval`,
    the `state` ("best", "as good", "dropped", "failed", ...) and its `run`. `seconds` were spent,
    or with `dry_run` are expected. `complete`: not ended by the budget or a signal.
    """

    rows: list[dict[str, Any]]
    rungs: tuple[int, ...]
    seconds: float | None
    complete: bool
    page: Path | None = None
    next_command: Sequence[str] = field(default=(), repr=False)
    again: str = field(default="", repr=False)
    stopped_by: int | None = field(default=None, repr=False)

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """128 and the number of the signal that stopped it."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by

    @property
    def best(self) -> str | None:
        """The name of the best draft."""
        return next((row["name"] for row in self.rows if row["state"] == "best"), None)

    def facts(self) -> dict[str, Any]:
        """Return the fields, the best draft, and the words of the command that trains it."""
        return {**super().facts(), "best": self.best, "next": list(self.next_command)}

    def __str__(self) -> str:
        from spec_data.terminal.progress import duration

        cells: list[tuple[str, ...]] = [("draft", "steps", "length", "95 %", "")]
        for row in self.rows[:_ROWS]:
            low, high = row["interval"] or (None, None)
            length = "" if row["length"] is None else f"{row['length']:.2f}"
            between = "" if low is None else f"{low:.2f} to {high:.2f}"
            steps = f"{row['steps']:,}" if row["steps"] else ""
            cells.append((row["name"], steps, length, between, row["state"]))
        lines = [text_table(cells, "<>>>")]
        if (more := len(self.rows) - _ROWS) > 0:
            lines.append(f"and {more} more")
        if self.again == "next":
            about = "" if self.seconds is None else f", about {duration(self.seconds)}"
            rungs = ", ".join(f"{step:,}" for step in self.rungs)
            lines.append(f"{len(self.rows)} drafts, compared at steps {rungs}{about}")
        else:
            spent = duration(self.seconds or 0.0)
            page = "" if self.page is None else f"; {self.page}"
            lines.append(f"{spent}{'' if self.complete else ', not complete'}{page}")
        return "\n".join(lines)


@command
def search(
    training: SearchTraining,
    *,
    space: Space,
    budget: str = DEFAULT_BUDGET,
    dry_run: bool = False,
) -> SearchResult:
    """Find the draft, its layers and its shape, by short runs on one dataset.

    All drafts of --space train for some steps; those that are clearly behind others of their kind
    on held-out documents are dropped, and the others train twice as long. The best of each kind are
    compared at the end. Each is an ordinary run of `fit` in DIR. The same command resumes an
    interrupted search.

    Examples:
        spec-train search --data DATA --space layers=auto,draft=eagle3,dspark,dflash2 --budget 30m
        spec-train search --data DATA --space draft=dspark,num_layers=2,3,5 --budget 2h --dry-run
        spec-train search --data DATA --space draft=eagle3,layers=1+9+17,3+9+15,lr=1e-4,4e-4
            + stands for the commas of a list

    Args:
        training: data, directory, batch size, seed, ... of every run; --steps: of the last rung.
        space: axes and their values, of which every combination is a draft: draft, options of a
            draft such as layers, num_layers and draft_vocab_size, and lr, optimizer, warmup_ratio,
            weight_decay, clip. An axis that a draft does not have, or that does nothing
            there, is left out for it. layers=auto tries the recipe, every captured layer, and a
            spread, a lower and an upper set of them.
        budget: time for all of it, such as 30m or 2h: decides the steps.
        dry_run: print the drafts, the steps at which they are compared and the time; write nothing.

    Returns:
        Every draft with its length, the best one first.

    Raises:
        ConfigError, DraftError: a bad axis or value, or a budget that is too small.
        RunError: no draft could be trained.

    >>> import spec_train as st
    >>> options = st.SearchTraining(data="data", out="found", steps=4, validation=0.2,
    ...                             batch_size=1, seq_len=128)
    >>> found = st.search(options, space="draft=eagle3,ttt_steps=1,2")
    >>> found.complete, sorted(row["name"] for row in found.rows)
    (True, ['eagle3 ttt_steps=1', 'eagle3 ttt_steps=2'])
    """
    axes, seconds = read_space(space), read_budget(budget)
    if training.steps == 0:
        raise ConfigError(
            "--steps 0: untrained drafts cannot be compared; leave it out, or raise it"
        )
    if training.preset is not None:
        preset = PRESETS[training.preset]
        own = {n: preset[n] for n in OF_DRAFTS if n in preset and n not in axes}
        logging.getLogger(__name__).log(NOTICE, "%s", preset_line(training, own, {}))
    for source in parse_sources(training.data):
        check_path("--data", source.location, Kind.DATASET)
    from spec_train.training import search as searching

    if dry_run:
        arms = searching.arms_of(training, axes)
        plan = searching.plan_search(training, arms, seconds, estimate=True)
        rows, rungs = list(map(searching.row_of, arms)), tuple(plan.rungs)
        return SearchResult(
            rows=rows, rungs=rungs, seconds=plan.seconds, complete=False, again="next"
        )
    outcome = searching.search(training, axes, seconds)
    rows, stopped, following = outcome.rows(), outcome.stopped_by, []
    _warn_of_kinds(rows)
    if stopped is None and rows[0]["state"] == "best":
        whole = training.of_arm(out=str(outcome.directory / "winner"), steps=None)
        best = next(arm for arm in outcome.arms if arm.name == rows[0]["name"])
        following = best.fit_words(whole)
    return SearchResult(
        rows=rows,
        rungs=tuple(outcome.plan.rungs),
        seconds=outcome.spent,
        complete=outcome.complete,
        page=_leave_page(outcome.directory, rows),
        next_command=following,
        again="" if stopped is None else "resume",
        stopped_by=stopped,
    )


def _warn_of_kinds(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say what the lengths of drafts of several kinds are worth; `rows`: the best one first."""
    best: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["length"] is not None and row["state"] != "failed":
            best.setdefault(row["draft"], row)
    if len(best) > 1:
        logging.getLogger(__name__).warning(
            "warning[kinds]: kinds of drafts learn at different speeds, so after %s steps the "
            "longest is not always that of whole runs: train the best of each kind by `fit`, and "
            "compare these (%s)",
            f"{max(row['steps'] for row in best.values()):,}",
            "; ".join(row["name"] for row in best.values()),
        )


def _leave_page(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path | None:
    """Write the page about the runs of the drafts that were measured, the best one first."""
    from spec_train.reports.results import Run
    from spec_train.reports.run_page import PAGE, leave_page, report_page

    measured = [row for row in rows if row["run"] is not None]
    if not measured:
        return None
    return leave_page(
        folder / PAGE, lambda: report_page([Run(row["run"], row["name"]) for row in measured], [])
    )


def kept_of(given: Mapping[str, Any]) -> str:
    """Say what an interrupted search keeps."""
    return f"the runs in {given['training'].out} are kept"
