"""The EAGLE-1/2 loss of plain tensors (arXiv 2401.15077).

Everything is in the token frame: row t of a tensor belongs to token x_t. Slot t is fed the state
f_t (plus noise, in training) and the known token x_{t+1}; it predicts f_{t+1}, and through the
target's frozen head the distribution of x_{t+2}, whose teacher is softmax(head(f_{t+1})). So the
loss of a slot is

    regression_weight * mean_H SmoothL1(pred_t, f_{t+1})
    + ce_weight * -sum_v softmax(head(f_{t+1}))_v log softmax(head(pred_t))_v

over the slots with m_{t+1} and m_{t+2} ("serving") or m_{t+1} alone ("shifted"), divided by their
number over the whole optimizer step. Teachers are free of noise.

Further steps are measured, never trained on: step s is fed the prediction of step s-1 and the
document's token x_{t+1+s}, and is compared with f_{t+1+s}.

B rows, T slots, S steps, n supervised slots of a step, H hidden size, V target vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.packing import shift_left
from spec_train.drafts.eagle.model import EagleModel
from spec_train.drafts.eagle.unroll import EagleUnroll
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.slots import document_lengths, document_offsets, slot_masks
from spec_train.drafts.slots import step_masks as masks_of_steps
from spec_train.head import TargetHead
from spec_train.losses import LossKind, RowStats, head_loss, wide
from spec_train.metrics import chain_sums

NOISE_LENGTH = 512  # document length at which "length" noise has the width of "fixed"


def input_noise(states: Tensor, document_ids: Tensor, width: float, scale: str) -> Tensor:
    """Uniform noise in (-width, width) for states [B, T, H], float32, from torch's generator.

    scale "fixed": as it is; "length": times 512 / tokens of the slot's document.
    """
    noise = (torch.rand(states.shape, device=states.device) * 2 - 1) * width
    if scale == "length":
        noise *= (NOISE_LENGTH / document_lengths(document_ids))[..., None]
    return noise


def supervised_slots(loss_mask: Tensor, document_ids: Tensor, slots: str, steps: int = 1) -> Tensor:
    """Slot masks of every step, boolean [S, B, T], from the loss mask [B, T] of the token frame."""
    mask = slot_masks(shift_left(loss_mask, document_ids), document_ids, slots)
    return masks_of_steps(mask, document_ids, steps)


def eagle_loss(
    draft: EagleModel,
    *,
    final_hidden: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    head: TargetHead,
    target_argmax: Tensor | None = None,
    document_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    noise: Tensor | None = None,
    slots: str = "serving",
    steps: int = 1,
    regression_weight: float = 1.0,
    ce_weight: float = 0.1,
    counts: Tensor | None = None,
) -> DraftLoss:
    """Compute the EAGLE-1/2 loss of documents in the token frame.

    Args:
        draft: weights.
        final_hidden: f_t [B, T, H].
        input_ids: x_t, int64 [B, T].
        loss_mask: m_t [B, T].
        head: the target's.
        target_argmax: the target's choice for x_{t+1}, int64 [B, T]; by default the head's.
        document_ids: int64 [B, T], -1 in padding; None: a row is one document.
        position_ids: int64 [B, T]; None: counted from 0 in each document.
        noise: added to f_t as the draft is fed it [B, T, H]; None: none.
        slots: "serving" or "shifted".
        steps: S; steps after the first carry no loss, only figures.
        regression_weight, ce_weight: of the two parts.
        counts: denominators [S] over the whole optimizer step, of which the first is used; None:
            this batch alone.
    """
    if document_ids is None:
        document_ids = torch.zeros_like(input_ids)
    if position_ids is None:
        position_ids = document_offsets(document_ids)
    masks = supervised_slots(loss_mask, document_ids, slots, steps)
    own = masks.flatten(1).sum(1).double()
    share = torch.zeros_like(own)
    share[0] = 1.0
    fed = final_hidden if noise is None else (wide(final_hidden) + noise).to(final_hidden.dtype)
    unroll = EagleUnroll(draft, fed, document_ids, position_ids)
    states, known = final_hidden.flatten(0, 1), input_ids
    weights = regression_weight, ce_weight
    loss: Tensor | None = None
    parts = []
    for s in range(steps):
        rows = masks[s].flatten().nonzero().squeeze(1)
        if not len(rows):
            parts.append(_nothing(rows))
            continue
        known = shift_left(known, document_ids)
        predicted = unroll.advance(known).flatten(0, 1)[rows]
        teacher = states[rows + s + 1]  # of the same document: its token is supervised
        choice = None if target_argmax is None else target_argmax.flatten()[rows + s + 1]
        factor = share[s] / (own if counts is None else counts)[s]
        total, part = _step_loss(predicted, teacher, choice, head, factor, weights)
        loss = total if loss is None else loss
        parts.append((rows, *part))
    if loss is None:
        # Connected to every parameter, so that optimizers and all-reduces see a gradient of zero.
        loss = sum((p.flatten()[0] * 0 for p in draft.trainable_parameters()), torch.zeros(()))
    return DraftLoss(loss, _sums(parts, masks, own, share, weights))


Part = tuple[Tensor, Tensor, RowStats, Tensor]
"""Of one step: flat slots [n], smooth L1 [n], the head's figures, the target's choices [n]."""


def _nothing(rows: Tensor) -> Part:
    empty = torch.zeros(0, 1, device=rows.device)
    return rows, empty[:, 0], RowStats(empty, empty, empty.long()), rows


def _step_loss(
    predicted: Tensor,
    teacher: Tensor,
    choice: Tensor | None,
    head: TargetHead,
    factor: Tensor,
    weights: tuple[float, float],
) -> tuple[Tensor, tuple[Tensor, RowStats, Tensor]]:
    """Loss of predicted states [n, H] against the target's [n, H], summed and times `factor`;
    and what it is made of."""
    distance = F.smooth_l1_loss(wide(predicted), wide(teacher), reduction="none").mean(-1)
    best: list[Tensor] = []

    def distribution(part: slice) -> Tensor:
        logits = head.logits(teacher[part])
        best.append(logits.argmax(-1))
        return torch.softmax(logits, -1)

    entropy, stats = head_loss(
        predicted[:, None].to(head.head_weight.dtype),
        head.head_weight,
        distribution,
        (weights[1] * factor).to(distance.dtype).expand(len(distance), 1),
        LossKind(),
        bias=head.head_bias,
        spec=head.spec,
    )
    total = entropy + (weights[0] * factor).to(distance.dtype) * distance.sum()
    return total, (distance.detach(), stats, torch.cat(best) if choice is None else choice)


@torch.no_grad()
def _sums(
    parts: list[Part], masks: Tensor, own: Tensor, share: Tensor, weights: tuple[float, float]
) -> dict[str, Tensor]:
    """The additive figures of a batch (see `metrics`), and those of the two parts of the loss."""
    hits = torch.zeros_like(masks).flatten(1)
    for s, (rows, _, stats, choice) in enumerate(parts):
        hits[s, rows] = stats.best[:, 0] == choice
    distance = torch.stack([d.double().sum() for _, d, _, _ in parts])
    entropy = torch.stack([stats.loss.double().sum() for _, _, stats, _ in parts])
    return {
        "loss": weights[0] * distance + weights[1] * entropy,
        "smooth_l1": distance,
        "cross_entropy": entropy,
        "supervised": own,
        "weighted": own * share,
        "drafted": own,
        "hits": hits.sum(1).double(),
        "acceptance": torch.stack([stats.acceptance.double().sum() for _, _, stats, _ in parts]),
        **chain_sums(hits.view_as(masks), masks),
    }
