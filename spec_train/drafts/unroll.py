"""Drafts that read their own states: EAGLE-1/2 and EAGLE-3, one row after the other and unrolled.

The row of slot t reads token x_{t+1} and a carried state: of the target's at first, then the
draft's own of the step before. In serving, `step` appends rows to caches. Over packs, `Unroll` runs
S steps from many slots at once (EAGLE-1/2 trains with one step, EAGLE-3 with several).

Step 0 makes a key at every slot. Step s carries the state of step s - 1 and adds one key per slot,
which only that slot sees; a layer's window limits both. So queries, MLP and later keys are computed
at the `active` slots only: those of which some step is used. A draft of several layers has such
keys in each of them. The step-0 keys of a layer need the output of the layer before it at every
slot, so only the last layer is limited to the active slots in step 0.

B packs, T slots, A active slots, S unroll steps, H hidden size, W width of a layer's attention
input (2H in the first layer of EAGLE-3, else H), h / g query / key-value heads, d head size.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.batch import DraftBatch
from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL
from spec_train.attention.masks import document_starts
from spec_train.attention.unrolled import (
    StepQueries,
    active_slots,
    narrowed_pairs,
)
from spec_train.drafts.draft import Draft, FinalDraft
from spec_train.drafts.drafting import ChainDrafter, KVCache
from spec_train.drafts.layers import Rotary, argmax_by_chunks, run_layer
from spec_train.drafts.slots import (
    ScoredSlots,
    empty_chains,
    first_slots,
    gather_slots,
    rope_lengths,
)
from spec_train.losses.head import TargetHead

Pairs = list[tuple[Tensor, Tensor]]
"""Keys and values [B, g, A, d] of later steps in a layer, oldest first."""


class AutoregressiveDraft(Draft):
    """A draft that continues from its own states, token by token."""

    rotary: Rotary

    @property
    @abstractmethod
    def decoder_layers(self) -> list[Any]:
        """The layers; each has `inputs`, `self_attn`, `outputs` and `forward` (see `layers`)."""

    @abstractmethod
    def project(self, states: Tensor) -> Tensor:
        """Map the target's states [B, T, A] to the first carried states [B, T, H]."""

    @abstractmethod
    def layer_inputs(self, token_ids: Tensor, carried: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the first layer of known tokens, int64 [B, T], and carried states.

        The last of them is the layer's residual [B, T, H].
        """

    @abstractmethod
    def feedback(self, output: Tensor) -> Tensor:
        """Map the last layer's output [B, T, H] to the next carried state [B, T, H]."""

    @abstractmethod
    def states_of(self, batch: DraftBatch) -> Tensor:
        """Return the target's states that `project` takes, of a batch [B, T, A]."""

    @abstractmethod
    def logits_with(self, head: TargetHead) -> Callable[[Tensor], Tensor]:
        """Return what maps carried states [..., H] to logits [..., Vd]; `head` is the target's."""

    def unroll(self, *inputs: Any) -> "Unroll":
        """Return the unrolled draft over a batch; `inputs` are the arguments of `Unroll`."""
        return Unroll(self, *inputs)

    def step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        position_ids: Tensor,
        caches: Sequence[KVCache] | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Process T new rows as serving does, after the rows in `caches`.

        Args:
            token_ids: known tokens, int64 [B, T].
            carried: the result of `project`, or of an earlier `step`, [B, T, H].
            position_ids: RoPE positions, int64 [B, T].
            caches: the rows processed so far, one per layer; the new rows are appended.
            seen: which rows, old and new, a new row sees, bool [T, length]; None: causal.

        Returns:
            Carried states [B, T, H], for the head and for the next `step`.
        """
        cos, sin = self.rotary(position_ids, None, carried.dtype)
        inputs = self.layer_inputs(token_ids, carried)
        layers = zip(
            self.decoder_layers, caches or self.new_caches(), self.config.windows, strict=True
        )
        for layer, cache, window in layers:
            attend = partial(cache.attend, scale=self.scale, seen=seen, window=window)
            inputs = (layer(*inputs, cos, sin, attend),)
        return self.feedback(inputs[0])

    @torch.no_grad()
    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, scored_only: bool = False
    ) -> Tensor:
        """Draft greedily from every slot; each step reads the draft's own last token and state."""
        scored = ScoredSlots(batch) if scored_only else None
        documents, positions = batch.document_ids, batch.position_ids
        tokens = shift_left(batch.input_ids, documents)  # [B, T], known at every slot
        chains, active = empty_chains(tokens, depth), first_slots(tokens, scored)
        unroll = self.unroll(self.states_of(batch), tokens, documents, positions, active)
        logits, ids = self.logits_with(head), self.proposed_ids
        for d in range(depth):
            best = argmax_by_chunks(logits, unroll.advance(tokens))
            tokens = best if ids is None else ids[best]  # [B, A]
            chains[..., d].scatter_(1, active, tokens)
            if scored is None or d + 1 == depth:
                continue
            going = scored.go_on(active, tokens)
            if not bool(going.any()):
                break
            part = active_slots(going)
            unroll.narrow(part)
            active, tokens = active.gather(1, part), tokens.gather(1, part)
        return chains


class FinalStatesDraft(FinalDraft, AutoregressiveDraft):
    """A draft that continues from the target's final hidden states, whose head it has."""

    def project(self, states: Tensor) -> Tensor:
        """Cast the target's final hidden states [B, T, H]."""
        return self.cast(states)

    def states_of(self, batch: DraftBatch) -> Tensor:
        return batch.hidden[FINAL]

    def drafter(self, head: TargetHead) -> ChainDrafter:
        vocab = self.config.vocab_size
        with_head = SimpleNamespace(
            project=self.project,
            step=self.step,
            logits=self.logits_with(head),
            draft_ids=torch.arange(vocab, device=self.embed_tokens.weight.device),
        )
        return ChainDrafter(with_head, vocab, self.new_caches())


class Unroll:
    """The unrolled draft over one batch: makes step-0 keys and masks once, then `advance`s."""

    def __init__(
        self,
        draft: AutoregressiveDraft,
        states: Tensor,  # the target's [B, T, A]
        input_ids: Tensor,  # known tokens of step 0 (shifted), int64 [B, T]
        document_ids: Tensor,  # int64 [B, T], -1 in padding
        position_ids: Tensor,  # int64 [B, T]
        # slots to compute outputs for, int64 [B, A]; None: all of them
        active: Tensor | None = None,
    ) -> None:
        self.draft = draft
        self._layers, self._windows = draft.decoder_layers, draft.config.windows
        features = draft.project(states)  # [B, T, H]
        backend = draft.backend
        every = torch.arange(document_ids.shape[1], device=document_ids.device)  # [T]
        begin = document_starts(document_ids)  # [B, T]
        lengths = rope_lengths(draft.rotary, document_ids)  # [B, T]
        cos, sin = draft.rotary(position_ids, lengths, features.dtype)
        inputs = draft.layer_inputs(input_ids, features)
        self._first_keys: list[tuple[Tensor, Tensor]] = []  # of step 0, per layer: [B, g, T, d]
        slots = every.expand_as(begin) if active is None else active
        self._queries = StepQueries(begin.gather(1, slots), slots, len(every), backend)
        whole, everywhere = range(len(self._layers) - (active is not None)), self._queries
        if active is not None and whole:
            everywhere = StepQueries(begin, every.expand_as(begin), len(every), backend)
        for number in whole:
            output, *keys = self._run(self._whole, number, everywhere, cos, sin, *inputs)
            self._first_keys.append((keys[0], keys[1]))
            inputs = (output,)
        self._diagonals: list[Pairs] = [[] for _ in self._layers]
        self._steps = 0
        self._first: tuple[Tensor, ...] = inputs  # what is left of step 0
        if active is None:
            self._lengths, self._positions, self.carried = lengths, position_ids, features
            return
        u = self._layers[-1].inputs(*inputs)  # [B, T, W]
        keys_values = self._layers[-1].self_attn.keys_values(u, cos, sin)
        self._first_keys.append(keys_values)
        self._first = gather_slots(u, active), gather_slots(inputs[-1], active)
        self._lengths = rope_lengths(draft.rotary, document_ids, active)  # [B, A]
        self._positions = position_ids.gather(1, active)  # [B, A]
        self.carried = gather_slots(features, active)

    def _run(self, part: Any, *arguments: Any) -> Any:
        """Call a part of the computation, with `gradient_checkpointing` if the draft has it on."""
        recompute = getattr(self.draft.options, "gradient_checkpointing", False)
        return run_layer(part, *arguments, recompute=recompute)

    def _whole(
        self, number: int, queries: StepQueries, cos: Tensor, sin: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run a layer in step 0 at every slot; return its output [B, T, H], keys and values."""
        keys: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.extend((k, v))
            return queries.attend(q, k, v, [], self.draft.scale, self._windows[number])

        return self._layers[number](*inputs, cos, sin, attend), *keys

    def advance(self, token_ids: Tensor) -> Tensor:
        """Run the next step on its known tokens, int64 [B, A].

        Step 0 ignores them: it reads the `input_ids` of the constructor.

        Returns:
            The carried states [B, A, H], for the head and for the next step.
        """
        positions = self._positions + self._steps
        if self._steps == 0 and len(self._first) == 1:  # every slot is active
            self.carried = self.draft.feedback(self._first[0])
        else:
            cos, sin = self.draft.rotary(positions, self._lengths, self.carried.dtype)
            if self._steps == 0:
                self.carried = self._run(self._first_step, cos, sin, *self._first)
            else:
                arguments = token_ids, self.carried, cos, sin, self._diagonals
                self.carried, self._diagonals = self._run(self._later_step, *arguments)
        self._first = ()
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
        token_ids: Tensor,  # known tokens, int64 [B, A]
        carried: Tensor,  # states before the step [B, A, H]
        cos: Tensor,  # [B, A, r]
        sin: Tensor,  # [B, A, r]
        diagonals: list[Pairs],  # per layer, keys and values of steps 1 to this one, without it
    ) -> tuple[Tensor, list[Pairs]]:
        """Return the carried states [B, A, H] after a step, and the later keys with its own."""
        inputs = self.draft.layer_inputs(token_ids, carried)
        longer = []
        for number, layer in enumerate(self._layers):
            u = layer.inputs(*inputs)
            longer.append([*diagonals[number], layer.self_attn.keys_values(u, cos, sin)])
            inputs = (self._attended(number, u, inputs[-1], (cos, sin), longer[-1]),)
        return self.draft.feedback(inputs[0]), longer
