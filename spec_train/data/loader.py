"""The packs of `fit` for a training loop of one's own."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from spec_data.shards.batch import DraftBatch
from spec_train.data.seeds import batch_seed
from spec_train.data.stream import BatchStream


class Loader:
    """Batches of packs in the order of `fit`, on this rank: iterating once is one epoch.

    The next iteration is the next epoch, in another order. A rank for which the end of an epoch
    leaves no pack receives a batch of padding, whose loss is zero: all ranks have as many batches.

    Attributes:
        epoch: what the next iteration reads.
    """

    def __init__(self, stream: BatchStream) -> None:
        """Read what `stream` does, whose batches are not overwritten."""
        self._stream, self.epoch, self._done = stream, stream.epoch, stream.batches_done

    @property
    def documents(self) -> int:
        """How many documents an epoch has, on all ranks."""
        return self._stream.plan.documents(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of `epoch`."""
        self.epoch, self._done = epoch, 0

    def __len__(self) -> int:
        """Return how many batches the epoch has, on every rank."""
        return self._stream.plan.count_batches(self.epoch)

    def __iter__(self) -> Iterator[DraftBatch]:
        """Yield the batches of the epoch; after a loop that breaks, it begins again."""
        stream, seed = self._stream, self._stream.plan.seed
        stream.epoch, stream.batches_done = self.epoch, self._done
        left, self._done = len(self) - self._done, 0
        with contextlib.closing(stream.take(left)) as steps:
            for step in steps:
                for number, batch in zip(step.numbers, step.batches, strict=True):
                    yield replace(batch, seed=batch_seed(seed, "train", step.epoch, number))
        self.set_epoch(self.epoch + 1)

    def repeat(self, batches: int) -> Iterator[DraftBatch]:
        """Yield so many batches, over as many epochs as needed."""
        while batches > 0 and len(self):
            for batch in self:
                yield batch
                batches -= 1
                if not batches:
                    return

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded."""
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at a position that was saved.

        Raises:
            ConfigError: the state is of another dataset, seed or pack length.
        """
        self._stream.load_state_dict(state)
        self.epoch, self._done = self._stream.epoch, self._stream.batches_done

    def __repr__(self) -> str:
        plan = self._stream.plan
        return (
            f"Loader({str(self._stream.dataset.path)!r}, {self.documents:,} documents in "
            f"{len(self):,} batches of {plan.packs_per_batch // self._stream.world_size} packs of "
            f"{plan.seq_len:,} tokens)"
        )
