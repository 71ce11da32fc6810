"""What verify found, in words."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.errors import SpecDataError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, SUPERVISED, predicts_supervised


@dataclass
class Findings:
    """What was checked and what failed. A check with failures has no fact to tell."""

    failures: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    _failures_before: int = 0

    def check(self, check: Callable[[], None]) -> None:
        """Run a check; data it cannot read is a failure in words, not the end of verify."""
        self._failures_before = len(self.failures)
        try:
            check()
        except SpecDataError as error:
            self.fail(str(error))

    def fail(self, message: str) -> None:
        """Note a failure."""
        self.failures.append(message)

    def passed(self, fact: str) -> None:
        """Note what the running check has proven, unless it failed."""
        if len(self.failures) == self._failures_before:
            self.facts.append(fact)


def stored_tokens(dataset: HiddenStatesDataset, name: str, row: dict[str, Any]) -> Tensor:
    """Tokens of a document that have a state in a column, bool [T]."""
    mask = row["loss_mask"].numpy()
    if name == FINAL and dataset.final == SUPERVISED:
        return torch.from_numpy(predicts_supervised(mask, np.array([0, len(mask)])))
    return torch.ones(len(mask), dtype=torch.bool)


def declared_error(dataset: HiddenStatesDataset, name: str, figure: str) -> float:
    """Declared relative error of a column's states: root of a channel-normalised MSE."""
    entry = next(c for c in dataset.manifest.raw["columns"] if c["name"] == name)
    return math.sqrt(entry.get("error", {}).get(figure, 0.0))
