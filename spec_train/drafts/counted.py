"""Which drafts of a chain an evaluation counts, so that no others are computed.

Slot t knows token t + 1; its chain drafts token t + 2 + d at depth d, from 0. A draft counts while
all tokens from t + 1 to the drafted one are supervised and all earlier drafts were accepted and
equal the document (see simulation/walk.py: afterwards the result is a miss, or unknown). A target
accepts few drafts in a row, so most chains end after one or two steps.

B packs, T slots, A slots whose chains go on.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.attention.unrolled import active_slots
from spec_train.data.batch import DraftBatch

NOT_DRAFTED = -1
"""In chains: no draft at this slot and depth."""


class CountedDrafts:
    """Tells, depth after depth, which slots of a batch still have a draft that counts."""

    def __init__(self, batch: DraftBatch) -> None:
        """Read the masks, the tokens and the choices of the target from the batch."""
        self._documents = batch.document_ids
        self._token = shift_left(batch.input_ids, self._documents)  # at slot t: x_{t+1+d}
        self._choice = batch.target_argmax  # at slot t: the target's choice for x_{t+1+d}
        self._inside = shift_left(batch.loss_mask.bool(), self._documents)
        self._go_on()

    def _go_on(self) -> None:
        """Move every tensor to the token that the next depth drafts."""
        self._token = shift_left(self._token, self._documents)
        self._choice = shift_left(self._choice, self._documents)
        # at slot t: tokens t+1 to the drafted one are supervised; shifts of documents end in 0
        following = shift_left(self._inside, self._documents)
        self._inside = self._inside & following & (self._documents >= 0)

    @property
    def slots(self) -> Tensor:
        """The slots whose draft of depth 0 counts, bool [B, T]. Read it before `kept` is called."""
        return self._inside

    def kept(self, active: Tensor, drafted: Tensor) -> Tensor:
        """Return whether the next draft of each chain counts, bool [B, A].

        Args:
            active: slots of the chains, int64 [B, A].
            drafted: what they drafted at this depth, target ids int64 [B, A].
        """
        right = drafted == self._choice.gather(1, active)
        same = drafted == self._token.gather(1, active)
        self._go_on()
        return right & same & self._inside.gather(1, active)


def first_slots(known: Tensor, counted: CountedDrafts | None) -> Tensor:
    """Return the slots whose chains are drafted, int64 [B, A]; `known` is any tensor [B, T]."""
    if counted is not None:
        return active_slots(counted.slots)
    return torch.arange(known.shape[1], device=known.device).expand_as(known)


def empty_chains(known: Tensor, depth: int) -> Tensor:
    """Return chains without a draft, int64 [B, T, depth]; `known` is any tensor [B, T]."""
    return torch.full((*known.shape, depth), NOT_DRAFTED, device=known.device)


def greedy_chains(
    step: Callable[[Tensor], Tensor],
    narrow: Callable[[Tensor], None],
    known: Tensor,
    depth: int,
    counted: CountedDrafts | None,
) -> Tensor:
    """Draft chains one token at a time.

    Args:
        step: maps the known tokens [B, A] of the chains to their next drafts [B, A]. The first
            call has the tokens of all slots, [B, T].
        narrow: called to go on with some chains only: their indices, int64 [B, A'].
        known: the known token of every slot, int64 [B, T].
        depth: tokens per chain.
        counted: which chains go on; None: all of them.

    Returns:
        Target ids, int64 [B, T, depth]; `NOT_DRAFTED` where a chain had ended.
    """
    chains, active = empty_chains(known, depth), first_slots(known, counted)
    for d in range(depth):
        known = step(known)
        chains[..., d].scatter_(1, active, known)
        if counted is None or d + 1 == depth:
            continue
        kept = counted.kept(active, known)
        if not bool(kept.any()):
            break
        part = active_slots(kept)
        narrow(part)
        active, known = active.gather(1, part), known.gather(1, part)
    return chains
