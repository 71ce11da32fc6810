"""A dataset under another mask policy than the one that it was generated with (`--mask`)."""

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from spec_data.shards.loss_masks import masks_under
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.terminal.progress import progress


def open_with_mask(
    path: str | Path,
    policy: str | None,
    columns: Sequence[str] | None = None,
) -> HiddenStatesDataset:
    """Open a dataset with the masks of a policy; None, or its own policy: as it is stored.

    Raises:
        MissingError, DatasetError: it cannot be read, or the masks cannot be derived from it.
        ConfigError: an unknown policy.
    """
    stored = HiddenStatesDataset(path, columns)
    if policy is None or policy == stored.manifest.mask:
        return stored
    return PolicyDataset(path, policy, columns)


class PolicyDataset(HiddenStatesDataset):
    """A sealed dataset whose masks are those of `policy`; see `spec_data.shards.turn_masks`."""

    def __init__(
        self,
        path: str | Path,
        policy: str,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Open `path`; `columns` are as for HiddenStatesDataset.

        Raises:
            As `open_with_mask`.
        """
        super().__init__(path, columns)
        self.policy = policy
        bar = partial(progress, desc="masks", unit="documents", leave=False)
        self._masks = masks_under(HiddenStatesDataset(path, ()), policy, bar)

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        return self._masks.offsets, self._masks.spans

    @cached_property
    def supervised(self) -> np.ndarray:
        """Supervised tokens per document, int64 [N]."""
        return self._masks.supervised

    @cached_property
    def first_supervised(self) -> np.ndarray:
        """Index of the first supervised token, int64 [N]; the length when there is none."""
        return self._masks.first_supervised
