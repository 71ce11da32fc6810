"""`spec-train search`: which draft, of which layers and shape, is worth a whole run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_data.shards.path_kinds import Kind
from spec_data.terminal.command import Result, command
from spec_data.terminal.paths import check_path
from spec_data.terminal.text_table import text_table
from spec_train.options.data_option import parse_sources
from spec_train.options.search import (
    DEFAULT_BUDGET,
    SearchTraining,
    Space,
    read_budget,
    read_space,
)

if TYPE_CHECKING:
    from spec_data.pages.page import Page
    from spec_train.options.search import Arm
    from spec_train.training.search import Outcome

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

    All drafts of --space train for some steps; those that are clearly behind on held-out documents
    are dropped, and the others train twice as long, until one is left or the budget is spent. Each
    is an ordinary run of `fit` in DIR. The same command resumes an interrupted search.

    Examples:
        spec-train search --data DATA --space layers=auto,draft=eagle3,dspark,dflash2 --budget 30m
        spec-train search --data DATA --space draft=dspark,num_layers=2,3,5 --budget 2h --dry-run
        spec-train search --data DATA --space draft=eagle3,layers=1+9+17,3+9+15,lr=1e-4,4e-4
            + stands for the commas of a list

    Args:
        training: data, directory, batch size, seed, ... of every run; --steps: of the last rung.
        space: axes and their values, of which every combination is a draft: draft, options of a
            draft such as layers, num_layers and draft_vocab_size, and lr, optimizer, warmup_ratio,
            weight_decay, clip. An axis that a draft does not have is left out for it. layers=auto
            tries the recipe, every captured layer, and a spread, a lower and an upper set of them.
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
    for source in parse_sources(training.data):
        check_path("--data", source.location, Kind.DATASET)
    from spec_train.training import search as searching

    if dry_run:
        arms = searching.arms_of(training, axes)
        plan = searching.plan_search(training, arms, seconds, estimate=True)
        rows, rungs = [_row(arm, "") for arm in arms], tuple(plan.rungs)
        return SearchResult(
            rows=rows, rungs=rungs, seconds=plan.seconds, complete=False, again="next"
        )
    outcome = searching.search(training, axes, seconds)
    result = _result(outcome, training)
    from spec_train.reports.run_page import PAGE, leave_page

    page = leave_page(outcome.directory / PAGE, partial(_page, outcome, result.rows))
    return replace(result, page=page)


def _row(arm: "Arm", state: str) -> dict[str, Any]:
    """Return a row of a draft that was not measured."""
    unknown = dict.fromkeys(("steps", "length", "interval", "run"))
    return {"name": arm.name, "draft": arm.draft, **unknown, "state": state}


def _result(outcome: "Outcome", training: SearchTraining) -> SearchResult:
    """Return the table of a search, and the command of the whole run of the best draft."""
    ranked, rows = outcome.ranked(), []
    for arm, steps, found in ranked:
        _, last, best = ranked[0]
        state = "as good" if steps == last and found.high >= best.low else "behind"
        state = "dropped" if arm.name in outcome.dropped else state
        state = "best" if found is best else state
        known = {"steps": steps, "length": found.length, "run": outcome.run_of(arm)}
        if math.isfinite(found.low):
            known["interval"] = (found.low, found.high)
        rows.append(_row(arm, "failed" if arm.name in outcome.failed else state) | known)
    for arm in outcome.arms:
        if not outcome.lengths[arm.name]:
            rows.append(_row(arm, "failed" if arm.name in outcome.failed else "not run"))
    stopped, following = outcome.stopped_by, []
    if stopped is None and rows[0]["state"] == "best":
        whole = training.of_arm(out=str(outcome.directory / "winner"), steps=None)
        following = ranked[0][0].fit_words(whole)
    return SearchResult(
        rows=rows,
        rungs=tuple(outcome.plan.rungs),
        seconds=outcome.spent,
        complete=outcome.complete,
        next_command=following,
        again="" if stopped is None else "resume",
        stopped_by=stopped,
    )


def _page(outcome: "Outcome", rows: Sequence[Mapping[str, Any]]) -> "Page":
    """Return the page of a search; `rows` are those of its result."""
    from spec_data import __version__
    from spec_data.pages.page import Axis, Chart, Column, Note, Page, Part, Section, Table
    from spec_data.terminal.progress import duration

    names = ("draft", "steps", "acceptance length", "from", "to (95 %)", "", "run")
    formats = ("text", "count", "number", "number", "number", "text", "text")
    columns: Sequence[Column] = list(zip(names, formats, strict=True))  # type: ignore[arg-type]
    cells = []
    for row in rows:
        low, high = row["interval"] or (None, None)
        run = str(row["run"] or "")
        cells.append([row["name"], row["steps"], row["length"], low, high, row["state"], run])
    best = rows[0] if rows[0]["state"] == "best" else None
    equal = sum(row["state"] == "as good" for row in rows)
    lead = "No draft was measured yet."
    if best is not None:
        lead = (
            f"Of {len(rows)} drafts, {best['name']} is the best after {best['steps']:,} steps"
            + (f"; {equal} more cannot be told from it." if equal else ".")
        )
    lengths = {
        name: [(float(step), by[step].length) for step in sorted(by)]
        for name, by in outcome.lengths.items()
    }
    parts: list[Part] = [
        Table(
            title="Drafts",
            columns=columns,
            rows=cells,
            best=0 if best is not None else None,
            note="Acceptance length on held-out documents, by simulated decoding. A dropped draft "
            "has the length of the step at which it was dropped.",
        ),
        *(Note(text=f"{name}: {why}", warning=True) for name, why in outcome.failed.items()),
    ]
    axes = Axis(title="steps", format="count", least=0.0), Axis(title="acceptance length")
    chart = Chart(title="Length over steps", x=axes[0], y=axes[1], series=lengths)
    return Page(
        title=outcome.directory.name,
        kind="Search",
        lead=lead,
        figures=[
            ("acceptance length", best["length"] if best else None, "number"),
            ("drafts", len(rows), "count"),
            ("time", duration(outcome.spent), "text"),
        ],
        sections=[Section(title="Result", parts=parts), Section(title="Curves", parts=[chart])],
        footer=f"spec-train {__version__}",
    )


def kept_of(given: Mapping[str, Any]) -> str:
    """Say what an interrupted search keeps."""
    return f"the runs in {given['training'].out} are kept"
