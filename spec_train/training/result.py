"""Where a run stands, and which of its drafts is the best."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FitResult:
    """Where a run stands: `finished`, or stopped by signal number `stopped_by` at `step`."""

    directory: Path
    step: int
    finished: bool
    stopped_by: int | None = None
    best: dict[str, Any] | None = None

    def __str__(self) -> str:
        text = f"{'finished' if self.finished else 'stopped and saved'} at step {self.step}"
        if self.best and self.best["acceptance_length"] is not None:
            length = self.best["acceptance_length"]
            text += f"; best draft: step {self.best['step']}, acceptance length {length:.3f}"
        elif self.best and self.best.get("loss") is not None:
            text += f"; best draft: step {self.best['step']}, loss {self.best['loss']:.4f}"
        return text


def better(figures: dict[str, Any], best: dict[str, Any]) -> bool:
    """Whether a draft has the longer product-limit length, or as long a one and a lower loss.

    A `best` that an older release saved is compared by what it has: the length of whole chains.
    """
    name = "product_limit_length" if "product_limit_length" in best else "acceptance_length"

    def rank(of: dict[str, Any]) -> tuple[float, float]:
        length, loss = of[name], of.get("loss")
        return (1.0 if length is None else length), (-math.inf if loss is None else -loss)

    return rank(figures) > rank(best)
