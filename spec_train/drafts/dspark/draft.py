"""DSpark and DFlash as the trainer and decoding see them: the drafts' classes, and drafting.

One forward pass drafts a block, then tokens are chosen left to right. The keys and values of a
position are computed once, when the target has verified it, and are never removed. A round always
computes the whole block, also if fewer drafts are wanted: the slots of a block see each other, and
a draft must not depend on how many are asked for.

B packs, T tokens, N blocks of a pack, S slots of a block, D drafts of a block, H hidden size,
V / Vd target / draft vocabulary.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.packing import shift_left
from spec_train.attention.plain import attend_block
from spec_train.data.batch import DraftBatch
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.draft import DatasetFacts, DraftLoss
from spec_train.drafts.drafting import Drafter, Proposal
from spec_train.drafts.dspark.loss import (
    Blocks,
    batch_block_frame,
    batch_context,
    block_states,
    blocks_loss,
    draft_weights,
    expected_weights,
    learnable,
    sample_blocks,
    summarise_blocks,
)
from spec_train.drafts.dspark.model import DFlashConfig, DSparkModel
from spec_train.drafts.mask_token import settle_mask_token
from spec_train.drafts.slots import NOT_DRAFTED, ScoredSlots, empty_chains
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import wide
from spec_train.losses.sampling import Sampler
from spec_train.options.draft_options import DFlashOptions

log = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 1 << 24  # mask entries, or logits, in memory at a time


class BlockTokens:
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


class BlockDrafter(Drafter):
    """Drafts up to D tokens with one forward pass."""

    def __init__(self, draft: DSparkModel, head: TargetHead, threshold: float) -> None:
        """Start a sequence. A block ends before its first draft with a confidence < `threshold`."""
        self._draft, self._head, self._threshold = draft, head, threshold
        self._caches = draft.new_caches()
        self._verified = 0  # verified positions in the caches

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> Proposal:
        """Append verified positions and draft a block after them: ids int64 [n], n <= count."""
        draft, config, device = self._draft, self._draft.config, states.device
        context = self._append(tokens, states)
        # The last known token is one position after the last verified state: it is the anchor.
        block = torch.full((1, config.block_size), config.mask_token_id, device=device)
        block[0, 0] = tokens[-1]
        places = self._verified + torch.arange(config.block_size, device=device)[None]
        attends = draft.per_layer(lambda window: partial(attend_block, window=window))
        y = draft.forward_blocks(block, places, context, attends)
        self.passes += 1
        tokens_of = BlockTokens(draft, self._head, y[0, config.first :])
        token, drafted, distributions = block[0, 0], [], []
        for _ in range(min(count, config.depth)):
            logits, confidence = tokens_of.advance(token)
            # The decision depends on earlier tokens only, not on the draw: sampling stays lossless.
            if self._ends(confidence):
                break
            token, q = sampler.draft(logits, draft.draft_ids, config.vocab_size)
            drafted.append(token)
            distributions.append(q)
        ids = torch.stack(drafted) if drafted else block.new_empty(0)  # 0: the first one is unsure
        return ids, distributions

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


@torch.no_grad()
def block_chains(
    draft: DSparkModel,
    batch: DraftBatch,
    head: TargetHead,
    depth: int,
    threshold: float,
    scored: ScoredSlots | None = None,
) -> Tensor:
    """Draft greedily from every slot as `BlockDrafter` would: int64 [B, T, depth].

    See `Draft.chains`. Entries after the threshold has ended a block are `NOT_DRAFTED`, and
    with `scored` those of slots whose first draft is not scored in any pack.
    """
    ids, documents, positions = batch.input_ids, batch.document_ids, batch.position_ids
    rows, length = ids.shape
    context = batch_context(draft, batch.aux(draft.config.layers), documents, positions)
    slots = torch.arange(length, device=ids.device)
    if scored is not None:
        slots = scored.slots.any(0).nonzero()[:, 0]
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
        tokens_of, token = BlockTokens(draft, head, y), ids.gather(1, chosen)
        alive, chain = torch.ones_like(token, dtype=torch.bool), []
        for _ in range(depth):
            logits, confidence = tokens_of.advance(token)  # [B, N, Vd], [B, N]
            if threshold and confidence is not None:
                alive = alive & (confidence >= threshold)
            token = draft.draft_ids[logits.argmax(-1)]
            chain.append(torch.where(alive, token, NOT_DRAFTED))
        chains[:, places] = torch.stack(chain, dim=-1)
    return chains


class DSparkDraft(DSparkModel):
    """The draft that `spec-train fit dspark` trains."""

    confidence_threshold: float = 0.0  # see `stop_below`

    @classmethod
    def own_settings(cls, options: Any, facts: DatasetFacts) -> dict[str, Any]:
        """Return the mask token (see Draft)."""
        return {"mask_token_id": settle_mask_token(options.mask_token_id, facts)}

    def stop_below(self, confidence: float) -> None:
        """End a drafted block before its first token of a lower confidence (see `Draft`)."""
        if self.confidence_head is None:
            super().stop_below(confidence)
        self.confidence_threshold = confidence

    @torch.no_grad()
    def adopt(self, head: TargetHead) -> None:
        """Share the target's embedding; copy the head rows of a reduced draft vocabulary."""
        if self.lm_head is not None:
            self._use_rows(head.head_weight[self.draft_ids])
        super().adopt(head)

    def share(self, head: TargetHead) -> None:
        """Share the target's embedding, and the head rows of a reduced draft vocabulary.

        Rows in a draft of another trainer that are not the target's are kept.
        """
        super().share(head)
        if self.lm_head is None:
            return
        rows, own = head.head_weight[self.draft_ids], self.lm_head.weight
        if torch.equal(rows.to(own), own):
            self._use_rows(rows)
        else:
            log.warning(
                "warning: the draft's lm_head is not made of the target's rows: it is kept, and "
                "not trained"
            )

    def _use_rows(self, rows: Tensor) -> None:
        """Use head rows [Vd, H] of the target, frozen."""
        assert self.lm_head is not None
        self.lm_head.weight = torch.nn.Parameter(rows, requires_grad=False)

    @property
    def depth(self) -> int:
        """Number of drafts of a block."""
        return self.config.depth

    @property
    def max_depth(self) -> int | None:
        """The same: a block has no more drafts."""
        return self.config.depth

    def drafter(self, head: TargetHead) -> BlockDrafter:
        """Start drafting one sequence with the target's head."""
        return BlockDrafter(self, head, self.confidence_threshold)

    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, scored_only: bool = False
    ) -> Tensor:
        """Draft greedily from every slot: int64 [B, T, depth]."""
        scored = ScoredSlots(batch) if scored_only else None
        return block_chains(self, batch, head, depth, self.confidence_threshold, scored)

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Return the summed weights of the cross-entropy and of the other terms, float64 [2].

        They are the mean over the draw of the blocks (see `dspark.loss`).
        """
        following = shift_left(batch.input_ids, batch.document_ids)
        weights = draft_weights(self).to(batch.input_ids.device)
        parts = [
            expected_weights(
                batch.loss_mask, batch.document_ids, inside, weights, self.options.num_anchors
            )
            for inside in learnable(self, batch.target_argmax, following)
        ]
        return torch.stack(parts)

    def loss(
        self,
        batch: DraftBatch,
        head: TargetHead,
        counts: Tensor | None,
        blocks: Blocks | None = None,
    ) -> DraftLoss:
        """Return the loss of a batch over `counts`, the slot counts of the whole optimizer step.

        `counts` is float64 [2], see `slot_counts`. `blocks` are the blocks to train; None: draw
        them with `sample_blocks`.
        """
        if blocks is None:
            limit = self.options.num_anchors
            blocks = sample_blocks(batch.loss_mask, batch.document_ids, limit)
        frame = batch_block_frame(self, batch, head, blocks)
        return blocks_loss(self, frame, head, counts)

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Turn added sums into metrics."""
        return summarise_blocks(sums)


class DFlashDraft(DSparkDraft):
    """The draft that `spec-train fit dflash` trains: DSpark without the two small heads."""

    name: ClassVar[str] = "dflash"
    options_class: ClassVar[type[Any]] = DFlashOptions
    config_class: ClassVar[type[DraftConfig]] = DFlashConfig
