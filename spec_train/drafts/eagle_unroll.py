"""The EAGLE-1/2 draft over whole packs of documents: one step ahead for training, more for chains.

Step 0 of slot t is the row (x_{t+1}, f_t), causal in its document: all that training needs. Step s
goes on from every slot at once as serving would: the row (a known token of position t+1+s, the
state that step s-1 predicted) at RoPE position t + s, which sees the step-0 rows of slots <= t and
the rows of steps 1..s of slot t alone.

B rows, T slots, H hidden size, h / g query / key-value heads, d head size, s later steps.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.attend import Attending
from spec_train.attention import (
    PreparedMask,
    active_mask,
    default_backend,
    prepare_mask,
    unrolled_attention,
)
from spec_train.drafts.eagle3_unroll import document_lengths
from spec_train.drafts.eagle_model import EagleModel
from spec_train.head import TargetHead
from spec_train.masks import causal_mask

if TYPE_CHECKING:
    from spec_train.batch import DraftBatch

_ROWS = 512  # of logits that exist at a time


class _Steps:
    """Attention of one layer over the steps: keeps step 0's keys, and a diagonal per later step."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._first: tuple[Tensor, Tensor] | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def first(self, q: Tensor, k: Tensor, v: Tensor, attending: Attending) -> Tensor:
        self._first = k, v
        return attending(q, k, v, self._scale)

    def later(self, q: Tensor, k: Tensor, v: Tensor, mask: PreparedMask, backend: str) -> Tensor:
        assert self._first is not None
        self._keys.append(k)
        self._values.append(v)
        diagonals = torch.stack(self._keys, dim=2), torch.stack(self._values, dim=2)
        return unrolled_attention(q, *self._first, *diagonals, mask, self._scale, backend)


class EagleUnroll:
    """The unrolled draft over one batch: `advance` gives the predictions of the next step."""

    def __init__(
        self, draft: EagleModel, states: Tensor, document_ids: Tensor, position_ids: Tensor
    ) -> None:
        """Start before step 0.

        Args:
            draft: the model.
            states: final hidden states f_t (with their noise, if any) [B, T, H].
            document_ids, position_ids: int64 [B, T].
        """
        self.draft = draft
        self._document_ids, self._positions = document_ids, position_ids
        self._lengths = document_lengths(document_ids) if draft.rotary.limit is not None else None
        self._layers = [_Steps(draft.scale) for _ in draft.layers]
        self._later: tuple[PreparedMask, str] | None = None
        self._steps = 0
        self.carried = draft.cast(states)

    def advance(self, token_ids: Tensor) -> Tensor:
        """Run the next step on its known tokens [B, T]; gives predicted states [B, T, H]."""
        draft = self.draft
        positions = self._positions + self._steps
        cos, sin = draft.rotary.cos_sin(positions, self._lengths, self.carried.dtype)
        x = draft.fuse(token_ids, self.carried)
        if self._steps == 0:
            mask = causal_mask(self._document_ids)
            attending = Attending.prepare(mask, draft.config.head_dim, draft.attention_backend)
            for layer, steps in zip(draft.layers, self._layers, strict=True):
                x = layer(x, cos, sin, lambda q, k, v, s=steps: s.first(q, k, v, attending))
        else:
            later = self._later = self._later or self._prepare_later(x.dtype)
            for layer, steps in zip(draft.layers, self._layers, strict=True):
                x = layer(x, cos, sin, lambda q, k, v, s=steps: s.later(q, k, v, *later))
        self._steps += 1
        self.carried = x
        return x

    def _prepare_later(self, dtype: torch.dtype) -> tuple[PreparedMask, str]:
        """Mask and back end of the steps after the first: every slot is a query."""
        ids = self._document_ids
        backend = default_backend(ids.device.type, dtype, self.draft.config.head_dim)
        every = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return prepare_mask(active_mask(ids, every), backend, dtype), backend


@torch.no_grad()
def serving_chains(
    draft: EagleModel, batch: "DraftBatch", states: Tensor, head: TargetHead, depth: int
) -> Tensor:
    """Draft greedy chains from every slot, each step fed the draft's own last token and state.

    Args:
        draft: the model.
        batch: documents in the token frame.
        states: their final hidden states [B, T, H].
        head: the target's.
        depth: tokens per chain.

    Returns:
        Target ids, int64 [B, T, depth], as `protocol.Draft.chains` says.
    """
    known = shift_left(batch.input_ids, batch.document_ids)
    unroll = EagleUnroll(draft, states, batch.document_ids, batch.position_ids)
    chains = []
    for _ in range(depth):
        predicted = unroll.advance(known).flatten(0, 1)
        best = [head.logits(part).argmax(-1) for part in predicted.split(_ROWS)]
        known = torch.cat(best).view_as(known)
        chains.append(known)
    return torch.stack(chains, dim=-1)
