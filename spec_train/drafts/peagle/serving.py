"""Drafting with P-EAGLE (arXiv 2602.01469): one forward pass for all tokens of a round.

In: verified tokens and the target's states. Out: drafted tokens. Caches, one per layer, keep the
rows that the target has verified. A round appends the newly verified rows and then rows with the
mask token. The last verified row drafts the first token, the mask rows draft the others. The mask
rows are then removed from the caches. Drafted tokens are never fed back, so a rejected token leaves
no trace.

B packs, T slots, n anchors, H hidden size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.attention.masked import Attending
from spec_train.attention.masks import AttentionMask, causal_mask, parallel_mask
from spec_train.data.batch import DraftBatch
from spec_train.drafts.counted import CountedDrafts, empty_chains, first_slots
from spec_train.drafts.draft_caches import DraftCache
from spec_train.drafts.layers import Attend, argmax_by_chunks
from spec_train.drafts.peagle.model import PeagleModel
from spec_train.drafts.protocol import Ask
from spec_train.drafts.slots import gather_slots, rope_lengths
from spec_train.drafts.together import Draws, NewRows, stacked, take
from spec_train.losses.sampling import Sampler

CHUNK_ROWS = 2048  # elements of a pack that `serving_chains` computes at a time


class ParallelDrafter:
    """A `protocol.Drafter`: one forward pass of the draft per round."""

    def __init__(self, draft: PeagleModel) -> None:
        """Start a sequence."""
        self.passes = 0
        self._draft = draft
        self._caches = draft.new_caches()
        self._rows = 0  # verified rows in the caches

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> tuple[Tensor, list[Any]]:
        """Append verified rows and draft at most the trained depth: ids int64 [n], n <= count.

        See protocol.Drafter.propose; `states` are the aux states [1, t, n*H].
        """
        draft, device, new = self._draft, states.device, len(tokens)
        count = min(count, draft.options.depths)
        known = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]  # [1, new]
        ids, carried = draft.element_inputs(known, draft.project(states), count - 1)
        positions = torch.arange(self._rows, self._rows + ids.shape[1], device=device)[None]
        # ids, positions: [1, new + count - 1]; the last `count` rows draft.
        out = draft.step(ids, carried, positions, self._caches)[0, new - 1 :]  # [count, H]
        self._rows += new
        self.passes += 1
        for cache in self._caches:
            cache.crop(self._rows)
        vocab_size = draft.config.vocab_size
        pairs = [sampler.draft(row, draft.draft_ids, vocab_size) for row in draft.logits(out)]
        return torch.stack([token for token, _ in pairs]), [q for _, q in pairs]

    @staticmethod
    def propose_together(
        drafters: Sequence["ParallelDrafter"], asks: Sequence[Ask]
    ) -> list[tuple[Tensor, list[Any]]]:
        """Answer several sequences (see `protocol.Drafter`) in one pass; prompts alone."""
        later = [row for row, drafter in enumerate(drafters) if drafter._rows]
        found = {}
        for row in set(range(len(drafters))) - set(later):
            ask = asks[row]
            found[row] = drafters[row].propose(ask.tokens, ask.states, ask.count, ask.sampler)
        if later:
            drafted = _rounds([drafters[row] for row in later], [asks[row] for row in later])
            found |= zip(later, drafted, strict=True)
        return [found[row] for row in range(len(drafters))]


def _rounds(
    drafters: Sequence[ParallelDrafter], asks: Sequence[Ask]
) -> list[tuple[Tensor, list[Any]]]:
    """Append the verified rows of B sequences and draft, in one pass.

    A sequence's rows are its t verified ones, padded to n, and then m rows with the mask token.
    """
    draft = drafters[0]._draft
    caches = stacked([d._caches for d in drafters])
    width = caches[0].length
    new = NewRows.of(asks, [d._rows for d in drafters], width)
    counts = [min(ask.count, draft.options.depths) for ask in asks]
    masks = max(counts) - 1
    device, size = new.ids.device, new.ids.shape[1]
    ids, carried = draft.element_inputs(new.ids, draft.project(new.states), masks)
    deeper = torch.arange(1, masks + 1, device=device).expand(len(asks), -1)  # [B, m]
    own = torch.tensor(counts, device=device)[:, None] - 1  # [B, 1]
    # a row that is not wanted repeats the last position that is (see NewRows)
    places = new.last(new.positions) + torch.minimum(deeper, own)
    positions = torch.cat([new.positions, places], dim=1)  # [B, n + m]
    out = draft.step(ids, carried, positions, caches, _seen(new, masks))
    rows = torch.cat([new.last(out), out[:, size:]], dim=1)  # [B, 1 + m, H]
    logits = draft.logits(rows)
    draws = Draws(asks, draft.draft_ids, draft.config.vocab_size)
    for row, (drafter, ask) in enumerate(zip(drafters, asks, strict=True)):
        for depth in range(counts[row]):
            draws.draw(row, logits[row, depth])
        taken = take(caches, row, width, drafter._rows, len(ask.tokens))
        for cache, pair in zip(drafter._caches, taken, strict=True):
            cache.keys, cache.values = pair
        drafter._rows += len(ask.tokens)
        drafter.passes += 1
    return draws.found()


def _seen(new: NewRows, masks: int) -> Tensor:
    """Return what new rows and m mask rows see, bool [B, 1, n + m, T + n + m]."""
    size, batch = new.ids.shape[1], len(new.ids)
    # a mask row sees what the last verified row of its sequence sees, and the mask rows before it
    above = new.last(new.seen[:, 0])  # [B, 1, T + n]
    old = torch.cat([new.seen[:, 0], above.expand(-1, masks, -1)], dim=1)  # [B, n + m, T + n]
    own = torch.zeros(size + masks, masks, dtype=torch.bool, device=old.device)
    own[size:] = torch.ones(masks, masks, dtype=torch.bool, device=old.device).tril()
    return torch.cat([old, own.expand(batch, -1, -1)], dim=-1)[:, None]


@torch.no_grad()
def serving_chains(
    draft: PeagleModel, batch: DraftBatch, depth: int, counted: CountedDrafts | None = None
) -> Tensor:
    """Draft greedily from every slot as serving would.

    The rows of depth 0 are computed once, and the caches keep their keys and values. The deeper
    rows are computed for some anchors at a time, so that memory does not grow with slots x depths.

    Args:
        draft: the model.
        batch: documents in the token frame.
        depth: tokens per slot.
        counted: leave out most of the drafts that it does not count.

    Returns:
        Target ids, int64 [B, T, depth] (see protocol.Draft.chains).
    """
    known = shift_left(batch.input_ids, batch.document_ids)  # [B, T]
    features = draft.project(batch.aux(draft.config.layers))  # [B, T, H]
    lengths = rope_lengths(draft.rotary, batch.document_ids)  # [B, T]
    caches = draft.new_caches()
    attends = _attends(draft, partial(causal_mask, batch.document_ids), caches)
    states = draft.states(known, features, batch.position_ids, lengths, attends)
    active = first_slots(known, counted)  # [B, A]
    drafted = draft.draft_ids[argmax_by_chunks(draft.logits, gather_slots(states, active))]
    chains = empty_chains(known, depth)
    chains[..., 0].scatter_(1, active, drafted)
    if depth > 1:
        slots = torch.arange(known.shape[1], device=known.device)
        if counted is not None:  # all depths at once, so the first draft alone decides
            slots = active[counted.kept(active, drafted)].unique()  # of any pack
        size = max(1, CHUNK_ROWS // (depth - 1))
        for part in slots.split(size) if len(slots) else ():
            chains[:, part, 1:] = draft.draft_ids[_deeper(draft, batch, caches, part, depth)]
    return chains


def _deeper(
    draft: PeagleModel,
    batch: DraftBatch,
    caches: Sequence[DraftCache],
    slots: Tensor,
    depth: int,
) -> Tensor:
    """Return draft indices of depths 1 to depth - 1, int64 [B, n, depth - 1].

    `slots` int64 [n] are the anchors. The caches hold the rows of depth 0, and do so again after.
    """
    packs, length = batch.document_ids.shape
    # The E = n * (depth - 1) elements of a pack, anchor by anchor.
    anchors = slots.repeat_interleave(depth - 1).expand(packs, -1)  # [B, E]
    depths = torch.arange(1, depth, device=slots.device).repeat(len(slots))
    depths = depths.expand(packs, -1)  # [B, E]
    every = torch.arange(length, device=slots.device).expand(packs, -1)  # [B, T]
    documents = torch.cat([batch.document_ids, batch.document_ids.gather(1, anchors)], dim=1)

    def mask_of(window: int | None) -> AttentionMask:
        mask = parallel_mask(  # T + E elements, those of depth 0 first
            documents,
            torch.cat([every, anchors], dim=1),
            torch.cat([torch.zeros_like(every), depths], dim=1),
            length,
            window,
        )
        return _last_queries(mask, anchors.shape[1])

    lengths = rope_lengths(draft.rotary, batch.document_ids, anchors)  # [B, E]
    tokens, carried = draft.unknown_inputs(packs, anchors.shape[1])  # [B, E], [B, E, H]
    attends = _attends(draft, mask_of, caches)
    positions = batch.position_ids.gather(1, anchors) + depths
    states = draft.states(tokens, carried, positions, lengths, attends)  # [B, E, H]
    for cache in caches:
        cache.crop(length)
    best = argmax_by_chunks(draft.logits, states)  # [B, E]
    return best.view(packs, len(slots), depth - 1)


def _attends(
    draft: PeagleModel,
    mask_of: Callable[[int | None], AttentionMask],
    caches: Sequence[DraftCache],
) -> list[Attend]:
    """Return every layer's attention: new rows over its cache and themselves.

    `mask_of` returns the mask of a layer with a window.
    """

    def after(cache: DraftCache, attending: Attending) -> Attend:
        return lambda q, k, v: attending(q, *cache.append(k, v), draft.scale)

    layers = draft.attendings(mask_of)
    return [after(cache, attending) for cache, attending in zip(caches, layers, strict=True)]


def _last_queries(mask: AttentionMask, count: int) -> AttentionMask:
    """Return the mask of the last `count` queries."""
    first = mask.queries - count
    return AttentionMask(
        lambda row, query, key: mask.sees(row, query + first, key),
        mask.batch,
        count,
        mask.keys,
        mask.device,
        lambda: mask.make_spans().of_queries(first),
    )
