"""DSpark and DFlash: the draft classes that the trainer drives."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from spec_data.shards.errors import DatasetError, DraftError
from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL, Manifest, layer_column
from spec_train.drafts.aux_draft import LOGITS
from spec_train.drafts.dspark_blocks import Blocks, expected_weights, sample_blocks
from spec_train.drafts.dspark_config import DSparkConfig
from spec_train.drafts.dspark_loss import blocks_loss, draft_weights, dspark_loss, learnable
from spec_train.drafts.dspark_metrics import summarise_blocks
from spec_train.drafts.dspark_model import DSparkModel
from spec_train.drafts.dspark_serving import BlockDrafter, block_chains
from spec_train.drafts.eagle3_loss import head_teacher, logits_teacher
from spec_train.drafts.mask_token import settle_mask_token
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.shape import special_ids
from spec_train.head import TargetHead, choose_draft_vocabulary
from spec_train.options import BlockOptions, DFlashOptions, DSparkOptions
from spec_train.origin import origin_of, require_same_embedding, weights_warning

if TYPE_CHECKING:
    from spec_train.batch import DraftBatch

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
    def build(
        cls,
        options: Any,
        *,
        target_config: dict[str, Any],
        manifest: Manifest,
        head: TargetHead,
        token_counts: Tensor | None,
    ) -> Self:
        """Make a fresh draft for a dataset, float32, with the target's embedding.

        Random weights come from torch's default generator: seed it first.

        Raises:
            DraftError: options, target config and dataset do not go together.
        """
        cls.check_data(options, manifest)
        vocab = head.spec.vocab_size
        size = min(options.draft_vocab_size or vocab, vocab)
        mask = settle_mask_token(options.mask_token_id, target_config, manifest, head, token_counts)
        config = DSparkConfig.from_target(
            target_config,
            layers=options.layer_ids(manifest.layers),
            vocab_size=vocab,
            draft_vocab_size=size,
            mask_token_id=mask,
            options=options,
            dtype=manifest.target.get("dtype"),
            origin=origin_of(manifest),
        )
        if config.hidden_size != head.spec.hidden_size:
            raise DraftError(
                f"the target's config.json has hidden size {config.hidden_size}, its head "
                f"{head.spec.hidden_size}; the dataset mixes two targets"
            )
        draft = cls(config, options)
        draft.to(head.head_weight.device)
        if size < vocab:
            if token_counts is None:
                raise DraftError("a draft vocabulary needs the counts of the supervised tokens")
            special = special_ids(target_config)
            draft.set_vocabulary(choose_draft_vocabulary(token_counts, size, special))
        draft.adopt(head)
        return draft

    @torch.no_grad()
    def join(self, head: TargetHead, manifest: Manifest, where: str) -> list[str]:
        """Go on with the target of a dataset, sharing the frozen weights of its `head`.

        Gives warnings. `where` is what the draft was read from.

        Raises:
            DraftError: it is another target.
        """
        whose = str(Path(manifest.where).parent)
        require_same_embedding(self.embed_tokens.weight, head.embed_weight, where, whose)
        warnings = weights_warning(self.config.origin, manifest)
        self.config = dataclasses.replace(self.config, origin=origin_of(manifest))
        self.adopt(head)
        return warnings

    @torch.no_grad()
    def adopt(self, head: TargetHead) -> None:
        """Take the target's embedding (shared with `head`) and the rows of its head."""
        self.embed_tokens.weight = torch.nn.Parameter(head.embed_weight, requires_grad=False)
        if self.lm_head is not None:
            rows = head.head_weight[self.draft_ids]
            self.lm_head.weight = torch.nn.Parameter(rows, requires_grad=False)

    @property
    def state_columns(self) -> tuple[str, ...]:
        """The aux states, ascending."""
        return tuple(layer_column(k) for k in self.config.layers)

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

    def chains(self, batch: "DraftBatch", head: TargetHead, depth: int) -> Tensor:
        """Draft greedily from every slot as serving would (see protocol.Draft)."""
        return block_chains(self, batch, head, depth, self.confidence_threshold)

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Columns that the loss reads of a dataset with that supervision."""
        teacher = LOGITS if supervision == LOGITS else FINAL
        return ("input_ids", "loss_mask", *self.state_columns, teacher, "target_argmax")

    @torch.no_grad()
    def slot_counts(self, batch: "DraftBatch") -> Tensor:
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
        batch: "DraftBatch",
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

    def forward(self, batch: "DraftBatch", head: TargetHead, counts: Tensor | None) -> DraftLoss:
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
