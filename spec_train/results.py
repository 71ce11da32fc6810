"""What the public functions of spec_train return beside FitResult: frozen values.

`print` shows them as the commands do.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AcceptanceResult:
    """Acceptance of a draft simulated on stored states, without the target.

    Lengths are tokens per verification of the target, its own token included; None: nothing was
    measured. Rates are by depth, from 1, given that all earlier drafts were accepted.
    """

    path: Path
    split: str
    documents: int
    supervised_tokens: int
    acceptance_length: float | None
    """Of rounds as serving makes them, the draft on its own tokens: predicts real decoding."""
    accept_rate: tuple[float | None, ...]
    rounds: int
    all_slots_length: float | None
    """The same from every supervised token, not only from those where a round begins."""
    teacher_forced_length: float | None
    """On the document's own tokens at every depth, as in training; None with `walk_only`."""
    on_policy: float
    """Share of the supervised tokens that are the target's own greedy choice."""
    figures: dict[str, Any] = field(repr=False)
    """Every figure, as under "data" in the file of `spec-train eval --json`."""
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class DecodingResult:
    """Acceptance and speed of real speculative decoding against the target."""

    target: str
    acceptance_length: float | None
    accept_rate: tuple[float | None, ...]
    rounds: int
    responses: int
    tokens: int
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float | None
    identical: int | None
    """Responses equal to plain greedy decoding; None above temperature 0."""
    ties: int | None
    """Responses that differ only where two tokens have equal logits, up to the dtype's noise."""


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """The figures of a draft: of real decoding where a target was given, and on a dataset."""

    draft: Path
    acceptance_length: float | None
    """Of `decoding` where there is one, else of `data`; None: nothing was measured."""
    draft_tokens: int
    dtype: str
    device: str
    warnings: tuple[str, ...]
    decoding: DecodingResult | None
    data: AcceptanceResult | None
    figures: dict[str, Any] = field(repr=False)
    """Every figure, as in the file of `spec-train eval --json`."""
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text
