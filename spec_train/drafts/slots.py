"""Slots: where a document begins and ends in a pack, and which of its slots count.

A slot is a position of a pack in the shifted frame: slot t knows token t + 1 and drafts token
t + 2. All functions work per document: nothing crosses a document boundary.

Shapes: B packs, T slots of a pack, S unroll steps, A active slots, H hidden size."""

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import PADDING, shift_left

SLOTS = ("serving", "shifted")


def gather_slots(x: Tensor, active: Tensor) -> Tensor:
    """Rows [B, A, H] of `x` [B, T, H] at slots `active` [B, A]."""
    return x.gather(1, active[..., None].expand(-1, -1, x.shape[-1]))


def document_offsets(document_ids: Tensor) -> Tensor:
    """Index of every slot within its document, int64 [B, T] (documents are contiguous)."""
    slots = torch.arange(document_ids.shape[1], device=document_ids.device)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return slots - torch.where(starts, slots, 0).cummax(dim=1).values


def document_lengths(document_ids: Tensor) -> Tensor:
    """Number of slots of the document that each slot belongs to, int64 [B, T]."""
    ahead = document_offsets(document_ids.flip(1)).flip(1)
    return document_offsets(document_ids) + ahead + 1


def slot_masks(loss_mask: Tensor, document_ids: Tensor, slots: str) -> Tensor:
    """Slot mask of step 0, boolean [B, T], from a shifted loss mask.

    "serving": known and drafted token both supervised. "shifted": the known token alone.

    Raises:
        DraftError: another policy.
    """
    if slots not in SLOTS:
        raise DraftError(f"slots = {slots!r}: choose from {', '.join(SLOTS)}")
    known = loss_mask.bool() & (document_ids != PADDING)
    return known & shift_left(known, document_ids) if slots == "serving" else known


def step_masks(mask: Tensor, document_ids: Tensor, steps: int) -> Tensor:
    """Slot masks of every step, boolean [S, B, T]: step s is step 0 moved left by s."""
    masks = [mask]
    for _ in range(steps - 1):
        masks.append(shift_left(masks[-1], document_ids))
    return torch.stack(masks)
