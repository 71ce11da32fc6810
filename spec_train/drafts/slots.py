"""Slots: where documents begin and end in a pack, and which slots are supervised.

A slot is a position of a pack in the shifted frame: slot t knows token t + 1 and drafts token
t + 2. In: document ids and masks. Out: offsets, lengths and masks. Every function works per
document: nothing crosses a document boundary.

B packs, T slots of a pack, S unroll steps, A active slots, H hidden size.
"""

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import PADDING, shift_left
from spec_data.shards.schema import SUPERVISED, Manifest
from spec_train.drafts.layers import Rotary

SLOTS = ("serving", "shifted")


def check_teachers(slots: str, manifest: Manifest) -> None:
    """Check that a dataset has the teachers of the slots asked for.

    A slot needs the teacher of its known token. "serving" slots have a supervised token after it,
    and sparse columns hold exactly these. Some "shifted" slots are at the end of a turn.

    Raises:
        DraftError: it lacks some; the message says how to generate them.
    """
    if slots == "serving":
        return
    kept = {"hidden.final": manifest.final, "target_argmax": manifest.teacher}
    lacking = [name for name, tokens in kept.items() if tokens == SUPERVISED]
    if lacking:
        raise DraftError(
            f"--slots {slots} also needs {' and '.join(lacking)} at the end of every turn, but "
            f"{manifest.where} stores them only where the next token is supervised; use --slots "
            "serving, or generate with --final all --teacher all"
        )


def gather_slots(x: Tensor, active: Tensor) -> Tensor:
    """Return rows [B, A, H] of `x` [B, T, H] at the slots `active`, int64 [B, A]."""
    return x.gather(1, active[..., None].expand(-1, -1, x.shape[-1]))


def document_offsets(document_ids: Tensor) -> Tensor:
    """Return the index of every slot within its document, int64 [B, T].

    `document_ids` is int64 [B, T]; documents are contiguous.
    """
    slots = torch.arange(document_ids.shape[1], device=document_ids.device)  # [T]
    starts = torch.ones_like(document_ids, dtype=torch.bool)  # [B, T]: a document's first slot
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return slots - torch.where(starts, slots, 0).cummax(dim=1).values


def document_lengths(document_ids: Tensor) -> Tensor:
    """Return the number of slots of each slot's document, int64 [B, T]; argument as above."""
    ahead = document_offsets(document_ids.flip(1)).flip(1)  # [B, T]: slots that follow
    return document_offsets(document_ids) + ahead + 1


def rope_lengths(
    rotary: Rotary, document_ids: Tensor, slots: Tensor | None = None
) -> Tensor | None:
    """Return the document lengths that `rotary` needs, int64; None if it needs none.

    `slots` int64 [B, A] selects slots of the packs: [B, A]; None: all of them, [B, T].
    """
    if rotary.limit is None:
        return None
    lengths = document_lengths(document_ids)
    return lengths if slots is None else lengths.gather(1, slots)


def settle_documents(
    input_ids: Tensor,
    document_ids: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return document ids and position ids, both int64 [B, T], with the defaults filled in.

    Args:
        input_ids: int64 [B, T]; only its shape counts.
        document_ids: int64 [B, T], -1 in padding; None: a row is one document.
        position_ids: int64 [B, T]; None: they count from 0 in each document.
        attention_mask: 0 in padding [B, T]; None: `document_ids` marks all the padding.
    """
    if document_ids is None:
        document_ids = torch.zeros_like(input_ids)
    if attention_mask is not None:
        document_ids = document_ids.masked_fill(attention_mask == 0, PADDING)
    return document_ids, document_offsets(document_ids) if position_ids is None else position_ids


def slot_masks(loss_mask: Tensor, document_ids: Tensor, slots: str) -> Tensor:
    """Return the slot mask of step 0, bool [B, T], from a shifted loss mask [B, T].

    "serving": the known and the drafted token are both supervised. "shifted": the known token is.

    Raises:
        DraftError: `slots` is neither.
    """
    if slots not in SLOTS:
        raise DraftError(f"slots = {slots!r}: choose from {', '.join(SLOTS)}")
    known = loss_mask.bool() & (document_ids != PADDING)
    return known & shift_left(known, document_ids) if slots == "serving" else known


def step_masks(mask: Tensor, document_ids: Tensor, steps: int) -> Tensor:
    """Return the slot masks of all steps, bool [S, B, T].

    The mask of step s is that of step 0, `mask` bool [B, T], moved left by s in each document.
    """
    masks = [mask]
    for _ in range(steps - 1):
        masks.append(shift_left(masks[-1], document_ids))
    return torch.stack(masks)
