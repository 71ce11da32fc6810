"""What the public functions of spec_train return beside FitResult: frozen values.

`print` shows them as the commands do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from spec_data.pages.page import notebook_html
from spec_data.terminal.command import Result
from spec_train.evaluation.eval_table import table
from spec_train.reports.results import evaluations
from spec_train.reports.run_page import report_page


@dataclass(frozen=True, kw_only=True)
class AcceptanceResult(Result):
    """Acceptance of a draft by simulated decoding on stored hidden states, without the target.

    Lengths are tokens per verification of the target, its own token included; None: nothing was
    measured. Rates are by depth, from 1, given that all earlier drafts were accepted.
    """

    path: Path
    split: str
    documents: int
    supervised_tokens: int
    acceptance_length: float | None
    """Of verifications as serving makes them, the draft on its own tokens: estimates decoding."""
    accept_rate: tuple[float | None, ...]
    rounds: int
    teacher_forced_length: float | None
    """On the document's own tokens at every depth, as in training."""
    on_policy: float
    """Share of the supervised tokens that are the target's own greedy choice."""
    figures: dict[str, Any] = field(repr=False)
    """Every metric, as under "data" in the file of `spec-train eval --json`."""

    @classmethod
    def of(cls, figures: dict[str, Any]) -> "AcceptanceResult":
        """Return the result with the metrics of `evaluation.on_dataset`."""
        simulated = figures["simulated"]
        names = ("split", "documents", "supervised_tokens", "on_policy")
        return cls(
            path=Path(figures["path"]),
            acceptance_length=simulated["acceptance_length"],
            accept_rate=tuple(simulated["accept_rate"]),
            rounds=simulated["rounds"],
            teacher_forced_length=figures["teacher_forced"].get("acceptance_length"),
            figures=figures,
            **{name: figures[name] for name in names},
        )

    def _repr_html_(self) -> str:
        """Return the page of the evaluation."""
        return _html({"warnings": [], "data": self.figures}, self.path.name, str(self))

    def __str__(self) -> str:
        return table({"data": self.figures})


@dataclass(frozen=True, kw_only=True)
class DecodingResult:
    """Acceptance and speed of real speculative decoding against the target."""

    target: str
    acceptance_length: float | None
    accept_rate: list[float | None]
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
class EvalResult(Result):
    """The metrics of a draft: of real decoding where a target was given, and on a dataset."""

    draft: Path | None
    """None: a server alone was measured."""
    acceptance_length: float | None
    """Of `decoding` where there is one, else of `data`, else `deployed`; None: nothing was."""
    draft_tokens: int | None
    dtype: str
    device: str
    warnings: list[str]
    decoding: DecodingResult | None
    data: AcceptanceResult | None
    others: tuple["EvalResult", ...]
    """Of several targets, one for each but the first."""
    deployed: float | None
    """The acceptance length by a server's own counters; all of them are `figures["server"]`."""
    figures: dict[str, Any] = field(repr=False)
    """Every metric, as in the file of `spec-train eval --json`."""
    next_command: Sequence[str] = field(default=(), repr=False)
    page: Path | None = field(default=None, repr=False)
    """The page that was written in the run."""

    @classmethod
    def of(
        cls, figures: dict[str, Any], next_command: Sequence[str] = (), page: Path | None = None
    ) -> "EvalResult":
        """Return the result with the metrics of `evaluation.evaluate.measure`."""
        names = ("acceptance_length", "draft_tokens", "dtype", "device", "warnings")
        decoding: dict[str, Any] = {f.name: figures.get(f.name) for f in fields(DecodingResult)}
        return cls(
            draft=None if figures["draft"] is None else Path(figures["draft"]),
            decoding=DecodingResult(**decoding) if "target" in figures else None,
            data=AcceptanceResult.of(figures["data"]) if "data" in figures else None,
            others=tuple(map(cls.of, figures.get("others", ()))),
            deployed=figures["server"]["acceptance_length"] if "server" in figures else None,
            figures=figures,
            next_command=next_command,
            page=page,
            **{name: figures[name] for name in names},
        )

    def facts(self) -> dict[str, Any]:
        """Return every metric."""
        return self.figures

    def _repr_html_(self) -> str:
        """Return the page of the evaluation."""
        if self.draft is None:
            return super()._repr_html_()
        return _html(self.figures, self.draft.name, str(self))

    def details(self) -> str:
        """Return every length that was measured."""
        return table(self.figures, everything=True)

    def __str__(self) -> str:
        return table(self.figures, page=self.page)


def _html(figures: dict[str, Any], name: str, text: str) -> str:
    return notebook_html(lambda: report_page([], evaluations(figures, "the result", name)), text)
