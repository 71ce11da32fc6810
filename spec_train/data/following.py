"""The order of a run that follows a dataset while it is generated: whole units, in their order.

The first epoch goes through windows of consecutive units, each of at least `window_tokens`, and
shuffles inside them, so that batch k needs no unit later than its window's last. The others have
everything on disk and take the order of a BatchPlan. With `visits` above 1 there is one long epoch
that goes through every window so many times before the next: then its units are done with, and may
go. All of it follows from the plan of the dataset alone, which stands before the first unit does.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from spec_train.data.order import BatchPlan


class FollowingPlan(BatchPlan):
    """The global batches of every epoch over units that come one after another."""

    def __init__(
        self,
        lengths: np.ndarray,
        usable: np.ndarray,
        units: np.ndarray,
        visits: int = 0,
        **options: Any,
    ) -> None:
        """Plan over `lengths` int64 [N]; `units` int64 [U + 1] bound the rows of each unit.

        `visits`: 0, or how often every window is gone through in the only epoch.
        """
        super().__init__(lengths, usable, **options)
        self.units, self.visits = units, visits
        self.bounds = window_bounds(self.lengths, usable, units, self.window_tokens)

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"visits": self.visits}

    def documents(self, epoch: int) -> int:
        """Documents of an epoch, each as often as it appears."""
        return len(self.rows) * max(1, self.visits)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch, after the cut."""
        return super().tokens * max(1, self.visits)

    def windows(self, epoch: int) -> Iterator[np.ndarray]:
        """The rows of each window, in training order."""
        if epoch and not self.visits:
            yield from super().windows(epoch)
            return
        borders = np.searchsorted(self.rows, self.units[self.bounds])
        for first, last in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            for visit in range(max(1, self.visits)):
                if first < last:
                    yield self.rows[self._shuffled(np.arange(first, last), visit)]

    def units_needed(self) -> list[int]:
        """With `visits`: for every number of batches done, 0 to all, the first unit still needed.

        A batch reads of its window and perhaps of the next one, later batches of no earlier one.
        """
        first = []
        for batch in self.iter_batches(0):
            row = min(row for pack in batch for row in pack)
            unit = int(np.searchsorted(self.units, row, "right")) - 1
            first.append(int(self.bounds[np.searchsorted(self.bounds, unit, "right") - 1]))
        return [*first, len(self.units) - 1]

    def widest_pair(self) -> int:
        """Most units of two windows in a row: what a batch may need at once."""
        return int((self.bounds[2:] - self.bounds[:-2]).max(initial=self.bounds[1]))


def window_bounds(
    lengths: np.ndarray, usable: np.ndarray, units: np.ndarray, window_tokens: int
) -> np.ndarray:
    """Bounds of windows of consecutive units, int64 [W + 1]: each closes with the unit that takes
    its usable documents to `window_tokens`."""
    total = np.concatenate([[0], np.cumsum(np.where(usable, lengths, 0))])
    per_unit = np.diff(total[units])
    bounds, tokens = [0], 0
    for unit, count in enumerate(per_unit.tolist(), 1):
        tokens += count
        if tokens >= window_tokens:
            bounds.append(unit)
            tokens = 0
    if bounds[-1] < len(per_unit):
        bounds.append(len(per_unit))
    return np.array(bounds, np.int64)
