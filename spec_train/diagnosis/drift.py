"""`spec-train doctor --target A B`: is a drift the target's or the draft's?

The draft is examined on answers of each target. If it is sound on the first one, its own, and
clearly shorter on another, that target has moved away from what the draft learned. If a convention
is wrong on the first one too, the draft has a mistake of its own, whatever the target.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from spec_train.diagnosis.checks import OK, Check, Diagnosis, judged, one_per_name, undecided
from spec_train.simulation.intervals import middle, resampled

_OF_TARGETS = ("target", "quantised", "chat-template", "tokenizer", "streams", "on-policy")
"""Checks that say in which way two targets differ; all others are about the draft."""


def examine_over(targets: Sequence[str], examine_one: Callable[[str], Diagnosis]) -> Diagnosis:
    """Return the diagnosis with the first target, and a check of how the others differ from it.

    `examine_one` examines the draft with a target.
    """
    first, *others = [examine_one(target) for target in targets]
    drifts = [
        drift(first, other, targets[0], name)
        for other, name in zip(others, targets[1:], strict=True)
    ]
    checks = one_per_name([*first.checks, *drifts])
    found = any(check.state != OK for check in drifts)
    command = () if found else first.next_command
    return dataclasses.replace(first, checks=tuple(checks), next_command=command)


def drift(first: Diagnosis, other: Diagnosis, own: str, name: str) -> Check:
    """Return whether a draft is worse with the target `name` than with `own`, and why."""
    evidence = [
        f"{name}: {check.name}: {line}"
        for check in other.findings
        if check.name in _OF_TARGETS
        for line in (check.text, *check.evidence)
    ]
    if not first.per_document or not other.per_document:
        lacks = own if not first.per_document else name
        text = f"the draft could not be tried on answers of {lacks}: see its other checks"
        return undecided("drift", text, *evidence)
    difference, (low, high) = length_difference(first, other)
    lengths = (
        f"acceptance length {other.acceptance_length or 0:.2f} with {name}, "
        f"{first.acceptance_length or 0:.2f} with {own} (difference {difference:+.2f}, 95 % "
        f"interval {low:+.2f} to {high:+.2f})"
    )
    wrong = [check.name for check in first.findings if check.name not in _OF_TARGETS]
    if wrong:
        text = f"the draft's: with {own} too it has findings ({', '.join(wrong)})"
        return judged("drift", [f"{text}; correct them first"], lengths, *evidence)
    if high >= 0:
        return judged("drift", [], *evidence, sound=f"none: {lengths}")
    text = f"the target's: the draft is sound with {own}, and clearly shorter with {name}"
    return judged("drift", [text], lengths, *evidence)


def length_difference(a: Diagnosis, b: Diagnosis) -> tuple[float, tuple[float, float]]:
    """Return the acceptance length of b minus that of a, with its 95 % interval.

    The documents are not paired: they are the answers of two targets.
    """
    counts = [np.array(one.per_document, dtype=np.int64) for one in (a, b)]
    lengths = [some[:, 1].sum() / max(some[:, 0].sum(), 1) for some in counts]
    drawn = [resampled(some, seed) for seed, some in enumerate(counts)]
    draws = [sums[:, 1] / np.maximum(sums[:, 0], 1) for sums in drawn]
    return float(lengths[1] - lengths[0]), middle(draws[1] - draws[0])
