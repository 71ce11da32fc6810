"""Acceptance by set of prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spec_train.decoding.chains import Round
from spec_train.simulation.intervals import length_interval


@dataclass
class Counts:
    """Counts of some rounds. `tried` and `accepted` have an entry for each depth that occurs."""

    rounds: int = 0
    emitted: int = 0
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, one: Round) -> None:
        """Count a round."""
        self.rounds += 1
        self.emitted += one.emitted
        missing = one.tried - len(self.tried)
        self.tried += [0] * missing
        self.accepted += [0] * missing
        for depth in range(one.tried):
            self.tried[depth] += 1
            self.accepted[depth] += depth < one.accepted

    def figures(self) -> dict[str, Any]:
        """Return the acceptance length and the share accepted at each depth, of those tried."""
        pairs = zip(self.accepted, self.tried, strict=True)
        return {
            "acceptance_length": self.emitted / self.rounds if self.rounds else None,
            "accept_rate": [a / t for a, t in pairs],
            "rounds": self.rounds,
            "emitted": self.emitted,
        }


def by_set(
    sets: Mapping[str, Counts], prompts: Sequence[tuple[str, int, int]]
) -> list[dict[str, Any]]:
    """Return the figures of each set of prompts, in the order in which they were read.

    Args:
        sets: counts by name.
        prompts: of each prompt the name of its set, its verifications and their tokens.
    """
    found = []
    for name, counts in sets.items():
        own = np.array([line[1:] for line in prompts if line[0] == name], dtype=np.int64)
        interval = length_interval(own.reshape(-1, 2))
        found.append(
            {"set": name, "prompts": len(own)}
            | counts.figures()
            | {"interval": None if interval is None else list(interval)}
        )
    return found
