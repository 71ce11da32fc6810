"""Attention of the EAGLE-3 unroll: step-0 keys of a document, plus a slot's own later keys.

At unroll step s, a query of slot t sees the step-0 keys of slots <= t of its document, and of steps
1..s only the keys of slot t itself: a diagonal (see `masked`). Only slots whose output is used are
queries. A key of a later step is seen only by its own slot, so slots of a prompt are needed as
step-0 keys only. What the steps share is prepared once.

At step s, slot t is at position t + s, as in serving. In a layer with a window of W positions it
sees the step-0 keys after slot t + s - W and the newest W of its own keys: the window moves on with
the steps. From step W on, no step-0 key is left.

B packs, T slots, A active slots (queries), h / g query / key-value heads, d head size, s later
steps.
"""

import torch
from torch import Tensor

from spec_train.attention.masked import Attending, Diagonal, own_only
from spec_train.attention.masks import span_mask


def active_slots(used: Tensor) -> Tensor:
    """Return the indices, int64 [B, A], of the True slots of `used`, bool [B, T], ascending.

    A pack with fewer than A such slots repeats its last one (its last slot if it has none).
    """
    slots = torch.arange(used.shape[1], device=used.device)  # [T]
    width = max(int(used.sum(1).max()), 1)  # A
    order = torch.argsort((~used).to(torch.int8), dim=1, stable=True)[:, :width]  # [B, A]
    last = torch.where(used, slots, -1).amax(1, keepdim=True)  # [B, 1]
    last = torch.where(last < 0, used.shape[1] - 1, last)
    return torch.where(used.gather(1, order), order, last)


class StepQueries:
    """The step-0 keys that the active slots see in every step and layer, prepared as needed."""

    def __init__(self, first: Tensor, active: Tensor, width: int, backend: str) -> None:
        """Prepare for layers without a window; `width` is T.

        `first` is the slot at which each query's document begins, `active` its own slot, int64
        [B, A] each.
        """
        self._first, self._active, self._width, self._backend = first, active, width, backend
        self._all = self._prepare(first)
        self._prepared: dict[tuple[int, int], Attending] = {}  # by window and step

    def _prepare(self, first: Tensor) -> Attending:
        return Attending.prepare(span_mask(first, self._active, self._width), self._backend)

    def narrowed(self, part: Tensor) -> "StepQueries":
        """Return the queries of some of the active slots: their indices, int64 [B, A']."""
        first, active = self._first.gather(1, part), self._active.gather(1, part)
        return StepQueries(first, active, self._width, self._backend)

    def of(self, step: int, window: int | None = None) -> Attending | None:
        """Return the attention of a step, from 0, in a layer with this window.

        None: the window, which begins after slot + step - window, holds no step-0 key.
        """
        if window is None:
            return self._all
        if step >= window:
            return None
        if (window, step) not in self._prepared:
            first = torch.maximum(self._first, self._active + (step - window + 1))
            # a window longer than all documents changes nothing and needs no preparation
            longer = torch.equal(first, self._first)
            self._prepared[window, step] = self._all if longer else self._prepare(first)
        return self._prepared[window, step]

    def attend(
        self,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        diagonal: Diagonal,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend from queries [B, h, A, d] in step s = len(diagonal), within the window.

        `k0` and `v0` are step-0 keys and values [B, g, T, d]; the rest as for `Attending`.
        """
        attending = self.of(len(diagonal), window)
        newest = diagonal if window is None else diagonal[-window:]
        if attending is None:
            return own_only(q, newest, scale)
        return attending(q, k0, v0, scale, newest)


def narrowed_pairs(diagonal: Diagonal, part: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return later keys and values [B, g, A', d] of the active slots `part`, int64 [B, A']."""
    return [
        (k.gather(2, at), v.gather(2, at))
        for k, v in diagonal
        for at in [part[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])]
    ]
