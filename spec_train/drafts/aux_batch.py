"""A batch of the token frame as drafts over captured layers learn from it: slots and teachers.

Ids and masks are shifted here, states are not copied: the teacher of a slot is read one row further
on. Shapes: B rows, T slots, n slots that count, Vd draft vocabulary.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL
from spec_train.drafts.aux_draft import LOGITS, AuxDraft
from spec_train.drafts.eagle3_loss import Teacher, head_teacher, logits_teacher
from spec_train.drafts.eagle3_unroll import slot_masks
from spec_train.head import TargetHead

if TYPE_CHECKING:
    from spec_train.batch import DraftBatch


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
