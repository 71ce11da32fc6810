"""Collect what verify found, and read what a dataset declares about its columns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.errors import SpecDataError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import predicts_supervised

_SHOWN = 20


@dataclass
class Findings:
    """The results of the checks: failures, warnings, one fact per check without a failure."""

    data: str = ""
    fingerprint: str = ""
    failures: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    _failures_before: int = 0

    def check(self, check: Callable[[], None]) -> None:
        """Run a check. If it cannot read the data, that is a failure, and verify continues."""
        self._failures_before = len(self.failures)
        try:
            check()
        except SpecDataError as error:
            self.fail(str(error))

    def fail(self, message: str) -> None:
        """Add a failure."""
        self.failures.append(message)

    def warn(self, message: str) -> None:
        """Add what needs attention, although the dataset is sound."""
        self.warnings.append(message)

    def passed(self, fact: str) -> None:
        """Add what the current check has proven, unless it has a failure."""
        if len(self.failures) == self._failures_before:
            self.facts.append(fact)

    def measured(self, name: str, found: float, allowed: float) -> str:
        """Keep a figure and its bound; return both in words."""
        self.figures[name] = {"found": found, "allowed": allowed}
        return f"{found:.1e} (allowed {allowed:.1e})"

    def text(self) -> str:
        """Describe every fact, the first warnings and failures and the verdict, one line each."""
        lines = [f"ok    {fact}" for fact in self.facts]
        for word, found in (("warn", self.warnings), ("FAIL", self.failures)):
            lines += [f"{word}  {message}" for message in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"{word}  and {len(found) - _SHOWN} more")
        if self.failures:
            lines.append(f"{self.data}: {len(self.failures)} failures")
        else:
            lines.append(f"{self.data}: verified, fingerprint {self.fingerprint[:16]}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain values: verdict, facts, warnings, failures, and figures with bounds."""
        return {
            "data": self.data,
            "verified": not self.failures,
            "fingerprint": self.fingerprint,
            "facts": self.facts,
            "warnings": self.warnings,
            "failures": self.failures,
            "figures": self.figures,
        }


def stored_tokens(dataset: HiddenStatesDataset, name: str, row: dict[str, Any]) -> Tensor:
    """Return which tokens of a document have a stored value in column `name`, bool [T].

    `row` is the document as `HiddenStatesDataset` returns it.
    """
    mask = row["loss_mask"].numpy()
    if any(c.name == name and c.sparse for c in dataset.manifest.columns):
        return torch.from_numpy(predicts_supervised(mask, np.array([0, len(mask)])))
    return torch.ones(len(mask), dtype=torch.bool)


def declared_error(dataset: HiddenStatesDataset, name: str, figure: str) -> float:
    """Return a figure of the error that generation measured of a column; 0 if it is exact."""
    error = next(c.error for c in dataset.manifest.columns if c.name == name)
    return getattr(error, figure, None) or 0.0
