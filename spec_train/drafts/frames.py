"""The two frames of a loss: the shifted frame of EAGLE-3 and P-EAGLE, the token frame of the rest.

In the token frame, row t of every tensor belongs to token x_t. In the shifted frame, all tensors
except the aux states are moved left by one inside each document, with zero in its last slot: slot t
holds the aux states a_t, the known token x_{t+1}, its mask m_{t+1} and its teacher z_{t+1}.

In: the plain tensors that a public loss accepts, or a `DraftBatch`. Out: a `Frame`, which has every
default filled in, the supervised slots listed, and one teacher.

B packs, T slots, n captured layers, N slots in the mask, H hidden size, V / Vd target / draft
vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import PADDING, shift_left
from spec_data.shards.schema import FINAL
from spec_train.data.batch import DraftBatch
from spec_train.drafts.draft import Draft
from spec_train.drafts.layers import argmax_by_chunks
from spec_train.drafts.slots import settle_documents, slot_masks
from spec_train.drafts.teacher import (
    LOGITS,
    TOPK,
    Teacher,
    head_teacher,
    logits_teacher,
    topk_teacher,
)
from spec_train.losses.head import TargetHead
from spec_train.losses.teacher_rows import TeacherRows


def require_frame(given: str, own: str) -> None:
    """Refuse the inputs of the other frame: their shapes are equal, so they would train silently.

    Raises:
        DraftError: `given` is not the frame that the loss reads, its `own`.
    """
    if given != own:
        call = '"token"' if own == "token" else ""
        raise DraftError(
            f"this loss reads the {own} frame, and its inputs are in the {given} frame; make them "
            f"with TargetBatch.to_trainer_inputs({call})"
        )


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """Plain tensors of a loss in the token frame: nothing is shifted."""

    input_ids: Tensor  # x_t, int64 [B, T]
    loss_mask: Tensor  # m_t [B, T]
    target_argmax: Tensor | None = None  # argmax of z_t, int64 [B, T]; None: from the teacher
    target_logsumexp: Tensor | None = None  # of z_t over V [B, T]; None: from the teacher
    document_ids: Tensor | None = None  # int64 [B, T], -1 in padding; None: a row is one document
    position_ids: Tensor | None = None  # int64 [B, T]; None: from 0 in each document
    frame: str = "token"  # as `TargetBatch.to_trainer_inputs` names it; another one is refused

    def __post_init__(self) -> None:
        require_frame(self.frame, "token")

    def documents(self) -> tuple[Tensor, Tensor]:
        """Return document ids and position ids, both int64 [B, T], with the defaults filled in."""
        return settle_documents(self.input_ids, self.document_ids, self.position_ids)


@dataclass(frozen=True, kw_only=True)
class ShiftedInputs:
    """Plain tensors of a loss in the shifted frame; exactly one mask and one teacher.

    The teacher is `logits`, or `final_hidden` with `head`, or `target_probs` with `position_mask`.
    The last one also needs `target_mass` if the draft vocabulary is reduced: `target_probs` are
    renormalised over it, and serving accepts with the target's full distribution.
    """

    aux_hidden_states: Tensor  # a_t, NOT shifted, layers ascending, [B, T, n*H]
    input_ids: Tensor  # x_{t+1}, int64 [B, T]
    loss_mask: Tensor | None = None  # m_{t+1} [B, T]; makes the slot mask of serving
    slot_mask: Tensor | None = None  # the slot mask of step 0 [B, T], instead of `loss_mask`
    logits: Tensor | None = None  # z_{t+1} [B, T, V]
    final_hidden: Tensor | None = None  # f_{t+1} [B, T, H]
    head: TargetHead | None = None
    target_probs: Tensor | None = None  # over the draft vocabulary [B, T, Vd], adding up to 1
    position_mask: Tensor | None = None  # [B, T]: the target's choice is in the draft vocabulary
    target_mass: Tensor | None = None  # [B, T]: the target's probability of the draft vocabulary
    target_argmax: Tensor | None = None  # the target's choice, int64 [B, T]; None: from the teacher
    target_logsumexp: Tensor | None = None  # of z_{t+1} over V [B, T]; None: from the teacher
    document_ids: Tensor | None = None  # int64 [B, T], -1 in padding; None: a row is one document
    position_ids: Tensor | None = None  # int64 [B, T]; None: from 0 in each document
    attention_mask: Tensor | None = None  # 0 in padding [B, T]; None: `document_ids` marks it
    frame: str = "shifted"  # as `TargetBatch.to_trainer_inputs` names it; another one is refused

    def __post_init__(self) -> None:
        require_frame(self.frame, "shifted")

    def check(self, full_vocabulary: bool) -> None:
        """Raise DraftError unless there is exactly one teacher, complete, and one mask."""
        teachers = ("logits", "final_hidden", "target_probs")
        given = [name for name in teachers if getattr(self, name) is not None]
        if len(given) != 1:
            raise DraftError(
                f"give exactly one of logits, final_hidden, target_probs; found {given or 'none'}"
            )
        if (self.loss_mask is None) == (self.slot_mask is None):
            raise DraftError("give exactly one of loss_mask and slot_mask")
        if self.target_probs is not None and self.position_mask is None:
            raise DraftError(
                "target_probs needs position_mask: True where the target's choice is in the draft "
                "vocabulary"
            )
        if self.target_probs is not None and self.target_mass is None and not full_vocabulary:
            raise DraftError(
                "target_probs over a reduced draft vocabulary need target_mass, the target's "
                "probability of that vocabulary: without it, acceptance would be that of a "
                "renormalised target. TargetBatch.to_trainer_inputs returns it"
            )
        if self.final_hidden is not None and self.head is None:
            raise DraftError("final_hidden needs head, the target's LM head")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A batch in the shifted frame, with defaults filled in and the slots of step 0 listed."""

    aux: Tensor  # a_t, not shifted, [B, T, n*H]
    input_ids: Tensor  # x_{t+1}, int64 [B, T]
    document_ids: Tensor  # int64 [B, T], -1 in padding
    position_ids: Tensor  # int64 [B, T]
    mask: Tensor  # slot mask of step 0, bool [B, T]
    rows: Tensor  # flat slots of the mask, ascending, int64 [N]
    choice: Tensor  # the target's choice there as a draft index, -1 outside, int64 [N]
    teacher: Teacher  # of flat slots


def tensor_frame(draft: Draft, inputs: ShiftedInputs) -> Frame:
    """Return the frame of plain tensors.

    Raises:
        DraftError: not exactly one teacher or one mask, or an incomplete teacher.
    """
    inputs.check(draft.full_vocabulary)
    document_ids, position_ids = settle_documents(
        inputs.input_ids, inputs.document_ids, inputs.position_ids, inputs.attention_mask
    )
    if inputs.slot_mask is not None:
        mask = inputs.slot_mask.bool() & (document_ids != PADDING)
    else:
        assert inputs.loss_mask is not None  # `check` guarantees it
        mask = slot_masks(inputs.loss_mask, document_ids)
    rows = mask.flatten().nonzero().squeeze(1)  # [N]
    choice, teacher = _choice_and_teacher(draft, inputs, rows)
    return Frame(
        aux=inputs.aux_hidden_states,
        input_ids=inputs.input_ids,
        document_ids=document_ids,
        position_ids=position_ids,
        mask=mask,
        rows=rows,
        choice=choice,
        teacher=teacher,
    )


def _choice_and_teacher(
    draft: Draft, inputs: ShiftedInputs, rows: Tensor
) -> tuple[Tensor, Teacher]:
    """Return the target's choice at `rows` [N] as a draft index (-1: outside), and the teacher."""
    known = None if inputs.target_argmax is None else inputs.target_argmax.flatten()[rows]  # [N]
    if inputs.target_probs is not None and inputs.position_mask is not None:
        probs = inputs.target_probs.flatten(0, 1)  # [B*T, Vd]
        mass = None if draft.full_vocabulary else inputs.target_mass
        known_mass = None if mass is None else mass.flatten()  # [B*T]
        index = probs[rows].argmax(-1) if known is None else draft.draft_index[known]  # [N]
        inside = inputs.position_mask.bool().flatten()[rows]  # [N]
        return index.masked_fill(~inside, -1), TeacherRows(probs, known_mass).__getitem__
    ids = draft.proposed_ids
    if inputs.logits is not None:
        table = inputs.logits.flatten(0, 1)  # [B*T, V]
        choice = table[rows].argmax(-1) if known is None else known  # [N]
        return draft.draft_index[choice], logits_teacher(table, ids)
    assert inputs.final_hidden is not None and inputs.head is not None  # `check` guarantees it
    states = inputs.final_hidden.flatten(0, 1)  # [B*T, H]
    choice = argmax_by_chunks(inputs.head.logits, states[rows]) if known is None else known  # [N]
    logsumexp = inputs.target_logsumexp
    sums = None if logsumexp is None else logsumexp.flatten()  # [B*T]
    return draft.draft_index[choice], head_teacher(inputs.head, states, ids, sums)


def batch_frame(draft: Draft, batch: DraftBatch, head: TargetHead) -> Frame:
    """Return the frame of a batch, which is shifted here."""
    mask, rows, choice = slots_of(draft, batch)
    return Frame(
        aux=batch.aux(draft.config.layers),
        input_ids=shift_left(batch.input_ids, batch.document_ids),
        document_ids=batch.document_ids,
        position_ids=batch.position_ids,
        mask=mask,
        rows=rows,
        choice=choice,
        teacher=teacher_of(draft, batch, head, shift=1),
    )


def slots_of(draft: Draft, batch: DraftBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return `mask` bool [B, T], `rows` int64 [N] and `choice` int64 [N] of a batch's `Frame`.

    Reads no states, so it also works on a batch without them.
    """
    mask = slot_mask_of(draft, batch)
    rows = mask.flatten().nonzero().squeeze(1)  # [N]
    # A slot of the mask is never the last of its document, so rows + 1 is the next token's slot.
    return mask, rows, draft.draft_index[batch.target_argmax.flatten()[rows + 1]]


def slot_mask_of(draft: Draft, batch: DraftBatch) -> Tensor:
    """Return the slot mask of step 0 of a batch, bool [B, T]; no host sync, unlike its rows."""
    shifted = shift_left(batch.loss_mask, batch.document_ids)  # [B, T]
    return slot_masks(shifted, batch.document_ids)


def teacher_of(draft: Draft, batch: DraftBatch, head: TargetHead, shift: int) -> Teacher:
    """Return the teacher of a batch: from its logits, all or K, or else from its final states.

    `shift` is 1 for slots of the shifted frame, 0 for slots of the token frame.
    """
    ids = draft.proposed_ids
    if LOGITS in batch.hidden:
        return logits_teacher(batch.hidden[LOGITS].flatten(0, 1), ids, shift)
    if TOPK[0] in batch.hidden:
        chosen, logits = (batch.hidden[name].flatten(0, 1) for name in TOPK)
        assert batch.target_logsumexp is not None  # `columns` names it
        size, total = draft.config.draft_vocab_size, batch.target_logsumexp.flatten()
        return topk_teacher(chosen, logits, total, draft.draft_index, size, shift)
    return head_teacher(head, batch.hidden[FINAL].flatten(0, 1), ids, shift=shift)
