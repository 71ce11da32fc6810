"""Deleting units that a run with --follow-keep has used for all its epochs.

A unit goes when a checkpoint is past it, so that going on from the newest one never needs it. Units
that hold measured validation documents stay to the end.
"""

import logging

from spec_data.shards.errors import ConfigError
from spec_data.shards.follow import FollowedDataset, used_marker
from spec_data.shards.reclaim import delete_unit, start_ring
from spec_train.data.following import FollowingPlan
from spec_train.data.order import BatchPlan

log = logging.getLogger(__name__)


class KeepAll:
    """Nothing is ever deleted."""

    def due(self, batches_done: int) -> bool:
        """Never."""
        return False

    def take(self, batches_done: int) -> list[int]:
        """No unit."""
        return []

    def delete(self, units: list[int]) -> None:
        """Do nothing."""


class UnitRelease(KeepAll):
    """Which units a run has done with, and their deletion."""

    def __init__(
        self, dataset: FollowedDataset, plan: FollowingPlan, validation: BatchPlan, keep: int
    ) -> None:
        """Give the units of an unsealed dataset away, of which `keep` fit on the disk.

        Raises:
            ConfigError: it is sealed, or `keep` is too few for one batch.
        """
        self.dataset = dataset
        self.pinned = {dataset.unit_of(row) for row in validation.rows.tolist()}
        needed = len(self.pinned) + plan.widest_pair()
        if keep < needed:
            raise ConfigError(
                f"--follow-keep {keep}: {needed} units are needed at once: two windows of "
                f"--window-tokens {plan.window_tokens} and {len(self.pinned)} units with measured "
                "documents. Keep more, or lower --window-tokens or --validation-documents"
            )
        start_ring(dataset.path, keep)
        self._needed = plan.units_needed()
        self._released = 0

    def due(self, batches_done: int) -> bool:
        """Whether a checkpoint now would let units go."""
        return self._needed[batches_done] > self._released

    def take(self, batches_done: int) -> list[int]:
        """The units that nothing after `batches_done` reads and that were not taken before."""
        first = self._needed[batches_done]
        gone = [u for u in range(self._released, first) if u not in self.pinned]
        self._released = max(self._released, first)
        return [u for u in gone if not used_marker(self.dataset.path, u).is_file()]

    def delete(self, units: list[int]) -> None:
        """Delete units that were taken; a checkpoint past them must be there."""
        for unit in units:
            self.dataset.close_unit(unit)
            delete_unit(self.dataset.path, unit)
        if units:
            log.info("%s: %d used units were deleted", self.dataset.path, len(units))
