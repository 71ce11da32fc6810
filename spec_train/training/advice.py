"""What would make a trained draft better, judged by the curves of its own run."""

from collections.abc import Sequence
from typing import Any

LEAST_VALIDATIONS = 5  # after step 0: a curve of fewer points shows no trend
RISE = 0.03  # of the accepted drafted tokens, over the last third of the steps
BEHIND = 0.15  # of the accepted drafted tokens on trained documents


LEAST_SLOTS = 500  # supervised tokens held out: fewer say little


def advice(training: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> str:
    """Return what would help a finished run: more data, more steps, or "" if it cannot be known.

    Both lists are lines of metrics.jsonl. Compared are teacher-forced acceptance lengths less 1,
    which is the target's own token: on training documents (before each step) and on held-out ones.
    In its first epoch a draft has seen no document before, so none can be fitted too closely.
    """
    trained = _gains(training)
    held_out = _gains([line for line in validation if line["step"] > 0])
    if len(held_out) < LEAST_VALIDATIONS or not trained:
        return ""
    if validation[-1].get("chains", 0) < LEAST_SLOTS:
        return ""
    last = held_out[-1][0]
    seen, unseen = (_mean(part, last * 2 / 3, last) for part in (trained, held_out))
    before = [_mean(part, last / 3, last * 2 / 3) for part in (trained, held_out)]
    if unseen <= 0 or min(before) <= 0:
        return ""
    lengths = f"length {1 + seen:.2f} on trained documents, {1 + unseen:.2f} on held-out ones"
    if training[-1].get("epoch", 0) > 1 and unseen < (1 - BEHIND) * seen:
        return f"more data ({lengths})"
    if seen > (1 + RISE) * before[0] and unseen > (1 + RISE) * before[1]:
        return f"more steps (both still rise: {lengths})"
    return ""


def _gains(lines: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return step and drafted tokens that are accepted per verification, where measured."""
    pairs = [(line["step"], line.get("acceptance_length")) for line in lines]
    return [(step, length - 1) for step, length in pairs if length is not None]


def _mean(points: Sequence[tuple[int, float]], after: float, until: float) -> float:
    """Return the mean over steps in (after, until]; 0: there is no such step."""
    values = [value for step, value in points if after < step <= until]
    return sum(values) / max(len(values), 1)
