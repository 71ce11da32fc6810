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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_train.attention.masks import parallel_mask
from spec_train.drafts.frames import Frame, ShiftedInputs, tensor_frame
from spec_train.drafts.layers import Attend
from spec_train.drafts.peagle.elements import Elements, segments_of
from spec_train.drafts.peagle.model import PeagleModel
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.slots import rope_lengths, step_masks
from spec_train.drafts.teacher import SharedTeacher
from spec_train.losses import LossKind, head_loss, wide
from spec_train.metrics import chain_sums
from spec_train.teacher_rows import SharedRows


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
        **inputs: the fields of `frames.ShiftedInputs`, with their shapes there:
            aux_hidden_states and input_ids; loss_mask (with slots) or slot_mask; one teacher:
            logits, or final_hidden with head, or target_probs with position_mask (and target_mass
            if the draft vocabulary is reduced); and optionally target_argmax, target_logsumexp,
            document_ids, position_ids, attention_mask.

    Raises:
        DraftError: not exactly one teacher or one mask, an unknown `slots`, inputs of the other
            frame, or a sample of another shape than the batch.
        TypeError: an input is unknown or missing.
    """
    given = ShiftedInputs(**inputs)
    batch, length = given.input_ids.shape
    if sample.ndim != 3 or sample.shape[0] != batch or sample.shape[2] != length:
        raise DraftError(f"sample is {list(sample.shape)}: expected [{batch}, depths, {length}]")
    kind = kind if isinstance(kind, LossKind) else LossKind(name=kind)
    weighed = Weighed(kind, position_weights)
    frame = tensor_frame(draft, given)
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
