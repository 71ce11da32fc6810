"""P-EAGLE: the draft class that the trainer drives. It maps a batch onto `peagle_loss`'s core."""

from typing import Any

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_data.shards.schema import Manifest
from spec_train.data.batch import DraftBatch
from spec_train.draft_options import PeagleOptions
from spec_train.drafts.mask_token import settle_mask_token
from spec_train.drafts.peagle.config import PeagleConfig
from spec_train.drafts.peagle.depth_sampling import Draws, cod_sample
from spec_train.drafts.peagle.loss import element_masks, parallel_loss, peagle_loss
from spec_train.drafts.peagle.model import PeagleModel
from spec_train.drafts.peagle.serving import ParallelDrafter, serving_chains
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.slots import document_offsets
from spec_train.drafts.teacher import Frame, slots_of, teacher_of
from spec_train.head import TargetHead
from spec_train.metrics import summarise

__all__ = ["PeagleConfig", "PeagleDraft", "PeagleOptions", "cod_sample", "peagle_loss"]


class PeagleDraft(PeagleModel):
    """The draft that `spec-train fit peagle` trains."""

    def __init__(self, config: PeagleConfig, options: PeagleOptions | None = None) -> None:
        """Make a draft with random weights and the first Vd tokens as draft vocabulary."""
        super().__init__(config, options)
        self._draws = Draws()

    @classmethod
    def own_settings(
        cls,
        options: PeagleOptions,
        target_config: dict[str, Any],
        manifest: Manifest,
        head: TargetHead,
        counts: Tensor | None,
    ) -> dict[str, Any]:
        """Number of layers, and the mask token."""
        token = settle_mask_token(options.mask_token_id, target_config, manifest, head, counts)
        return {"num_hidden_layers": options.draft_layers, "mask_token_id": token}

    @property
    def depth(self) -> int:
        """Depths of its training."""
        return self.options.depths

    @property
    def max_depth(self) -> int | None:
        """The same: what a mask row says further from its anchor was never trained."""
        return self.options.depths

    def drafter(self, head: TargetHead) -> ParallelDrafter:
        """Start drafting one sequence; the draft has its own head."""
        return ParallelDrafter(self)

    def chains(self, batch: DraftBatch, head: TargetHead, depth: int) -> Tensor:
        """Draft greedily from every slot as serving would (see protocol.Draft)."""
        return serving_chains(self, batch, depth)

    @torch.no_grad()
    def draw(self, batch: DraftBatch) -> Tensor:
        """Draw the elements of a batch, bool [B, K, T] (see `cod_sample`).

        Training draws from torch's default generator. Evaluation draws the same ones every time,
        by places in the document, so that figures depend neither on packs nor on what went before.
        """
        options, ids = self.options, batch.document_ids
        mask, _, _ = slots_of(self, batch)
        deeper, exact = options.depths - 1, torch.float64
        if self.training:
            uniforms = torch.rand(deeper, *mask.shape, dtype=exact, device=ids.device)
        else:
            fixed = torch.Generator().manual_seed(0)
            table = torch.rand(mask.shape[1], deeper, generator=fixed, dtype=exact)
            uniforms = table.to(ids.device)[document_offsets(ids)].permute(2, 0, 1)
        return cod_sample(mask, ids, uniforms, ratio=options.cod_ratio, floor=options.cod_floor)

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch, sample: Tensor | None = None) -> Tensor:
        """Elements of all depths that have a loss, float64 [1].

        Draws the batch's sample, which the loss of the batch then uses, unless one is given.
        """
        if sample is None:
            sample = self.draw(batch)
            self._draws.keep(_key(batch), sample)
        supervised = element_masks(*slots_of(self, batch), batch.document_ids, sample)[1]
        return supervised.sum().double()[None]

    def loss(
        self,
        batch: DraftBatch,
        head: TargetHead,
        counts: Tensor | None,
        sample: Tensor | None = None,
    ) -> DraftLoss:
        """Loss of a batch over `counts`, the slot counts of the whole optimizer step.

        `sample` is given, or the one that `slot_counts` drew for the batch, or drawn now.
        """
        if sample is None:
            sample = self._draws.take(_key(batch))
        if sample is None:
            sample = self.draw(batch)
        frame = Frame(
            *slots_of(self, batch),
            teacher_of(self, batch, head),
            batch.document_ids,
            batch.position_ids,
        )
        return parallel_loss(
            self,
            frame,
            aux=batch.aux(self.config.layers),
            input_ids=shift_left(batch.input_ids, batch.document_ids),
            sample=sample,
            segments=self.options.segments,
            count=counts,
        )

    def forward(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """The loss: what a distributed wrapper calls."""
        return self.loss(batch, head, counts)

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Figures of added-up sums. All depths share one denominator: depths weigh by size."""
        share = sums["supervised"] / sums["supervised"].sum().clamp_min(1)
        return summarise(sums | {"weighted": sums["supervised"] * share})


def _key(batch: DraftBatch) -> tuple[object, ...]:
    """What tells a batch from the others of its step, with its states or without."""
    return (tuple(map(tuple, batch.rows)), tuple(batch.document_ids.shape))
