"""The P-EAGLE loss (arXiv 2602.01469) of plain tensors.

The frame is EAGLE-3's: slot t holds the aux states a_t, the known token x_{t+1}, the mask m_{t+1}
and the teacher z_{t+1}. Element (anchor t, depth d) has the teacher of slot t + d, whatever its
anchor: those of one slot are neighbours here, and their teacher row is computed once. The loss is
KL(teacher || draft), summed over the sampled supervised elements of all depths and divided by their
one number.

Segments are trained in turn, and their gradients made there and then, as the head makes its own:
no more than one segment's activations exist, the forward is not repeated, and the backward pass
that the caller starts hands the finished gradients to the parameters once (so a distributed wrapper
synchronises once). What it costs: one more copy of the gradients, none of gradients of gradients.

B rows, T slots, K depths, n elements with a loss, H hidden size, V / Vd target / draft vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_train.attention.masked import Attending
from spec_train.attention.masks import parallel_mask
from spec_train.drafts.layers import Attend
from spec_train.drafts.peagle.elements import Elements, segments_of
from spec_train.drafts.peagle.model import PeagleModel
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.slots import document_lengths, step_masks
from spec_train.drafts.teacher import Frame, Teacher, settle_frame
from spec_train.head import TargetHead
from spec_train.losses import LossKind, head_loss, wide
from spec_train.metrics import chain_sums


def peagle_loss(
    draft: PeagleModel,
    *,
    aux_hidden_states: Tensor,
    input_ids: Tensor,
    sample: Tensor,
    loss_mask: Tensor | None = None,
    slot_mask: Tensor | None = None,
    logits: Tensor | None = None,
    final_hidden: Tensor | None = None,
    head: TargetHead | None = None,
    target_probs: Tensor | None = None,
    position_mask: Tensor | None = None,
    target_argmax: Tensor | None = None,
    document_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    slots: str = "serving",
    segments: int = 1,
    count: Tensor | None = None,
) -> DraftLoss:
    """Compute the P-EAGLE loss of plain tensors.

    All but `aux_hidden_states` are in the shifted frame: moved left by one inside each document,
    zero in its last slot.

    Args:
        draft: weights, as `PeagleDraft.from_pretrained` reads them.
        aux_hidden_states: a_t, unshifted, layers ascending, [B, T, n*H].
        input_ids: x_{t+1}, int64 [B, T].
        sample: the elements, bool [B, K, T] by depth and anchor, as `cod_sample` draws them; every
            slot is attended to at depth 0, in the sample or not.
        loss_mask: m_{t+1} [B, T]; `slots` makes the slot mask from it.
        slot_mask: the slot mask of depth 0 [B, T] itself, instead of `loss_mask`.
        logits: the teacher z_{t+1} [B, T, V]; or
        final_hidden: f_{t+1} [B, T, H] with `head`; or
        target_probs: probabilities over the draft vocabulary [B, T, Vd] with
        position_mask: [B, T], True where the target's own choice is in the draft vocabulary.
        target_argmax: the target's choice, int64 [B, T]; derived from the teacher when absent.
        document_ids: int64 [B, T], -1 in padding; None: a row is one document.
        position_ids: int64 [B, T]; None: counted from 0 in each document.
        attention_mask: 0 in padding [B, T]; None: no padding but that of `document_ids`.
        slots: "serving" or "shifted".
        segments: parts of a row that are trained in turn: the same loss and gradients.
        count: denominator [1] over the whole optimizer step; None: this batch alone.

    Raises:
        DraftError: not exactly one teacher or one mask, an unknown policy, or a sample that has not
            the shape of the batch.
    """
    batch, length = input_ids.shape
    if sample.ndim != 3 or sample.shape[0] != batch or sample.shape[2] != length:
        raise DraftError(f"sample is {list(sample.shape)}: expected [{batch}, depths, {length}]")
    frame = settle_frame(
        draft,
        input_ids=input_ids,
        loss_mask=loss_mask,
        slot_mask=slot_mask,
        logits=logits,
        final_hidden=final_hidden,
        head=head,
        target_probs=target_probs,
        position_mask=position_mask,
        target_argmax=target_argmax,
        document_ids=document_ids,
        position_ids=position_ids,
        attention_mask=attention_mask,
        slots=slots,
    )
    return parallel_loss(
        draft,
        frame,
        aux=aux_hidden_states,
        input_ids=input_ids,
        sample=sample,
        segments=segments,
        count=count,
    )


def element_masks(
    mask: Tensor, rows: Tensor, choice: Tensor, document_ids: Tensor, sample: Tensor
) -> tuple[Tensor, Tensor]:
    """Sampled elements in the slot mask, and those with a loss, each bool [K, B, T].

    The difference are misses: the target's choice is outside the draft vocabulary. Arguments as in
    `Frame`, and `sample` as for `peagle_loss`.
    """
    inside = torch.zeros_like(mask)
    inside.view(-1)[rows] = choice >= 0
    sampled, depths = sample.transpose(0, 1), sample.shape[1]
    drafted = step_masks(mask, document_ids, depths) & sampled
    return drafted, step_masks(inside, document_ids, depths) & sampled


def parallel_loss(
    draft: PeagleModel,
    frame: Frame,
    *,
    aux: Tensor,
    input_ids: Tensor,
    sample: Tensor,
    segments: int,
    count: Tensor | None,
) -> DraftLoss:
    """The loss, its slots and teachers settled; other arguments as for `peagle_loss`."""
    drafted, supervised = element_masks(
        frame.mask, frame.rows, frame.choice, frame.document_ids, sample
    )
    own = supervised.flatten(1).sum(1).double()
    total = own.sum() if count is None else count.to(own).sum()
    tally = _Tally.zero(drafted)
    losses = [
        functools.partial(
            _segment_loss, draft, frame, aux, input_ids, elements, 1 / total.clamp_min(1), tally
        )
        for elements in segments_of(sample, supervised, frame.document_ids, segments)
    ]
    parameters = draft.trainable_parameters()
    if not losses:
        # Connected to every parameter, so that optimizers and all-reduces see a gradient of zero.
        loss = sum((p.flatten()[0] * 0 for p in parameters), torch.zeros(()))
    elif len(losses) > 1 and torch.is_grad_enabled():
        loss = _InTurn.apply(losses, *parameters)
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
    return DraftLoss(loss, sums)


@dataclass(frozen=True)
class _Tally:
    """What segments add to: per depth, and hits by depth, row and anchor."""

    loss: Tensor  # float64 [K]
    acceptance: Tensor  # float64 [K]
    hits: Tensor  # bool [K, B, T]

    @classmethod
    def zero(cls, like: Tensor) -> "_Tally":
        per_depth = torch.zeros(len(like), dtype=torch.float64, device=like.device)
        return cls(per_depth, per_depth.clone(), torch.zeros_like(like))


def _segment_loss(
    draft: PeagleModel,
    frame: Frame,
    aux: Tensor,
    input_ids: Tensor,
    elements: Elements,
    weight: Tensor,
    tally: _Tally,
) -> Tensor:
    """Sum of `weight` times the losses of a segment, with a graph; adds to the tally."""
    states = _element_states(draft, frame, aux, input_ids, elements)
    hidden = draft.norm(states.flatten(0, 1)[elements.place])
    depth, row, anchor = elements.where
    slots = row * input_ids.shape[1] + anchor + depth
    teacher = _SharedTeacher(frame.teacher, slots)
    weights = weight.to(wide(hidden).dtype).expand(len(slots), 1)
    loss, stats = head_loss(hidden[:, None], draft.lm_head.weight, teacher, weights, LossKind())
    with torch.no_grad():
        entropy = teacher.entropy[teacher.index]
        choice = frame.choice[torch.searchsorted(frame.rows, slots)]
        tally.loss.index_add_(0, depth, stats.loss[:, 0].double() - entropy)
        tally.acceptance.index_add_(0, depth, stats.acceptance[:, 0].double())
        tally.hits[depth, row, anchor] = stats.best[:, 0] == choice
        constant = (entropy.sum() * weight).to(loss.dtype)
    return loss - constant  # cross-entropy less the teacher's entropy is the divergence


def _element_states(
    draft: PeagleModel, frame: Frame, aux: Tensor, input_ids: Tensor, elements: Elements
) -> Tensor:
    """States [B, E, H] of a segment's elements."""
    part = slice(elements.first, elements.stop)
    features = draft.project(aux[:, part])
    tokens, carried = draft.element_inputs(input_ids[:, part], features, elements.deeper)
    lengths = None
    if draft.rotary.limit is not None:
        lengths = document_lengths(frame.document_ids).gather(1, elements.anchors)
    mask = parallel_mask(elements.document_ids, elements.anchors, elements.depths)
    attending = Attending.prepare(mask, draft.config.head_dim, draft.attention_backend)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attending(q, k, v, draft.scale)

    positions = frame.position_ids.gather(1, elements.anchors) + elements.depths
    attends: list[Attend] = [attend] * len(draft.layers)
    return draft.states(tokens, carried, positions, lengths, attends)


class _SharedTeacher:
    """Teacher rows of elements, each slot's computed once per chunk; notes their entropies."""

    def __init__(self, teacher: Teacher, slots: Tensor) -> None:
        """Elements stand at `slots` [n]; those of one slot side by side."""
        self._teacher = teacher
        self._slots, self.index = torch.unique_consecutive(slots, return_inverse=True)
        self._bounds = self.index.tolist()
        self.entropy = torch.zeros(len(self._slots), dtype=torch.float64, device=slots.device)

    def __call__(self, part: slice) -> Tensor:
        """Probabilities [n, Vd] of a slice of the elements."""
        first, last = self._bounds[part.start], self._bounds[part.stop - 1]
        p = self._teacher(self._slots[first : last + 1])
        self.entropy[first : last + 1] = -torch.xlogy(p, p).sum(-1).double()
        return p[self.index[part] - first]


class _InTurn(torch.autograd.Function):
    """The sum of losses that are computed and differentiated one after the other."""

    @staticmethod
    def forward(ctx: Any, losses: Sequence[Callable[[], Tensor]], *parameters: Tensor) -> Tensor:
        total, gradients = None, [torch.zeros_like(p) for p in parameters]
        for loss in losses:
            with torch.enable_grad():
                value = loss()
            # The backward pass of a training loop is outside autocast; so is this one.
            with torch.autocast(value.device.type, enabled=False):
                parts = torch.autograd.grad(value, parameters)
            for gradient, part in zip(gradients, parts, strict=True):
                gradient += part
            total = value.detach() if total is None else total + value.detach()
        ctx.save_for_backward(*gradients)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient * grads[0].to(gradient.dtype) for gradient in ctx.saved_tensors)
