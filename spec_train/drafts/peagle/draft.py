"""P-EAGLE (arXiv 2602.01469): EAGLE-3's layer, then Llama layers, on elements of several depths.

Element (anchor t, depth d) has RoPE position t + d and drafts x_{t+2+d}. At depth 0 it holds the
known token x_{t+1} and the target's states of token t. A deeper element holds the mask token and
the learned states `mask_hidden`, projected by the same `fc`. No output is fed back, so one forward
pass drafts all depths. Parameter names are those of the checkpoint: layers.0 is the one with inputs
of width 2H.

Drafting: caches, one per layer, keep the rows that the target has verified. A round appends the
newly verified rows and then rows with the mask token. The last verified row drafts the first token,
the mask rows draft the others, and are then removed from the caches. Drafted tokens are never fed
back, so a rejected token leaves no trace.

Loss: element (t, d) has the teacher of slot t + d, so elements of one slot are neighbours here and
share one teacher row. The loss is KL(teacher || draft) as published, or another of `losses`, summed
over the sampled supervised elements of all depths and divided by their total number. With position
weights, both sums are weighted by depth. A sampled element whose target's choice is outside the
draft vocabulary has no loss, but its expected acceptance counts.

The segments are trained one after the other. Each segment's gradients are computed in the forward
pass, as the head's are, so the activations of one segment exist at a time and no forward pass is
repeated. The caller's backward pass then hands the finished gradients to the parameters once, so a
distributed wrapper synchronises once. The price: one more copy of the gradients, and no gradients
of gradients.

B packs, T slots, K depths, E elements of a pack in a forward pass, D of them deeper than 0, P
elements of a segment deeper than 0 over all packs, n elements of a segment that count (or anchors),
H hidden size, V / Vd target / draft vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_data.models.devices import sent
from spec_data.shards.batch import DraftBatch
from spec_data.shards.packing import PADDING, shift_left
from spec_train.attention.masked import Attending
from spec_train.attention.masks import (
    AttentionMask,
    causal_mask,
    document_starts,
    parallel_mask,
)
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.draft import AuxDraft, DraftLoss
from spec_train.drafts.drafting import Drafter, KVCache, Proposal
from spec_train.drafts.eagle3.draft import Eagle3Config, Eagle3Layer
from spec_train.drafts.eagle3.files import WITH_QK_NORM
from spec_train.drafts.frames import Frame, batch_frame, slot_mask_of, slots_of
from spec_train.drafts.layers import Attend, DecoderLayer, argmax_by_chunks, per_window, run_layer
from spec_train.drafts.peagle.files import WRITTEN
from spec_train.drafts.peagle.options import PeagleOptions
from spec_train.drafts.slots import (
    ScoredSlots,
    document_offsets,
    empty_chains,
    first_slots,
    gather_slots,
    rope_lengths,
    step_masks,
)
from spec_train.drafts.teacher import SharedTeacher
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind, head_loss, wide
from spec_train.losses.metrics import chain_sums, summarise
from spec_train.losses.own import Asked, asked
from spec_train.losses.sampling import Sampler
from spec_train.losses.teacher_rows import SharedRows

CHUNK_ROWS = 2048  # elements of a pack that `chains` computes at a time


@dataclass(frozen=True, kw_only=True)
class PeagleConfig(Eagle3Config):
    """An EAGLE-3 configuration with more layers and a mask token.

    The file has vLLM's flat form (`method: eagle3` with `parallel_drafting: true`), because no
    other engine drafts in parallel; `formats.write` says why it has this architecture name. Both
    keys for the mask token are written: vLLM reads the first that it finds.
    """

    draft: ClassVar[str] = "peagle"
    architectures: ClassVar[tuple[str, ...]] = (WRITTEN, WITH_QK_NORM)

    mask_token_id: int

    def to_json(self, options: PeagleOptions) -> dict[str, Any]:
        out = super().to_json(options)
        out["ptd_token_id"] = self.mask_token_id
        return out


class PeagleDraft(AuxDraft):
    """The draft that `spec-train fit peagle` trains."""

    config_class: ClassVar[type[DraftConfig]] = PeagleConfig
    config: PeagleConfig
    options: PeagleOptions

    def __init__(self, config: PeagleConfig, options: PeagleOptions | None = None) -> None:
        super().__init__(config, options)
        # Samples that `slot_counts` drew, for the losses that divide by these counts: a step counts
        # all its micro-batches before the first loss. Equal ones take theirs in the same order.
        self._samples: dict[object, list[Tensor]] = {}
        self._counting = False

    def make_layers(self) -> None:
        """Make the layers, and `mask_hidden` [1, 1, n*H] with unit variance."""
        shape, count = self.config, self.config.num_hidden_layers
        others = (DecoderLayer(shape) for _ in range(1, count))
        self.layers = nn.ModuleList([Eagle3Layer(self.config), *others])
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    @property
    def units(self) -> list[nn.Module]:
        """The layers; none with segments, each of which runs all layers, forward and backward."""
        return list(self.layers) if self.options.segments == 1 else []

    def states_of_no_slot(self) -> Tensor:
        ids, carried = self.unknown_inputs(1, 1)
        return self.step(ids, carried, torch.zeros_like(ids), self.new_caches())

    @property
    def reach(self) -> int | None:
        """How many positions back an element's state depends on inputs; None: all of them."""
        windows = [window for window in self.config.windows if window is not None]
        return sum(windows) - len(windows) if len(windows) == len(self.layers) else None

    def unknown_inputs(self, batch: int, count: int) -> tuple[Tensor, Tensor]:
        """Return mask tokens, int64 [B, count], and projected `mask_hidden`, [B, count, H]."""
        unknown = self.project(self.mask_hidden)
        ids = torch.full((batch, count), self.config.mask_token_id, device=unknown.device)
        return ids, unknown.expand(batch, count, -1)

    def element_inputs(
        self, tokens: Tensor, features: Tensor, deeper: int
    ) -> tuple[Tensor, Tensor]:
        """Return tokens, int64 [B, T + deeper], and carried states [B, T + deeper, H].

        The elements of depth 0 come first: known tokens, int64 [B, T], and features [B, T, H]. They
        are followed by the inputs of `deeper` deeper elements.
        """
        masks, unknown = self.unknown_inputs(tokens.shape[0], deeper)
        return torch.cat([tokens, masks], dim=1), torch.cat([features, unknown], dim=1)

    def states(
        self,
        token_ids: Tensor,  # int64 [B, E]
        carried: Tensor,  # features, or projected `mask_hidden`, [B, E, H]
        position_ids: Tensor,  # RoPE positions, int64 [B, E]
        # tokens of each element's document, int64 [B, E], or None (see `Rotary`)
        lengths: Tensor | None,
        attends: Sequence[Attend],  # the attention of every layer
    ) -> Tensor:
        """Run the layers over elements.

        Returns:
            States [B, E, H], for `logits`.
        """
        cos, sin = self.rotary(position_ids, lengths, carried.dtype)
        recompute = self.options.gradient_checkpointing
        inputs: tuple[Tensor, ...] = (self.embed(token_ids), carried)
        for layer, attend in zip(self.layers, attends, strict=True):
            inputs = (run_layer(layer, *inputs, cos, sin, attend, recompute=recompute),)
        return inputs[0]

    def logits(self, states: Tensor) -> Tensor:
        """Map states [..., H] to draft logits [..., Vd]."""
        return self.lm_head(self.norm(states))

    def step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        position_ids: Tensor,
        caches: Sequence[KVCache],
    ) -> Tensor:
        """Process rows as serving does: causal, after the rows in `caches` (one per layer).

        The other arguments and the result [B, E, H] are those of `states`. The new rows are
        appended to the caches.
        """
        pairs = zip(caches, self.config.windows, strict=True)
        attends = [
            partial(cache.attend, scale=self.scale, window=window) for cache, window in pairs
        ]
        return self.states(token_ids, carried, position_ids, None, attends)

    def attendings(self, mask_of: Callable[[int | None], AttentionMask]) -> list[Attending]:
        """Prepare every layer's mask; `mask_of` returns that of a layer with a window."""
        return per_window(
            self.config.windows, lambda window: Attending.prepare(mask_of(window), self.backend)
        )

    # -- drafting ---------------------------------------------------------------------------------

    @property
    def max_depth(self) -> int | None:
        """Number of depths of its training: elements further from their anchor were never seen."""
        return self.depth

    def drafter(self, head: TargetHead) -> Drafter:
        return ParallelDrafter(self)

    @torch.no_grad()
    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, scored_only: bool = False
    ) -> Tensor:
        """Draft from every slot as serving would (see `Draft.chains`).

        The rows of depth 0 are computed once, and the caches keep their keys and values. The deeper
        rows are computed for some anchors at a time, so that memory does not grow with slots x
        depths.
        """
        scored, documents = ScoredSlots(batch) if scored_only else None, batch.document_ids
        tokens = shift_left(batch.input_ids, documents)  # [B, T]
        features = self.project(batch.aux(self.config.layers))  # [B, T, H]
        lengths = rope_lengths(self.rotary, documents)  # [B, T]
        caches = self.new_caches()
        attends = self._attends(partial(causal_mask, documents), caches)
        states = self.states(tokens, features, batch.position_ids, lengths, attends)
        active = first_slots(tokens, scored)  # [B, A]
        drafted = self.draft_ids[argmax_by_chunks(self.logits, gather_slots(states, active))]
        chains = empty_chains(tokens, depth)
        chains[..., 0].scatter_(1, active, drafted)
        if depth > 1:
            slots = torch.arange(tokens.shape[1], device=tokens.device)
            if scored is not None:  # all depths at once, so the first draft alone decides
                slots = active[scored.go_on(active, drafted)].unique()  # of any pack
            size = max(1, CHUNK_ROWS // (depth - 1))
            for part in slots.split(size) if len(slots) else ():
                chains[:, part, 1:] = self.draft_ids[self._deeper(batch, caches, part, depth)]
        return chains

    def _deeper(
        self, batch: DraftBatch, caches: Sequence[KVCache], slots: Tensor, depth: int
    ) -> Tensor:
        """Return draft indices of depths 1 to depth - 1, int64 [B, n, depth - 1].

        `slots` int64 [n] are the anchors. The caches hold the rows of depth 0, and do so again
        after.
        """
        packs, length = batch.document_ids.shape
        # The E = n * (depth - 1) elements of a pack, anchor by anchor.
        anchors = slots.repeat_interleave(depth - 1).expand(packs, -1)  # [B, E]
        depths = torch.arange(1, depth, device=slots.device).repeat(len(slots))
        depths = depths.expand(packs, -1)  # [B, E]
        every = torch.arange(length, device=slots.device).expand(packs, -1)  # [B, T]
        documents = torch.cat([batch.document_ids, batch.document_ids.gather(1, anchors)], dim=1)
        all_anchors = torch.cat([every, anchors], dim=1)  # T + E elements, those of depth 0 first
        all_depths = torch.cat([torch.zeros_like(every), depths], dim=1)

        def mask_of(window: int | None) -> AttentionMask:
            mask = parallel_mask(documents, all_anchors, all_depths, length, window)
            return AttentionMask(mask.keys, mask.ends[:, length:])  # the new elements

        lengths = rope_lengths(self.rotary, batch.document_ids, anchors)  # [B, E]
        tokens, carried = self.unknown_inputs(packs, anchors.shape[1])  # [B, E], [B, E, H]
        positions = batch.position_ids.gather(1, anchors) + depths
        attends = self._attends(mask_of, caches)
        states = self.states(tokens, carried, positions, lengths, attends)  # [B, E, H]
        for cache in caches:
            cache.crop(length)
        best = argmax_by_chunks(self.logits, states)  # [B, E]
        return best.view(packs, len(slots), depth - 1)

    def _attends(
        self, mask_of: Callable[[int | None], AttentionMask], caches: Sequence[KVCache]
    ) -> list[Attend]:
        """Return every layer's attention: new rows over its cache and themselves."""

        def after(cache: KVCache, attending: Attending) -> Attend:
            return lambda q, k, v: attending(q, *cache.append(k, v), self.scale)

        pairs = zip(caches, self.attendings(mask_of), strict=True)
        return [after(cache, attending) for cache, attending in pairs]

    # -- training ---------------------------------------------------------------------------------

    @torch.no_grad()
    def draw(self, batch: DraftBatch) -> Tensor:
        """Draw the elements of a batch, bool [B, K, T] (see `cod_sample`).

        Training draws from torch's default generator. Evaluation draws the same elements every
        time, by their index in the document, so that metrics depend neither on the packs nor on
        earlier draws.
        """
        options, ids = self.options, batch.document_ids
        mask = slot_mask_of(batch)
        deeper, exact = options.depths - 1, torch.float64
        if self.training:
            uniforms = torch.rand(deeper, *mask.shape, dtype=exact, device=ids.device)
        else:
            fixed = torch.Generator().manual_seed(0)
            table = torch.rand(mask.shape[1], deeper, generator=fixed, dtype=exact)  # [T, K-1]
            uniforms = table.to(ids.device)[document_offsets(ids)].permute(2, 0, 1)
        # uniforms: [K-1, B, T]
        return cod_sample(mask, ids, uniforms, ratio=options.cod_ratio, floor=options.cod_floor)

    @torch.no_grad()
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Return the number of elements with a loss, weighted by depth, float64 [1].

        They are drawn here, and kept for the loss of the batch.
        """
        sample = self.draw(batch)
        if not self._counting:
            self._samples.clear()  # what no loss has used
            self._counting = True
        self._samples.setdefault(_key(batch), []).append(sample)
        supervised = element_masks(*slots_of(self, batch), batch.document_ids, sample)[1]
        counts = supervised.flatten(1).sum(1).double()  # [K]
        return (counts @ depth_weights(self.options.weights_of(self.depth), counts))[None]

    def batch_loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Return the loss of a batch over `counts`, the slot counts of the whole optimizer step.

        The elements are those that `slot_counts` drew for the batch, or are drawn now.
        """
        self._counting = False
        kept, kind = self._samples.get(_key(batch)), LossKind.of(self.options)
        return parallel_loss(
            self,
            batch_frame(self, batch, head, kind, batch.aux(self.config.layers)),
            sample=kept.pop(0) if kept else self.draw(batch),
            segments=self.options.segments,
            kind=kind,
            position_weights=self.options.weights_of(self.depth),
            count=counts,
        )

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Turn added sums into metrics; a depth's weight is its share of the weighted elements."""
        share = sums["weighted"] / sums["weighted"].sum().clamp_min(1e-30)
        return summarise(sums | {"weighted": sums["supervised"] * share})


def _key(batch: DraftBatch) -> object:
    """Return what identifies a batch within its step, with or without its states."""
    return (tuple(map(tuple, batch.rows)), tuple(batch.document_ids.shape))


class ParallelDrafter(Drafter):
    """Drafts all tokens of a round with one forward pass."""

    def __init__(self, draft: PeagleDraft) -> None:
        self._draft = draft
        self._caches = draft.new_caches()
        self._rows = 0  # verified rows in the caches

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> Proposal:
        draft, device, new = self._draft, states.device, len(tokens)
        count = min(count, draft.options.depths)
        new_ids = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]  # [1, new]
        ids, carried = draft.element_inputs(new_ids, draft.project(states), count - 1)
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


# -- depth sampling --------------------------------------------------------------------------------
# Conditional drop sampling: depth 0 keeps every slot, depth d int((n - d) * max(r ** d, floor)) of
# a document's n supervised slots. Its candidates are the supervised slots that directly follow, in
# the same document, a slot that depth d - 1 kept. So the depths of an anchor are 0, 1, .. without
# gaps, and the first slot of a document holds no element of depth 1 or more. Each document is
# sampled for itself: the result does not depend on its pack.


def cod_sample(
    supervised: Tensor, document_ids: Tensor, uniforms: Tensor, *, ratio: float, floor: float
) -> Tensor:
    """Sample elements by conditional drop.

    Args:
        supervised: the slot mask of depth 0, bool [B, T].
        document_ids: int64 [B, T], -1 in padding; documents are contiguous.
        uniforms: random numbers in [0, 1), float64 [K - 1, B, T]; every depth keeps the candidates
            with the smallest numbers.
        ratio: r.
        floor: the smallest share that a depth keeps.

    Returns:
        bool [B, K, T]: entry (b, d, t) is whether element (anchor t, depth d) is in the sample.
    """
    offsets, starts = document_offsets(document_ids), document_starts(document_ids)  # [B, T] each
    supervised = supervised & (document_ids != PADDING)
    total = torch.zeros_like(document_ids).scatter_add_(1, starts, supervised.long())
    total = total.gather(1, starts)  # [B, T], supervised slots of the document of each slot
    sampled = document_ids != PADDING  # [B, T], by the element's own slot
    depths = [sampled]
    for d, u in enumerate(uniforms, start=1):
        # by the element's own slot: one further right, in the same document
        candidates = sampled.roll(1, 1) & (offsets > 0) & supervised  # [B, T]
        quota = ((total - d).clamp_min(0).double() * max(ratio**d, floor)).long()  # [B, T]
        # Sort by document, then candidates before others, then by random number.
        key = starts.double() + (u + ~candidates) / 2  # [B, T], in [start, start + 1)
        order = key.argsort(dim=1, stable=True)  # [B, T], slots in sorted order
        # The sorted place minus the document's start is the rank within the document.
        rank = torch.empty_like(order).scatter_(1, order, offsets)  # [B, T]
        sampled = candidates & (rank < quota)
        anchored = sampled
        for _ in range(d):  # from the element's slot to its anchor
            anchored = shift_left(anchored, document_ids)
        depths.append(anchored)
    return torch.stack(depths, dim=1)  # [B, K, T]


# -- elements --------------------------------------------------------------------------------------
# Sequence partitioning (arXiv 2602.01469, Algorithm 1): an element of depth 0 belongs to the
# segment of its slot, a deeper element to the segment of the slot after its anchor. Every segment
# also reads the depth-0 elements before it that belong to documents it holds a part of. The
# invariant: the loss of an element is counted in its own segment only, and depends on nothing
# outside the segment's forward pass. So the losses and gradients of the segments add up to those of
# one forward pass over all elements.


@dataclass(frozen=True)
class Elements:
    """One forward pass: slots `first` to `stop` - 1 of every pack at depth 0, then deeper elements.

    E = stop - first + D. The deeper ones are sorted by anchor, then depth, padding last.
    """

    first: int
    stop: int
    document_ids: Tensor  # int64 [B, E], -1 in padding
    anchors: Tensor  # int64 [B, E]
    depths: Tensor  # int64 [B, E]
    index: Tensor  # int64 [n]: flat element b * E + e of those that count, by drafted position
    where: tuple[Tensor, Tensor, Tensor]  # their depth, pack and anchor, int64 [n] each

    @property
    def deeper(self) -> int:
        """D: elements of a pack that are deeper than 0, padding included."""
        return self.anchors.shape[1] - (self.stop - self.first)


def segments_of(
    sample: Tensor,  # bool [B, K, T], as `cod_sample` returns it
    drafted: Tensor,  # elements that count, bool [K, B, T]; a subset of the sample
    document_ids: Tensor,  # int64 [B, T], -1 in padding
    count: int,  # number of segments; 1 is one forward pass over all elements
    # no element depends on inputs further back than this many positions; None: any may. With
    # windows in all layers it is the sum of W - 1 over the layers
    reach: int | None = None,
) -> Iterator[Elements]:
    """Cut the packs into `count` segments of equal width; skip those in which nothing counts."""
    length = document_ids.shape[1]
    width = -(-length // count)
    starts = list(range(0, length, width))
    offsets = document_offsets(document_ids).masked_fill(document_ids == PADDING, 0)  # [B, T]
    # Per segment: slots before its start that belong to a document it continues, over all packs.
    behind = offsets[:, starts].amax(0).tolist()  # [segments]
    for start, held in zip(starts, behind, strict=True):
        stop = min(start + width, length)
        inside = torch.zeros_like(sample)  # [B, K, T]: elements of this segment
        inside[:, 0, start:stop] = sample[:, 0, start:stop]
        before = max(start - 1, 0)  # the anchor of a deeper element is one slot to the left
        inside[:, 1:, before : stop - 1] = sample[:, 1:, before : stop - 1]
        counted = drafted & inside.transpose(0, 1)  # [K, B, T]
        if counted.any():
            first = start - (held if reach is None else min(held, reach))
            yield _elements(inside, counted, document_ids, first, stop)


def _elements(
    inside: Tensor,  # elements of the segment, bool [B, K, T]
    counted: Tensor,  # those that count, bool [K, B, T]
    document_ids: Tensor,  # int64 [B, T]
    first: int,  # the first slot that the segment reads at depth 0
    stop: int,  # the slot after its last one
) -> Elements:
    batch, depths, length = inside.shape
    device = inside.device
    # The P deeper elements, pack by pack, anchor by anchor, so that neighbours see nearly the same;
    # depth = level + 1.
    row, anchor, level = inside[:, 1:].transpose(1, 2).nonzero(as_tuple=True)  # [P] each
    per_row = inside[:, 1:].flatten(1).sum(1)  # [B]
    before = per_row.cumsum(0) - per_row  # [B]: deeper elements of earlier packs
    column = torch.arange(len(row), device=device) - before[row]  # [P], in 0..D-1
    deeper = int(per_row.max()) if len(row) else 0  # D

    def table(flat: Tensor, empty: int, shallow: Tensor) -> Tensor:
        """Append values of the deeper elements [P] to those of depth 0 [B, E - D]: [B, E]."""
        deep = torch.full((batch, deeper), empty, device=device)  # [B, D]
        deep[row, column] = flat
        return torch.cat([shallow, deep], dim=1)

    slots = torch.arange(first, stop, device=device).expand(batch, -1)  # [B, E - D]
    anchors = table(anchor, 0, slots)  # [B, E]
    # The flat element b * E + e of every (depth, pack, anchor); only elements inside are read.
    index = torch.zeros(depths, batch, length, dtype=torch.long, device=device)  # [K, B, T]
    index[0] = torch.arange(length, device=device) - first
    index[level + 1, row, anchor] = column + (stop - first)
    index += torch.arange(batch, device=device)[:, None] * anchors.shape[1]
    # The n elements that count, sorted by pack, then drafted position, then depth.
    d, b, t = counted.nonzero(as_tuple=True)  # [n] each
    order = ((b * length + t + d) * depths + d).argsort()  # [n]
    where = d[order], b[order], t[order]
    return Elements(
        first=first,
        stop=stop,
        document_ids=table(document_ids[row, anchor], PADDING, document_ids[:, first:stop]),
        anchors=anchors,
        depths=table(level + 1, 0, torch.zeros_like(slots)),
        index=index[where],
        where=where,
    )


def element_masks(
    mask: Tensor, rows: Tensor, choice: Tensor, document_ids: Tensor, sample: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sampled elements in the slot mask, and those with a loss; each bool [K, B, T].

    The others are misses: the target's choice is outside the draft vocabulary. `mask`, `rows`,
    `choice` and `document_ids` are those of a `Frame`; `sample` is bool [B, K, T].
    """
    inside = torch.zeros_like(mask)  # [B, T]
    inside.view(-1)[rows] = choice >= 0
    sampled, depths = sample.transpose(0, 1), sample.shape[1]  # [K, B, T]
    drafted = step_masks(mask, document_ids, depths) & sampled
    return drafted, step_masks(inside, document_ids, depths) & sampled


class _Differentiated(torch.autograd.Function):
    """A number whose gradients are known."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: Sequence[Tensor], *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = (gradient * grads[0].to(gradient.dtype) for gradient in ctx.saved_tensors)
        return None, None, *given


def in_turn(losses: Sequence[Callable[[], Tensor]], parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the sum of two or more losses; each is differentiated before the next one starts.

    The last one keeps its graph: gradients become complete layer by layer, so that several
    processes exchange those of one layer during the backward pass of the next.
    """
    total, gradients = None, [torch.zeros_like(p) for p in parameters]
    for loss in losses[:-1]:
        value = loss()
        # The backward pass of a training loop runs outside autocast, so this one does too.
        with torch.autocast(value.device.type, enabled=False):
            parts = torch.autograd.grad(value, parameters)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient += part
        total = value.detach() if total is None else total + value.detach()
    assert total is not None
    # A backward pass visits what was made last first. So the casts of weights are made anew, each
    # with its layer, and the known gradients join at the end.
    torch.clear_autocast_cache()
    last = losses[-1]()
    return _Differentiated.apply(total, gradients, *parameters) + last


# -- loss ------------------------------------------------------------------------------------------


def depth_weights(given: Sequence[float] | None, like: Tensor) -> Tensor:
    """Return the weights of the depths, float64 [K], where `like` [K] is; None: all are 1."""
    weights = torch.tensor([1.0] * len(like) if given is None else given, dtype=torch.float64)
    return sent(weights, like.device)


def parallel_loss(
    draft: PeagleDraft,
    frame: Frame,
    *,
    sample: Tensor,
    segments: int,
    kind: LossKind,
    position_weights: Sequence[float] | None,
    count: Tensor | None,
) -> DraftLoss:
    """Compute the loss of a frame.

    Args:
        draft, frame: the weights, and the slots.
        sample: the elements, bool [B, K, T] by depth and anchor, as `cod_sample` draws them; every
            slot is attended to at depth 0, in the sample or not.
        segments: parts of a pack that are trained one after the other; the loss and the gradients
            are the same for any number.
        kind: the loss of an element.
        position_weights: weights of the K depths; None: all are 1.
        count: denominator [1] over the whole optimizer step; None: that of this frame.
    """
    drafted, supervised = element_masks(
        frame.mask, frame.rows, frame.choice, frame.document_ids, sample
    )
    counts = supervised.flatten(1).sum(1).double()  # [K]
    weights = depth_weights(position_weights, counts)  # [K]
    total = counts @ weights if count is None else count.to(counts).sum()
    shares = weights / total.clamp_min(1e-30)  # [K]; the weights may add up to less than 1
    zeros = torch.zeros_like
    tally = _Tally(zeros(counts), zeros(counts), zeros(counts), zeros(drafted))
    losses = [
        partial(_segment_loss, draft, frame, elements, shares, kind, tally)
        for elements in segments_of(sample, drafted, frame.document_ids, segments, draft.reach)
    ]
    if not losses:
        loss = draft.zero_loss()
    elif len(losses) > 1 and torch.is_grad_enabled():
        loss = in_turn(losses, draft.trainable_parameters())
        for rows in asked().rows or ():
            rows.detach()
    else:
        loss = torch.stack([part() for part in losses]).sum()
    sums = {
        "loss": tally.loss,
        "supervised": counts,
        "weighted": counts * weights,
        "acceptance": tally.acceptance,
        "measured": tally.measured,
        **chain_sums(tally.hits, drafted),
    }
    return DraftLoss(loss, sums)


@dataclass(frozen=True)
class _Tally:
    """Sums that every segment adds to: per depth, and hits by depth, pack and anchor."""

    loss: Tensor  # float64 [K]
    acceptance: Tensor  # float64 [K]
    measured: Tensor  # elements in `acceptance`, float64 [K]
    hits: Tensor  # bool [K, B, T]


def _segment_loss(
    draft: PeagleDraft,
    frame: Frame,
    elements: Elements,
    weights: Tensor,
    kind: LossKind,
    tally: _Tally,
) -> Tensor:
    """Return the losses of a segment times `weights` [K], summed, with a graph; add to the tally.

    The tally's losses have no weights.
    """
    states = element_states(draft, frame, elements)  # [B, E, H]
    hidden = draft.norm(states.flatten(0, 1)[elements.index])  # [n, H]
    depth, row, anchor = elements.where  # [n] each
    slots = row * frame.input_ids.shape[1] + anchor + depth  # [n], flat, ascending
    choice = frame.choice[torch.searchsorted(frame.rows, slots)]  # [n]
    trained = choice >= 0  # [n]: the target's choice is in the draft vocabulary
    shared = SharedTeacher(frame.teacher, slots, entropy=kind.name == "kl" and not kind.hard)

    labelled = kind.hard or asked() != Asked()

    def teacher(part: slice) -> SharedRows:
        taught = shared(part)
        return taught.labelled(choice[part]) if labelled else taught

    factors = (trained * weights.to(wide(hidden).dtype)[depth])[:, None]  # [n, 1]
    loss, stats = head_loss(hidden[:, None], draft.lm_head.weight, teacher, factors, kind)
    with torch.no_grad():
        tally.loss.index_add_(0, depth, stats.loss[:, 0].double() * trained)
        acceptance = stats.acceptance[:, 0].double()  # [n]
        measured = ~acceptance.isnan()
        tally.acceptance.index_add_(0, depth, torch.where(measured, acceptance, 0.0))
        tally.measured.index_add_(0, depth, measured.double())
        tally.hits[depth, row, anchor] = stats.best[:, 0] == choice
    return loss


def element_states(draft: PeagleDraft, frame: Frame, elements: Elements) -> Tensor:
    """Return the states [B, E, H] of a segment's elements."""
    part = slice(elements.first, elements.stop)
    features = draft.project(frame.aux[:, part])  # [B, E - D, H]
    tokens, carried = draft.element_inputs(frame.input_ids[:, part], features, elements.deeper)
    lengths = rope_lengths(draft.rotary, frame.document_ids, elements.anchors)  # [B, E]
    mask_of = partial(
        parallel_mask,
        elements.document_ids,
        elements.anchors,
        elements.depths,
        elements.stop - elements.first,
    )
    attends: list[Attend] = [
        partial(attending, scale=draft.scale) for attending in draft.attendings(mask_of)
    ]
    positions = frame.position_ids.gather(1, elements.anchors) + elements.depths  # [B, E]
    return draft.states(tokens, carried, positions, lengths, attends)
