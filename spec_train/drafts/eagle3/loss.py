"""The EAGLE-3 loss (training-time test) of plain tensors.

The shifted frame: slot t holds the aux states a_t, the known token x_{t+1}, the mask m_{t+1} and
the teacher z_{t+1}, and drafts x_{t+2}. Unroll step s looks s tokens further along the document.
So step s of slot t has the teacher of slot t + s: one teacher row serves up to S chains, and is
computed once.

Norm, head and loss run at supervised slots alone, in chunks: memory grows with T + S x slots, never
with slots x vocabulary. What it costs: no gradients of gradients.

B rows, T slots, N supervised rows of the teacher, S unroll steps, H hidden size, V / Vd target /
draft vocabulary.
"""

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import shift_left
from spec_train.attention.unrolled import active_slots
from spec_train.drafts.eagle3.model import Eagle3Model
from spec_train.drafts.eagle3.unroll import Unroll
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.slots import document_offsets, step_masks
from spec_train.drafts.teacher import Teacher, settle_frame
from spec_train.head import TargetHead
from spec_train.losses import KINDS, LossKind, RowStats, head_loss, wide
from spec_train.metrics import chain_sums


def eagle3_loss(
    draft: Eagle3Model,
    *,
    aux_hidden_states: Tensor,
    input_ids: Tensor,
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
    steps: int = 7,
    decay: float = 0.8,
    kind: str | LossKind = "ce",
    counts: Tensor | None = None,
) -> DraftLoss:
    """Compute the EAGLE-3 loss of plain tensors.

    All but `aux_hidden_states` are in the shifted frame: moved left by one inside each document,
    zero in its last slot.

    Args:
        draft: weights, as `Eagle3Draft.from_pretrained` reads them.
        aux_hidden_states: a_t, unshifted, layers ascending, [B, T, n*H].
        input_ids: x_{t+1}, int64 [B, T].
        loss_mask: m_{t+1} [B, T]; `slots` makes the slot mask from it.
        slot_mask: the slot mask of step 0 [B, T] itself, instead of `loss_mask`.
        logits: the teacher z_{t+1} [B, T, V]; or
        final_hidden: f_{t+1} [B, T, H] with `head`; or
        target_probs: probabilities over the draft vocabulary [B, T, Vd] with
        position_mask: [B, T], True where the target's own choice is in the draft vocabulary.
        target_argmax: the target's choice, int64 [B, T]; derived from the teacher when absent.
        document_ids: int64 [B, T], -1 in padding; None: a row is one document.
        position_ids: int64 [B, T]; None: counted from 0 in each document.
        attention_mask: 0 in padding [B, T]; None: no padding but that of `document_ids`.
        slots: "serving" or "shifted".
        steps, decay: S and the weight base of maths' sum over steps.
        kind: "ce", "alpha", "lambda", or a `LossKind` with its numbers.
        counts: denominators [S] over the whole optimizer step; None: this batch alone.

    Raises:
        DraftError: not exactly one teacher or one mask, or an unknown policy.
    """
    kind = kind if isinstance(kind, LossKind) else LossKind(name=kind)
    if kind.name not in KINDS:
        raise DraftError(f"kind = {kind.name!r}: choose from {', '.join(KINDS)}")
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
    return unrolled_loss(
        draft,
        aux=aux_hidden_states,
        input_ids=input_ids,
        mask=frame.mask,
        rows=frame.rows,
        choice=frame.choice,
        teacher=frame.teacher,
        document_ids=frame.document_ids,
        position_ids=frame.position_ids,
        steps=steps,
        decay=decay,
        kind=kind,
        counts=counts,
    )


def unrolled_loss(
    draft: Eagle3Model,
    *,
    aux: Tensor,
    input_ids: Tensor,
    mask: Tensor,
    rows: Tensor,
    choice: Tensor,
    teacher: Teacher,
    document_ids: Tensor,
    position_ids: Tensor,
    steps: int,
    decay: float,
    kind: LossKind,
    counts: Tensor | None,
) -> DraftLoss:
    """The loss, its inputs settled: `rows` [n] are the flat slots of `mask` [B, T] (step 0),
    `choice` [n] the target's choice there as a draft index, -1 outside the draft vocabulary.
    """
    drafted = step_masks(mask, document_ids, steps)
    inside = choice >= 0
    rows, choice = rows[inside], choice[inside]
    reach = document_offsets(document_ids).flatten()[rows]
    valid = reach[:, None] >= torch.arange(steps, device=rows.device)  # [N, S]: slot row - s exists
    own = valid.sum(0).double()
    counts = own if counts is None else counts.to(own)
    share = decay ** torch.arange(steps, dtype=torch.float64, device=rows.device)
    share = share / share.sum()
    if rows.numel():
        supervised = torch.zeros_like(mask).flatten().index_fill_(0, rows, True).view_as(mask)
        used = step_masks(supervised, document_ids, steps).any(0)
        hidden = _chain_states(draft, aux, input_ids, document_ids, position_ids, used, rows, valid)
        weights = valid * torch.where(counts > 0, share / counts, 0.0)
        loss, stats = head_loss(
            draft.head_input(hidden),
            draft.lm_head.weight,
            lambda part: teacher(rows[part]),
            weights.to(wide(hidden).dtype),
            kind,
        )
    else:
        # Connected to every parameter, so that optimizers and all-reduces see a gradient of zero.
        loss = sum((p.flatten()[0] * 0 for p in draft.trainable_parameters()), torch.zeros(()))
        empty = torch.zeros(0, steps, device=rows.device)
        stats = RowStats(empty, empty, empty.long())
    return DraftLoss(loss, _sums(stats, rows, choice, valid, drafted, own, share))


def _chain_states(
    draft: Eagle3Model,
    aux: Tensor,
    input_ids: Tensor,
    document_ids: Tensor,
    position_ids: Tensor,
    used: Tensor,
    rows: Tensor,
    valid: Tensor,
) -> Tensor:
    """States [N, S, H]: entry (n, s) is step s of the chain whose teacher there is `rows[n]`."""
    active = active_slots(used)
    unroll = Unroll(draft, aux, input_ids, document_ids, position_ids, active)
    place = (used.cumsum(1) - 1).clamp_min(0)  # of a slot among its row's active ones
    place = place + active.shape[1] * torch.arange(len(used), device=used.device)[:, None]
    known, states = input_ids, []
    for _ in range(valid.shape[1]):
        states.append(unroll.advance(known.gather(1, active)).flatten(0, 1))
        known = shift_left(known, document_ids)
    slots = rows[:, None] - torch.arange(valid.shape[1], device=rows.device)
    index = torch.where(valid, place.flatten()[slots.clamp_min(0)], 0)
    return torch.stack([state[index[:, s]] for s, state in enumerate(states)], dim=1)


@torch.no_grad()
def _sums(
    stats: RowStats,
    rows: Tensor,
    choice: Tensor,
    valid: Tensor,
    drafted: Tensor,
    own: Tensor,
    share: Tensor,
) -> dict[str, Tensor]:
    """The additive figures of a batch (see `metrics`)."""
    hit = (stats.best == choice[:, None]) & valid
    hits = torch.zeros_like(drafted).flatten(1)
    for s in range(len(hits)):
        reached = valid[:, s]
        hits[s, rows[reached] - s] = hit[reached, s]
    return {
        "loss": (stats.loss.double() * valid).sum(0),
        "supervised": own,
        "weighted": own * share,
        "drafted": drafted.flatten(1).sum(1).double(),
        "hits": hit.sum(0).double(),
        "acceptance": (stats.acceptance.double() * valid).sum(0),
        **chain_sums(hits.view_as(drafted), drafted),
    }
