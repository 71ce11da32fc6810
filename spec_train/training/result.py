"""The state of a run as `fit` returns it: validations, the best draft, what would help it."""

import itertools
import json
import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from spec_data.shards.errors import RunError
from spec_data.terminal import NOTICE
from spec_data.terminal.text_table import text_table
from spec_train.losses.metrics import shown
from spec_train.simulation.simulated_decoding import train_serve_gap

log = logging.getLogger(__name__)

BEST_FIGURES = (
    *("acceptance_length", "product_limit_length", "loss"),
    *("serving_like_length", "serving_like_interval", "serving_like_rounds", "every_slot_length"),
)
"""Figures of a validation that a run keeps of its best draft."""


class _Line(msgspec.Struct):
    """Types of values of metrics.jsonl; all others are numbers and lists of them."""

    step: int = 0
    split: str = ""
    tokens: float = 0


_Values = dict[str, float | list[float | None] | None]


@dataclass(frozen=True)
class FitResult:
    """The state of a run: `finished`, or stopped at `step` by signal number `stopped_by`."""

    directory: Path
    step: int
    finished: bool
    stopped_by: int | None = None
    best: dict[str, Any] | None = None
    html: Callable[[str], str] = field(default=escape, repr=False, compare=False)
    """Makes what a notebook shows of the text of the result; `fit` gives that of the run's page."""
    _absolute: Path = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_absolute", self.directory.absolute())

    def _repr_html_(self) -> str:
        return self.html(str(self))

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl, in order: `pandas.DataFrame(result.history)`.

        `split` is "train" or "validation"; RunError: the file is damaged.
        """
        file = self._absolute / "metrics.jsonl"  # in any working directory
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        whole = text[: text.rfind("\n") + 1]  # not a line that is being written
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            msgspec.convert(lines, list[_Line])
            for line in lines:
                msgspec.convert({k: v for k, v in line.items() if k != "split"}, _Values)
            return lines
        except ValueError as error:  # msgspec's is one, too
            raise RunError(f"{file}: damaged ({error}); restore it, or remove the line") from None

    @property
    def training(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl about training: step, loss, acceptance_length, ..."""
        return [line for line in self.history if line.get("split") == "train"]

    @property
    def validation(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl about the held-out documents; the last is the newest."""
        return [line for line in self.history if line.get("split") == "validation"]

    def __str__(self) -> str:
        text = f"{'finished' if self.finished else 'stopped and saved'} at step {self.step}"
        if self.best and self.best.get("loss") is not None:
            text += f"; best draft: step {self.best['step']}, {headline(self.best)}"
        elif not self.best and self.step:
            text += f"; no trained draft was validated yet: {self.directory} means its `last`"
        elif not self.step:
            text += f": the draft in {self.directory / 'last'} is untrained"
        return text


def result_table(result: FitResult) -> str:
    """Return a run in a few lines: what was trained, the headline length, what would help."""
    best, training = result.best or {}, result.training
    tokens = f"{training[-1]['tokens']:,} tokens" if training else ""
    rows = [("steps", f"{result.step:,}", tokens)]
    if best.get("loss") is not None:
        length = best.get("serving_like_length")
        low, high = best.get("serving_like_interval") or (None, None)
        between = "" if low is None else f"{low:.2f} to {high:.2f} (95%), "
        meaning = "simulated on held-out documents"
        if length is None:
            length, meaning = best.get("product_limit_length"), "on held-out documents, as trained"
        rows.append(("acceptance length", shown(length, 2), between + meaning))
        rows.append(("best step", f"{best['step']:,}", ""))
    if result.finished and (text := advice(training, result.validation)):
        rows.append(("would help", "", text))
    if (page := result.directory / "report.html").is_file():
        rows.append(("page", "", str(page)))
    return text_table(rows, "<><")


def log_result(result: FitResult) -> None:
    """Log how a run ended, and what speaks against its best draft."""
    level = logging.INFO if result.stopped_by is None else NOTICE
    log.log(level, "%s: %s", result.directory, result)
    best = result.best or {}
    if not result.finished:
        return
    if no_gain(best, result.validation):
        log.warning(
            "warning[no-gain]: %d steps did not improve the draft: no validation was better than "
            "the one at step 0, before training. `best` is the best of the trained ones, step %d: "
            "with --init-from, keep the draft that the run began with; else lower --lr, train "
            "longer, or check that the data are what the draft is for",
            *(result.step, best["step"]),
        )
    else:
        steps = best.get("serving_like_rounds") or 0
        forced, own = best.get("product_limit_length"), best.get("every_slot_length")
        if text := train_serve_gap(forced, own, steps):
            log.warning("warning[serving-gap]: %s", text)


def no_gain(best: dict[str, Any], validation: Sequence[dict[str, Any]]) -> bool:
    """Return whether the best trained draft is no better than what was measured at step 0.

    `validation` are lines of metrics.jsonl.
    """
    start = next((line for line in validation if line.get("step") == 0), None)
    if start is None or best.get("loss") is None or start.get("loss") is None:
        return False
    return not better(best, start)


def better(figures: dict[str, Any], best: dict[str, Any]) -> bool:
    """Return whether `figures` has the longer product-limit length; equal ones compare by loss."""

    def rank(of: dict[str, Any]) -> tuple[float, float]:
        length, loss = of["product_limit_length"], of.get("loss")
        return (1.0 if length is None else length), (-math.inf if loss is None else -loss)

    return rank(figures) > rank(best)


def headline(figures: dict[str, Any]) -> str:
    """Return the one length that a validation is told by: as in serving, with its interval.

    Without a serving-like step it is the one that chooses the best draft.
    """
    if figures.get("serving_like_length") is None:
        length = f"teacher-forced length {shown(figures.get('product_limit_length'))}"
    else:
        length = f"serving-like length {shown(figures['serving_like_length'])}"
        low, high = figures.get("serving_like_interval") or (None, None)
        length += "" if low is None else f" ({low:.2f} to {high:.2f})"
    return f"{length}, loss {shown(figures['loss'], 4)}"


# -- advice ----------------------------------------------------------------------------------------

LEAST_VALIDATIONS = 5  # after step 0: a curve of fewer points shows no trend
RISE = 0.03  # of the accepted drafted tokens, over the last third of the steps
BEHIND = 0.15  # of the accepted drafted tokens on trained documents
LEAST_CHAINS = 500  # held out: fewer say little


def advice(training: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> str:
    """Return what would help a finished run: more data, more steps, or "" if it cannot be known.

    Both lists are lines of metrics.jsonl. Compared are drafted tokens accepted per verification,
    teacher-forced, on training documents (before each step) and on held-out ones; of the depths
    that training measures, which for EAGLE is one. In its first epoch a draft has seen no document
    before, so none can be fitted too closely.
    """
    names = training[-1] if training else {}
    depth = sum(name.startswith("accept_rate/") for name in names)
    trained = _accepted(training, depth)
    held_out = _accepted([line for line in validation if line["step"] > 0], depth)
    if len(held_out) < LEAST_VALIDATIONS or not trained:
        return ""
    if validation[-1].get("chains", 0) < LEAST_CHAINS:
        return ""
    last = held_out[-1][0]
    seen, unseen = (_mean(part, last * 2 / 3, last) for part in (trained, held_out))
    before = [_mean(part, last / 3, last * 2 / 3) for part in (trained, held_out)]
    if unseen <= 0 or min(before) <= 0:
        return ""
    figures = (
        f"accepted of {depth} drafted: {seen:.2f} on trained documents, {unseen:.2f} on held-out "
        "ones"
    )
    if training[-1].get("epoch", 0) > 1 and unseen < (1 - BEHIND) * seen:
        return f"more data ({figures})"
    if seen > (1 + RISE) * before[0] and unseen > (1 + RISE) * before[1]:
        return f"more steps (both still rise; {figures})"
    return ""


def _accepted(lines: Sequence[dict[str, Any]], depth: int) -> list[tuple[int, float]]:
    """Return step, and how many of `depth` drafted tokens are accepted, where measured."""
    points = []
    for line in lines:
        rates = [line.get(f"accept_rate/{d}") for d in range(1, depth + 1)]
        if None not in rates:
            points.append((line["step"], sum(itertools.accumulate(rates, operator.mul))))
    return points


def _mean(points: Sequence[tuple[int, float]], after: float, until: float) -> float:
    """Return the mean over steps in (after, until]; 0: there is no such step."""
    values = [value for step, value in points if after < step <= until]
    return sum(values) / max(len(values), 1)
