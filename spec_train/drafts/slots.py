"""Slots of a pack: where documents begin and end, which slots have a loss, which drafts are scored.

Slot t is a position of a pack in the shifted frame: it knows token t + 1 and drafts token t + 2.
Every function works per document: nothing crosses a document boundary.

B packs, T slots of a pack, S unroll steps, A active slots, H hidden size.
"""

import torch
from torch import Tensor

from spec_data.shards.batch import DraftBatch
from spec_data.shards.packing import PADDING, shift_left
from spec_train.attention.masks import document_starts
from spec_train.attention.unrolled import active_slots
from spec_train.drafts.layers import Rotary

NOT_DRAFTED = -1
"""In chains: no draft at this slot and depth."""


def gather_slots(x: Tensor, active: Tensor) -> Tensor:
    """Return rows [B, A, H] of `x` [B, T, H] at the slots `active`, int64 [B, A]."""
    return x.gather(1, active[..., None].expand(-1, -1, x.shape[-1]))


def document_offsets(document_ids: Tensor) -> Tensor:
    """Return the index of every slot within its document, both int64 [B, T]."""
    slots = torch.arange(document_ids.shape[1], device=document_ids.device)  # [T]
    return slots - document_starts(document_ids)


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


def slot_masks(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Return the slot mask of step 0, bool [B, T], from a shifted loss mask [B, T].

    The known and the drafted token are both supervised, as in serving.
    """
    supervised = loss_mask.bool() & (document_ids != PADDING)
    return supervised & shift_left(supervised, document_ids)


def step_masks(mask: Tensor, document_ids: Tensor, steps: int) -> Tensor:
    """Return the slot masks of all steps, bool [S, B, T].

    The mask of step s is that of step 0, `mask` bool [B, T], moved left by s in each document.
    """
    masks = [mask]
    for _ in range(steps - 1):
        masks.append(shift_left(masks[-1], document_ids))
    return torch.stack(masks)


# -- scored slots ----------------------------------------------------------------------------------
# The chain of slot t drafts token t + 2 + d at depth d, from 0. An evaluation scores a draft while
# all tokens from t + 1 to the drafted one are supervised and all earlier drafts were accepted and
# equal the document (see simulation/simulated_decoding.py: afterwards the result is a miss, or
# unknown). A target accepts few drafts in a row, so most chains end after one or two steps, and no
# others are computed.


class ScoredSlots:
    """Tells, depth after depth, which slots of a batch still have a draft that is scored."""

    def __init__(self, batch: DraftBatch) -> None:
        """Read the masks, the tokens and the choices of the target from the batch."""
        self._documents = batch.document_ids
        self._token = shift_left(batch.input_ids, self._documents)  # at slot t: x_{t+1+d}
        self._choice = batch.target_argmax  # at slot t: the target's choice for x_{t+1+d}
        self._inside = shift_left(batch.loss_mask.bool(), self._documents)
        self._next_depth()

    def _next_depth(self) -> None:
        """Move every tensor to the token that the next depth drafts."""
        self._token = shift_left(self._token, self._documents)
        self._choice = shift_left(self._choice, self._documents)
        # at slot t: tokens t+1 to the drafted one are supervised; shifts of documents end in 0
        following = shift_left(self._inside, self._documents)
        self._inside = self._inside & following & (self._documents >= 0)

    @property
    def slots(self) -> Tensor:
        """The slots whose draft of depth 0 is scored, bool [B, T]; read it before `go_on`."""
        return self._inside

    def go_on(self, active: Tensor, drafted: Tensor) -> Tensor:
        """Return whether the next draft of each chain is scored, bool [B, A].

        Args:
            active: slots of the chains, int64 [B, A].
            drafted: what they drafted at this depth, target ids int64 [B, A].
        """
        right = drafted == self._choice.gather(1, active)
        same = drafted == self._token.gather(1, active)
        self._next_depth()
        return right & same & self._inside.gather(1, active)


def first_slots(like: Tensor, scored: ScoredSlots | None) -> Tensor:
    """Return the slots whose chains are drafted, int64 [B, A]; `like` is any tensor [B, T]."""
    if scored is not None:
        return active_slots(scored.slots)
    return torch.arange(like.shape[1], device=like.device).expand_as(like)


def empty_chains(like: Tensor, depth: int) -> Tensor:
    """Return chains without a draft, int64 [B, T, depth]; `like` is any tensor [B, T]."""
    return torch.full((*like.shape, depth), NOT_DRAFTED, device=like.device)
