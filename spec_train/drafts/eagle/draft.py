"""EAGLE-1/2: the draft class that the trainer drives. It maps a batch onto `eagle_loss`.

EAGLE-2 differs from EAGLE-1 only in decoding (see `decoding.tree_growth`): one draft serves both.

Training looks one token ahead. In evaluation mode the figures are those of chains of `depth` tokens
that go on from the draft's own predictions, like the unroll that EAGLE-3 is trained with, so that
`best` is chosen by what serving needs; the loss is that of the first step in both modes.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from spec_data.shards.errors import DatasetError
from spec_data.shards.schema import ALL, FINAL, Manifest
from spec_train.data.batch import DraftBatch
from spec_train.draft_options import EagleOptions
from spec_train.drafts.drafting import ChainDrafter, LayerCaches
from spec_train.drafts.eagle.config import EagleConfig
from spec_train.drafts.eagle.loss import eagle_loss, input_noise, supervised_slots
from spec_train.drafts.eagle.model import EagleModel, HeadedEagle
from spec_train.drafts.eagle.unroll import serving_chains
from spec_train.drafts.protocol import DraftLoss
from spec_train.head import TargetHead
from spec_train.metrics import summarise
from spec_train.origin import origin_of

__all__ = ["EagleConfig", "EagleDraft", "EagleOptions", "eagle_loss", "serving_chains"]


class EagleDraft(EagleModel):
    """The draft that `spec-train fit eagle` trains."""

    name: ClassVar[str] = "eagle"
    options_class: ClassVar[type] = EagleOptions

    @classmethod
    def check_data(cls, options: EagleOptions, manifest: Manifest) -> None:
        """Refuse a dataset without the final hidden states of every token.

        Raises:
            DatasetError: what is missing, and how to generate it.
        """
        if FINAL not in {column.name for column in manifest.columns}:
            raise DatasetError(
                f"{manifest.where}: --supervision {manifest.supervision} keeps no {FINAL}, and the "
                "final hidden states are what an eagle draft reads and predicts. Generate with "
                "--supervision final-hidden, or fit eagle3"
            )
        if manifest.final != ALL:
            raise DatasetError(
                f"{manifest.where} keeps {FINAL} only where the next token is supervised; an eagle "
                "draft reads it at every token of the prompt too. Generate with --final all, or "
                "fit eagle3"
            )

    @classmethod
    def make_config(
        cls,
        options: EagleOptions,
        target_config: dict[str, Any],
        manifest: Manifest,
        head: TargetHead,
        token_counts: Tensor | None,
    ) -> EagleConfig:
        """The configuration of a fresh draft for a dataset; it speaks the whole vocabulary."""
        return EagleConfig.from_target(
            target_config,
            vocab_size=head.spec.vocab_size,
            options=options,
            dtype=manifest.target.get("dtype"),
            origin=origin_of(manifest),
        )

    @property
    def state_columns(self) -> tuple[str, ...]:
        """The final hidden states."""
        return (FINAL,)

    @property
    def depth(self) -> int:
        """Drafted tokens per round."""
        return self.options.depth

    @property
    def max_depth(self) -> int | None:
        """Chains can go on for ever."""
        return None

    def drafter(self, head: TargetHead) -> ChainDrafter:
        """Start drafting one sequence through the target's head."""
        caches = LayerCaches(len(self.layers))
        return ChainDrafter(HeadedEagle(self, head), self.config.vocab_size, caches)

    def chains(self, batch: DraftBatch, head: TargetHead, depth: int) -> Tensor:
        """Draft greedily from every slot as serving would (see protocol.Draft)."""
        return serving_chains(self, batch, batch.hidden[FINAL], head, depth)

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Columns that the loss reads."""
        return ("input_ids", "loss_mask", FINAL, "target_argmax")

    @property
    def _steps(self) -> int:
        return 1 if self.training else self.options.depth

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Supervised slots of every step, float64 [1] in training, [depth] in evaluation."""
        slots = self.options.slots
        masks = supervised_slots(batch.loss_mask, batch.document_ids, slots, self._steps)
        return masks.flatten(1).sum(1).double()

    def loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Loss of a batch over `counts`, the slot counts of the whole optimizer step.

        In training mode the input states get noise from torch's generator.
        """
        options, states, noise = self.options, batch.hidden[FINAL], None
        if self.training and options.noise > 0:
            noise = input_noise(states, batch.document_ids, options.noise, options.noise_scale)
        return eagle_loss(
            self,
            final_hidden=states,
            input_ids=batch.input_ids,
            loss_mask=batch.loss_mask,
            head=head,
            target_argmax=batch.target_argmax,
            document_ids=batch.document_ids,
            position_ids=batch.position_ids,
            noise=noise,
            slots=options.slots,
            steps=self._steps,
            regression_weight=options.regression_weight,
            ce_weight=options.ce_weight,
            counts=counts,
        )

    def forward(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """The loss: what a distributed wrapper calls."""
        return self.loss(batch, head, counts)

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Figures of added-up sums, with the mean of both parts of the loss at the first step."""
        first = float(sums["supervised"][0])
        parts = {
            name: float(sums[name][0]) / first if first else None
            for name in ("smooth_l1", "cross_entropy")
        }
        return summarise(sums) | parts
