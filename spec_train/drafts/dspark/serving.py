"""Drafting with blocks as serving does: one forward per round, then tokens from left to right.

The context's keys and values of a position are made once, when the target has verified it, and are
never taken back. A round always runs the whole block, however few drafts are wanted: its slots see
one another, and drafts must not depend on how many were asked for.

B rows, T tokens, S slots of a block, D drafts of a block, H hidden size, V target vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_train.attention.plain import attend_all
from spec_train.data.batch import DraftBatch
from spec_train.drafts.drafting import DraftCache
from spec_train.drafts.dspark.blocks import Blocks, batch_context, block_states
from spec_train.drafts.dspark.model import DSparkModel
from spec_train.head import TargetHead
from spec_train.losses import wide
from spec_train.sampling import Sampler

NOT_DRAFTED = -1
"""In chains: the draft stopped before this depth."""
_CHUNK_ELEMENTS = 1 << 24  # mask entries, or logits, that exist at a time


class BlockWalk:
    """Drafts of one or more blocks, one after the other, each from the token before it."""

    def __init__(self, draft: DSparkModel, head: TargetHead, states: Tensor) -> None:
        """Begin at the anchors with states y [..., D, H] of their blocks."""
        self._draft, self._rows, self._states = draft, draft.head_rows(head), states
        self._markov: Tensor | None = None  # state of an rnn head
        self._depth = 0

    def advance(self, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [..., Vd] of the next draft and its confidence [...], given the token before it.

        `previous` int64 [...]; the confidence is None without a confidence head.
        """
        draft, y = self._draft, self._states[..., self._depth, :]
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
    """A `Drafter` (see protocol): one pass of the draft per round, up to D drafted tokens."""

    def __init__(self, draft: DSparkModel, head: TargetHead, threshold: float) -> None:
        """Start empty. A block ends before its first draft of a confidence below `threshold`."""
        self.passes = 0
        self._draft, self._head, self._threshold = draft, head, threshold
        self._caches = [DraftCache() for _ in draft.layers]
        self._verified = 0  # positions whose states are in the caches

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> tuple[Tensor, list[Any]]:
        """Append verified positions and draft a block after them (see protocol.Drafter)."""
        draft, config, device = self._draft, self._draft.config, states.device
        first, self._verified = self._verified, self._verified + len(tokens)
        positions = torch.arange(first, self._verified, device=device)[None]
        new = draft.context(states, positions)
        context = [cache.append(*pair) for cache, pair in zip(self._caches, new, strict=True)]
        # The last known token stands after the last verified state: it is the anchor.
        block = torch.full((1, config.block_size), config.mask_token_id, device=device)
        block[0, 0] = tokens[-1]
        places = self._verified + torch.arange(config.block_size, device=device)[None]
        y = draft.forward_blocks(block, places, context, attend_all)
        self.passes += 1
        walk = BlockWalk(draft, self._head, y[0, config.first :])
        token, drafted, distributions = block[0, 0], [], []
        for d in range(min(count, config.depth)):
            logits, confidence = walk.advance(token)
            # Decided before the draw, from what came before: sampling stays lossless.
            if d and self._ends(confidence):
                break
            token, q = sampler.draft(logits, draft.draft_ids, config.vocab_size)
            drafted.append(token)
            distributions.append(q)
        return torch.stack(drafted), distributions

    def _ends(self, confidence: Tensor | None) -> bool:
        """Whether a draft of that confidence is left out, and the block ends before it."""
        return (
            confidence is not None and self._threshold > 0 and float(confidence) < self._threshold
        )


@torch.no_grad()
def block_chains(
    draft: DSparkModel, batch: DraftBatch, head: TargetHead, depth: int, threshold: float
) -> Tensor:
    """Draft greedily from every slot as `BlockDrafter` would (see protocol.Draft.chains).

    Entries after the threshold has ended a block are `NOT_DRAFTED`: no target token.
    """
    ids, documents, positions = batch.input_ids, batch.document_ids, batch.position_ids
    rows, length = ids.shape
    context = batch_context(draft, batch.aux(draft.config.layers), documents, positions)
    # Slot t knows token t+1: that is its anchor. The last slot of a row has none, and any will do.
    anchors = torch.arange(1, length + 1, device=ids.device).clamp(max=length - 1)
    size = draft.config.block_size
    per_block = max(draft.draft_ids.numel(), size * (length + 32 * size))
    width = max(1, min(32, _CHUNK_ELEMENTS // (rows * per_block)))
    parts = []
    for part in anchors.split(width):
        chosen = part.expand(rows, -1)
        blocks = Blocks(chosen, torch.ones_like(chosen, dtype=torch.bool))
        y = block_states(draft, context, ids, documents, positions, blocks)
        walk, token = BlockWalk(draft, head, y), ids.gather(1, chosen)
        alive, chain = torch.ones_like(token, dtype=torch.bool), []
        for d in range(depth):
            logits, confidence = walk.advance(token)
            if d and threshold and confidence is not None:
                alive = alive & (confidence >= threshold)
            token = draft.draft_ids[logits.argmax(-1)]
            chain.append(torch.where(alive, token, NOT_DRAFTED))
        parts.append(torch.stack(chain, dim=-1))
    return torch.cat(parts, dim=1)
