"""The EAGLE-1/2 draft over whole packs of documents: one step ahead for training, more for chains.

Step 0 of slot t is the row (x_{t+1}, f_t), causal in its document: all that training needs. Step s
goes on from every slot at once as serving would: the row (a known token of position t+1+s, the
state that step s-1 predicted) at RoPE position t + s, which sees the step-0 rows of slots <= t and
the rows of steps 1..s of slot t alone.

B rows, T slots, H hidden size, h / g query / key-value heads, d head size, s later steps.
"""

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.attention.unrolled import Queries, default_backend, unrolled_attention
from spec_train.data.batch import DraftBatch
from spec_train.drafts.eagle.model import EagleModel
from spec_train.drafts.slots import document_lengths, document_offsets
from spec_train.head import TargetHead

_ROWS = 512  # of logits that exist at a time


class _Steps:
    """Attention of one layer over the steps: keeps step 0's keys, and a diagonal per later step."""

    def __init__(self, queries: Queries, scale: float) -> None:
        self._queries, self._scale = queries, scale
        self._first: tuple[Tensor, Tensor] | None = None
        self._diagonal: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._first is None:
            self._first = k, v
        else:
            self._diagonal.append((k, v))
        return unrolled_attention(q, *self._first, self._diagonal, self._queries, self._scale)


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
        self._positions = position_ids
        self._lengths = document_lengths(document_ids) if draft.rotary.limit is not None else None
        self.carried = draft.cast(states)
        backend = draft.attention_backend
        if backend == "auto":
            kind = self.carried.device.type, self.carried.dtype, draft.config.head_dim
            backend = default_backend(*kind)
        every = torch.arange(document_ids.shape[1], device=document_ids.device)
        first = every - document_offsets(document_ids)
        queries = Queries.prepare(first, every.expand_as(first), len(every), backend)
        self._layers = [_Steps(queries, draft.scale) for _ in draft.layers]
        self._steps = 0

    def advance(self, token_ids: Tensor) -> Tensor:
        """Run the next step on its known tokens [B, T]; gives predicted states [B, T, H]."""
        draft = self.draft
        positions = self._positions + self._steps
        cos, sin = draft.rotary.cos_sin(positions, self._lengths, self.carried.dtype)
        x = draft.fuse(token_ids, self.carried)
        for layer, steps in zip(draft.layers, self._layers, strict=True):
            x = layer(x, cos, sin, steps)
        self._steps += 1
        self.carried = x
        return x


@torch.no_grad()
def serving_chains(
    draft: EagleModel, batch: DraftBatch, states: Tensor, head: TargetHead, depth: int
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
