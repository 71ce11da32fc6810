"""The EAGLE-3 loss (training-time test, arXiv 2503.01840) of plain tensors.

In: a `Frame` (see `frames`). Out: a `DraftLoss`. Slot t of the shifted frame holds the aux states
a_t, the known token x_{t+1}, the mask m_{t+1} and the teacher z_{t+1}, and drafts x_{t+2}. Unroll
step s looks s tokens further along the document, so step s of slot t has the teacher of slot t + s.
One teacher row therefore serves up to S chains, and is computed once.

Norm, head and loss run at supervised slots only, in chunks: memory grows with T + S x slots, never
with slots x vocabulary. The price: gradients of gradients do not exist.

A slot whose target's choice is outside the draft vocabulary trains nothing and is never a hit. Its
expected acceptance counts all the same: a sampled draft may be kept there.

B packs, T slots, N slots in the slot mask, S unroll steps, H hidden size, V / Vd target / draft
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.attention.plain import repeat_heads
from spec_train.attention.unrolled import StepQueries, active_slots, default_backend, narrowed_pairs
from spec_train.data.batch import DraftBatch
from spec_train.drafts.counted import CountedDrafts, first_slots, greedy_chains
from spec_train.drafts.eagle3.model import Eagle3Model
from spec_train.drafts.frames import Frame, ShiftedInputs, tensor_frame
from spec_train.drafts.layers import argmax_by_chunks, run_layer
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.slots import document_offsets, gather_slots, rope_lengths, step_masks
from spec_train.losses.menu import LossKind, RowStats, TeacherRows, head_loss, wide
from spec_train.losses.metrics import chain_sums

# -- unroll ----------------------------------------------------------------------------------------
# The EAGLE-3 unroll (arXiv 2503.01840): S steps of the layers over packs, in the shifted frame.
#
# In: aux states and known tokens. Out: the states of every step. Step 0 carries the projected
# features and makes a key at every slot. Step s carries the state of step s - 1 and adds one key
# per slot, which only that slot sees; a layer's window limits both. So queries, MLP and later keys
# are computed at the `active` slots only: those of which some step is used. A draft of several
# layers has such keys in each of them. The step-0 keys of a layer need the output of the layer
# before it at every slot, so only the last layer is limited to the active slots in step 0.
#
# B packs, T slots, A active slots, S unroll steps, n captured layers, H hidden size, W width of a
# layer's attention input (2H in the first layer, H in the others), h / g query / key-value heads, d
# head size.


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


# -- loss ------------------------------------------------------------------------------------------


def eagle3_loss(
    draft: Eagle3Model,
    *,
    steps: int = 7,
    decay: float = 0.8,
    kind: str | LossKind = "ce",
    position_weights: Sequence[float] | None = None,
    counts: Tensor | None = None,
    **inputs: Any,
) -> DraftLoss:
    """Compute the EAGLE-3 loss of plain tensors in the shifted frame.

    Args:
        draft: the weights, as `Eagle3Draft.from_pretrained` reads them.
        steps: S.
        decay: step s has weight decay ** s, normalised over the S steps.
        kind: a name of `losses.KINDS`, or a `LossKind` with its target and numbers.
        position_weights: weights of the S steps instead of powers of `decay`.
        counts: denominators [S] over the whole optimizer step; None: those of this batch.
        **inputs: the fields of `frames.ShiftedInputs`, with their shapes there:
            aux_hidden_states and input_ids; loss_mask (with slots) or slot_mask; one teacher:
            logits, or final_hidden with head, or target_probs with position_mask (and target_mass
            if the draft vocabulary is reduced); and optionally target_argmax, target_logsumexp,
            document_ids, position_ids, attention_mask.

    Raises:
        DraftError: not exactly one teacher or one mask, an unknown `slots` or `kind`, or inputs of
            the other frame.
        TypeError: an input is unknown or missing.
    """
    kind = kind if isinstance(kind, LossKind) else LossKind(name=kind)
    frame = tensor_frame(draft, ShiftedInputs(**inputs))
    shares = step_shares(steps, decay, position_weights)
    return unrolled_loss(draft, frame, shares=shares, kind=kind, counts=counts)


def step_shares(steps: int, decay: float, weights: Sequence[float] | None = None) -> Tensor:
    """Return the normalised weights of the steps, float64 [S]: powers of `decay`, or `weights`."""
    share = decay ** torch.arange(steps, dtype=torch.float64)
    if weights is not None:
        share = torch.tensor(weights, dtype=torch.float64)
    return share / share.sum()


@dataclass(frozen=True)
class Teachers:
    """The N slots of the slot mask; those with a choice in the draft vocabulary train the draft."""

    rows: Tensor  # flat slots, int64 [N]
    choice: Tensor  # the target's choice as a draft index, -1 outside, int64 [N]
    valid: Tensor  # bool [N, S]: the document has a slot rows - s, whose step s it teaches
    trained: Tensor  # bool [N, S]: valid, and the choice is in the draft vocabulary

    @classmethod
    def select(cls, rows: Tensor, choice: Tensor, document_ids: Tensor, steps: int) -> "Teachers":
        """Make them from `rows` and `choice` of a `Frame`; `document_ids` is int64 [B, T]."""
        reach = document_offsets(document_ids).flatten()[rows]  # [N]: slots before it
        valid = reach[:, None] >= torch.arange(steps, device=rows.device)  # [N, S]
        return cls(rows, choice, valid, valid & (choice >= 0)[:, None])

    def counts(self) -> Tensor:
        """Return the number of supervised slots of every step, float64 [S]."""
        return self.trained.sum(0).double()


def unrolled_loss(
    draft: Eagle3Model,
    frame: Frame,
    *,
    shares: Tensor,
    kind: LossKind,
    counts: Tensor | None,
) -> DraftLoss:
    """Compute the loss of a frame; `shares` [S] of `step_shares`, the rest as for `eagle3_loss`."""
    steps = len(shares)
    drafted = step_masks(frame.mask, frame.document_ids, steps)  # [S, B, T]
    teachers = Teachers.select(frame.rows, frame.choice, frame.document_ids, steps)
    rows, own = teachers.rows, teachers.counts()
    counts = own if counts is None else counts.to(own)
    share = shares.to(rows.device, non_blocking=True)
    if rows.numel():
        hidden = _chain_states(draft, frame, teachers)  # [N, S, H]

        def teacher(part: slice) -> TeacherRows:
            found = frame.teacher(rows[part])
            return found.labelled(teachers.choice[part]) if kind.hard else found

        weights = teachers.trained * torch.where(counts > 0, share / counts, 0.0)  # [N, S]
        loss, stats = head_loss(
            draft.head_input(hidden),
            draft.lm_head.weight,
            teacher,
            weights.to(wide(hidden).dtype),
            kind,
        )
    else:
        loss = draft.zero_loss()
        empty = torch.zeros(0, steps, device=rows.device)
        stats = RowStats(empty, empty, empty.long())
    return DraftLoss(loss, _sums(stats, teachers, drafted, share))


def _chain_states(draft: Eagle3Model, frame: Frame, teachers: Teachers) -> Tensor:
    """Return states [N, S, H]: entry (n, s) is step s of the chain from slot rows[n] - s."""
    rows, valid = teachers.rows, teachers.valid
    steps = valid.shape[1]
    used = step_masks(frame.mask, frame.document_ids, steps).any(0)  # [B, T]: starts a chain
    active = active_slots(used)  # [B, A]
    unroll = Unroll(
        draft, frame.aux, frame.input_ids, frame.document_ids, frame.position_ids, active
    )
    # The row of every used slot in the flattened states [B*A, H].
    place = (used.cumsum(1) - 1).clamp_min(0)  # [B, T], in 0..A-1
    place = place + active.shape[1] * torch.arange(len(used), device=used.device)[:, None]
    known, states = frame.input_ids, []
    for _ in range(steps):
        states.append(unroll.advance(known.gather(1, active)).flatten(0, 1))  # [B*A, H]
        known = shift_left(known, frame.document_ids)  # [B, T]
    slots = rows[:, None] - torch.arange(
        steps, device=rows.device
    )  # [N, S]: flat, -1 or less: none
    index = torch.where(valid, place.flatten()[slots.clamp_min(0)], 0)  # [N, S], in 0..B*A-1
    return torch.stack([state[index[:, s]] for s, state in enumerate(states)], dim=1)


@torch.no_grad()
def _sums(stats: RowStats, teachers: Teachers, drafted: Tensor, share: Tensor) -> dict[str, Tensor]:
    """Return the additive metrics of a batch (see `metrics`).

    Args:
        stats: figures of the head, each [N, S].
        teachers: the N slots.
        drafted: slot masks of all steps, bool [S, B, T].
        share: normalised weights of the steps, float64 [S].
    """
    rows, valid, own = teachers.rows, teachers.valid, teachers.counts()
    hit = (stats.best == teachers.choice[:, None]) & valid  # [N, S]
    steps, slots = len(drafted), drafted[0].numel()
    # [N, S]: the slot that starts the chain; one more slot takes the rows that have none. Selecting
    # the others with a mask would make the host wait for their number.
    start = rows[:, None] - torch.arange(steps, device=rows.device)
    start = torch.where(valid, start, slots)
    hits = torch.zeros(steps, slots + 1, dtype=torch.bool, device=rows.device)
    hits = hits.scatter_(1, start.T, hit.T)[:, :slots]  # [S, B*T]
    return {
        "loss": (stats.loss.double() * teachers.trained).sum(0),
        "supervised": own,
        "weighted": own * share,
        "drafted": drafted.flatten(1).sum(1).double(),
        "hits": hit.sum(0).double(),
        "acceptance": (stats.acceptance.double() * valid).sum(0),
        **chain_sums(hits.view_as(drafted), drafted),
    }
