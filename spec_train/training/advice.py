"""What would make a trained draft better, judged by the curves of its own run."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

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
