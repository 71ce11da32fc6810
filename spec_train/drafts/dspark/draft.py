"""DSpark and DFlash: the draft classes that the trainer drives."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from spec_data.shards.errors import DatasetError
from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL, Manifest
from spec_train.data.batch import DraftBatch
from spec_train.draft_options import BlockOptions, DFlashOptions, DSparkOptions
from spec_train.drafts.aux_draft import LOGITS
from spec_train.drafts.dspark.block_metrics import summarise_blocks
from spec_train.drafts.dspark.blocks import Blocks, expected_weights, sample_blocks
from spec_train.drafts.dspark.config import DSparkConfig
from spec_train.drafts.dspark.loss import blocks_loss, draft_weights, dspark_loss, learnable
from spec_train.drafts.dspark.model import DSparkModel
from spec_train.drafts.dspark.serving import BlockDrafter, block_chains
from spec_train.drafts.mask_token import settle_mask_token
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.teacher import head_teacher, logits_teacher
from spec_train.head import TargetHead
from spec_train.origin import origin_of

__all__ = ["DFlashDraft", "DSparkConfig", "DSparkDraft", "dspark_loss"]


class DSparkDraft(DSparkModel):
    """The draft that `spec-train fit dspark` trains."""

    name: ClassVar[str] = "dspark"
    options_class: ClassVar[type] = DSparkOptions
    confidence_threshold: float = 0.0  # of drafting: see BlockDrafter; 0 = off

    @classmethod
    def check_data(cls, options: BlockOptions, manifest: Manifest) -> None:
        """Refuse a dataset that lacks teachers or layers.

        Raises:
            DatasetError, DraftError: what is missing, and how to generate it.
        """
        if manifest.supervision.startswith("topk"):
            raise DatasetError(
                f"{manifest.where}: --supervision {manifest.supervision} keeps too few logits to "
                "learn from: the draft needs the target's distribution over its whole vocabulary. "
                "Generate with --supervision final-hidden, or logits where the target's head "
                "rules that out"
            )
        options.layer_ids(manifest.layers)

    @classmethod
    def make_config(
        cls,
        options: Any,
        target_config: dict[str, Any],
        manifest: Manifest,
        head: TargetHead,
        token_counts: Tensor | None,
    ) -> DSparkConfig:
        """The configuration of a fresh draft for a dataset."""
        vocab = head.spec.vocab_size
        mask = settle_mask_token(options.mask_token_id, target_config, manifest, head, token_counts)
        return DSparkConfig.from_target(
            target_config,
            layers=options.layer_ids(manifest.layers),
            vocab_size=vocab,
            draft_vocab_size=min(options.draft_vocab_size or vocab, vocab),
            mask_token_id=mask,
            options=options,
            dtype=manifest.target.get("dtype"),
            origin=origin_of(manifest),
        )

    def share(self, head: TargetHead) -> None:
        """Hold the target's embedding, and a copy of the rows of its head that it can propose."""
        super().share(head)
        if self.lm_head is not None:
            rows = head.head_weight[self.draft_ids]
            self.lm_head.weight = torch.nn.Parameter(rows, requires_grad=False)

    def set_confidence_threshold(self, threshold: float) -> None:
        """End a block before a draft of lower confidence (see protocol.Draft)."""
        if self.confidence_head is None:
            super().set_confidence_threshold(threshold)
        self.confidence_threshold = threshold

    @property
    def depth(self) -> int:
        """Drafts of a block."""
        return self.config.depth

    @property
    def max_depth(self) -> int | None:
        """A block has no more."""
        return self.config.depth

    def drafter(self, head: TargetHead) -> BlockDrafter:
        """Start drafting one sequence with the target's head."""
        return BlockDrafter(self, head, self.confidence_threshold)

    def chains(self, batch: DraftBatch, head: TargetHead, depth: int) -> Tensor:
        """Draft greedily from every slot as serving would (see protocol.Draft)."""
        return block_chains(self, batch, head, depth, self.confidence_threshold)

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Columns that the loss reads of a dataset with that supervision."""
        teacher = LOGITS if supervision == LOGITS else FINAL
        return ("input_ids", "loss_mask", *self.state_columns, teacher, "target_argmax")

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Weights of the cross-entropy and of the other terms, float64 [2]: see `dspark_loss`."""
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
        """Loss of a batch over `counts`, the slot counts of the whole optimizer step.

        `blocks` are the blocks to train; by default they are drawn (see `sample_blocks`).
        """
        if blocks is None:
            limit = self.options.num_anchors
            blocks = sample_blocks(batch.loss_mask, batch.document_ids, limit)
        ids = None if self.full_vocabulary else self.draft_ids
        if LOGITS in batch.hidden:
            teacher = logits_teacher(batch.hidden[LOGITS].flatten(0, 1), ids)
        else:
            teacher = head_teacher(head, batch.hidden[FINAL].flatten(0, 1), ids)
        return blocks_loss(
            self,
            aux=batch.aux(self.config.layers),
            input_ids=batch.input_ids,
            loss_mask=batch.loss_mask,
            document_ids=batch.document_ids,
            position_ids=batch.position_ids,
            target_argmax=batch.target_argmax,
            blocks=blocks,
            head=head,
            teacher=teacher,
            counts=counts,
        )

    def forward(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """The loss: what a distributed wrapper calls."""
        return self.loss(batch, head, counts)

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Figures of added-up sums."""
        return summarise_blocks(sums)


class DFlashDraft(DSparkDraft):
    """The draft that `spec-train fit dflash` trains: DSpark without its two small heads."""

    name: ClassVar[str] = "dflash"
    options_class: ClassVar[type] = DFlashOptions
