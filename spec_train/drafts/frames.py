"""The two frames of a loss: the shifted frame of EAGLE-3 and P-EAGLE, the token frame of the rest.

In the token frame, row t of every tensor belongs to token x_t. In the shifted frame, all tensors
except the aux states are moved left by one inside each document, with zero in its last slot: slot t
holds the aux states a_t, the known token x_{t+1}, its mask m_{t+1} and its teacher z_{t+1}.

In: the plain tensors that a public loss accepts, or a `DraftBatch`. Out: a `Frame` of the shifted
frame, which has every default filled in, the supervised slots listed, and one teacher.

B packs, T slots, n captured layers, N slots in the mask, H hidden size, V / Vd target / draft
vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import shift_left
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
    measured_at,
    sums_at,
    topk_teacher,
)
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind
from spec_train.losses.teacher_rows import TeacherRows

MEASURED = 16
"""In training, one slot of a pack in so many has an expected acceptance, unless the loss needs it.

With a reduced draft vocabulary it takes all rows of the target's head, else a pass over the logits.
"""


def require_frame(given: str, wanted: str) -> None:
    """Refuse the inputs of the other frame: their shapes are equal, so they would train silently.

    Raises:
        DraftError: `given` is not the frame that the loss reads, `wanted`.
    """
    if given != wanted:
        call = '"token"' if wanted == "token" else ""
        raise DraftError(
            f"this loss reads the {wanted} frame, and its inputs are in the {given} frame; make "
            f"them with TargetBatch.to_trainer_inputs({call})"
        )


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


def shifted_frame(
    draft: Draft,
    *,
    aux_hidden_states: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    logits: Tensor | None = None,
    final_hidden: Tensor | None = None,
    head: TargetHead | None = None,
    target_probs: Tensor | None = None,
    position_mask: Tensor | None = None,
    target_mass: Tensor | None = None,
    target_argmax: Tensor | None = None,
    target_logsumexp: Tensor | None = None,
    document_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    frame: str = "shifted",
) -> Frame:
    """Return the frame of plain tensors in the shifted frame, with exactly one teacher.

    The teacher is `logits`, or `final_hidden` with `head`, or `target_probs` with `position_mask`.

    Args:
        draft: decides the draft vocabulary.
        aux_hidden_states: a_t, NOT shifted, layers ascending, [B, T, n*H].
        input_ids: x_{t+1}, int64 [B, T].
        loss_mask: m_{t+1} [B, T].
        logits: z_{t+1} [B, T, V].
        final_hidden: f_{t+1} [B, T, H].
        head: the target's LM head.
        target_probs: over the draft vocabulary [B, T, Vd], adding up to 1.
        position_mask: [B, T]: the target's choice is in the draft vocabulary.
        target_mass: [B, T]: the target's probability of the draft vocabulary. `target_probs` over
            a reduced one need it: they are renormalised, and serving accepts with the target's full
            distribution.
        target_argmax: the target's choice, int64 [B, T]; None: from the teacher.
        target_logsumexp: of z_{t+1} over V [B, T]; None: from the teacher.
        document_ids: int64 [B, T], -1 in padding; None: a row is one document.
        position_ids: int64 [B, T]; None: from 0 in each document.
        frame: as `TargetBatch.to_trainer_inputs` names it; another one is refused.

    Raises:
        DraftError: not exactly one teacher, an incomplete one, or the other frame.
    """
    require_frame(frame, "shifted")
    teachers = {"logits": logits, "final_hidden": final_hidden, "target_probs": target_probs}
    given = [name for name, value in teachers.items() if value is not None]
    if len(given) != 1:
        raise DraftError(f"give exactly one of {', '.join(teachers)}; found {given or 'none'}")
    documents, positions = settle_documents(input_ids, document_ids, position_ids)
    mask = slot_masks(loss_mask, documents)
    rows = mask.flatten().nonzero().squeeze(1)  # [N]
    choices = None if target_argmax is None else target_argmax.flatten()[rows]  # [N]
    ids = draft.proposed_ids
    teacher: Teacher
    if target_probs is not None:
        if position_mask is None:
            raise DraftError(
                "target_probs needs position_mask: True where the target's choice is in the draft "
                "vocabulary"
            )
        if target_mass is None and ids is not None:
            raise DraftError(
                "target_probs over a reduced draft vocabulary need target_mass, the target's "
                "probability of that vocabulary: without it, acceptance would be that of a "
                "renormalised target. TargetBatch.to_trainer_inputs returns it"
            )
        probs = target_probs.flatten(0, 1)  # [B*T, Vd]
        mass = None if ids is None or target_mass is None else target_mass.flatten()  # [B*T]
        choice = probs[rows].argmax(-1) if choices is None else draft.draft_index[choices]  # [N]
        choice = choice.masked_fill(~position_mask.bool().flatten()[rows], -1)
        teacher = TeacherRows(probs, mass).__getitem__
    elif logits is not None:
        table = logits.flatten(0, 1)  # [B*T, V]
        choice = draft.draft_index[table[rows].argmax(-1) if choices is None else choices]
        teacher = logits_teacher(table, ids)
    elif final_hidden is not None and head is not None:
        states = final_hidden.flatten(0, 1)  # [B*T, H]
        best = argmax_by_chunks(head.logits, states[rows]) if choices is None else choices
        choice = draft.draft_index[best]
        sums = None if target_logsumexp is None else target_logsumexp.flatten()  # [B*T]
        teacher = head_teacher(head, states, ids, sums)
    else:
        raise DraftError("final_hidden needs head, the target's LM head")
    return Frame(
        aux=aux_hidden_states,
        input_ids=input_ids,
        document_ids=documents,
        position_ids=positions,
        mask=mask,
        rows=rows,
        choice=choice,
        teacher=teacher,
    )


def batch_frame(
    draft: Draft, batch: DraftBatch, head: TargetHead, kind: LossKind, states: Tensor
) -> Frame:
    """Return the frame of a batch, which is shifted here.

    `kind` is the loss of a slot, `states` are what the draft reads of the target [B, T, A].
    """
    mask, rows, choice = slots_of(draft, batch)
    measured = None
    if draft.training and not kind.needs_mass:
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
    """Return the teacher of a batch: from its logits, all or K, or else from its final states.

    `shift` is 1 for slots of the shifted frame, 0 for slots of the token frame. The mass is that of
    the `measured` slots only, bool [B*T]; None: of all.
    """
    teacher = _teacher_of(draft, batch, head, shift, measured)
    return teacher if measured is None else measured_at(teacher, measured)


def _teacher_of(
    draft: Draft, batch: DraftBatch, head: TargetHead, shift: int, measured: Tensor | None
) -> Teacher:
    ids = draft.proposed_ids
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
