"""P-EAGLE: the draft class that the trainer drives.

In: a `DraftBatch` in the token frame. Out: the loss of `peagle.loss`, chains and a drafter.

B packs, T slots, K depths.
"""

from typing import Any

import torch
from torch import Tensor

from spec_train.data.batch import DraftBatch
from spec_train.drafts.base import DatasetFacts
from spec_train.drafts.counted import CountedDrafts
from spec_train.drafts.frames import batch_frame, slot_mask_of, slots_of
from spec_train.drafts.mask_token import settle_mask_token
from spec_train.drafts.peagle.loss import (
    Draws,
    Weighed,
    cod_sample,
    element_masks,
    parallel_loss,
    peagle_loss,
)
from spec_train.drafts.peagle.model import PeagleConfig, PeagleModel
from spec_train.drafts.peagle.serving import ParallelDrafter, serving_chains
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.slots import document_offsets
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind
from spec_train.losses.metrics import summarise
from spec_train.options.draft_options import PeagleOptions

__all__ = ["PeagleConfig", "PeagleDraft", "PeagleOptions", "cod_sample", "peagle_loss"]


class PeagleDraft(PeagleModel):
    """The draft that `spec-train fit peagle` trains."""

    def __init__(self, config: PeagleConfig, options: PeagleOptions | None = None) -> None:
        """Make a draft with random weights and the first Vd tokens as draft vocabulary."""
        super().__init__(config, options)
        self._draws = Draws()

    @classmethod
    def own_settings(cls, options: PeagleOptions, facts: DatasetFacts) -> dict[str, Any]:
        """Return the mask token (see LayeredDraft)."""
        return {"mask_token_id": settle_mask_token(options.mask_token_id, facts)}

    @property
    def depth(self) -> int:
        """Number of depths of its training."""
        return self.options.depths

    @property
    def max_depth(self) -> int | None:
        """The same: elements further from their anchor were never trained."""
        return self.options.depths

    def drafter(self, head: TargetHead) -> ParallelDrafter:
        """Start drafting one sequence. The draft has its own head; `head` is not used."""
        return ParallelDrafter(self)

    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, counted_only: bool = False
    ) -> Tensor:
        """Draft greedily from every slot: int64 [B, T, depth] (see protocol.Draft)."""
        counted = CountedDrafts(batch) if counted_only else None
        return serving_chains(self, batch, depth, counted)

    @torch.no_grad()
    def draw(self, batch: DraftBatch) -> Tensor:
        """Draw the elements of a batch, bool [B, K, T] (see `cod_sample`).

        Training draws from torch's default generator. Evaluation draws the same elements every
        time, by their index in the document, so that metrics depend neither on the packs nor on
        earlier draws.
        """
        options, ids = self.options, batch.document_ids
        mask = slot_mask_of(self, batch)
        deeper, exact = options.depths - 1, torch.float64
        if self.training:
            uniforms = torch.rand(
                deeper, *mask.shape, dtype=exact, device=ids.device
            )  # [K-1, B, T]
        else:
            fixed = torch.Generator().manual_seed(0)
            table = torch.rand(mask.shape[1], deeper, generator=fixed, dtype=exact)  # [T, K-1]
            uniforms = table.to(ids.device)[document_offsets(ids)].permute(2, 0, 1)  # [K-1, B, T]
        return cod_sample(mask, ids, uniforms, ratio=options.cod_ratio, floor=options.cod_floor)

    @property
    def _weighed(self) -> Weighed:
        """The loss and the weights of the depths that the options name."""
        return Weighed(LossKind.of(self.options), self.options.weights_of(self.options.depths))

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch, sample: Tensor | None = None) -> Tensor:
        """Return the number of elements with a loss, weighted by depth, float64 [1].

        If no `sample` bool [B, K, T] is given, draw one and keep it for the loss of the batch.
        """
        if sample is None:
            sample = self.draw(batch)
            self._draws.keep(_key(batch), sample)
        supervised = element_masks(*slots_of(self, batch), batch.document_ids, sample)[1]
        return self._weighed.total(supervised)[None]

    def loss(
        self,
        batch: DraftBatch,
        head: TargetHead,
        counts: Tensor | None,
        sample: Tensor | None = None,
    ) -> DraftLoss:
        """Return the loss of a batch over `counts`, the slot counts of the whole optimizer step.

        `sample` bool [B, K, T] is, if absent, the one that `slot_counts` drew for the batch; if
        there is none, it is drawn now.
        """
        if sample is None:
            sample = self._draws.take(_key(batch))
        if sample is None:
            sample = self.draw(batch)
        frame, segments = batch_frame(self, batch, head), self.options.segments
        return parallel_loss(
            self, frame, sample=sample, segments=segments, weighed=self._weighed, count=counts
        )

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Turn added sums into metrics; a depth's weight is its share of the weighted elements."""
        weighted = sums.get("weighted", sums["supervised"])
        least = 1 if "weighted" not in sums else 1e-30
        share = weighted / weighted.sum().clamp_min(least)
        return summarise(sums | {"weighted": sums["supervised"] * share})


def _key(batch: DraftBatch) -> tuple[object, ...]:
    """Return what identifies a batch within its step, with or without its states."""
    return (tuple(map(tuple, batch.rows)), tuple(batch.document_ids.shape))
