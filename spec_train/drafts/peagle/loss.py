"""The P-EAGLE loss (arXiv 2602.01469) of plain tensors.

In: a `Frame` (see `frames`) and a sample of elements. Out: a `DraftLoss`. Element (anchor t, depth
d) has the teacher of slot t + d, so elements of one slot are neighbours here and share one teacher
row. The loss is KL(teacher || draft) as published, or another of `losses`, summed over the sampled
supervised elements of all depths and divided by their total number. With position weights, both
sums are weighted by depth. A sampled element whose target's choice is outside the draft
vocabulary has no loss, but its expected acceptance counts.

The segments are trained one after the other. Each segment's gradients are computed in the forward
pass, as the head's are, so the activations of one segment exist at a time and no forward pass is
repeated. The caller's backward pass then hands the finished gradients to the parameters once, so a
distributed wrapper synchronises once. The price: one more copy of the gradients, and no gradients
of gradients.

B packs, T slots, K depths, n elements of a segment that count, m distinct slots of them, E
elements of a pack in a forward pass, H hidden size, V / Vd target / draft vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import PADDING, shift_left
from spec_train.attention.masks import parallel_mask
from spec_train.drafts.draft import DraftLoss
from spec_train.drafts.frames import Frame, shifted_frame
from spec_train.drafts.layers import Attend
from spec_train.drafts.peagle.model import PeagleModel
from spec_train.drafts.slots import document_offsets, rope_lengths, step_masks
from spec_train.drafts.teacher import SharedTeacher
from spec_train.losses.menu import LossKind, head_loss, wide
from spec_train.losses.metrics import chain_sums
from spec_train.losses.teacher_rows import SharedRows

# -- depth sampling --------------------------------------------------------------------------------
# Conditional drop sampling (COD, arXiv 2602.01469): which elements a P-EAGLE step trains on.
#
# In: supervised slots, document ids and random numbers. Out: a sample of elements. An element is
# (anchor slot, depth) and is at slot anchor + depth. Depth 0 keeps every slot. Depth d keeps int((n
# - d) * max(r ** d, floor)) of a document's n supervised slots. Its candidates are the supervised
# slots that directly follow, in the same document, a slot that depth d - 1 kept. So the depths of
# an anchor are 0, 1, .. without gaps, and the first slot of a document holds no element of depth 1
# or more. Each document is sampled for itself: the result does not depend on its pack.
#
# B packs, T slots, K depths.


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
    offsets = document_offsets(document_ids)  # [B, T], index in the document
    starts = torch.arange(document_ids.shape[1], device=document_ids.device) - offsets
    # starts: [B, T], first slot of the document of each slot
    supervised = supervised & (document_ids != PADDING)
    total = torch.zeros_like(document_ids).scatter_add_(1, starts, supervised.long())
    total = total.gather(1, starts)  # [B, T], supervised slots of the document of each slot
    kept = document_ids != PADDING  # [B, T], by the element's own slot
    depths = [kept]
    for d, u in enumerate(uniforms, start=1):
        candidates = _shift_right(kept, offsets) & supervised  # [B, T]
        quota = ((total - d).clamp_min(0).double() * max(ratio**d, floor)).long()  # [B, T]
        # Sort by document, then candidates before others, then by random number.
        key = starts.double() + (u + ~candidates) / 2  # [B, T], in [start, start + 1)
        order = key.argsort(dim=1, stable=True)  # [B, T], slots in sorted order
        # The sorted place minus the document's start is the rank within the document.
        rank = torch.empty_like(order).scatter_(1, order, offsets)  # [B, T]
        kept = candidates & (rank < quota)
        anchored = kept
        for _ in range(d):  # from the element's slot to its anchor
            anchored = shift_left(anchored, document_ids)
        depths.append(anchored)
    return torch.stack(depths, dim=1)  # [B, K, T]


def _shift_right(values: Tensor, offsets: Tensor) -> Tensor:
    """Move booleans [B, T] right by one inside each document; `offsets` is int64 [B, T]."""
    out = torch.zeros_like(values)
    out[:, 1:] = values[:, :-1]
    return out & (offsets > 0)


class SampleStore:
    """Keeps the samples drawn by `slot_counts` for the losses that divide by those counts.

    An optimizer step counts all its micro-batches before the first loss, so it needs one sample per
    micro-batch. When counting starts again, the samples that a loss has used are dropped. The key
    of a sample is made of the documents and the shape of its batch.
    """

    def __init__(self) -> None:
        """Start without samples."""
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._used: set[tuple[object, ...]] = set()

    def keep(self, key: tuple[object, ...], sample: Tensor) -> None:
        """Keep a sample, bool [B, K, T], for the loss of its batch; drop the used ones."""
        for used in self._used:
            self._kept.pop(used, None)
        self._used.clear()
        self._kept[key] = sample

    def take(self, key: tuple[object, ...]) -> Tensor | None:
        """Return a batch's sample, bool [B, K, T], or None; it stays until counting restarts."""
        self._used.add(key)
        return self._kept.get(key)


# -- elements --------------------------------------------------------------------------------------
# The elements of a P-EAGLE forward pass: all of a batch, or those of one segment of its packs.
#
# In: a sample of elements. Out: index tables of one forward pass per segment.
#
# Sequence partitioning (arXiv 2602.01469, Algorithm 1): an element of depth 0 belongs to the
# segment of its slot, a deeper element to the segment of the slot after its anchor. Every segment
# also reads the depth-0 elements before it that belong to documents it holds a part of. The
# invariant: the loss of an element is counted in its own segment only, and depends on nothing
# outside the segment's forward pass. So the losses and gradients of the segments add up to those of
# one forward pass over all elements.
#
# B packs, T slots, K depths, E elements of a pack in the forward pass, D of them deeper than 0,
# P elements of a segment deeper than 0 over all packs, n elements that count.


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
    place: Tensor  # int64 [n]: flat element b * E + e of those that count, by drafted position
    where: tuple[Tensor, Tensor, Tensor]  # their depth, pack and anchor, int64 [n] each

    @property
    def deeper(self) -> int:
        """D: elements of a pack that are deeper than 0, padding included."""
        return self.anchors.shape[1] - (self.stop - self.first)


def segments_of(
    sample: Tensor, drafted: Tensor, document_ids: Tensor, count: int, reach: int | None = None
) -> Iterator[Elements]:
    """Cut the packs into `count` segments of equal width; skip those in which nothing counts.

    Args:
        sample: bool [B, K, T], as `cod_sample` returns it.
        drafted: elements that count, bool [K, B, T]; a subset of the sample.
        document_ids: int64 [B, T], -1 in padding.
        count: number of segments; 1 is one forward pass over all elements.
        reach: no element depends on inputs further back than this many positions; None: any may.
            With windows in all layers it is the sum of W - 1 over the layers.
    """
    length = document_ids.shape[1]
    width = -(-length // count)
    starts = list(range(0, length, width))
    offsets = document_offsets(document_ids).masked_fill(document_ids == PADDING, 0)  # [B, T]
    # Per segment: slots before its start that belong to a document it continues, over all packs.
    behind = offsets[:, starts].amax(0).tolist()  # [segments]
    for start, held in zip(starts, behind, strict=True):
        stop = min(start + width, length)
        own = torch.zeros_like(sample)  # [B, K, T]: elements of this segment
        own[:, 0, start:stop] = sample[:, 0, start:stop]
        before = max(start - 1, 0)  # the anchor of a deeper element is one slot to the left
        own[:, 1:, before : stop - 1] = sample[:, 1:, before : stop - 1]
        counted = drafted & own.transpose(0, 1)  # [K, B, T]
        if counted.any():
            first = start - (held if reach is None else min(held, reach))
            yield _elements(own, counted, document_ids, first, stop)


def _elements(
    own: Tensor, counted: Tensor, document_ids: Tensor, first: int, stop: int
) -> Elements:
    """Return the forward pass of a segment.

    Args:
        own: elements of the segment, bool [B, K, T].
        counted: those that count, bool [K, B, T].
        document_ids: int64 [B, T].
        first: the first slot that the segment reads at depth 0.
        stop: the slot after its last one.
    """
    batch, depths, length = own.shape
    device = own.device
    # The P deeper elements, pack by pack, anchor by anchor, so that neighbours see nearly the same;
    # depth = level + 1.
    row, anchor, level = own[:, 1:].transpose(1, 2).nonzero(as_tuple=True)  # [P] each
    per_row = own[:, 1:].flatten(1).sum(1)  # [B]
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
    # The flat element b * E + e of every (depth, pack, anchor); only elements of `own` are read.
    place = torch.zeros(depths, batch, length, dtype=torch.long, device=device)  # [K, B, T]
    place[0] = torch.arange(length, device=device) - first
    place[level + 1, row, anchor] = column + (stop - first)
    place += torch.arange(batch, device=device)[:, None] * anchors.shape[1]
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
        place=place[where],
        where=where,
    )


# -- loss ------------------------------------------------------------------------------------------


def peagle_loss(
    draft: PeagleModel,
    *,
    sample: Tensor,
    segments: int = 1,
    kind: str | LossKind = "kl",
    position_weights: Sequence[float] | None = None,
    count: Tensor | None = None,
    **inputs: Any,
) -> DraftLoss:
    """Compute the P-EAGLE loss of plain tensors in the shifted frame.

    Args:
        draft: the weights, as `PeagleDraft.from_pretrained` reads them.
        sample: the elements, bool [B, K, T] by depth and anchor, as `cod_sample` draws them; every
            slot is attended to at depth 0, in the sample or not.
        segments: parts of a pack that are trained one after the other; the loss and the gradients
            are the same for any number.
        kind: a name of `losses.KINDS`, or a `LossKind` with its target and numbers.
        position_weights: weights of the K depths; None: all are 1.
        count: denominator [1] over the whole optimizer step; None: that of this batch.
        **inputs: the arguments of `frames.shifted_frame`, with their shapes there:
            aux_hidden_states and input_ids; loss_mask or slot_mask; one teacher:
            logits, or final_hidden with head, or target_probs with position_mask (and target_mass
            if the draft vocabulary is reduced); and optionally target_argmax, target_logsumexp,
            document_ids, position_ids, attention_mask.

    Raises:
        DraftError: not exactly one teacher or one mask, inputs of the other frame, or a
            sample of another shape than the batch.
        TypeError: an input is unknown or missing.
    """
    frame = shifted_frame(draft, **inputs)
    batch, length = frame.input_ids.shape
    if sample.ndim != 3 or sample.shape[0] != batch or sample.shape[2] != length:
        raise DraftError(f"sample is {list(sample.shape)}: expected [{batch}, depths, {length}]")
    kind = kind if isinstance(kind, LossKind) else LossKind(name=kind)
    weighed = Weighed(kind, position_weights)
    return parallel_loss(
        draft, frame, sample=sample, segments=segments, weighed=weighed, count=count
    )


@dataclass(frozen=True)
class Weighed:
    """A loss and the weights of the K depths; None: all are 1."""

    kind: LossKind
    weights: Sequence[float] | None = None

    def of_depths(self, supervised: Tensor) -> Tensor:
        """Return the weights of the depths, float64 [K]; `supervised` is [K, ...]."""
        weights = [1.0] * len(supervised) if self.weights is None else self.weights
        known = torch.tensor(weights, dtype=torch.float64)
        return known.to(supervised.device, non_blocking=True)  # the host does not wait

    def total(self, supervised: Tensor) -> Tensor:
        """Return the weighted number of elements with a loss, float64 []; bool [K, B, T]."""
        return supervised.flatten(1).sum(1).double() @ self.of_depths(supervised)


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


def parallel_loss(
    draft: PeagleModel,
    frame: Frame,
    *,
    sample: Tensor,
    segments: int,
    weighed: Weighed,
    count: Tensor | None,
) -> DraftLoss:
    """Compute the loss of a frame; `sample` is bool [B, K, T], `count` [1] (see `peagle_loss`)."""
    drafted, supervised = element_masks(
        frame.mask, frame.rows, frame.choice, frame.document_ids, sample
    )
    own = supervised.flatten(1).sum(1).double()  # [K]
    total = weighed.total(supervised) if count is None else count.to(own).sum()
    least = 1 if weighed.weights is None else 1e-30  # weights may add up to less than 1
    weights = weighed.of_depths(own) / total.clamp_min(least)  # [K]
    tally = _Tally.zero(drafted)
    losses = [
        functools.partial(_segment_loss, draft, frame, elements, weights, weighed.kind, tally)
        for elements in segments_of(sample, drafted, frame.document_ids, segments, draft.reach)
    ]
    if not losses:
        loss = draft.zero_loss()
    elif len(losses) > 1 and torch.is_grad_enabled():
        loss = _InTurn.apply(losses, *draft.trainable_parameters())
    else:
        loss = torch.stack([part() for part in losses]).sum()
    sums = {
        "loss": tally.loss,
        "supervised": own,
        "drafted": drafted.flatten(1).sum(1).double(),
        "hits": tally.hits.flatten(1).sum(1).double(),
        "acceptance": tally.acceptance,
        **chain_sums(tally.hits, drafted),
    }
    if weighed.weights is not None:
        sums["weighted"] = own * weighed.of_depths(own)
    return DraftLoss(loss, sums)


@dataclass(frozen=True)
class _Tally:
    """Sums that every segment adds to: per depth, and hits by depth, pack and anchor."""

    loss: Tensor  # float64 [K]
    acceptance: Tensor  # float64 [K]
    hits: Tensor  # bool [K, B, T]

    @classmethod
    def zero(cls, like: Tensor) -> "_Tally":
        """Return zero sums for elements like `like`, bool [K, B, T]."""
        per_depth = torch.zeros(len(like), dtype=torch.float64, device=like.device)
        return cls(per_depth, per_depth.clone(), torch.zeros_like(like))


def _segment_loss(
    draft: PeagleModel,
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
    hidden = draft.norm(states.flatten(0, 1)[elements.place])  # [n, H]
    depth, row, anchor = elements.where  # [n] each
    slots = row * frame.input_ids.shape[1] + anchor + depth  # [n], flat, ascending
    choice = frame.choice[torch.searchsorted(frame.rows, slots)]  # [n]
    trained = choice >= 0  # [n]: the target's choice is in the draft vocabulary
    shared = SharedTeacher(frame.teacher, slots, entropy=kind.name == "kl" and not kind.hard)

    def teacher(part: slice) -> SharedRows:
        found = shared(part)
        return found.labelled(choice[part]) if kind.hard else found

    factors = (trained * weights.to(wide(hidden).dtype)[depth])[:, None]  # [n, 1]
    loss, stats = head_loss(hidden[:, None], draft.lm_head.weight, teacher, factors, kind)
    with torch.no_grad():
        tally.loss.index_add_(0, depth, stats.loss[:, 0].double() * trained)
        tally.acceptance.index_add_(0, depth, stats.acceptance[:, 0].double())
        tally.hits[depth, row, anchor] = stats.best[:, 0] == choice
    return loss


def element_states(draft: PeagleModel, frame: Frame, elements: Elements) -> Tensor:
    """Return the states [B, E, H] of a segment's elements."""
    part = slice(elements.first, elements.stop)
    features = draft.project(frame.aux[:, part])  # [B, E - D, H]
    tokens, carried = draft.element_inputs(frame.input_ids[:, part], features, elements.deeper)
    lengths = rope_lengths(draft.rotary, frame.document_ids, elements.anchors)  # [B, E]
    mask_of = functools.partial(
        parallel_mask,
        elements.document_ids,
        elements.anchors,
        elements.depths,
        elements.stop - elements.first,
    )
    attends: list[Attend] = [
        functools.partial(attending, scale=draft.scale) for attending in draft.attendings(mask_of)
    ]
    positions = frame.position_ids.gather(1, elements.anchors) + elements.depths  # [B, E]
    return draft.states(tokens, carried, positions, lengths, attends)


class _InTurn(torch.autograd.Function):
    """The sum of losses, each computed and differentiated before the next one starts."""

    @staticmethod
    def forward(ctx: Any, losses: Sequence[Callable[[], Tensor]], *parameters: Tensor) -> Tensor:
        total, gradients = None, [torch.zeros_like(p) for p in parameters]
        for loss in losses:
            with torch.enable_grad():
                value = loss()
            # The backward pass of a training loop runs outside autocast, so this one does too.
            with torch.autocast(value.device.type, enabled=False):
                parts = torch.autograd.grad(value, parameters)
            for gradient, part in zip(gradients, parts, strict=True):
                gradient += part
            total = value.detach() if total is None else total + value.detach()
        ctx.save_for_backward(*gradients)
        assert total is not None  # there is at least one loss
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient * grads[0].to(gradient.dtype) for gradient in ctx.saved_tensors)
