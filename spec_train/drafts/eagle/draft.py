"""EAGLE-1/2: the draft class that the trainer drives.

In: a `DraftBatch` in the token frame. Out: the loss of `eagle.loss`, chains and a drafter. EAGLE-2
(arXiv 2406.16858) differs from EAGLE-1 only in decoding (see `decoding.tree_growth`): one draft
serves both.

Training looks one token ahead. In evaluation mode the metrics are those of chains of `depth` tokens
that continue from the draft's own predictions, like the unroll of EAGLE-3's training. So `best` is
chosen by what serving needs. The loss is that of the first step in both modes.
"""

from typing import ClassVar

import torch
from torch import Tensor

from spec_data.shards.errors import DatasetError
from spec_data.shards.schema import FINAL, Manifest, data_problem
from spec_train.data.batch import DraftBatch
from spec_train.drafts.base import DatasetFacts
from spec_train.drafts.counted import CountedDrafts
from spec_train.drafts.draft_caches import LayerCaches
from spec_train.drafts.drafting import ChainDrafter
from spec_train.drafts.eagle.loss import eagle_loss, input_noise, serving_chains, supervised_slots
from spec_train.drafts.eagle.model import EagleConfig, EagleModel, HeadedEagle
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.slots import check_teachers
from spec_train.formats.origin import origin_of
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind
from spec_train.losses.metrics import summarise
from spec_train.options.draft_options import EagleOptions

__all__ = ["EagleConfig", "EagleDraft", "EagleOptions", "eagle_loss", "serving_chains"]


class EagleDraft(EagleModel):
    """The draft that `spec-train fit eagle` trains."""

    name: ClassVar[str] = "eagle"
    options_class: ClassVar[type] = EagleOptions

    @classmethod
    def check_data(cls, options: EagleOptions, manifest: Manifest) -> None:
        """Raise an error if a dataset lacks the final hidden states of some tokens.

        Raises:
            DatasetError, DraftError: what is missing, and how to generate it.
        """
        if problem := data_problem("eagle", manifest.supervision, manifest.final):
            raise DatasetError(f"{manifest.where}: {problem}")
        check_teachers(options.slots, manifest)

    @classmethod
    def make_config(cls, options: EagleOptions, facts: DatasetFacts) -> EagleConfig:
        """Return the configuration of a fresh draft for a dataset; it has the full vocabulary."""
        return EagleConfig.from_target(
            facts.target_config,
            vocab_size=facts.head.spec.vocab_size,
            options=options,
            dtype=facts.manifest.target.get("dtype"),
            origin=origin_of(facts.manifest),
            positions=facts.positions,
        )

    @property
    def state_columns(self) -> tuple[str, ...]:
        """The final hidden states."""
        return (FINAL,)

    @property
    def depth(self) -> int:
        """Number of drafted tokens per round."""
        return self.options.depth

    @property
    def max_depth(self) -> int | None:
        """None: a chain can have any length."""
        return None

    def drafter(self, head: TargetHead) -> ChainDrafter:
        """Start drafting one sequence with the target's head."""
        caches = LayerCaches(len(self.layers))
        return ChainDrafter(HeadedEagle(self, head), self.config.vocab_size, caches)

    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, counted_only: bool = False
    ) -> Tensor:
        """Draft greedily from every slot: int64 [B, T, depth] (see protocol.Draft)."""
        counted = CountedDrafts(batch) if counted_only else None
        return serving_chains(self, batch, batch.hidden[FINAL], head, depth, counted)

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Return the columns that the loss reads; the same with every supervision."""
        return ("input_ids", "loss_mask", FINAL, "target_argmax")

    @property
    def _steps(self) -> int:
        """Number of steps that `loss` computes: metrics need more than the loss."""
        return 1 if self.training else self.options.depth

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Return the supervised slots per step, float64 [1] in training, [depth] otherwise."""
        slots = self.options.slots
        masks = supervised_slots(batch.loss_mask, batch.document_ids, slots, self._steps)
        return masks.flatten(1).sum(1).double()

    def loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Return the loss of a batch over `counts`, the slot counts of the whole optimizer step.

        `counts` is float64 [1] in training, [depth] otherwise; None: those of this batch. In
        training mode, noise from torch's generator is added to the input states.
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
            kind=LossKind.of(options),
            counts=counts,
        )

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Turn added sums into metrics, with the means of both loss terms at the first step."""
        first = float(sums["supervised"][0])
        parts = {
            name: float(sums[name][0]) / first if first else None
            for name in ("smooth_l1", "cross_entropy", "distribution_loss")
            if name in sums
        }
        return summarise(sums) | parts
