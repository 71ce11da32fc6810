"""The shifted frame, in which EAGLE-3, P-EAGLE and MTP learn, and the teacher of a batch.

In the token frame, that of a `DraftBatch`, row t of every tensor belongs to token x_t. In the
shifted frame, all tensors except the aux states are moved left by one inside each document, with
zero in its last slot: slot t holds the aux states a_t, the known token x_{t+1}, its mask m_{t+1}
and its teacher z_{t+1}.

B packs, T slots, n captured layers, N slots in the mask, H hidden size, V / Vd target / draft
vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.shards.batch import MASS, PROBABILITIES, DraftBatch
from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL
from spec_train.drafts.draft import Draft
from spec_train.drafts.slots import slot_masks
from spec_train.drafts.teacher import (
    LOGITS,
    TOPK,
    Teacher,
    head_teacher,
    logits_teacher,
    measured_at,
    sums_at,
    topk_teacher,
)
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind
from spec_train.losses.own import asked
from spec_train.losses.teacher_rows import TeacherRows

MEASURED = 16
"""In training, one slot of a pack in so many has an expected acceptance, unless the loss needs it.

With a reduced draft vocabulary it takes all rows of the target's head, else a pass over the logits.
"""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A batch in the shifted frame, with the slots of step 0 listed, and one teacher."""

    aux: Tensor  # a_t, not shifted, [B, T, n*H]
    input_ids: Tensor  # x_{t+1}, int64 [B, T]
    document_ids: Tensor  # int64 [B, T], -1 in padding
    position_ids: Tensor  # int64 [B, T]
    mask: Tensor  # slot mask of step 0, bool [B, T]
    rows: Tensor  # flat slots of the mask, ascending, int64 [N]
    choice: Tensor  # the target's choice there as a draft index, -1 outside, int64 [N]
    teacher: Teacher  # of flat slots


def batch_frame(
    draft: Draft, batch: DraftBatch, head: TargetHead, kind: LossKind, states: Tensor
) -> Frame:
    """Return the frame of a batch, which is shifted here.

    `kind` is the loss of a slot, `states` are what the draft reads of the target [B, T, A].
    """
    mask, rows, choice = slots_of(draft, batch)
    measured = None
    if draft.training and not kind.needs_mass and asked().loss_fn is None:
        chosen = torch.arange(mask.shape[1], device=mask.device) % MEASURED == 0
        measured = (mask & chosen).flatten()
    return Frame(
        aux=states,
        input_ids=shift_left(batch.input_ids, batch.document_ids),
        document_ids=batch.document_ids,
        position_ids=batch.position_ids,
        mask=mask,
        rows=rows,
        choice=choice,
        teacher=teacher_of(draft, batch, head, 1, measured),
    )


def slots_of(draft: Draft, batch: DraftBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return `mask` bool [B, T], `rows` int64 [N] and `choice` int64 [N] of a batch's `Frame`.

    Reads no states, so it also works on a batch without them.
    """
    mask = slot_mask_of(batch)
    rows = mask.flatten().nonzero().squeeze(1)  # [N]
    # A slot of the mask is never the last of its document, so rows + 1 is the next token's slot.
    return mask, rows, draft.draft_index[batch.target_argmax.flatten()[rows + 1]]


def slot_mask_of(batch: DraftBatch) -> Tensor:
    """Return the slot mask of step 0 of a batch, bool [B, T]; no host sync, unlike its rows."""
    return slot_masks(shift_left(batch.loss_mask, batch.document_ids), batch.document_ids)


def teacher_of(
    draft: Draft, batch: DraftBatch, head: TargetHead, shift: int, measured: Tensor | None = None
) -> Teacher:
    """Return the teacher of a batch: from its probabilities, logits (all or K) or final states.

    `shift` is 1 for slots of the shifted frame, 0 for slots of the token frame. The mass is that of
    the `measured` slots only, bool [B*T]; None: of all.
    """
    teacher = _teacher_of(draft, batch, head, shift, measured)
    return teacher if measured is None else measured_at(teacher, measured)


def _teacher_of(
    draft: Draft, batch: DraftBatch, head: TargetHead, shift: int, measured: Tensor | None
) -> Teacher:
    ids = draft.proposed_ids
    if PROBABILITIES in batch.hidden:
        mass = None if ids is None else batch.hidden[MASS].flatten()
        known = TeacherRows(batch.hidden[PROBABILITIES].flatten(0, 1), mass)
        return lambda r: known[r + shift]
    if LOGITS in batch.hidden:
        return logits_teacher(batch.hidden[LOGITS].flatten(0, 1), ids, shift)
    if TOPK[0] in batch.hidden:
        chosen, logits = (batch.hidden[name].flatten(0, 1) for name in TOPK)
        assert batch.target_logsumexp is not None  # `columns` names it
        size, total = draft.config.draft_vocab_size, batch.target_logsumexp.flatten()
        return topk_teacher(chosen, logits, total, draft.draft_index, size, shift)
    states, sums = batch.hidden[FINAL].flatten(0, 1), None
    if ids is not None and measured is not None:
        sums = sums_at(head, states, measured.nonzero().squeeze(1) + shift)
    return head_teacher(head, states, ids, sums, shift)
