"""The EAGLE-3 unroll (arXiv 2503.01840): S steps of the layer over packs, in the shifted frame.

In: aux states and known tokens. Out: the states of every step. Step 0 carries the projected
features and makes a key at every slot. Step s carries the state of step s - 1 and adds one key per
slot, which only that slot sees; a layer's window limits both. So queries, MLP and later keys are
computed at the `active` slots only: those of which some step is used.

B packs, T slots, A active slots, S unroll steps, n captured layers, H hidden size, h / g query /
key-value heads, d head size.
"""

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.attention.plain import repeat_heads
from spec_train.attention.unrolled import StepQueries, default_backend
from spec_train.data.batch import DraftBatch
from spec_train.drafts.eagle3.model import Eagle3Model
from spec_train.drafts.layers import argmax_by_chunks, run_layer
from spec_train.drafts.slots import document_offsets, gather_slots, rope_lengths

Pairs = list[tuple[Tensor, Tensor]]
"""Keys and values [B, g, A, d] of later steps, oldest first."""


class Unroll:
    """The unrolled draft over one batch: makes step-0 keys and masks once, then `advance`s."""

    def __init__(
        self,
        draft: Eagle3Model,
        aux: Tensor,
        input_ids: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        active: Tensor,
    ) -> None:
        """Compute what all steps share.

        Args:
            draft: the model.
            aux: aux states [B, T, n*H].
            input_ids: known tokens of step 0 (shifted), int64 [B, T].
            document_ids: int64 [B, T], -1 in padding.
            position_ids: int64 [B, T].
            active: slots to compute outputs for, int64 [B, A].
        """
        self.draft = draft
        attention = draft.midlayer.self_attn
        features = draft.project(aux)  # [B, T, H]
        lengths = rope_lengths(draft.rotary, document_ids)  # [B, T]
        self._lengths = rope_lengths(draft.rotary, document_ids, active)  # [B, A]
        cos, sin = draft.rotary.cos_sin(position_ids, lengths, features.dtype)
        u = draft.midlayer.inputs(draft.embed(input_ids), features)  # [B, T, 2H]
        k0, v0 = attention.keys_values(u, cos, sin)  # [B, g, T, d]
        backend = draft.attention_backend
        if backend == "auto":
            backend = default_backend(k0.device.type, k0.dtype, k0.shape[-1])
        slots = torch.arange(document_ids.shape[1], device=active.device)  # [T]
        first = (slots - document_offsets(document_ids)).gather(1, active)  # [B, A]
        self._queries = StepQueries(first, active, document_ids.shape[1], backend)
        self._window = draft.config.windows[0]
        if backend != "flex":  # once for all steps
            heads = draft.config.num_attention_heads
            k0, v0 = repeat_heads(k0, heads), repeat_heads(v0, heads)
        self._k0, self._v0 = k0, v0
        self._positions = position_ids.gather(1, active)  # [B, A]
        self._first: Tensor | None = gather_slots(u, active)
        self._diagonal: Pairs = []
        self._steps = 0
        self.carried = gather_slots(features, active)

    def advance(self, token_ids: Tensor) -> Tensor:
        """Run the next step on its known tokens, int64 [B, A].

        Step 0 ignores them: it reads the `input_ids` of the constructor.

        Returns:
            The carried states [B, A, H], for `head_input` and for the next step.
        """
        positions = self._positions + self._steps
        cos, sin = self.draft.rotary.cos_sin(positions, self._lengths, self.carried.dtype)
        self.carried, self._diagonal = run_layer(
            self._step,
            token_ids,
            self.carried,
            cos,
            sin,
            self._first,
            self._diagonal,
            recompute=self.draft.options.gradient_checkpointing,
        )
        self._first = None
        self._steps += 1
        return self.carried

    def _step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        cos: Tensor,
        sin: Tensor,
        first: Tensor | None,
        diagonal: Pairs,
    ) -> tuple[Tensor, Pairs]:
        """Return the carried states [B, A, H] after a step, and the keys of all later steps.

        Args:
            token_ids: known tokens, int64 [B, A].
            carried: states before the step [B, A, H].
            cos, sin: [B, A, r].
            first: layer inputs [B, A, 2H] at step 0, whose keys exist already; None later.
            diagonal: keys and values of steps 1 to this one, without it.
        """
        layer, attention = self.draft.midlayer, self.draft.midlayer.self_attn
        u = first
        if u is None:
            u = layer.inputs(self.draft.embed(token_ids), carried)
            diagonal = [*diagonal, attention.keys_values(u, cos, sin)]
        q = attention.queries(u, cos, sin)
        first_keys = self._k0, self._v0
        out = self._queries.attend(q, *first_keys, diagonal, attention.scale, self._window)
        return self.draft.feedback(layer.outputs(carried, out)), diagonal


@torch.no_grad()
def serving_chains(draft: Eagle3Model, batch: DraftBatch, depth: int) -> Tensor:
    """Draft greedy chains from every slot; each step reads the draft's own last token.

    Args:
        draft: the model.
        batch: documents in the token frame.
        depth: tokens per chain.

    Returns:
        Target ids, int64 [B, T, depth] (see protocol.Draft.chains).
    """
    known = shift_left(batch.input_ids, batch.document_ids)
    active = torch.arange(known.shape[1], device=known.device).expand_as(known)
    unroll = Unroll(
        draft,
        batch.aux(draft.config.layers),
        known,
        batch.document_ids,
        batch.position_ids,
        active,
    )
    chains = []
    for _ in range(depth):
        known = draft.draft_ids[argmax_by_chunks(draft.logits, unroll.advance(known))]  # [B, T]
        chains.append(known)
    return torch.stack(chains, dim=-1)
