"""The teacher: the target's distribution at a slot, over the draft vocabulary.

A teacher is computed from exactly one of final hidden states and the target's head, all logits, or
probabilities. It is a function of flat slots, so that only supervised rows are ever computed.

Shapes: B packs, T slots, n slots that count, V / Vd target / draft vocabulary, H hidden size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import PADDING, shift_left
from spec_data.shards.schema import FINAL
from spec_train.data.batch import DraftBatch
from spec_train.drafts.aux_draft import LOGITS, AuxDraft
from spec_train.drafts.slots import document_offsets, slot_masks
from spec_train.head import TargetHead
from spec_train.losses import wide

Teacher = Callable[[Tensor], Tensor]  # flat slots of the shifted frame [n] -> probabilities [n, Vd]


@dataclass(frozen=True)
class Frame:
    """The slots that count and their teachers, settled from what a plain loss was given."""

    mask: Tensor  # slot mask of step 0, bool [B, T]
    rows: Tensor  # its flat slots, int64 [n]
    choice: Tensor  # the target's choice there as a draft index, -1 outside, int64 [n]
    teacher: Teacher
    document_ids: Tensor  # int64 [B, T], -1 in padding
    position_ids: Tensor  # int64 [B, T]


def settle_frame(
    draft: AuxDraft,
    *,
    input_ids: Tensor,
    loss_mask: Tensor | None,
    slot_mask: Tensor | None,
    logits: Tensor | None,
    final_hidden: Tensor | None,
    head: TargetHead | None,
    target_probs: Tensor | None,
    position_mask: Tensor | None,
    target_argmax: Tensor | None,
    document_ids: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    slots: str,
) -> Frame:
    """Settle the arguments that `eagle3_loss` describes.

    Raises:
        DraftError: not exactly one teacher or one mask, or an unknown policy.
    """
    given = [name for name, x in _named(logits, final_hidden, target_probs) if x is not None]
    if len(given) != 1:
        raise DraftError(
            f"give exactly one of logits, final_hidden, target_probs; found {given or 'none'}"
        )
    if (loss_mask is None) == (slot_mask is None):
        raise DraftError("give exactly one of loss_mask and slot_mask")
    if document_ids is None:
        document_ids = torch.zeros_like(input_ids)
    if attention_mask is not None:
        document_ids = document_ids.masked_fill(attention_mask == 0, PADDING)
    if position_ids is None:
        position_ids = document_offsets(document_ids)
    if slot_mask is not None:
        mask = slot_mask.bool() & (document_ids != PADDING)
    else:
        mask = slot_masks(cast(Tensor, loss_mask), document_ids, slots)
    rows = mask.flatten().nonzero().squeeze(1)
    choice, teacher = _teacher(
        draft, rows, logits, final_hidden, head, target_probs, position_mask, target_argmax
    )
    return Frame(mask, rows, choice, teacher, document_ids, position_ids)


def _named(
    logits: Tensor | None, final_hidden: Tensor | None, target_probs: Tensor | None
) -> list[tuple[str, Tensor | None]]:
    return [("logits", logits), ("final_hidden", final_hidden), ("target_probs", target_probs)]


def _teacher(
    draft: AuxDraft,
    rows: Tensor,
    logits: Tensor | None,
    final_hidden: Tensor | None,
    head: TargetHead | None,
    target_probs: Tensor | None,
    position_mask: Tensor | None,
    target_argmax: Tensor | None,
) -> tuple[Tensor, Teacher]:
    """The target's choice at `rows` as a draft index (-1: outside), and the teacher of rows."""
    ids = None if draft.full_vocabulary else draft.draft_ids
    choice = None if target_argmax is None else target_argmax.flatten()[rows]
    if target_probs is not None:
        if position_mask is None:
            raise DraftError("target_probs needs position_mask: where the target's choice is in it")
        probs = target_probs.flatten(0, 1)
        index = probs[rows].argmax(-1) if choice is None else draft.draft_index[choice]
        return index.masked_fill(~position_mask.bool().flatten()[rows], -1), lambda r: probs[r]
    if logits is not None:
        table = logits.flatten(0, 1)
        if choice is None:
            choice = table[rows].argmax(-1)
        return draft.draft_index[choice], logits_teacher(table, ids)
    if head is None:
        raise DraftError("final_hidden needs head, the target's LM head")
    states = cast(Tensor, final_hidden).flatten(0, 1)
    if choice is None:
        parts = [head.logits(states[part]).argmax(-1) for part in rows.split(256)]
        choice = torch.cat(parts) if parts else rows
    return draft.draft_index[choice], head_teacher(head, states, ids)


def head_teacher(head: TargetHead, states: Tensor, ids: Tensor | None, shift: int = 0) -> Teacher:
    """Teacher of rows from final hidden states [B*T, H]: row r reads state r + `shift`."""
    return lambda r: torch.softmax(head.logits(states[r + shift], ids), -1)


def logits_teacher(logits: Tensor, ids: Tensor | None, shift: int = 0) -> Teacher:
    """Teacher of rows from the target's logits [B*T, V]: row r reads row r + `shift`."""

    def teacher(r: Tensor) -> Tensor:
        rows = logits[r + shift]
        return torch.softmax(wide(rows if ids is None else rows[:, ids]), -1)

    return teacher


def teacher_of(draft: AuxDraft, batch: "DraftBatch", head: TargetHead) -> Teacher:
    """Teacher of flat slots, from the batch's logits where it has them, else its final states."""
    ids = None if draft.full_vocabulary else draft.draft_ids
    if LOGITS in batch.hidden:
        return logits_teacher(batch.hidden[LOGITS].flatten(0, 1), ids, shift=1)
    return head_teacher(head, batch.hidden[FINAL].flatten(0, 1), ids, shift=1)


def slots_of(draft: AuxDraft, batch: "DraftBatch") -> tuple[Tensor, Tensor, Tensor]:
    """Slot mask [B, T], its flat slots [n], the target's choice there (draft index, -1: none)."""
    shifted = shift_left(batch.loss_mask, batch.document_ids)
    mask = slot_masks(shifted, batch.document_ids, draft.options.slots)
    rows = mask.flatten().nonzero().squeeze(1)
    # A slot of the mask is never the last of its document: its teacher is the next token's.
    return mask, rows, draft.draft_index[batch.target_argmax.flatten()[rows + 1]]
