"""The order of a run that follows a dataset while it is generated: whole units, in their order.

The first epoch trains on windows of consecutive units, of at least `window_tokens` each, and
shuffles inside a window, so batch k needs no unit after the last one of its window. In later epochs
all units are on disk, and the order is that of a BatchPlan.

The order follows from the generation plan alone, which is complete before the first unit.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from spec_train.data.order import BatchPlan


class FollowingPlan(BatchPlan):
    """The global batches of every epoch over units that are generated one after another."""

    def __init__(
        self,
        lengths: np.ndarray,
        usable: np.ndarray,
        units: np.ndarray,
        **options: Any,
    ) -> None:
        """Plan over documents of `lengths` int64 [N]; unit u has documents units[u] to units[u+1].

        `units` is int64 [U + 1]; other arguments as for BatchPlan.
        """
        super().__init__(lengths, usable, **options)
        self.units = units
        self.bounds = window_bounds(self.lengths, usable, units, self.window_tokens)

    def windows(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the documents of each window in training order, int64 dataset rows."""
        if epoch:
            yield from super().windows(epoch)
            return
        # int64 [W + 1]: window w has the usable documents borders[w] to borders[w + 1]
        borders = np.searchsorted(self.rows, self.units[self.bounds])
        for first, last in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            if first < last:
                yield self.rows[self._shuffled(np.arange(first, last), 0)]


def window_bounds(
    lengths: np.ndarray, usable: np.ndarray, units: np.ndarray, window_tokens: int
) -> np.ndarray:
    """Return the bounds of W windows of consecutive units, int64 [W + 1].

    A window ends with the unit in which its usable documents reach `window_tokens` tokens.

    Args:
        lengths, usable: of the documents, int64 and bool [N].
        units: first document of each unit, and N, int64 [U + 1].
        window_tokens: least tokens of a window.
    """
    total = np.concatenate([[0], np.cumsum(np.where(usable, lengths, 0))])  # [N + 1]
    per_unit = np.diff(total[units])  # [U], usable tokens
    bounds, tokens = [0], 0
    for unit, count in enumerate(per_unit.tolist(), 1):
        tokens += count
        if tokens >= window_tokens:
            bounds.append(unit)
            tokens = 0
    if bounds[-1] < len(per_unit):
        bounds.append(len(per_unit))
    return np.array(bounds, np.int64)
