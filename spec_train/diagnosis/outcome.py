"""What the doctor says: one check after the other, each decided or not, and the tried conventions.

A finding names a failure with its evidence and what to do. A check that cannot be decided says what
to give so that it can.
"""

from dataclasses import dataclass, field
from typing import Any

OK, FINDING, UNDECIDED = "ok", "finding", "undecided"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of a draft.

    Attributes:
        name: its short name, which does not change between releases.
        state: "ok", "finding" or "undecided".
        text: the result in one sentence; of an undecided check, what to give.
        evidence: figures and details, a line each.
        fix: what to do about a finding.
    """

    name: str
    state: str
    text: str
    evidence: tuple[str, ...] = ()
    fix: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A convention that the draft was run under, compared with the one before it.

    `length` and `before` are acceptance lengths over all supervised slots of the documents: with
    this convention, and with the one that the files declare or that was found better before.
    """

    round: int
    check: str
    text: str
    length: float
    before: float
    interval: tuple[float, float]
    """95 % interval of `length` minus `before`, over the documents."""
    p_value: float
    loss: float | None
    """Teacher-forced loss per slot; None: not comparable, or the dataset has no teachers for it."""
    loss_before: float | None
    loss_p_value: float | None
    better: bool

    @property
    def rank(self) -> tuple[float, float]:
        """Larger is better: the gain in acceptance length, then the lower loss."""
        gain = 0.0 if self.loss is None else (self.loss_before or 0.0) - self.loss
        return self.length - self.before, gain


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of `spec-train doctor`: every check, and every convention that was tried."""

    draft: str
    kind: str | None
    """Name of the kind of draft; None if its files cannot be read."""
    checks: tuple[Check, ...]
    tried: tuple[Tried, ...] = ()
    documents: int = 0
    """Documents that the conventions were tried on."""
    which_documents: str = ""
    """Which these are, if other ones were to be expected: such as those that it was trained on."""
    acceptance_length: float | None = None
    """Of the draft as its files declare it, over all supervised slots; None: not measured."""
    text: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.text

    @property
    def findings(self) -> tuple[Check, ...]:
        """The checks that found a failure."""
        return tuple(check for check in self.checks if check.state == FINDING)

    def named(self, name: str) -> Check | None:
        """Return the check of that name, None if it does not apply to this kind of draft."""
        return next((check for check in self.checks if check.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Return plain values of everything but the text."""
        return {
            "draft": self.draft,
            "kind": self.kind,
            "findings": [check.name for check in self.findings],
            "checks": [vars(check) for check in self.checks],
            "tried": [vars(tried) for tried in self.tried],
            "documents": self.documents,
            "which_documents": self.which_documents,
            "acceptance_length": self.acceptance_length,
        }


def ok(name: str, text: str, *evidence: str) -> Check:
    """Return a check that found nothing."""
    return Check(name=name, state=OK, text=text, evidence=evidence)


def finding(name: str, text: str, *evidence: str, fix: str) -> Check:
    """Return a check that found a failure."""
    return Check(name=name, state=FINDING, text=text, evidence=evidence, fix=fix)


def undecided(name: str, text: str, *evidence: str) -> Check:
    """Return a check that lacks something; `text` says what to give."""
    return Check(name=name, state=UNDECIDED, text=text, evidence=evidence)
