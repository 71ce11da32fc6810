"""Drafting with P-EAGLE: one forward for all tokens of a round.

The rows that the target has verified are kept in caches, one per layer. A round appends the newly
verified rows and, after the last of them, rows with the mask token: its row drafts the first token,
the mask rows the others. The mask rows leave the caches again; nothing that was drafted is ever fed
back, so a rejected token leaves no trace.

B rows, T slots, K depths, H hidden size, d head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.attention.masked import Attending
from spec_train.attention.masks import AttentionMask, causal_mask, parallel_mask
from spec_train.data.batch import DraftBatch
from spec_train.drafts.drafting import DraftCache
from spec_train.drafts.layers import Attend
from spec_train.drafts.peagle.model import PeagleModel
from spec_train.drafts.slots import document_lengths
from spec_train.sampling import Sampler

CHUNK_ROWS = 2048  # elements of a row that `serving_chains` runs at a time


class ParallelDrafter:
    """A `Drafter` (see protocol): one pass of the draft per round."""

    def __init__(self, draft: PeagleModel) -> None:
        """Start empty."""
        self.passes = 0
        self._draft = draft
        self._caches = draft.new_caches()
        self._rows = 0  # verified rows, which the caches hold

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> tuple[Tensor, list[Any]]:
        """Append verified rows and draft (see protocol.Drafter); at most the trained depth."""
        draft, device, new = self._draft, states.device, len(tokens)
        count = min(count, draft.options.depths)
        known = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]
        ids, carried = draft.element_inputs(known, draft.project(states), count - 1)
        positions = torch.arange(self._rows, self._rows + ids.shape[1], device=device)[None]
        out = draft.step(ids, carried, positions, self._caches)[0, new - 1 :]
        self._rows += new
        self.passes += 1
        for cache in self._caches:
            cache.crop(self._rows)
        vocab_size = draft.config.vocab_size
        pairs = [sampler.draft(row, draft.draft_ids, vocab_size) for row in draft.logits(out)]
        return torch.stack([token for token, _ in pairs]), [q for _, q in pairs]


@torch.no_grad()
def serving_chains(draft: PeagleModel, batch: DraftBatch, depth: int) -> Tensor:
    """Draft greedily from every slot as serving would.

    The rows of depth 0 are computed once, and their keys and values kept; the deeper ones follow
    for some anchors at a time, so that memory does not grow with slots x depths.

    Args:
        draft: the model.
        batch: documents in the token frame.
        depth: tokens per slot.

    Returns:
        Target ids, int64 [B, T, depth] (see protocol.Draft.chains).
    """
    known = shift_left(batch.input_ids, batch.document_ids)
    features = draft.project(batch.aux(draft.config.layers))
    lengths = document_lengths(batch.document_ids) if draft.rotary.limit is not None else None
    caches = draft.new_caches()
    attends = _attends(draft, causal_mask(batch.document_ids), caches)
    states = draft.states(known, features, batch.position_ids, lengths, attends)
    chains = _best(draft, states)[..., None]
    if depth > 1:
        slots = torch.arange(known.shape[1], device=known.device)
        size = max(1, CHUNK_ROWS // (depth - 1))
        parts = [_deeper(draft, batch, caches, part, depth) for part in slots.split(size)]
        chains = torch.cat([chains, torch.cat(parts, dim=1)], dim=-1)
    return draft.draft_ids[chains]


def _deeper(
    draft: PeagleModel,
    batch: DraftBatch,
    caches: Sequence[DraftCache],
    slots: Tensor,
    depth: int,
) -> Tensor:
    """Draft indices of depths 1 and deeper for the anchors `slots` [n]: int64 [B, n, depth - 1]."""
    rows, length = batch.document_ids.shape
    anchors = slots.repeat(depth - 1).expand(rows, -1)
    depths = torch.arange(1, depth, device=slots.device).repeat_interleave(len(slots))
    depths = depths.expand(rows, -1)
    every = torch.arange(length, device=slots.device).expand(rows, -1)
    mask = parallel_mask(
        torch.cat([batch.document_ids, batch.document_ids.gather(1, anchors)], dim=1),
        torch.cat([every, anchors], dim=1),
        torch.cat([torch.zeros_like(every), depths], dim=1),
    )
    lengths = None
    if draft.rotary.limit is not None:
        lengths = document_lengths(batch.document_ids).gather(1, anchors)
    tokens, carried = draft.unknown_inputs(rows, anchors.shape[1])
    attends = _attends(draft, _last_queries(mask, anchors.shape[1]), caches)
    positions = batch.position_ids.gather(1, anchors) + depths
    states = draft.states(tokens, carried, positions, lengths, attends)
    for cache in caches:
        cache.crop(length)
    return _best(draft, states).view(rows, depth - 1, len(slots)).transpose(1, 2)


def _attends(draft: PeagleModel, mask: AttentionMask, caches: Sequence[DraftCache]) -> list[Attend]:
    """Attention of new rows over a cache and themselves, for every layer's cache."""
    attending = Attending.prepare(mask, draft.config.head_dim, draft.attention_backend)

    def after(cache: DraftCache) -> Attend:
        return lambda q, k, v: attending(q, *cache.append(k, v), draft.scale)

    return [after(cache) for cache in caches]


def _last_queries(mask: AttentionMask, count: int) -> AttentionMask:
    """The mask of the last `count` queries alone."""
    first = mask.queries - count
    return AttentionMask(
        lambda row, query, key: mask.sees(row, query + first, key),
        mask.batch,
        count,
        mask.keys,
        mask.device,
    )


def _best(draft: PeagleModel, states: Tensor) -> Tensor:
    """Draft index of the largest logit, int64 [...], of states [..., H]."""
    parts = [draft.logits(part).argmax(-1) for part in states.flatten(0, -2).split(512)]
    return torch.cat(parts).view(states.shape[:-1])
