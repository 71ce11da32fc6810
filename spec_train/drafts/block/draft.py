"""The backbone of block drafts, and DFlash, which is the backbone alone.

The states of a verified token become c = RMSNorm(fc(states)). Every layer projects c to keys and
values of that position, without an input norm; the layers do not change c. A block consists of the
last known token (the anchor) and mask tokens, at the anchor's position and the following ones. Its
slots see the context before the anchor, and each other in both directions; in a layer with a window
they see less (`BlockWindow`). With `sample_from_anchor`, slot k drafts the token after its
position. Without it, slots 1, 2, .. draft the tokens of their own positions.

Embedding and LM head are the target's, frozen. The head is in `TargetHead`; the draft has a copy of
some of its rows if the draft vocabulary is a selection. If the target scales, biases or caps its
logits, the draft leaves that out, as the engines do.

A second stage makes drafts of a block's logits. It is a module with a subclass of `BlockDraft`:

    make_stage    its weights
    walk_class    drafts tokens left to right (`Walk`): which tokens, with which logits
    rows_class    training (`StageRows`): what it adds to the logits, its loss, its metrics

Drafting: tokens are chosen left to right. The keys and values of a position are computed once, when
the target has verified it, and are never removed. A round always computes the whole block, also if
fewer drafts are wanted: the slots of a block see each other, and a draft must not depend on how
many are asked for.

Loss (`blocks` says which blocks and drafts count): with p the target's distribution renormalised
over the draft vocabulary, m the target's probability of that vocabulary, and q the softmax of the
logits with the stage's bias, the loss of a draft is

    ce_weight * cross-entropy + l1_weight * |q - p|_1 + the stage's weight * the stage's loss

That is --loss ce+l1. Any other loss of `losses`, as DSpark's default, replaces the cross-entropy
and the L1 term by one term of weight 1, between p (or a hard target) and q; both are measured all
the same. The acceptance c* = sum_v min(m p, q) is the probability that sampling with the target's
full distribution keeps the draft. It equals (1 + m - |q - m p|_1) / 2, which is 1 - |q - p|_1 / 2,
as published, only if m = 1. Each term is a mean over the drafts that count, weighted by exp(-d /
gamma), or by D-PACE (`blocks.pace_weights`), then over their number, as the speculators library
does. The cross-entropy is taken with the document's token, as published, with p, or with the
target's choice. The first term (the cross-entropy, or the other loss) has a denominator of its own,
because it may count at fewer drafts. If the draft vocabulary is a selection of the target's, a
draft whose target's choice is outside it is not trained and counts as a miss; its c* still counts
in tau and in the acceptance. A cross-entropy with a token outside the draft vocabulary is left out.

B packs, T tokens, N blocks of a pack, S slots of a block, D drafts of a block, R drafts that count,
Q slots of blocks, n captured layers, H hidden size, h / g query / key-value heads, d head size, r
Markov rank, V / Vd target / draft vocabulary.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_data.shards.batch import DraftBatch
from spec_data.shards.packing import shift_left
from spec_train.attention.fused import overwriting
from spec_train.attention.masked import Attending
from spec_train.attention.masks import BlockWindow, block_mask
from spec_train.attention.plain import attend_block
from spec_train.drafts.block.blocks import (
    Blocks,
    drafted_mask,
    expected_weights,
    pace_weights,
    sample_blocks,
    summarise_blocks,
)
from spec_train.drafts.block.config import BlockConfig
from spec_train.drafts.draft import DraftLoss, LayersDraft
from spec_train.drafts.drafting import Drafter, Proposal
from spec_train.drafts.frames import teacher_of
from spec_train.drafts.layers import (
    Attention,
    DecoderLayer,
    RMSNorm,
    Rotary,
    per_window,
    run_layer,
)
from spec_train.drafts.slots import (
    NOT_DRAFTED,
    ScoredSlots,
    empty_chains,
    rope_lengths,
)
from spec_train.drafts.teacher import SharedTeacher, Teacher
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import (
    LossKind,
    LowRank,
    RowStats,
    candidate_ids,
    distribution_loss,
    in_kernel,
    overwrite,
    rows_per_chunk,
    scored_rows,
    wide,
)
from spec_train.losses.metrics import Sums, chain_sums
from spec_train.losses.own import Asked, asked, asking, note_rows
from spec_train.losses.sampling import Sampler
from spec_train.losses.teacher_rows import SomeRows, TeacherRows
from spec_train.losses.tiles import dot, softmax_sums
from spec_train.options.draft_options import BlockOptions

log = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 1 << 24  # mask entries, or logits, in memory at a time

Pair = tuple[Tensor, Tensor]
"""Keys and values [B, g, T, d] of verified positions, in a layer."""

Context = Sequence[Pair | Callable[[], Pair]]
"""A pair per layer, or what makes it inside the layer."""

Before = Callable[[], tuple[Tensor, Tensor]]
"""Returns the context's states c [..., H] at the positions before the anchors, and where there are
any, bool [...]."""

Attend = Callable[..., Tensor]
"""Queries [B, h, Q, d], keys and values [B, g, T + Q, d], scale, `sinks` -> heads [B, h, Q, d]."""


# -- the second stage: none -----------------------------------------------------------------------


class Walk:
    """Drafts the tokens of one or more blocks left to right, each from the token before it.

    This is the walk without a second stage. A stage overrides `advance`.
    """

    def __init__(self, draft: Any, head: TargetHead, states: Tensor, before: Before) -> None:
        """Start at the anchors, with the states y [..., S, H] of all slots of their blocks.

        `before` makes what a stage may read of the context.
        """
        self.draft, self._rows = draft, draft.head_rows(head)
        self._states, self._depth = states[..., draft.config.first :, :], 0
        self._state: Tensor | None = None  # of a recurrent stage [..., r]

    def pick(self, paths: Tensor) -> None:
        """Go on with these of m blocks, perhaps with one several times: indices, int64 [m]."""
        self._states = self._states[paths]
        if self._state is not None:
            self._state = self._state[paths]

    def slot(self) -> tuple[Tensor, Tensor]:
        """Return the state y [..., H] of the next draft and the backbone's logits [..., Vd]."""
        y = self._states[..., self._depth, :]
        self._depth += 1
        return y, wide(F.linear(y.to(self._rows.dtype), self._rows))

    def advance(self, previous: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the next draft's logits [..., C], its C candidates, and its confidence [...].

        `previous` int64 [...] is the token before it. The candidates are target ids, int64
        [..., C]; None: the draft vocabulary. The confidence is None if nothing forecasts it.
        """
        return self.slot()[1], None, None


@dataclass(frozen=True)
class StageTerm:
    """What a second stage adds to the loss and the metrics of the R drafts that count."""

    losses: Tensor  # of every draft [R], with a graph unless there is a `total`
    weight: float  # of their weighted mean in the loss
    figures: RowStats  # of the drafts with the second stage
    sums: Sums  # of its own
    total: Tensor | None = None  # what they add to the loss, with a graph; None: they have one
    rows: Tensor | None = None  # their weights, float64 [R]; None: those of the drafts


class StageRows:
    """A second stage at the R drafts of a batch that count. Here: none."""

    candidates = 0  # how many of a slot's most probable tokens the stage chooses from; 0: all
    served: Tensor | None = None  # those tokens, int64 [R, K], if the stage knows them already
    share = 1.0  # of the loss of the logits with the bias; the rest is of those without it
    alone: tuple[Tensor, RowStats] | None = None  # that rest, and the figures without the bias

    def __init__(self, draft: Any, chosen: "TrainedRows") -> None:
        self.draft, self.chosen = draft, chosen

    def prepare(self, head: TargetHead, y: Tensor) -> None:
        """Compute what `term` needs of the blocks' states y [B, N, D, H]; not called if R is 0."""

    def bias(self, y: Tensor, shared: SharedTeacher) -> LowRank | None:
        """Return what is added to the logits, of the blocks' states y [B, N, D, H]."""
        return None

    def term(self, hidden: Tensor, head_rows: Tensor, figures: RowStats) -> StageTerm | None:
        """Return the loss of the stage, of the drafts' states [R, H]; None: it has none.

        `head_rows` are those of the target's head [Vd, H], and `figures` those of the logits.
        """
        return None


# -- the backbone ----------------------------------------------------------------------------------


class BlockDraft(LayersDraft):
    """The backbone: the draft is what its logits say, unless a second stage follows them.

    A kind with a second stage subclasses this with `make_stage`, `walk_class` and `rows_class`.
    """

    walk_class: ClassVar[type[Walk]] = Walk
    rows_class: ClassVar[type[StageRows]] = StageRows
    stage_term: ClassVar[str] = "confidence_bce"
    """Name of the loss of the second stage in the metrics; without a stage, a figure of none."""
    confidence_threshold: float = 0.0  # see `stop_below`

    def __init__(self, config: BlockConfig, options: BlockOptions | None = None) -> None:
        super().__init__(config, options)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.layers) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        layers = [self.make_layer() for _ in range(config.num_hidden_layers)]
        self.layers: Any = nn.ModuleList(layers)
        self.norm = RMSNorm(size, eps)
        self.make_stage()
        self.lm_head: nn.Linear | None = None
        if not self.full_vocabulary:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
            self.lm_head.weight.requires_grad_(False)
        self.rotary = Rotary(config)
        self.make_vocabulary()

    def make_layer(self) -> nn.Module:
        """Return a layer of the backbone."""
        return DecoderLayer(self.config)

    def make_stage(self) -> None:
        """Make the modules of the second stage, under their names in the checkpoint."""

    def head_rows(self, head: TargetHead) -> Tensor:
        """Return the frozen head rows [Vd, H] that map states to logits; `head` is the target's."""
        return head.head_weight if self.lm_head is None else self.lm_head.weight

    # -- forward ----------------------------------------------------------------------------------

    def context(
        self, aux: Tensor, position_ids: Tensor, document_ids: Tensor | None = None
    ) -> list[Pair]:
        """Return keys and values of verified positions, one pair per layer; see `late_context`."""
        return [make() for make in self.late_context(aux, position_ids, document_ids)]

    def late_context(
        self, aux: Tensor, position_ids: Tensor, document_ids: Tensor | None = None
    ) -> list[Callable[[], Pair]]:
        """Return what makes the keys and values of verified positions, to call inside each layer.

        `aux` are their aux states [B, T, n*H]; the ids are int64 [B, T]. None: a row is one
        document.
        """
        c = self.hidden_norm(self.fc(self.cast(aux)))  # [B, T, H]
        lengths = None if document_ids is None else rope_lengths(self.rotary, document_ids)
        cos, sin = self.rotary(position_ids, lengths, c.dtype)
        return [partial(layer.self_attn.keys_values, c, cos, sin) for layer in self.layers]

    def before_anchors(self, aux: Tensor, document_ids: Tensor, anchors: Tensor) -> Before:
        """Return what makes c at the positions before anchors, int64 [B, N].

        `aux` are the aux states [B, T, n*H] of documents, int64 [B, T].
        """

        def made() -> tuple[Tensor, Tensor]:
            at = (anchors - 1).clamp_min(0)
            rows = aux.gather(1, at[..., None].expand(-1, -1, aux.shape[-1]))
            same = document_ids.gather(1, at) == document_ids.gather(1, anchors)
            return self.hidden_norm(self.fc(self.cast(rows))), same & (anchors > 0)

        return made

    @property
    def units(self) -> list[nn.Module]:
        return list(self.layers)

    def states_of_no_slot(self) -> Tensor:
        size, weight = self.config.block_size, self.fc.weight  # layers may need a whole block
        ids = torch.zeros(1, size, dtype=torch.long, device=weight.device)
        context = self.late_context(weight.new_zeros(1, 1, self.fc.in_features), ids[:, :1])
        attends = [partial(attend_block, window=None)] * len(self.layers)
        return self.forward_blocks(ids, ids, context, attends)

    def forward_blocks(
        self,
        token_ids: Tensor,  # of the slots, int64 [B, Q]
        position_ids: Tensor,  # of the slots, int64 [B, Q]
        context: Context,  # of T positions, as `context` or `late_context` returns it
        # per layer, the attention of the Q slots over the T context positions and then the Q slots
        attends: Sequence[Attend],
        # tokens of each slot's document, int64 [B, Q], or None (see `Rotary`)
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Return the states y [B, Q, H] of the slots of blocks, after the final norm."""
        x = self.embed(token_ids)  # [B, Q, H]
        cos, sin = self.rotary(position_ids, lengths, x.dtype)
        recompute = self.options.gradient_checkpointing
        for layer, pair, attend in zip(self.layers, context, attends, strict=True):
            attention = partial(_over_context, attend, pair, self.scale, layer.self_attn)
            x = run_layer(layer, x, cos, sin, attention, recompute=recompute)
        return self.norm(x)

    def block_states(
        self,
        context: Context,
        input_ids: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        blocks: Blocks,
    ) -> Tensor:
        """Return the states y [B, N, S, H] of the slots of blocks; those from `first` on draft.

        `context` is that of the T tokens; their ids are int64 [B, T], in the token frame.
        """
        config, anchors = self.config, blocks.anchors
        size = config.block_size
        ids = torch.full((*anchors.shape, size), config.mask_token_id, device=anchors.device)
        ids[..., 0] = input_ids.gather(1, anchors)
        steps = torch.arange(size, device=anchors.device)  # [S]
        positions = position_ids.gather(1, anchors)[..., None] + steps  # [B, N, S]
        lengths = rope_lengths(self.rotary, document_ids, anchors)  # [B, N]
        if lengths is not None:
            lengths = lengths.repeat_interleave(size, dim=1)  # [B, N*S]

        def attending(window: BlockWindow | None) -> Attending:
            mask = block_mask(document_ids, anchors, blocks.real, size, window)
            return Attending.prepare(mask, self.backend)

        attends = per_window(config.block_windows, attending)
        y = self.forward_blocks(ids.flatten(1), positions.flatten(1), context, attends, lengths)
        return y.unflatten(1, (anchors.shape[1], size))

    # -- drafting ---------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        return self.config.depth

    @property
    def max_depth(self) -> int | None:
        return self.depth

    def drafter(self, head: TargetHead) -> Drafter:
        return BlockDrafter(self, head, self.confidence_threshold)

    @torch.no_grad()
    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, scored_only: bool = False
    ) -> Tensor:
        """Draft from every slot as `BlockDrafter` would.

        Entries after the threshold has ended a block are `NOT_DRAFTED`, and with `scored_only`
        those of slots whose first draft is not scored in any pack.
        """
        ids, documents, positions = batch.input_ids, batch.document_ids, batch.position_ids
        rows, length = ids.shape
        aux = batch.aux(self.config.layers)
        context = self.context(aux, positions, documents)
        slots = torch.arange(length, device=ids.device)
        if scored_only:
            slots = ScoredSlots(batch).slots.any(0).nonzero()[:, 0]
        # The anchor of slot t is its known token t+1. The last slot of a pack has none: any will do
        anchors = (slots + 1).clamp(max=length - 1)
        size, threshold = self.config.block_size, self.confidence_threshold
        per_block = max(self.draft_ids.numel(), size * (length + 32 * size))
        width = max(1, min(32, _CHUNK_ELEMENTS // (rows * per_block)))
        chains = empty_chains(ids, depth)
        pairs = zip(anchors.split(width), slots.split(width), strict=True)
        for part, at in pairs if len(slots) else ():
            chosen = part.expand(rows, -1)  # [B, N], N <= width
            blocks = Blocks(chosen, torch.ones_like(chosen, dtype=torch.bool))
            y = self.block_states(context, ids, documents, positions, blocks)  # [B, N, S, H]
            walk = self.walk_class(self, head, y, self.before_anchors(aux, documents, chosen))
            token = ids.gather(1, chosen)
            alive, chain = torch.ones_like(token, dtype=torch.bool), []
            for _ in range(depth):
                logits, candidates, confidence = walk.advance(token)  # [B, N, C], .., [B, N]
                if threshold and confidence is not None:
                    alive = alive & (confidence >= threshold)
                best = logits.argmax(-1)
                if candidates is None:
                    token = self.draft_ids[best]
                else:
                    token = candidates.gather(-1, best[..., None])[..., 0]
                chain.append(torch.where(alive, token, NOT_DRAFTED))
            chains[:, at] = torch.stack(chain, dim=-1)
        return chains

    # -- training ---------------------------------------------------------------------------------

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Return the summed weights of the cross-entropy and of the other terms, float64 [2].

        They are the mean over the draw of the blocks (see `block.blocks`).
        """
        following = shift_left(batch.input_ids, batch.document_ids)
        weights, limit = draft_weights(self).to(following.device), self.options.num_anchors
        return torch.stack(
            [
                expected_weights(batch.loss_mask, batch.document_ids, inside, weights, limit)
                for inside in learnable(self, batch.target_argmax, following)
            ]
        )

    def batch_loss(
        self,
        batch: DraftBatch,
        head: TargetHead,
        counts: Tensor | None,
        blocks: Blocks | None = None,
    ) -> DraftLoss:
        """Return the loss of `blocks`; None: draw them. `counts` is float64 [2]."""
        if blocks is None:
            limit = self.options.num_anchors
            blocks = sample_blocks(batch.loss_mask, batch.document_ids, limit)
        aux, teacher = batch.aux(self.config.layers), teacher_of(self, batch, head, shift=0)
        return blocks_loss(self, batch, blocks, aux, teacher, head, counts)

    @classmethod
    def summarise(cls, sums: Sums) -> dict[str, float | None]:
        return summarise_blocks(sums, cls.stage_term)


def _over_context(
    attend: Attend,
    pair: Pair | Callable[[], Pair],
    scale: float,
    layer: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Attend over keys and values of the context [B, g, T, d], then those of the own slots."""
    k0, v0 = pair() if callable(pair) else pair
    # Under autocast, norms return float32 and projections bfloat16; kernels need one dtype.
    keys, values = torch.cat([k0, k], dim=2).to(v.dtype), torch.cat([v0, v], dim=2)
    return attend(q.to(v.dtype), keys, values, scale, sinks=layer.attention_sink_bias)


# -- drafting --------------------------------------------------------------------------------------


class BlockDrafter(Drafter):
    """Drafts up to D tokens with one forward pass.

    A block ends before its first draft with a confidence below `threshold`.
    """

    def __init__(self, draft: BlockDraft, head: TargetHead, threshold: float) -> None:
        self.draft, self._head, self.threshold = draft, head, threshold
        self._caches = draft.new_caches()
        self._verified = 0  # verified positions in the caches

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> Proposal:
        draft, config = self.draft, self.draft.config
        block, y = self._block(tokens, states)
        walk = draft.walk_class(draft, self._head, y[0], self._before(states[0, -1]))
        token, drafted, distributions = block[0, 0], [], []
        for _ in range(min(count, config.depth)):
            logits, candidates, confidence = walk.advance(token)
            # The decision depends on earlier tokens only, not on the draw: sampling stays lossless.
            if self.threshold and confidence is not None and confidence < self.threshold:
                break
            ids = draft.draft_ids if candidates is None else candidates
            token, q = sampler.draft(logits, ids, config.vocab_size)
            drafted.append(token)
            distributions.append(q)
        chain = torch.stack(drafted) if drafted else block.new_empty(0)  # 0: the first is unsure
        return chain, distributions

    def branches(self, tokens: Sequence[int], states: Tensor) -> Walk:
        """Append verified positions and start to grow a tree after the last known token."""
        _, y = self._block(tokens, states)
        return self.draft.walk_class(self.draft, self._head, y, self._before(states[:, -1]))

    def _block(self, tokens: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Append verified positions; return the next block int64 [1, S], its states [1, S, H]."""
        draft, config, device = self.draft, self.draft.config, states.device
        positions = torch.arange(self._verified, self._verified + len(tokens), device=device)[None]
        new = draft.context(states, positions)
        context = [cache.append(*pair) for cache, pair in zip(self._caches, new, strict=True)]
        self._verified += len(tokens)
        # The last known token is one position after the last verified state: it is the anchor.
        block = torch.full((1, config.block_size), config.mask_token_id, device=device)
        block[0, 0] = tokens[-1]
        positions = self._verified + torch.arange(config.block_size, device=device)[None]
        attends = per_window(config.block_windows, lambda w: partial(attend_block, window=w))
        y = draft.forward_blocks(block, positions, context, attends)
        self.passes += 1
        return block, y

    def _before(self, last: Tensor) -> Before:
        """Return what makes c before the anchor, of the target's states there [..., A]."""
        draft = self.draft
        there = torch.ones(last.shape[:-1], dtype=torch.bool, device=last.device)
        return lambda: (draft.hidden_norm(draft.fc(draft.cast(last))), there)


# -- loss ------------------------------------------------------------------------------------------


def draft_weights(draft: BlockDraft) -> Tensor:
    """Return exp(-d / gamma), or the options' `position_weights`, float64 [D]; D-PACE: ones."""
    device, depth = draft.fc.weight.device, draft.config.depth
    if draft.options.smoothing is not None:  # the default of some: without a copy to the device
        return torch.ones(depth, dtype=torch.float64, device=device)
    given = draft.options.weights_of(depth)
    if given is not None:
        return torch.tensor(given, dtype=torch.float64, device=device)
    steps = torch.arange(depth, dtype=torch.float64, device=device)
    return torch.exp(-steps / draft.options.loss_decay_gamma)


def learnable(draft: BlockDraft, target_argmax: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the first term and where the others can be learned, bool [B, T] each.

    The arguments are the target's choice and the document's token after every token, int64 [B, T].
    """
    inside = draft.draft_index[target_argmax] >= 0
    if draft.options.compared_with != "tokens":
        return inside, inside
    return inside & (draft.draft_index[following] >= 0), inside


@dataclass(frozen=True)
class TrainedRows:
    """The R drafts of a batch that count, sorted by their teacher's slot."""

    drafted: Tensor  # bool [B, N, D]: the draft counts
    rows: Tensor  # flat index in [B, N, D], int64 [R]
    slot: Tensor  # flat slot of the teacher, ascending, int64 [R]; overlapping blocks share slots
    weight: Tensor  # exp(-d / gamma), float64 [R]; 0 where the choice is outside: not trained
    choice: Tensor  # the target's choice as a draft index, -1 outside, int64 [R]
    has_token: Tensor  # bool [R]: the first term of the loss counts
    token: Tensor  # the document's token as a draft index, int64 [R]; 0 where it is outside
    has_own: Tensor  # bool [R]: the document's token is in the draft vocabulary
    previous: Tensor  # the token before every draft, int64 [B, N, D]
    counted: Tensor  # their weights in the denominators of the loss, float64 [R]
    before: Before | None = None  # of the anchors [B, N]
    states: Tensor | None = None  # y of all slots of the blocks [B, N, S, H]

    @classmethod
    def select(cls, draft: BlockDraft, batch: DraftBatch, blocks: Blocks) -> "TrainedRows":
        documents, ids = batch.document_ids, batch.input_ids
        depth, length = draft.config.depth, ids.shape[1]
        at = blocks.anchors[..., None].expand(-1, -1, depth)
        drafted = drafted_mask(batch.loss_mask, documents, depth).gather(1, at)  # [B, N, D]
        drafted = drafted & blocks.real[..., None]
        # A slot beyond the pack belongs to a draft that does not count: any slot will do for it.
        slots = blocks.slots(depth).clamp_max(length - 1)  # [B, N, D], a + d
        following = shift_left(ids, documents)  # [B, T]
        with_token, inside = learnable(draft, batch.target_argmax, following)
        first = length * torch.arange(len(slots), device=slots.device)  # [B]: flat starts
        rows = drafted.flatten().nonzero().squeeze(1)  # [R], in block order
        slot, order = (slots + first[:, None, None]).flatten()[rows].sort(stable=True)  # [R] each
        rows = rows[order]
        weight = draft_weights(draft).to(rows.device)[rows % depth] * inside.flatten()[slot]
        token = draft.draft_index[following.flatten()[slot]]  # [R]
        return cls(
            drafted=drafted,
            rows=rows,
            slot=slot,
            weight=weight,
            counted=weight,
            choice=draft.draft_index[batch.target_argmax.flatten()[slot]],
            has_token=with_token.flatten()[slot],
            token=token.clamp_min(0),
            has_own=token >= 0,
            previous=ids.gather(1, slots.flatten(1)).view_as(slots),
        )

    def token_before(self, slots: Tensor) -> Tensor:
        """Return the token before the drafts of flat slots, int64 [M]; each is a slot of a row."""
        first = torch.searchsorted(self.slot, slots)  # a row of every slot
        return self.previous.flatten()[self.rows[first]]

    def totals(self) -> Tensor:
        """Return the summed weights of the first term and of the other terms, float64 [2]."""
        return torch.stack([(self.counted * self.has_token).sum(), self.counted.sum()])

    def paced(self, entropy: Tensor, smoothing: float) -> Tensor:
        """Return the weights of D-PACE by -log q of a token, [R] each."""
        trained = self.has_token & (self.counted > 0)
        weights = pace_weights(entropy, trained, self.drafted, self.rows, smoothing)
        return weights * (self.counted > 0)


@torch.no_grad()
def _sums(
    figures: RowStats,  # of the R drafts that count
    term: StageTerm | None,  # of the same; None without a second stage that has a loss
    chosen: TrainedRows,
    weights: Tensor,  # of draft d, float64 [D]
    options: Any,  # with the weights of the first two terms in the loss
    share: float,  # of these two, see `StageRows`
) -> Sums:
    assert figures.overlap is not None and figures.cross_entropy is not None
    depth, rows, drafted = len(weights), chosen.rows, chosen.drafted
    d = rows % depth  # [R], depth of each draft
    w = chosen.weight  # [R]
    hit = figures.best == chosen.choice  # [R]
    acceptance, overlap = figures.acceptance.double(), figures.overlap.double()
    cross_entropy = figures.cross_entropy.double()
    third = torch.zeros_like(acceptance) if term is None else term.losses.double()
    stage_weights = torch.zeros_like(w) if term is None else w if term.rows is None else term.rows
    third = third * stage_weights
    ce_weights = w * chosen.has_token
    counted = chosen.counted
    third_weight = counted.sum() if term is not None else w.new_zeros(())
    mixed = options.mixed and asked().loss_fn is None
    measured = (options.ce_weight, options.l1_weight) if mixed else (0.0, 0.0)
    alphas = *(share * x for x in measured), 0.0 if term is None else term.weight
    terms = [(ce_weights * cross_entropy).sum(), (w * 2 * (1 - overlap)).sum(), third.sum()]
    term_weights = torch.stack([*chosen.totals(), third_weight])  # [3]
    hits, shares = (torch.zeros_like(drafted, dtype=kind) for kind in (torch.bool, torch.float64))
    hits.view(-1)[rows] = hit  # [B, N, D]
    shares.view(-1)[rows] = acceptance  # [B, N, D]; 0 where no draft counts
    expected = 1 + torch.cumprod(shares, dim=-1).sum(-1)  # [B, N]
    live = drafted.any(-1)  # [B, N]

    def by_depth(values: Tensor) -> Tensor:
        """Sum values [R] by the depth of their draft: [D]."""
        return torch.zeros_like(weights).index_add_(0, d, values.double())

    supervised = by_depth(chosen.choice >= 0)
    sums = {
        "loss": by_depth(cross_entropy * chosen.has_token),
        "supervised": supervised,
        "weighted": supervised * weights,
        "acceptance": by_depth(acceptance),
        "terms": torch.stack(terms),
        "term_weights": term_weights,
        "part_weights": torch.stack([ce_weights.sum(), w.sum(), stage_weights.sum()]),
        "term_shares": torch.stack([x * a for x, a in zip(term_weights, alphas, strict=True)]),
        "tau": (expected * live).sum(),
        "blocks": live.sum().double(),
        **chain_sums(hits.movedim(-1, 0), drafted.movedim(-1, 0)),
    }
    if not mixed:
        sums["kind"] = (ce_weights * figures.loss.double()).sum()
        sums["kind_weight"] = chosen.totals()[0]
        sums["kind_share"] = share * chosen.totals()[0]
    return sums if term is None else sums | term.sums


def blocks_loss(
    draft: BlockDraft,
    batch: DraftBatch,
    blocks: Blocks,
    aux: Tensor,
    teacher: Teacher,
    head: TargetHead,
    counts: Tensor | None,
) -> DraftLoss:
    """Compute the loss of blocks of a batch.

    `aux` are its aux states [B, T, n*H], `teacher` is one of its flat slots b * T + t, and `head`
    the target's. `counts` are the denominators [2], of the first term and of the other terms, over
    the whole optimizer step; None: those of these blocks.
    """
    chosen = TrainedRows.select(draft, batch, blocks)
    totals = chosen.totals()  # [2]
    counts = totals if counts is None else counts.to(totals)
    shares = torch.where(counts > 0, 1 / counts, 0.0)  # [2]
    if chosen.rows.numel():
        documents, positions = batch.document_ids, batch.position_ids
        context = draft.late_context(aux, positions, documents)
        y = draft.block_states(context, batch.input_ids, documents, positions, blocks)
        before = draft.before_anchors(aux, documents, blocks.anchors)
        chosen = replace(chosen, before=before, states=y)
        y = y[:, :, draft.config.first :]
        loss, figures, term, chosen = _rows_loss(draft, y, chosen, head, teacher, shares)
    else:
        loss, empty, stage = draft.zero_loss(), totals.new_zeros(0), draft.rows_class(draft, chosen)
        tops = chosen.rows.new_zeros(0, stage.candidates)
        figures = RowStats(empty, empty, chosen.rows, empty, empty, tops, tops.double())
        rows, weight = draft.head_rows(head), draft.fc.weight  # the head may have another dtype
        term = stage.term(weight.new_zeros(0, rows.shape[1]), rows, figures)
    weights = draft_weights(draft).to(totals.device)  # [D]
    share = draft.rows_class(draft, chosen).share
    return DraftLoss(loss, _sums(figures, term, chosen, weights, draft.options, share))


def _rows_loss(
    draft: BlockDraft,
    y: Tensor,  # states of the blocks [B, N, D, H]
    chosen: TrainedRows,  # the R drafts
    head: TargetHead,  # the target's
    teacher: Teacher,  # of flat slots
    shares: Tensor,  # one over the denominators, float64 [2]
) -> tuple[Tensor, RowStats, StageTerm | None, TrainedRows]:
    """Return the loss of the chosen drafts with a graph, their figures, their second stage, and the
    drafts with the weights that their loss has."""
    options, stage = draft.options, draft.rows_class(draft, chosen)
    stage.prepare(head, y)
    hidden = y.flatten(0, 2)[chosen.rows]  # [R, H]
    needed = options.loss == "kl" and options.compared_with == "soft"
    shared = SharedTeacher(teacher, chosen.slot, entropy=needed)
    head_rows = draft.head_rows(head)  # [Vd, H]
    label = {"tokens": chosen.token, "hard": chosen.choice.clamp_min(0), "soft": None}
    own = asked().loss_fn
    mixed, bias = options.mixed and own is None, stage.bias(y, shared)
    states = hidden.to(head_rows.dtype).view_as(hidden)  # the head's own, see the hook

    def terms() -> tuple[Tensor, Tensor]:
        """Return the weights of the two terms of the chosen drafts, [R] each."""
        first = chosen.weight * chosen.has_token * shares[0]
        second = options.l1_weight * chosen.weight * shares[1]
        return (options.ce_weight * first, second) if mixed else (first, 0 * second)

    def part(
        share: float,
        bias: LowRank | None,
        candidates: int | Tensor = 0,
        against: str = options.compared_with,
    ) -> tuple[Tensor, RowStats]:
        """Return a share of the loss of the logits with a bias."""
        first, second = terms()
        return block_rows_loss(
            states,
            head_rows,
            shared,
            label[against],
            share * first,
            share * second,
            bias,
            None if mixed or against != options.compared_with else LossKind.of(options),
            candidates=candidates,
            choice=chosen.choice.clamp_min(0),
        )

    def pace(entropy: Tensor | None) -> None:
        """Give the drafts their weights of D-PACE, which are 0 and 1 until then."""
        nonlocal chosen
        assert options.smoothing is not None and entropy is not None
        chosen = replace(chosen, weight=chosen.paced(entropy, options.smoothing))
        stage.chosen = chosen

    # D-PACE needs -log q of one token. The cross-entropy with a distribution holds its entropy,
    # too, by which a draft that equals the target would look unsure.
    soft = options.compared_with == "soft"
    paced = options.smoothing is not None
    before = paced and (soft or bias is not None or own is not None)
    if before:
        # a bias's gradients are sums over rows: a pass for the weights
        with torch.no_grad(), asking():
            judged = "tokens" if soft else options.compared_with
            entropy = part(1.0, bias, against=judged)[1].cross_entropy
            assert entropy is not None
            pace(entropy.masked_fill(~chosen.has_own, math.inf) if soft else entropy)
    candidates = stage.candidates if stage.served is None else stage.served
    loss, figures = part(stage.share, bias, candidates)
    if paced and not before:
        pace(figures.cross_entropy)
        assert figures.cross_entropy is not None and figures.overlap is not None
        first, second = terms()
        value = first * (figures.cross_entropy if mixed else figures.loss)
        value = value + second * 2 * (1 - figures.overlap)
        loss = loss + (value.sum().to(loss.dtype) - loss.detach())
        if states.requires_grad:  # the gradient of a row is so far that of the weight 1
            factor = chosen.weight.to(loss.dtype)[:, None]
            states.register_hook(lambda slope: (slope * factor).to(slope.dtype))
    if stage.share < 1:
        with asking(Asked(own)):  # the rows are noted once, with their bias
            stage.alone = part(1 - stage.share, None)
    term = stage.term(hidden, head_rows, figures)
    if term is None:
        return loss, figures, None, chosen
    total = term.total
    if total is None:
        rows = chosen.weight if term.rows is None else term.rows
        weight = term.weight * rows * shares[1]  # [R]
        total = (weight.to(term.losses.dtype) * term.losses).sum()
    return loss + total, term.figures, term, chosen


# -- the loss of rows ------------------------------------------------------------------------------
# N rows, n rows of a tile. The gradient is made by hand; W gets none.


def block_rows_loss(
    hidden: Tensor,  # y [N, H], in the dtype of `weight`
    weight: Tensor,  # rows of the target's head [Vd, H], frozen
    # returns the teacher of a slice of the rows; called once per chunk
    teacher: Callable[[slice], SomeRows],
    # draft index of the token that the cross-entropy, or a loss with a hard target, is taken with,
    # int64 [N]; None: with p. A row whose token is not in the draft vocabulary has an arbitrary
    # label and weight 0
    labels: Tensor | None,
    ce_weights: Tensor,  # weights of the cross-entropy [N]
    l1_weights: Tensor,  # weights of the L1 term [N]
    low_rank: LowRank | None = None,  # the Markov bias; None without a Markov head
    kind: LossKind | None = None,  # the loss instead of cross-entropy and L1; None: these two
    chunk_rows: int | None = None,  # rows of a chunk; None: `rows_per_chunk`
    # how many of a row's most probable tokens the figures have, or which, int64 [N, K]
    candidates: int | Tensor = 0,
    # draft index of the target's choice, int64 [N]: the label of a loss of one's own without labels
    choice: Tensor | None = None,
) -> tuple[Tensor, RowStats]:
    """Return the sum over rows of ce_weights * cross-entropy + l1_weights * L1.

    With a `kind`, return the sum over rows of ce_weights * that loss.

    Returns:
        The sum, a float32 (or float64) scalar with a graph, and the figures of every row.
    """
    dtype = wide(hidden[:0]).dtype
    ce_weights, l1_weights = ce_weights.to(dtype), l1_weights.to(dtype)

    own, differentiate = asked().loss_fn, torch.is_grad_enabled()
    known = choice if labels is None else labels

    def named(part: slice) -> SomeRows:
        rows = teacher(part)
        return rows if known is None else rows.labelled(known[part])

    def plain_logits(part: Tensor) -> Tensor:
        return F.linear(part.to(weight.dtype), weight)

    note_rows(hidden, plain_logits, named, ce_weights, None if low_rank is None else low_rank.at)

    def score(logits: Tensor, rows: SomeRows, part: slice) -> tuple[Tensor, ...]:
        labelled = None if labels is None else labels[part]
        weighing = ce_weights[part], l1_weights[part]
        bias = (None, None) if low_rank is None else low_rank.of(part)
        wanted = candidates[part] if isinstance(candidates, Tensor) else candidates
        if own is not None:
            taught = rows if known is None else rows.labelled(known[part])
            call = partial(own.of, weights=ce_weights[part], differentiate=differentiate)
            return _own_rows(call, logits, taught, labelled, ce_weights[part], wanted, *bias)
        found = in_kernel(logits, rows, labelled, weighing, kind, None, bias, wanted)
        return found or _weighted_rows(logits, rows, labelled, *weighing, kind, wanted, *bias)

    rows = chunk_rows or rows_per_chunk(len(weight), weight.device)
    return scored_rows(hidden, weight, teacher, score, rows, low_rank=low_rank)


def _own_rows(
    call: Callable[[Tensor, TeacherRows], tuple[Tensor, Tensor | None]],  # see `OwnLoss.of`
    logits: Tensor,
    given: SomeRows,
    labels: Tensor | None,
    weights: Tensor,
    candidates: int | Tensor,
    values: Tensor | None,
    value_of: Tensor | None,
) -> tuple[Tensor, ...]:
    """Serve `block_rows_loss` as a `Score` with a loss of one's own, as `_weighted_rows` does."""
    precise, rows = wide(logits), given.spread()
    if values is not None:
        precise = precise + (values if value_of is None else values[value_of])
    tops: tuple[Tensor, ...] = ()
    if isinstance(candidates, Tensor) or candidates:
        ids = candidate_ids(precise, candidates)  # [n, K]
        tops = ids, rows.full().gather(1, ids)
    zero = torch.zeros_like(weights)
    figures = _row_losses(precise.clone(), rows, labels, zero, zero)
    weighted, slope = call(precise, rows)
    loss = torch.where(weights != 0, weighted / weights, 0.0)
    logits.zero_() if slope is None else logits.copy_(slope)
    entropy, overlap, acceptance, best = figures
    return weighted, loss, acceptance, best, entropy, overlap, *tops


@overwriting(1)
def _weighted_rows(
    logits: Tensor,
    given: SomeRows,
    labels: Tensor | None,
    ce: Tensor,
    l1: Tensor,
    kind: LossKind | None,
    candidates: int | Tensor,
    values: Tensor | None = None,
    value_of: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Serve `block_rows_loss`, which has the arguments, as a `Score`; `values` as `LowRank.of`."""
    precise, rows = wide(logits), given.spread()
    if values is not None:
        precise += values if value_of is None else values[value_of]
    tops: tuple[Tensor, ...] = ()
    if isinstance(candidates, Tensor) or candidates:
        ids = candidate_ids(precise, candidates)  # [n, K]
        tops = ids, rows.full().gather(1, ids)
    if kind is None or kind.name in ("ce", "kl"):  # with a kind, `l1` is 0
        entropy, overlap, acceptance, best = _row_losses(precise, rows, labels, ce, l1)
        if precise is not logits:
            logits.copy_(precise)
        loss = entropy
        if kind is not None and kind.name == "kl" and labels is None:
            least = rows.with_entropy().entropy
            assert least is not None
            loss = entropy - least
        weighted = ce * loss + l1 * 2 * (1 - overlap)
        return weighted, loss, acceptance, best, entropy, overlap, *tops
    zero = torch.zeros_like(ce)
    entropy, overlap, acceptance, best = _row_losses(precise.clone(), rows, labels, zero, zero)
    rows = rows if labels is None else rows.labelled(labels)
    loss, _, slope, _ = distribution_loss(precise[:, None], rows, kind)  # [n, 1], ...
    overwrite(logits, slope[:, 0], ce[:, None])
    return ce * loss[:, 0], loss[:, 0], acceptance, best, entropy, overlap, *tops


def _row_losses(
    logits: Tensor,  # of the draft [n, Vd]; overwritten by d loss / d logits
    teacher: TeacherRows,
    labels: Tensor | None,  # int64 [n]; None: cross-entropy with `p`
    ce_weight: Tensor,  # [n]
    l1_weight: Tensor,  # [n]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return cross-entropy, overlap, acceptance and the draft's choice of n rows, [n] each."""
    p = teacher.p
    if labels is None:
        agreement = dot(p, logits)
    else:
        agreement = logits.gather(1, labels[:, None]).squeeze(1)
    q, total, best = softmax_sums(logits)  # [n, Vd], [n], [n]
    cross_entropy = total - agreement
    if teacher.rest is not None:
        whole, tail = teacher.completed(q[:, None])
        p, rest = whole.squeeze(1), teacher.rest
        if labels is None and tail is not None:
            cross_entropy = (1 - rest) * total - agreement - rest * tail.squeeze(1).log()
    slope = torch.sub(q, p, out=logits)
    overlap = 1 - slope.abs().sum(-1) / 2  # = sum_v min(p, q)
    overlap = overlap.clamp(0, 1)
    exact = teacher.mass is None and teacher.rest is None
    full = overlap if exact else torch.minimum(teacher.full(), q).sum(-1)
    slope.sign_()  # q (slope - sum of q slope) is d L1 / d logits
    level = ce_weight - l1_weight * dot(slope, q)
    slope.mul_(l1_weight[:, None]).add_(level[:, None]).mul_(q)
    if labels is None:
        slope.addcmul_(p, ce_weight[:, None], value=-1)
    else:
        slope.scatter_add_(1, labels[:, None], -ce_weight[:, None])
    return cross_entropy, overlap, full, best
