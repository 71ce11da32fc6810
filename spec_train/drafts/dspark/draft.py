"""DSpark and DFlash: the draft classes that the trainer drives.

In: a `DraftBatch` in the token frame. Out: the loss of `dspark.loss`, chains and a drafter.
"""

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.data.batch import DraftBatch
from spec_train.drafts.base import DatasetFacts
from spec_train.drafts.counted import CountedDrafts
from spec_train.drafts.dspark.blocks import Blocks, expected_weights, sample_blocks
from spec_train.drafts.dspark.loss import (
    batch_block_frame,
    blocks_loss,
    draft_weights,
    dspark_loss,
    learnable,
    summarise_blocks,
)
from spec_train.drafts.dspark.model import DSparkConfig, DSparkModel
from spec_train.drafts.dspark.serving import BlockDrafter, block_chains
from spec_train.drafts.mask_token import settle_mask_token
from spec_train.drafts.protocol import DraftLoss
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DFlashOptions, DSparkOptions

log = logging.getLogger(__name__)

__all__ = ["DFlashDraft", "DSparkConfig", "DSparkDraft", "dspark_loss"]


class DSparkDraft(DSparkModel):
    """The draft that `spec-train fit dspark` trains."""

    name: ClassVar[str] = "dspark"
    options_class: ClassVar[type] = DSparkOptions
    confidence_threshold: float = 0.0  # see `stop_below`

    @classmethod
    def own_settings(cls, options: Any, facts: DatasetFacts) -> dict[str, Any]:
        """Return the mask token (see LayeredDraft)."""
        return {"mask_token_id": settle_mask_token(options.mask_token_id, facts)}

    def stop_below(self, confidence: float) -> None:
        """End a drafted block before its first token of a lower confidence (see protocol.Draft)."""
        if self.confidence_head is None:
            super().stop_below(confidence)
        self.confidence_threshold = confidence

    @torch.no_grad()
    def adopt(self, head: TargetHead) -> None:
        """Share the target's embedding; copy the head rows of a reduced draft vocabulary."""
        if self.lm_head is not None:
            self._use_rows(head.head_weight[self.draft_ids])
        super().adopt(head)

    def share(self, head: TargetHead) -> None:
        """Share the target's embedding, and the head rows of a reduced draft vocabulary.

        Rows in a draft of another trainer that are not the target's are kept.
        """
        super().share(head)
        if self.lm_head is None:
            return
        rows, own = head.head_weight[self.draft_ids], self.lm_head.weight
        if torch.equal(rows.to(own), own):
            self._use_rows(rows)
        else:
            log.warning(
                "warning: the draft's lm_head is not made of the target's rows: it is kept, and "
                "not trained"
            )

    def _use_rows(self, rows: Tensor) -> None:
        """Use head rows [Vd, H] of the target, frozen."""
        assert self.lm_head is not None
        self.lm_head.weight = torch.nn.Parameter(rows, requires_grad=False)

    @property
    def depth(self) -> int:
        """Number of drafts of a block."""
        return self.config.depth

    @property
    def max_depth(self) -> int | None:
        """The same: a block has no more drafts."""
        return self.config.depth

    def drafter(self, head: TargetHead) -> BlockDrafter:
        """Start drafting one sequence with the target's head."""
        return BlockDrafter(self, head, self.confidence_threshold)

    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, counted_only: bool = False
    ) -> Tensor:
        """Draft greedily from every slot: int64 [B, T, depth] (see protocol.Draft)."""
        counted = CountedDrafts(batch) if counted_only else None
        return block_chains(self, batch, head, depth, self.confidence_threshold, counted)

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Return the summed weights of the cross-entropy and of the other terms, float64 [2].

        They are the mean over the draw of the blocks (see `dspark.loss`).
        """
        following = shift_left(batch.input_ids, batch.document_ids)
        weights = draft_weights(self).to(batch.input_ids.device)
        parts = [
            expected_weights(
                batch.loss_mask, batch.document_ids, inside, weights, self.options.num_anchors
            )
            for inside in learnable(self, batch.target_argmax, following)
        ]
        return torch.stack(parts)

    def loss(
        self,
        batch: DraftBatch,
        head: TargetHead,
        counts: Tensor | None,
        blocks: Blocks | None = None,
    ) -> DraftLoss:
        """Return the loss of a batch over `counts`, the slot counts of the whole optimizer step.

        `counts` is float64 [2], see `slot_counts`. `blocks` are the blocks to train; None: draw
        them with `sample_blocks`.
        """
        if blocks is None:
            limit = self.options.num_anchors
            blocks = sample_blocks(batch.loss_mask, batch.document_ids, limit)
        frame = batch_block_frame(self, batch, head, blocks)
        return blocks_loss(self, frame, head, counts)

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Turn added sums into metrics."""
        return summarise_blocks(sums)


class DFlashDraft(DSparkDraft):
    """The draft that `spec-train fit dflash` trains: DSpark without the two small heads."""

    name: ClassVar[str] = "dflash"
    options_class: ClassVar[type] = DFlashOptions
