"""The EAGLE-3 unroll: S steps of the layer over whole documents, in the shifted frame.

Step 0 carries the projected features and makes a key at every slot; step s carries the step
before's own state and adds one key per slot, seen by that slot alone. So queries, MLP and later
keys are computed at `active` slots only: those with a step that anything depends on.

B rows, T slots, A active slots, S unroll steps, H hidden size, h heads, d head size.
"""

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.attention.plain import repeat_heads
from spec_train.attention.unrolled import Queries, default_backend, unrolled_attention
from spec_train.data.batch import DraftBatch
from spec_train.drafts.eagle3.model import Eagle3Model
from spec_train.drafts.layers import run_layer
from spec_train.drafts.slots import document_lengths, document_offsets, gather_slots

Pairs = list[tuple[Tensor, Tensor]]


class Unroll:
    """The unrolled draft over one batch: step-0 keys and mask made once, then `advance`."""

    def __init__(
        self,
        draft: Eagle3Model,
        aux: Tensor,
        input_ids: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        active: Tensor,
    ) -> None:
        """Compute what the steps share.

        Args:
            draft: the model.
            aux: aux states [B, T, n*H].
            input_ids: known tokens of step 0 (shifted), int64 [B, T].
            document_ids, position_ids: int64 [B, T].
            active: slots to compute outputs for, int64 [B, A].
        """
        self.draft = draft
        attention = draft.midlayer.self_attn
        features = draft.project(aux)
        lengths = None
        if draft.rotary.limit is not None:
            lengths = document_lengths(document_ids)
            self._lengths: Tensor | None = lengths.gather(1, active)
        else:
            self._lengths = None
        cos, sin = draft.rotary.cos_sin(position_ids, lengths, features.dtype)
        u = draft.midlayer.inputs(draft.embed(input_ids), features)
        k0, v0 = attention.keys_values(u, cos, sin)
        backend = draft.attention_backend
        if backend == "auto":
            backend = default_backend(k0.device.type, k0.dtype, k0.shape[-1])
        slots = torch.arange(document_ids.shape[1], device=active.device)
        first = (slots - document_offsets(document_ids)).gather(1, active)
        self._queries = Queries.prepare(first, active, document_ids.shape[1], backend)
        if backend != "flex":  # once for all steps
            heads = draft.config.num_attention_heads
            k0, v0 = repeat_heads(k0, heads), repeat_heads(v0, heads)
        self._k0, self._v0 = k0, v0
        self._positions = position_ids.gather(1, active)
        self._first: Tensor | None = gather_slots(u, active)
        self._diagonal: Pairs = []
        self._steps = 0
        self.carried = gather_slots(features, active)

    def advance(self, token_ids: Tensor) -> Tensor:
        """Run the next step on its known tokens [B, A] (step 0: as given at the start).

        Returns:
            The states [B, A, H] that go to `head_input`, and on to the next step.
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
        """Carried states after a step, and all later keys and values so far.

        `first`: layer inputs [B, A, 2H] of step 0, whose keys exist; None at later steps.
        """
        layer, attention = self.draft.midlayer, self.draft.midlayer.self_attn
        u = first
        if u is None:
            u = layer.inputs(self.draft.embed(token_ids), carried)
            diagonal = [*diagonal, attention.keys_values(u, cos, sin)]
        q = attention.queries(u, cos, sin)
        out = unrolled_attention(q, self._k0, self._v0, diagonal, self._queries, attention.scale)
        return self.draft.feedback(layer.outputs(carried, out)), diagonal


@torch.no_grad()
def serving_chains(draft: Eagle3Model, batch: DraftBatch, depth: int) -> Tensor:
    """Draft greedy chains from every slot, each step fed the draft's own last token.

    Args:
        draft: the model.
        batch: documents in the token frame.
        depth: tokens per chain.

    Returns:
        Target ids, int64 [B, T, depth]. Entry (t, d) is the draft for token t + 2 + d of the
        document, tokens up to t + 1 being given. Slots with no known token (the last of a
        document, padding) hold drafts of nothing: ignore them.
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
        states = unroll.advance(known).flatten(0, 1)
        best = [draft.logits(part).argmax(-1) for part in states.split(512)]
        known = draft.draft_ids[torch.cat(best)].view_as(known)
        chains.append(known)
    return torch.stack(chains, dim=-1)
