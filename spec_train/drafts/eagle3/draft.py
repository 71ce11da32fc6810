"""EAGLE-3: the draft class that the trainer drives.

In: a `DraftBatch` in the token frame. Out: the loss of `eagle3.loss`, chains and a drafter.
"""

import torch
from torch import Tensor

from spec_train.data.batch import DraftBatch
from spec_train.drafts.counted import CountedDrafts
from spec_train.drafts.drafting import ChainDrafter
from spec_train.drafts.eagle3.loss import (
    Teachers,
    Unroll,
    eagle3_loss,
    serving_chains,
    step_shares,
    unrolled_loss,
)
from spec_train.drafts.eagle3.model import Eagle3Config, Eagle3Model
from spec_train.drafts.frames import batch_frame, slots_of
from spec_train.drafts.protocol import DraftLoss
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind
from spec_train.losses.metrics import summarise
from spec_train.options.draft_options import Eagle3Options

__all__ = [
    "Eagle3Config",
    "Eagle3Draft",
    "Eagle3Options",
    "Unroll",
    "eagle3_loss",
    "serving_chains",
]


class Eagle3Draft(Eagle3Model):
    """The draft that `spec-train fit eagle3` trains."""

    @property
    def depth(self) -> int:
        """Number of unroll steps of its training."""
        return self.options.ttt_steps

    @property
    def max_depth(self) -> int | None:
        """None: a chain can have any length."""
        return None

    def drafter(self, head: TargetHead) -> ChainDrafter:
        """Start drafting one sequence. The draft has its own head; `head` is not used."""
        return ChainDrafter(self, self.config.vocab_size, self.new_cache())

    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, counted_only: bool = False
    ) -> Tensor:
        """Draft greedily from every slot: int64 [B, T, depth] (see protocol.Draft)."""
        counted = CountedDrafts(batch) if counted_only else None
        return serving_chains(self, batch, depth, counted)

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Return the number of supervised slots of every unroll step, float64 [S]."""
        _, rows, choice = slots_of(self, batch)
        steps = self.options.ttt_steps
        return Teachers.select(rows, choice, batch.document_ids, steps).counts()

    def loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Return the loss of a batch over `counts`, the slot counts of the whole optimizer step.

        `counts` is float64 [S]; None: those of this batch.
        """
        options, steps = self.options, self.options.ttt_steps
        shares = step_shares(steps, options.step_decay, options.weights_of(steps))
        frame, kind = batch_frame(self, batch, head), LossKind.of(options)
        return unrolled_loss(self, frame, shares=shares, kind=kind, counts=counts)

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Turn added sums into metrics."""
        return summarise(sums)
