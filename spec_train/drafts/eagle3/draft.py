"""EAGLE-3: the draft class that the trainer drives. It maps a batch onto `eagle3_loss`'s core."""

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.data.batch import DraftBatch
from spec_train.draft_options import Eagle3Options
from spec_train.drafts.drafting import ChainDrafter
from spec_train.drafts.eagle3.config import Eagle3Config
from spec_train.drafts.eagle3.loss import eagle3_loss, unrolled_loss
from spec_train.drafts.eagle3.model import Eagle3Model
from spec_train.drafts.eagle3.unroll import Unroll, serving_chains
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.slots import document_offsets
from spec_train.drafts.teacher import slots_of, teacher_of
from spec_train.head import TargetHead
from spec_train.losses import LossKind
from spec_train.metrics import summarise

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
        """Unroll steps of its training."""
        return self.options.ttt_steps

    @property
    def max_depth(self) -> int | None:
        """Chains can go on for ever."""
        return None

    def drafter(self, head: TargetHead) -> ChainDrafter:
        """Start drafting one sequence; the draft has its own head."""
        return ChainDrafter(self, self.config.vocab_size)

    def chains(self, batch: DraftBatch, head: TargetHead, depth: int) -> Tensor:
        """Draft greedily from every slot as serving would (see protocol.Draft)."""
        return serving_chains(self, batch, depth)

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Supervised slots of every unroll step, float64 [S]."""
        _, rows, choice = slots_of(self, batch)
        reach = document_offsets(batch.document_ids).flatten()[rows[choice >= 0]]
        steps = torch.arange(self.options.ttt_steps, device=rows.device)
        return (reach[:, None] >= steps).sum(0).double()

    def loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Loss of a batch over `counts`, the slot counts of the whole optimizer step."""
        options = self.options
        mask, rows, choice = slots_of(self, batch)
        return unrolled_loss(
            self,
            aux=batch.aux(self.config.layers),
            input_ids=shift_left(batch.input_ids, batch.document_ids),
            mask=mask,
            rows=rows,
            choice=choice,
            teacher=teacher_of(self, batch, head),
            document_ids=batch.document_ids,
            position_ids=batch.position_ids,
            steps=options.ttt_steps,
            decay=options.step_decay,
            kind=LossKind(
                name=options.loss, scale=options.lambda_scale, decay=options.lambda_decay
            ),
            counts=counts,
        )

    def forward(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """The loss: what a distributed wrapper calls."""
        return self.loss(batch, head, counts)

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Figures of added-up sums."""
        return summarise(sums)
