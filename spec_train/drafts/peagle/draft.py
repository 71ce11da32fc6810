"""P-EAGLE as the trainer and decoding see it: the draft's class, and drafting.

One forward pass drafts all tokens of a round. Caches, one per layer, keep the rows that the target
has verified. A round appends the newly verified rows and then rows with the mask token. The last
verified row drafts the first token, the mask rows draft the others. The mask rows are then removed
from the caches. Drafted tokens are never fed back, so a rejected token leaves no trace.

B packs, T slots, K depths, n anchors, H hidden size.
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
from spec_train.drafts.draft import DatasetFacts, DraftLoss
from spec_train.drafts.drafting import Drafter, KVCache, Proposal
from spec_train.drafts.frames import batch_frame, slot_mask_of, slots_of
from spec_train.drafts.layers import Attend, argmax_by_chunks
from spec_train.drafts.mask_token import settle_mask_token
from spec_train.drafts.peagle.loss import (
    SampleStore,
    Weighed,
    cod_sample,
    element_masks,
    parallel_loss,
)
from spec_train.drafts.peagle.model import PeagleConfig, PeagleModel
from spec_train.drafts.slots import (
    ScoredSlots,
    document_offsets,
    empty_chains,
    first_slots,
    gather_slots,
    rope_lengths,
)
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind
from spec_train.losses.metrics import summarise
from spec_train.losses.sampling import Sampler
from spec_train.options.draft_options import PeagleOptions

CHUNK_ROWS = 2048  # elements of a pack that `serving_chains` computes at a time


class ParallelDrafter(Drafter):
    """Drafts all tokens of a round with one forward pass."""

    def __init__(self, draft: PeagleModel) -> None:
        """Start a sequence."""
        self._draft = draft
        self._caches = draft.new_caches()
        self._rows = 0  # verified rows in the caches

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> Proposal:
        """Append verified rows and draft at most the trained depth: ids int64 [n], n <= count."""
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


@torch.no_grad()
def serving_chains(
    draft: PeagleModel, batch: DraftBatch, depth: int, scored: ScoredSlots | None = None
) -> Tensor:
    """Draft greedily from every slot as serving would.

    The rows of depth 0 are computed once, and the caches keep their keys and values. The deeper
    rows are computed for some anchors at a time, so that memory does not grow with slots x depths.

    Args:
        draft: the model.
        batch: documents in the token frame.
        depth: tokens per slot.
        scored: leave out most of the drafts that it does not score.

    Returns:
        Target ids, int64 [B, T, depth] (see `Draft.chains`).
    """
    known = shift_left(batch.input_ids, batch.document_ids)  # [B, T]
    features = draft.project(batch.aux(draft.config.layers))  # [B, T, H]
    lengths = rope_lengths(draft.rotary, batch.document_ids)  # [B, T]
    caches = draft.new_caches()
    attends = _attends(draft, partial(causal_mask, batch.document_ids), caches)
    states = draft.states(known, features, batch.position_ids, lengths, attends)
    active = first_slots(known, scored)  # [B, A]
    drafted = draft.draft_ids[argmax_by_chunks(draft.logits, gather_slots(states, active))]
    chains = empty_chains(known, depth)
    chains[..., 0].scatter_(1, active, drafted)
    if depth > 1:
        slots = torch.arange(known.shape[1], device=known.device)
        if scored is not None:  # all depths at once, so the first draft alone decides
            slots = active[scored.go_on(active, drafted)].unique()  # of any pack
        size = max(1, CHUNK_ROWS // (depth - 1))
        for part in slots.split(size) if len(slots) else ():
            chains[:, part, 1:] = draft.draft_ids[_deeper(draft, batch, caches, part, depth)]
    return chains


def _deeper(
    draft: PeagleModel,
    batch: DraftBatch,
    caches: Sequence[KVCache],
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
        return AttentionMask(mask.keys, mask.common, mask.ends[:, length:])  # the elements alone

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
    caches: Sequence[KVCache],
) -> list[Attend]:
    """Return every layer's attention: new rows over its cache and themselves.

    `mask_of` returns the mask of a layer with a window.
    """

    def after(cache: KVCache, attending: Attending) -> Attend:
        return lambda q, k, v: attending(q, *cache.append(k, v), draft.scale)

    layers = draft.attendings(mask_of)
    return [after(cache, attending) for cache, attending in zip(caches, layers, strict=True)]


class PeagleDraft(PeagleModel):
    """The draft that `spec-train fit peagle` trains."""

    def __init__(self, config: PeagleConfig, options: PeagleOptions | None = None) -> None:
        """Make a draft with random weights and the first Vd tokens as draft vocabulary."""
        super().__init__(config, options)
        self._samples = SampleStore()

    @classmethod
    def own_settings(cls, options: PeagleOptions, facts: DatasetFacts) -> dict[str, Any]:
        """Return the mask token (see Draft)."""
        return {"mask_token_id": settle_mask_token(options.mask_token_id, facts)}

    @property
    def depth(self) -> int:
        """Number of depths of its training."""
        return self.options.depths

    @property
    def max_depth(self) -> int | None:
        """The same: elements further from their anchor were never trained."""
        return self.options.depths

    def drafter(self, head: TargetHead) -> ParallelDrafter:
        """Start drafting one sequence. The draft has its own head; `head` is not used."""
        return ParallelDrafter(self)

    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, scored_only: bool = False
    ) -> Tensor:
        """Draft greedily from every slot: int64 [B, T, depth]."""
        return serving_chains(self, batch, depth, ScoredSlots(batch) if scored_only else None)

    @torch.no_grad()
    def draw(self, batch: DraftBatch) -> Tensor:
        """Draw the elements of a batch, bool [B, K, T] (see `cod_sample`).

        Training draws from torch's default generator. Evaluation draws the same elements every
        time, by their index in the document, so that metrics depend neither on the packs nor on
        earlier draws.
        """
        options, ids = self.options, batch.document_ids
        mask = slot_mask_of(self, batch)
        deeper, exact = options.depths - 1, torch.float64
        if self.training:
            uniforms = torch.rand(
                deeper, *mask.shape, dtype=exact, device=ids.device
            )  # [K-1, B, T]
        else:
            fixed = torch.Generator().manual_seed(0)
            table = torch.rand(mask.shape[1], deeper, generator=fixed, dtype=exact)  # [T, K-1]
            uniforms = table.to(ids.device)[document_offsets(ids)].permute(2, 0, 1)  # [K-1, B, T]
        return cod_sample(mask, ids, uniforms, ratio=options.cod_ratio, floor=options.cod_floor)

    @property
    def _weighed(self) -> Weighed:
        """The loss and the weights of the depths that the options name."""
        return Weighed(LossKind.of(self.options), self.options.weights_of(self.options.depths))

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch, sample: Tensor | None = None) -> Tensor:
        """Return the number of elements with a loss, weighted by depth, float64 [1].

        If no `sample` bool [B, K, T] is given, draw one and keep it for the loss of the batch.
        """
        if sample is None:
            sample = self.draw(batch)
            self._samples.keep(_key(batch), sample)
        supervised = element_masks(*slots_of(self, batch), batch.document_ids, sample)[1]
        return self._weighed.total(supervised)[None]

    def loss(
        self,
        batch: DraftBatch,
        head: TargetHead,
        counts: Tensor | None,
        sample: Tensor | None = None,
    ) -> DraftLoss:
        """Return the loss of a batch over `counts`, the slot counts of the whole optimizer step.

        `sample` bool [B, K, T] is, if absent, the one that `slot_counts` drew for the batch; if
        there is none, it is drawn now.
        """
        if sample is None:
            sample = self._samples.take(_key(batch))
        if sample is None:
            sample = self.draw(batch)
        frame, segments = batch_frame(self, batch, head), self.options.segments
        return parallel_loss(
            self, frame, sample=sample, segments=segments, weighed=self._weighed, count=counts
        )

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Turn added sums into metrics; a depth's weight is its share of the weighted elements."""
        weighted = sums.get("weighted", sums["supervised"])
        least = 1 if "weighted" not in sums else 1e-30
        share = weighted / weighted.sum().clamp_min(least)
        return summarise(sums | {"weighted": sums["supervised"] * share})


def _key(batch: DraftBatch) -> tuple[object, ...]:
    """Return what identifies a batch within its step, with or without its states."""
    return (tuple(map(tuple, batch.rows)), tuple(batch.document_ids.shape))
