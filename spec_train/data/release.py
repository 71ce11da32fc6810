"""Delete units that a run with --follow-keep has used in all its epochs.

A unit is deleted only after a checkpoint beyond it is saved, so resuming never needs it. Units with
validation documents that the run measures are kept to the end.
"""

import logging

from spec_data.shards.errors import ConfigError
from spec_data.shards.follow import FollowedDataset, used_marker
from spec_data.shards.reclaim import allow_deletion, delete_unit
from spec_train.data.following import FollowingPlan
from spec_train.data.order import BatchPlan

log = logging.getLogger(__name__)


class KeepAll:
    """The release of runs without --follow-keep: nothing is deleted."""

    def due(self, batches_done: int) -> bool:
        """Return False: no checkpoint is needed for deletion."""
        return False

    def take(self, batches_done: int) -> list[int]:
        """Return no unit."""
        return []

    def delete(self, units: list[int]) -> None:
        """Do nothing."""


class UnitRelease(KeepAll):
    """Decides which units a run no longer needs, and deletes them."""

    def __init__(
        self, dataset: FollowedDataset, plan: FollowingPlan, validation: BatchPlan, keep: int
    ) -> None:
        """Allow the deletion of the units of an unsealed dataset; `keep` units stay on disk.

        Raises:
            ConfigError: the dataset is sealed, or `keep` is less than a batch may need.
        """
        self.dataset = dataset
        self.pinned = {dataset.unit_of(row) for row in validation.rows.tolist()}
        needed = len(self.pinned) + plan.widest_pair()
        if keep < needed:
            raise ConfigError(
                f"--follow-keep {keep}: {needed} units are needed at once: two windows of "
                f"--window-tokens {plan.window_tokens}, and {len(self.pinned)} units with "
                "validation documents. Keep more, or lower --window-tokens or "
                "--validation-documents"
            )
        allow_deletion(dataset.path, keep)
        self._needed = plan.units_needed()
        self._released = 0

    def due(self, batches_done: int) -> bool:
        """Return whether a checkpoint now would allow units to be deleted."""
        return self._needed[batches_done] > self._released

    def take(self, batches_done: int) -> list[int]:
        """Return the units that no batch after `batches_done` reads, each only once."""
        first = self._needed[batches_done]
        gone = [u for u in range(self._released, first) if u not in self.pinned]
        self._released = max(self._released, first)
        return [u for u in gone if not used_marker(self.dataset.path, u).is_file()]

    def delete(self, units: list[int]) -> None:
        """Delete units that `take` returned; a checkpoint beyond them must be saved before."""
        for unit in units:
            self.dataset.close_unit(unit)
            delete_unit(self.dataset.path, unit)
        if units:
            log.info("%s: %d used units were deleted", self.dataset.path, len(units))
