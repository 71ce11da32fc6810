"""The EAGLE-1/2 draft over packs (arXiv 2401.15077): one step for training, more for chains.

In: final hidden states and known tokens. Out: the predicted states of every step. Step 0 of slot t
is the row (x_{t+1}, f_t), causal in its document; training needs no other. Step s continues from
every slot at once, as serving would: the row (a known token of position t+1+s, the state that step
s-1 predicted) at RoPE position t + s. It sees the step-0 rows of slots <= t of its document, and of
the later steps the rows of slot t only; a layer's window limits both.

B packs, T slots, H hidden size, h / g query / key-value heads, d head size.
"""

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.attention.unrolled import StepQueries, narrowed_pairs
from spec_train.attention.unrolled_backends import default_backend
from spec_train.data.batch import DraftBatch
from spec_train.drafts.counted import CountedDrafts, first_slots, greedy_chains
from spec_train.drafts.eagle.model import EagleModel
from spec_train.drafts.layers import argmax_by_chunks
from spec_train.drafts.slots import document_offsets, gather_slots, rope_lengths
from spec_train.head import TargetHead


class _Steps:
    """Attention of one layer over the steps: keeps the keys and values [B, g, T, d] of each step.

    A later step's key is seen by its own slot only (a diagonal). See `layers.Attend` for shapes.
    """

    def __init__(self, queries: StepQueries, scale: float, window: int | None) -> None:
        self._queries, self._scale, self._window = queries, scale, window
        self._first: tuple[Tensor, Tensor] | None = None
        self._diagonal: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._first is None:
            self._first = k, v
        else:
            self._diagonal.append((k, v))
        first, diagonal = self._first, self._diagonal
        return self._queries.attend(q, *first, diagonal, self._scale, self._window)

    def narrow(self, queries: StepQueries, part: Tensor) -> None:
        """Go on with the slots `part` of the queries, int64 [B, A]; `queries` are theirs."""
        self._queries = queries
        self._diagonal = narrowed_pairs(self._diagonal, part)


class EagleUnroll:
    """The unrolled draft over one batch: `advance` returns the predictions of the next step."""

    def __init__(
        self, draft: EagleModel, states: Tensor, document_ids: Tensor, position_ids: Tensor
    ) -> None:
        """Start before step 0.

        Args:
            draft: the model.
            states: final hidden states f_t (with their noise, if any) [B, T, H].
            document_ids: int64 [B, T], -1 in padding.
            position_ids: int64 [B, T].
        """
        self.draft = draft
        self._positions = position_ids
        self._lengths = rope_lengths(draft.rotary, document_ids)  # [B, T]
        self.carried = draft.cast(states)
        backend = draft.attention_backend
        if backend == "auto":
            kind = self.carried.device.type, self.carried.dtype, draft.config.head_dim
            backend = default_backend(*kind)
        every = torch.arange(document_ids.shape[1], device=document_ids.device)  # [T]
        first = every - document_offsets(document_ids)  # [B, T]: the document's first slot
        self._queries = StepQueries(first, every.expand_as(first), len(every), backend)
        scale, windows = draft.scale, draft.config.windows
        self._layers = [_Steps(self._queries, scale, window) for window in windows]
        self._steps = 0

    def advance(self, token_ids: Tensor) -> Tensor:
        """Run the next step on its known tokens, int64 [B, T]; return predictions [B, T, H]."""
        draft = self.draft
        positions = self._positions + self._steps
        cos, sin = draft.rotary.cos_sin(positions, self._lengths, self.carried.dtype)
        x = draft.fuse(token_ids, self.carried)
        for layer, steps in zip(draft.layers, self._layers, strict=True):
            x = layer(x, cos, sin, steps)
        self._steps += 1
        self.carried = draft.predict(x)
        return self.carried

    def narrow(self, part: Tensor) -> None:
        """Go on with some of the slots only: their indices, int64 [B, A]. Not before step 0."""
        self._queries = self._queries.narrowed(part)
        for steps in self._layers:
            steps.narrow(self._queries, part)
        self._positions = self._positions.gather(1, part)
        if self._lengths is not None:
            self._lengths = self._lengths.gather(1, part)
        self.carried = gather_slots(self.carried, part)


@torch.no_grad()
def serving_chains(
    draft: EagleModel,
    batch: DraftBatch,
    states: Tensor,
    head: TargetHead,
    depth: int,
    counted: CountedDrafts | None = None,
) -> Tensor:
    """Draft greedy chains from every slot; each step reads the draft's own last token and state.

    Args:
        draft: the model.
        batch: documents in the token frame.
        states: the final hidden states of the documents [B, T, H].
        head: the target's.
        depth: tokens per chain.
        counted: leave out the drafts that it does not count.

    Returns:
        Target ids, int64 [B, T, depth] (see protocol.Draft.chains).
    """
    known = shift_left(batch.input_ids, batch.document_ids)
    unroll = EagleUnroll(draft, states, batch.document_ids, batch.position_ids)
    first = first_slots(known, counted)
    started = False

    def step(tokens: Tensor) -> Tensor:
        nonlocal started
        unroll.advance(tokens)
        if not started:  # step 0 makes the keys of every slot
            unroll.narrow(first)
            started = True
        return argmax_by_chunks(head.logits, unroll.carried)

    return greedy_chains(step, unroll.narrow, known, depth, counted)
