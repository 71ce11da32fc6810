"""EAGLE-3: the draft class that the trainer drives. It maps a batch onto `eagle3_loss`'s core.

A batch comes in the token frame; ids and masks are shifted here, states are not copied: the
teacher of a slot is read one row further on.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from spec_data.shards.errors import DatasetError, DraftError
from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL, SUPERVISED, Manifest, layer_column
from spec_train.drafts.chain import ChainDrafter
from spec_train.drafts.eagle3_config import Eagle3Config
from spec_train.drafts.eagle3_loss import (
    Teacher,
    eagle3_loss,
    head_teacher,
    logits_teacher,
    unrolled_loss,
)
from spec_train.drafts.eagle3_model import Eagle3Model
from spec_train.drafts.eagle3_unroll import (
    Unroll,
    document_offsets,
    serving_chains,
    slot_masks,
)
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.shape import special_ids
from spec_train.head import TargetHead, choose_draft_vocabulary
from spec_train.losses import LossKind
from spec_train.metrics import summarise
from spec_train.options import Eagle3Options
from spec_train.origin import origin_of, require_same_embedding, weights_warning

if TYPE_CHECKING:
    from spec_train.batch import DraftBatch

__all__ = [
    "Eagle3Config",
    "Eagle3Draft",
    "Eagle3Options",
    "Unroll",
    "eagle3_loss",
    "serving_chains",
]


LOGITS = "logits"
"""The column, and the supervision, of a dataset that holds all logits of the target."""


def check_teachers(manifest: Manifest, options: Eagle3Options) -> None:
    """Refuse a dataset that does not hold the teachers of the slots that are asked for.

    A teacher is the target's distribution over the whole draft vocabulary: final states and the
    head give it, all logits do, the K largest logits do not. A slot needs the one of its known
    token. Slots "serving" have a supervised token after it, which is where `--final supervised`
    keeps states; "shifted" has slots that do not.

    Raises:
        DatasetError: the dataset has no such distributions.
        DraftError: some teachers would be zero.
    """
    if manifest.supervision.startswith("topk"):
        raise DatasetError(
            f"{manifest.where}: --supervision {manifest.supervision} keeps too few logits to learn "
            "from: the draft needs the target's distribution over its whole vocabulary. Generate "
            "with --supervision final-hidden, or logits where the target's head rules that out"
        )
    if manifest.final == SUPERVISED and options.slots != "serving":
        raise DraftError(
            f"--slots {options.slots} needs hidden.final at the end of every turn too, and "
            f"{manifest.where} keeps it only where the next token is supervised; use --slots "
            "serving, or generate with --final all"
        )


class Eagle3Draft(Eagle3Model):
    """The draft that `spec-train fit eagle3` trains."""

    name: ClassVar[str] = "eagle3"
    options_class: ClassVar[type] = Eagle3Options

    @classmethod
    def check_data(cls, options: Eagle3Options, manifest: Manifest) -> None:
        """Refuse a dataset that lacks teachers or layers.

        Raises:
            DatasetError, DraftError: what is missing, and how to generate it.
        """
        check_teachers(manifest, options)
        options.layer_ids(manifest.layers)

    @classmethod
    def build(
        cls,
        options: Eagle3Options,
        *,
        target_config: dict[str, Any],
        manifest: Manifest,
        head: TargetHead,
        token_counts: Tensor | None,
    ) -> Self:
        """Make a fresh draft for a dataset, float32, with the target's embedding and head rows.

        Random weights come from torch's default generator: seed it first.

        Raises:
            DraftError: options, target config and dataset do not go together.
        """
        cls.check_data(options, manifest)
        vocab = head.spec.vocab_size
        size = min(options.draft_vocab_size or vocab, vocab)
        config = Eagle3Config.from_target(
            target_config,
            layers=options.layer_ids(manifest.layers),
            vocab_size=vocab,
            draft_vocab_size=size,
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
        """Go on with the target of a dataset, sharing the embedding of its `head`.

        Gives warnings. `where` is what the draft was read from.

        Raises:
            DraftError: it is another target.
        """
        whose = str(Path(manifest.where).parent)
        require_same_embedding(self.embed_tokens.weight, head.embed_weight, where, whose)
        warnings = weights_warning(self.config.origin, manifest)
        self.config = dataclasses.replace(self.config, origin=origin_of(manifest))
        self._share_embedding(head)
        return warnings

    def _share_embedding(self, head: TargetHead) -> None:
        self.embed_tokens.weight = torch.nn.Parameter(head.embed_weight, requires_grad=False)

    @torch.no_grad()
    def adopt(self, head: TargetHead) -> None:
        """Take the target's embedding (shared with `head`) and, if asked, its head rows."""
        self._share_embedding(head)
        if self.options.head_init == "target":
            rows = head.head_weight[self.draft_ids] * head.spec.scale
            self.lm_head.weight.copy_(rows.to(self.lm_head.weight.dtype))

    @property
    def state_columns(self) -> tuple[str, ...]:
        """The aux states, ascending."""
        return tuple(layer_column(k) for k in self.config.layers)

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

    def chains(self, batch: "DraftBatch", head: TargetHead, depth: int) -> Tensor:
        """Draft greedily from every slot as serving would (see protocol.Draft)."""
        return serving_chains(self, batch, depth)

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Columns that the loss reads of a dataset with that supervision."""
        teacher = LOGITS if supervision == LOGITS else FINAL
        return ("input_ids", "loss_mask", *self.state_columns, teacher, "target_argmax")

    def _teacher(self, batch: "DraftBatch", head: TargetHead) -> Teacher:
        """Teacher of slots: one row further on, from stored logits or final states."""
        ids = None if self.full_vocabulary else self.draft_ids
        if LOGITS in batch.hidden:
            return logits_teacher(batch.hidden[LOGITS].flatten(0, 1), ids, shift=1)
        return head_teacher(head, batch.hidden[FINAL].flatten(0, 1), ids, shift=1)

    def _slots(self, batch: "DraftBatch") -> tuple[Tensor, Tensor, Tensor]:
        """Step-0 slot mask [B, T], its flat slots [n], the target's choice there (draft index)."""
        shifted = shift_left(batch.loss_mask, batch.document_ids)
        mask = slot_masks(shifted, batch.document_ids, self.options.slots)
        rows = mask.flatten().nonzero().squeeze(1)
        # A slot of the mask is never the last of its document: its teacher is the next token's.
        return mask, rows, self.draft_index[batch.target_argmax.flatten()[rows + 1]]

    @torch.no_grad()
    def slot_counts(self, batch: "DraftBatch") -> Tensor:
        """Supervised slots of every unroll step, float64 [S]."""
        _, rows, choice = self._slots(batch)
        reach = document_offsets(batch.document_ids).flatten()[rows[choice >= 0]]
        steps = torch.arange(self.options.ttt_steps, device=rows.device)
        return (reach[:, None] >= steps).sum(0).double()

    def loss(self, batch: "DraftBatch", head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Loss of a batch over `counts`, the slot counts of the whole optimizer step."""
        options = self.options
        mask, rows, choice = self._slots(batch)
        return unrolled_loss(
            self,
            aux=batch.aux(self.config.layers),
            input_ids=shift_left(batch.input_ids, batch.document_ids),
            mask=mask,
            rows=rows,
            choice=choice,
            teacher=self._teacher(batch, head),
            document_ids=batch.document_ids,
            position_ids=batch.position_ids,
            steps=options.ttt_steps,
            decay=options.step_decay,
            kind=LossKind(
                name=options.loss, scale=options.lambda_scale, decay=options.lambda_decay
            ),
            counts=counts,
        )

    def forward(self, batch: "DraftBatch", head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """The loss: what a distributed wrapper calls."""
        return self.loss(batch, head, counts)

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Figures of added-up sums."""
        return summarise(sums)
