"""Drafting with blocks as serving does: one forward pass per round, then tokens left to right.

In: verified tokens and the target's states. Out: drafted tokens. The keys and values of a position
are computed once, when the target has verified it, and are never removed. A round always computes
the whole block, also if fewer drafts are wanted: the slots of a block see each other, and a draft
must not depend on how many are asked for.

B packs, T tokens, S slots of a block, D drafts of a block, H hidden size, V / Vd target / draft
vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_train.attention.plain import attend_block
from spec_train.data.batch import DraftBatch
from spec_train.drafts.counted import NOT_DRAFTED, CountedDrafts, empty_chains
from spec_train.drafts.draft_caches import DraftCache
from spec_train.drafts.dspark.blocks import Blocks, batch_context, block_states
from spec_train.drafts.dspark.model import DSparkModel
from spec_train.drafts.protocol import Ask
from spec_train.drafts.together import Draws, NewRows, real_slots, stacked
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import wide
from spec_train.losses.sampling import Sampler

_CHUNK_ELEMENTS = 1 << 24  # mask entries, or logits, in memory at a time


class BlockWalk:
    """Drafts the tokens of one or more blocks left to right, each from the token before it."""

    def __init__(self, draft: DSparkModel, head: TargetHead, states: Tensor) -> None:
        """Start at the anchors, with the states y [..., D, H] of their blocks."""
        self._draft, self._rows, self._states = draft, draft.head_rows(head), states
        self._markov: Tensor | None = None  # state [..., r] of an "rnn" Markov head
        self._depth = 0

    def advance(self, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits [..., Vd] of the next draft, and its confidence [...].

        `previous` int64 [...] is the token before it. The confidence is None without a confidence
        head.
        """
        draft, y = self._draft, self._states[..., self._depth, :]  # [..., H]
        e = draft.previous(previous)
        logits = wide(F.linear(y.to(self._rows.dtype), self._rows))
        if draft.markov_head is not None and e is not None:
            g, self._markov = draft.markov_head.step(e, y, self._markov)
            logits = logits + draft.markov_head.markov_w2(g)
        confidence = None
        if draft.confidence_head is not None:
            confidence = draft.confidence_head(y, e).float().sigmoid()
        self._depth += 1
        return logits, confidence


class BlockDrafter:
    """A `protocol.Drafter`: one forward pass of the draft per round, up to D drafted tokens."""

    def __init__(self, draft: DSparkModel, head: TargetHead, threshold: float) -> None:
        """Start a sequence. A block ends before its first draft with a confidence < `threshold`."""
        self.passes = 0
        self._draft, self._head, self._threshold = draft, head, threshold
        self._caches = [DraftCache() for _ in draft.layers]
        self._verified = 0  # verified positions in the caches

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> tuple[Tensor, list[Any]]:
        """Append verified positions and draft a block after them: ids int64 [n], n <= count.

        See protocol.Drafter.propose; `states` are the aux states [1, t, n*H].
        """
        draft, config, device = self._draft, self._draft.config, states.device
        context = self._append(tokens, states)
        # The last known token is one position after the last verified state: it is the anchor.
        block = torch.full((1, config.block_size), config.mask_token_id, device=device)
        block[0, 0] = tokens[-1]
        places = self._verified + torch.arange(config.block_size, device=device)[None]
        attends = draft.per_layer(lambda window: partial(attend_block, window=window))
        y = draft.forward_blocks(block, places, context, attends)
        self.passes += 1
        walk = BlockWalk(draft, self._head, y[0, config.first :])
        token, drafted, distributions = block[0, 0], [], []
        for _ in range(min(count, config.depth)):
            logits, confidence = walk.advance(token)
            # The decision depends on earlier tokens only, not on the draw: sampling stays lossless.
            if self._ends(confidence):
                break
            token, q = sampler.draft(logits, draft.draft_ids, config.vocab_size)
            drafted.append(token)
            distributions.append(q)
        ids = torch.stack(drafted) if drafted else block.new_empty(0)  # 0: the first one is unsure
        return ids, distributions

    @staticmethod
    def propose_together(
        drafters: Sequence["BlockDrafter"], asks: Sequence[Ask]
    ) -> list[tuple[Tensor, list[Any]]]:
        """Answer several sequences (see `protocol.Drafter`): all blocks in one pass."""
        draft, head = drafters[0]._draft, drafters[0]._head
        _append_together(drafters, asks)
        caches = stacked([d._caches for d in drafters])
        anchors = [ask.tokens[-1] for ask in asks]
        block = torch.full((len(asks), draft.config.block_size), draft.config.mask_token_id)
        block[:, 0] = torch.tensor(anchors)
        block = block.to(asks[0].states.device)
        verified = torch.tensor([d._verified for d in drafters], device=block.device)
        every = torch.arange(block.shape[1], device=block.device)
        real = real_slots(verified + block.shape[1], caches[0].length + block.shape[1])
        attends = draft.per_layer(lambda window: partial(attend_block, window=window, real=real))
        context = [cache.rows for cache in caches]
        y = draft.forward_blocks(block, verified[:, None] + every, context, attends)
        walk = BlockWalk(draft, head, y[:, draft.config.first :])
        draws = Draws(asks, draft.draft_ids, draft.config.vocab_size)
        going = [min(ask.count, draft.config.depth) for ask in asks]  # drafts still wanted
        while any(going):
            logits, confidence = walk.advance(draws.latest(block[:, 0]))  # [B, Vd], [B]
            for row, drafter in enumerate(drafters):
                if going[row] and drafter._ends(None if confidence is None else confidence[row]):
                    going[row] = 0
                elif going[row]:
                    draws.draw(row, logits[row])
                    going[row] -= 1
        for drafter in drafters:
            drafter.passes += 1
        return draws.found()

    def _append(self, tokens: Sequence[int], states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Append verified positions to the caches; return keys and values of all, per layer."""
        first, self._verified = self._verified, self._verified + len(tokens)
        positions = torch.arange(first, self._verified, device=states.device)[None]
        new = self._draft.context(states, positions)
        return [cache.append(*pair) for cache, pair in zip(self._caches, new, strict=True)]

    def _ends(self, confidence: Tensor | None) -> bool:
        """Whether the block ends before a draft of this confidence, [] or None."""
        return (
            confidence is not None and self._threshold > 0 and float(confidence) < self._threshold
        )


def _append_together(drafters: Sequence[BlockDrafter], asks: Sequence[Ask]) -> None:
    """Append the verified positions of several sequences: prompts alone, the others in one pass."""
    later = [(d, ask) for d, ask in zip(drafters, asks, strict=True) if d._verified]
    for drafter, ask in zip(drafters, asks, strict=True):
        if not drafter._verified:
            drafter._append(ask.tokens, ask.states)
    if not later:
        return
    new = NewRows.of([ask for _, ask in later], [d._verified for d, _ in later], 0)
    pairs = drafters[0]._draft.context(new.states, new.positions)
    for row, (drafter, ask) in enumerate(later):
        count = len(ask.tokens)
        for cache, (keys, values) in zip(drafter._caches, pairs, strict=True):
            cache.append(keys[row : row + 1, :, :count], values[row : row + 1, :, :count])
        drafter._verified += count


@torch.no_grad()
def block_chains(
    draft: DSparkModel,
    batch: DraftBatch,
    head: TargetHead,
    depth: int,
    threshold: float,
    counted: CountedDrafts | None = None,
) -> Tensor:
    """Draft greedily from every slot as `BlockDrafter` would: int64 [B, T, depth].

    See protocol.Draft.chains. Entries after the threshold has ended a block are `NOT_DRAFTED`, and
    with `counted` those of slots whose first draft does not count in any pack.
    """
    ids, documents, positions = batch.input_ids, batch.document_ids, batch.position_ids
    rows, length = ids.shape
    context = batch_context(draft, batch.aux(draft.config.layers), documents, positions)
    slots = torch.arange(length, device=ids.device)
    if counted is not None:
        slots = counted.slots.any(0).nonzero()[:, 0]
    # The anchor of slot t is its known token t+1. The last slot of a pack has none: any will do.
    anchors = (slots + 1).clamp(max=length - 1)
    size = draft.config.block_size
    per_block = max(draft.draft_ids.numel(), size * (length + 32 * size))
    width = max(1, min(32, _CHUNK_ELEMENTS // (rows * per_block)))
    chains = empty_chains(ids, depth)
    pairs = zip(anchors.split(width), slots.split(width), strict=True)
    for part, places in pairs if len(slots) else ():
        chosen = part.expand(rows, -1)  # [B, N], N <= width
        blocks = Blocks(chosen, torch.ones_like(chosen, dtype=torch.bool))
        y = block_states(draft, context, ids, documents, positions, blocks)  # [B, N, D, H]
        walk, token = BlockWalk(draft, head, y), ids.gather(1, chosen)
        alive, chain = torch.ones_like(token, dtype=torch.bool), []
        for _ in range(depth):
            logits, confidence = walk.advance(token)  # [B, N, Vd], [B, N]
            if threshold and confidence is not None:
                alive = alive & (confidence >= threshold)
            token = draft.draft_ids[logits.argmax(-1)]
            chain.append(torch.where(alive, token, NOT_DRAFTED))
        chains[:, places] = torch.stack(chain, dim=-1)
    return chains
