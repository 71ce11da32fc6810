"""The EAGLE-3 unroll (arXiv 2503.01840): S steps of the layers over packs, in the shifted frame.

In: aux states and known tokens. Out: the states of every step. Step 0 carries the projected
features and makes a key at every slot. Step s carries the state of step s - 1 and adds one key per
slot, which only that slot sees; a layer's window limits both. So queries, MLP and later keys are
computed at the `active` slots only: those of which some step is used. A draft of several layers has
such keys in each of them. The step-0 keys of a layer need the output of the layer before it at
every slot, so only the last layer is limited to the active slots in step 0.

B packs, T slots, A active slots, S unroll steps, n captured layers, H hidden size, W width of a
layer's attention input (2H in the first layer, H in the others), h / g query / key-value heads, d
head size.
"""

from typing import Any

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.attention.plain import repeat_heads
from spec_train.attention.unrolled import StepQueries, narrowed_pairs
from spec_train.attention.unrolled_backends import default_backend
from spec_train.data.batch import DraftBatch
from spec_train.drafts.counted import CountedDrafts, first_slots, greedy_chains
from spec_train.drafts.eagle3.model import Eagle3Model
from spec_train.drafts.layers import argmax_by_chunks, run_layer
from spec_train.drafts.slots import document_offsets, gather_slots, rope_lengths

Pairs = list[tuple[Tensor, Tensor]]
"""Keys and values [B, g, A, d] of later steps in a layer, oldest first."""


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
        self._layers, self._windows = draft.decoder_layers, draft.config.windows
        features = draft.project(aux)  # [B, T, H]
        backend = draft.attention_backend
        if backend == "auto":
            kind = features.device.type, features.dtype, draft.config.head_dim
            backend = default_backend(*kind)
        self._repeat = backend != "flex"  # key heads are repeated once for all steps
        every = torch.arange(document_ids.shape[1], device=active.device)  # [T]
        begin = every - document_offsets(document_ids)  # [B, T]: the document's first slot
        self._queries = StepQueries(begin.gather(1, active), active, len(every), backend)
        self._lengths = rope_lengths(draft.rotary, document_ids, active)  # [B, A]
        self._positions = position_ids.gather(1, active)  # [B, A]

        lengths = rope_lengths(draft.rotary, document_ids)  # [B, T]
        cos, sin = draft.rotary.cos_sin(position_ids, lengths, features.dtype)
        inputs: tuple[Tensor, ...] = (draft.embed(input_ids), features)
        self._first_keys: list[tuple[Tensor, Tensor]] = []  # of step 0, per layer: [B, g, T, d]
        for number in range(len(self._layers) - 1):
            every_slot = StepQueries(begin, every.expand_as(begin), len(every), backend)
            output, *keys = self._run(self._whole, number, every_slot, cos, sin, *inputs)
            self._first_keys.append((keys[0], keys[1]))
            inputs = (output,)
        u = self._layers[-1].inputs(*inputs)  # [B, T, W]
        self._first_keys.append(self._keys(len(self._layers) - 1, u, cos, sin))
        self._first: tuple[Tensor, Tensor] | None = (
            gather_slots(u, active),
            gather_slots(inputs[-1], active),
        )
        self._diagonals: list[Pairs] = [[] for _ in self._layers]
        self._steps = 0
        self.carried = gather_slots(features, active)

    def _run(self, part: Any, *arguments: Any) -> Any:
        """Call a part of the computation, with `gradient_checkpointing` if it is on."""
        return run_layer(part, *arguments, recompute=self.draft.options.gradient_checkpointing)

    def _keys(self, number: int, u: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's step-0 keys and values of attention inputs [B, T, W]."""
        k, v = self._layers[number].self_attn.keys_values(u, cos, sin)  # [B, g, T, d]
        heads = self.draft.config.num_attention_heads
        return (repeat_heads(k, heads), repeat_heads(v, heads)) if self._repeat else (k, v)

    def _whole(
        self, number: int, queries: StepQueries, cos: Tensor, sin: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run a layer in step 0 at every slot; return its output [B, T, H], keys and values."""
        layer = self._layers[number]
        u = layer.inputs(*inputs)  # [B, T, W]
        k, v = self._keys(number, u, cos, sin)
        q = layer.self_attn.queries(u, cos, sin)
        out = queries.attend(q, k, v, [], self.draft.scale, self._windows[number])
        return layer.outputs(u, inputs[-1], out), k, v

    def advance(self, token_ids: Tensor) -> Tensor:
        """Run the next step on its known tokens, int64 [B, A].

        Step 0 ignores them: it reads the `input_ids` of the constructor.

        Returns:
            The carried states [B, A, H], for `head_input` and for the next step.
        """
        positions = self._positions + self._steps
        cos, sin = self.draft.rotary.cos_sin(positions, self._lengths, self.carried.dtype)
        if self._first is not None:
            self.carried = self._run(self._first_step, cos, sin, *self._first)
        else:
            arguments = token_ids, self.carried, cos, sin, self._diagonals
            self.carried, self._diagonals = self._run(self._later_step, *arguments)
        self._first = None
        self._steps += 1
        return self.carried

    def narrow(self, part: Tensor) -> None:
        """Go on with some of the active slots only: their indices, int64 [B, A']."""
        self._queries = self._queries.narrowed(part)
        self._positions = self._positions.gather(1, part)
        if self._lengths is not None:
            self._lengths = self._lengths.gather(1, part)
        self.carried = gather_slots(self.carried, part)
        self._diagonals = [narrowed_pairs(pairs, part) for pairs in self._diagonals]

    def _attended(self, number: int, u: Tensor, x: Tensor, turn: Any, diagonal: Pairs) -> Tensor:
        """Return a layer's output [B, A, H] of attention inputs [B, A, W] and residual [B, A, H].

        `turn` are the cosines and sines [B, A, r], `diagonal` the layer's later keys.
        """
        layer = self._layers[number]
        q, keys = layer.self_attn.queries(u, *turn), self._first_keys[number]
        out = self._queries.attend(q, *keys, diagonal, self.draft.scale, self._windows[number])
        return layer.outputs(u, x, out)

    def _first_step(self, cos: Tensor, sin: Tensor, u: Tensor, x: Tensor) -> Tensor:
        """Run the last layer at the active slots in step 0; its keys exist already."""
        last = len(self._layers) - 1
        return self.draft.feedback(self._attended(last, u, x, (cos, sin), []))

    def _later_step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        cos: Tensor,
        sin: Tensor,
        diagonals: list[Pairs],
    ) -> tuple[Tensor, list[Pairs]]:
        """Return the carried states [B, A, H] after a step, and the later keys with its own.

        Args:
            token_ids: known tokens, int64 [B, A].
            carried: states before the step [B, A, H].
            cos, sin: [B, A, r].
            diagonals: per layer, keys and values of steps 1 to this one, without it.
        """
        inputs: tuple[Tensor, ...] = (self.draft.embed(token_ids), carried)
        longer = []
        for number, layer in enumerate(self._layers):
            u = layer.inputs(*inputs)
            longer.append([*diagonals[number], layer.self_attn.keys_values(u, cos, sin)])
            inputs = (self._attended(number, u, inputs[-1], (cos, sin), longer[-1]),)
        return self.draft.feedback(inputs[0]), longer


@torch.no_grad()
def serving_chains(
    draft: Eagle3Model, batch: DraftBatch, depth: int, counted: CountedDrafts | None = None
) -> Tensor:
    """Draft greedy chains from every slot; each step reads the draft's own last token.

    Args:
        draft: the model.
        batch: documents in the token frame.
        depth: tokens per chain.
        counted: leave out the drafts that it does not count.

    Returns:
        Target ids, int64 [B, T, depth] (see protocol.Draft.chains).
    """
    known = shift_left(batch.input_ids, batch.document_ids)
    unroll = Unroll(
        draft,
        batch.aux(draft.config.layers),
        known,
        batch.document_ids,
        batch.position_ids,
        first_slots(known, counted),
    )

    def step(tokens: Tensor) -> Tensor:
        return draft.draft_ids[argmax_by_chunks(draft.logits, unroll.advance(tokens))]

    return greedy_chains(step, unroll.narrow, known, depth, counted)
