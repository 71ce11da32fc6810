"""The loss of DSpark and DFlash, of plain tensors in the token frame.

For draft d of the block at anchor a, with p the target's distribution at position a+d, q the
draft's (head and Markov bias over the document's previous token) and c its confidence:

    0.1 * cross-entropy + 0.9 * |q - p|_1 + 1.0 * BCE(c, c*),    c* = 1 - |q - p|_1 / 2, detached

each term a mean over the drafts that count, weighted by exp(-d / gamma). The cross-entropy is taken
with the document's token, as published, or with p. Where the draft vocabulary is a selection, a
draft whose target's choice is outside it is not trained and counts as a miss; the cross-entropy
with a token outside it is left out.

Denominators are sums of weights over the whole optimizer step. Blocks are drawn at random, and the
denominators of a step are wanted before they are: they are the expectation over the draw, exact
where every candidate is an anchor, which makes the sampled loss the unbiased estimate of the whole.

B rows, T tokens, N blocks of a row, D drafts of a block, R drafts that are trained, H hidden size,
V / Vd target / draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import PADDING, shift_left
from spec_train.drafts.dspark.block_metrics import block_sums
from spec_train.drafts.dspark.blocks import Blocks, batch_context, block_states, drafted_mask
from spec_train.drafts.dspark.head_loss import RowFigures, block_rows_loss
from spec_train.drafts.dspark.model import DSparkModel
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.slots import document_offsets
from spec_train.drafts.teacher import Teacher, head_teacher, logits_teacher
from spec_train.head import TargetHead


def dspark_loss(
    draft: DSparkModel,
    *,
    aux_hidden_states: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    head: TargetHead,
    kept: Tensor | None = None,
    final_hidden: Tensor | None = None,
    logits: Tensor | None = None,
    target_argmax: Tensor | None = None,
    document_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    counts: Tensor | None = None,
) -> DraftLoss:
    """Compute the loss of given blocks. Weights, gamma and the rest are the draft's `options`.

    Everything is in the token frame: index t is token t, nothing is shifted.

    Args:
        draft: weights, as `DSparkDraft.from_pretrained` reads them.
        aux_hidden_states: a_t, layers ascending, [B, T, n*H].
        input_ids: x_t, int64 [B, T]. loss_mask: m_t [B, T].
        anchors: slots of the row that blocks start at, int64 [B, N].
        head: the target's, whose rows also make the draft's logits.
        kept: bool [B, N], False for a block that is only there to fill the row; None: all are real.
        final_hidden: f_t [B, T, H]; or
        logits: the target's z_t [B, T, V]: the teacher.
        target_argmax: argmax of z_t, int64 [B, T]; derived from the teacher when absent.
        document_ids: int64 [B, T], -1 in padding; None: a row is one document.
        position_ids: int64 [B, T]; None: counted from 0 in each document.
        counts: denominators [2], of the cross-entropy and of the other terms, over the whole
            optimizer step; None: of these blocks alone.

    Raises:
        DraftError: not exactly one teacher, or anchors outside the row.
    """
    if (final_hidden is None) == (logits is None):
        raise DraftError("give exactly one of final_hidden and logits")
    if anchors.numel() and not 0 <= int(anchors.min()) <= int(anchors.max()) < input_ids.shape[1]:
        raise DraftError(f"anchors: slots must be within 0..{input_ids.shape[1] - 1}")
    if document_ids is None:
        document_ids = torch.zeros_like(input_ids)
    if position_ids is None:
        position_ids = document_offsets(document_ids)
    kept = torch.ones_like(anchors, dtype=torch.bool) if kept is None else kept.bool()
    kept = kept & (document_ids.gather(1, anchors) != PADDING)
    if target_argmax is None:
        target_argmax = _argmax(head, final_hidden, logits)
    ids = None if draft.full_vocabulary else draft.draft_ids
    if logits is not None:
        teacher = logits_teacher(logits.flatten(0, 1), ids)
    else:
        assert final_hidden is not None
        teacher = head_teacher(head, final_hidden.flatten(0, 1), ids)
    return blocks_loss(
        draft,
        aux=aux_hidden_states,
        input_ids=input_ids,
        loss_mask=loss_mask,
        document_ids=document_ids,
        position_ids=position_ids,
        target_argmax=target_argmax,
        blocks=Blocks(anchors, kept),
        head=head,
        teacher=teacher,
        counts=counts,
    )


def _argmax(head: TargetHead, final_hidden: Tensor | None, logits: Tensor | None) -> Tensor:
    if logits is not None:
        return logits.argmax(-1)
    assert final_hidden is not None
    parts = [head.logits(part).argmax(-1) for part in final_hidden.flatten(0, 1).split(256)]
    return torch.cat(parts).view(final_hidden.shape[:2])


def draft_weights(draft: DSparkModel) -> Tensor:
    """Weight of every draft of a block, float64 [D]."""
    gamma, depth = draft.options.loss_decay_gamma, draft.config.depth
    steps = torch.arange(depth, dtype=torch.float64, device=draft.fc.weight.device)
    return torch.exp(-steps / gamma) if gamma else torch.ones_like(steps)


def learnable(
    draft: DSparkModel, target_argmax: Tensor, following: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the cross-entropy and where the other terms can be learned, bool [B, T].

    Args:
        target_argmax: the target's choice after every token, int64 [B, T].
        following: the document's token after every token, int64 [B, T].
    """
    inside = draft.draft_index[target_argmax] >= 0
    if draft.options.ce_target == "teacher":
        return inside, inside
    return inside & (draft.draft_index[following] >= 0), inside


@dataclass(frozen=True)
class TrainedRows:
    """The R drafts of a batch that are trained, by position, and all that count."""

    drafted: Tensor  # bool [B, N, D]: counts
    trained: Tensor  # bool [B, N, D]: and the target's choice is in the draft vocabulary
    rows: Tensor  # flat index in [B, N, D], int64 [R]
    slot: Tensor  # flat slot of the teacher, ascending, int64 [R]: blocks that overlap share it
    weight: Tensor  # exp(-d / gamma), float64 [R]
    choice: Tensor  # the target's choice as a draft index, int64 [R]
    has_token: Tensor  # bool [R]: the cross-entropy counts
    label: Tensor  # the document's token as a draft index, int64 [R]; any where it does not count
    previous: Tensor  # the token before every draft, int64 [B, N, D]

    @classmethod
    def select(
        cls,
        draft: DSparkModel,
        input_ids: Tensor,
        loss_mask: Tensor,
        document_ids: Tensor,
        target_argmax: Tensor,
        blocks: Blocks,
    ) -> "TrainedRows":
        """Find them; everything is [B, T], in the token frame."""
        depth, length = draft.config.depth, input_ids.shape[1]
        drafted = _at(drafted_mask(loss_mask, document_ids, depth), blocks) & blocks.kept[..., None]
        # Where nothing counts, slots may lie beyond the row: any will do, nothing is read there.
        places = blocks.places(depth).clamp_max(length - 1)
        following = shift_left(input_ids, document_ids)
        with_token, inside = learnable(draft, target_argmax, following)
        trained = drafted & _gather(inside, places)
        first = length * torch.arange(len(places), device=places.device)
        rows = trained.flatten().nonzero().squeeze(1)
        slot, order = (places + first[:, None, None]).flatten()[rows].sort(stable=True)
        rows = rows[order]
        return cls(
            drafted=drafted,
            trained=trained,
            rows=rows,
            slot=slot,
            weight=draft_weights(draft).to(rows.device)[rows % depth],
            choice=draft.draft_index[target_argmax.flatten()[slot]],
            has_token=with_token.flatten()[slot],
            label=draft.draft_index[following.flatten()[slot]].clamp_min(0),
            previous=_gather(input_ids, places),
        )

    def totals(self) -> Tensor:
        """Weights of the cross-entropy and of the other terms, float64 [2]."""
        return torch.stack([(self.weight * self.has_token).sum(), self.weight.sum()])


def blocks_loss(
    draft: DSparkModel,
    *,
    aux: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    document_ids: Tensor,
    position_ids: Tensor,
    target_argmax: Tensor,
    blocks: Blocks,
    head: TargetHead,
    teacher: Teacher,
    counts: Tensor | None,
) -> DraftLoss:
    """The loss, its inputs settled: `teacher` gives probabilities [n, Vd] of flat slots [n]."""
    select = TrainedRows.select
    chosen = select(draft, input_ids, loss_mask, document_ids, target_argmax, blocks)
    own = chosen.totals()
    counts = own if counts is None else counts.to(own)
    shares = torch.where(counts > 0, 1 / counts, 0.0)
    if chosen.rows.numel():
        context = batch_context(draft, aux, document_ids, position_ids)
        y = block_states(draft, context, input_ids, document_ids, position_ids, blocks)
        loss, figures, confidence = _rows_loss(draft, y, chosen, head, teacher, shares)
    else:
        # Connected to every parameter, so that optimizers and all-reduces see a gradient of zero.
        loss = sum((p.flatten()[0] * 0 for p in draft.trainable_parameters()), torch.zeros(()))
        empty = own.new_zeros(0)
        figures = RowFigures(empty, empty, chosen.rows)
        confidence = None if draft.confidence_head is None else (empty, empty)
    options = draft.options
    sums = block_sums(
        figures,
        confidence,
        hit=figures.best == chosen.choice,
        rows=chosen.rows,
        drafted=chosen.drafted,
        trained=chosen.trained,
        weights=draft_weights(draft).to(own.device),
        has_token=chosen.has_token,
        alphas=(options.ce_weight, options.l1_weight, options.confidence_weight),
    )
    return DraftLoss(loss, sums)


def _rows_loss(
    draft: DSparkModel,
    y: Tensor,
    chosen: TrainedRows,
    head: TargetHead,
    teacher: Teacher,
    shares: Tensor,
) -> tuple[Tensor, RowFigures, tuple[Tensor, Tensor] | None]:
    """Loss of the chosen drafts given states y [B, N, D, H]; their figures; and the confidence
    head's forecasts [R] with their BCE [R]. `shares` [2] are one over the denominators."""
    options, rows = draft.options, chosen.rows
    hidden, latent, known, markov_w2 = y.flatten(0, 2)[rows], None, None, None
    if draft.markov_head is not None:
        e = draft.markov_head.markov_w1(chosen.previous)
        latent = draft.markov_head.block(e, y).flatten(0, 2)[rows]
        known, markov_w2 = e.flatten(0, 2)[rows], draft.markov_head.markov_w2.weight
    head_rows = draft.head_rows(head)
    loss, figures = block_rows_loss(
        hidden.to(head_rows.dtype),
        latent,
        head_rows,
        markov_w2,
        _shared_rows(teacher, chosen.slot),
        None if options.ce_target == "teacher" else chosen.label,
        options.ce_weight * chosen.weight * chosen.has_token * shares[0],
        options.l1_weight * chosen.weight * shares[1],
    )
    if draft.confidence_head is None:
        return loss, figures, None
    forecast = draft.confidence_head(hidden, known).to(figures.acceptance.dtype)
    bce = F.binary_cross_entropy_with_logits(forecast, figures.acceptance, reduction="none")
    weight = options.confidence_weight * chosen.weight * shares[1]
    loss = loss + (weight.to(bce.dtype) * bce).sum()
    return loss, figures, (forecast.detach().sigmoid(), bce.detach())


def _at(x: Tensor, blocks: Blocks) -> Tensor:
    """Entries [B, N, D] of `x` [B, T, D] at the anchors."""
    return x.gather(1, blocks.anchors[..., None].expand(-1, -1, x.shape[-1]))


def _gather(x: Tensor, places: Tensor) -> Tensor:
    """Entries [B, N, D] of `x` [B, T] at `places`."""
    return x.gather(1, places.flatten(1)).view_as(places)


def _shared_rows(teacher: Teacher, slot: Tensor) -> Callable[[slice], Tensor]:
    """The teacher of a slice of the sorted `slot` [R], each slot's distribution computed once."""

    def of(part: slice) -> Tensor:
        unique, place = torch.unique_consecutive(slot[part], return_inverse=True)
        return teacher(unique)[place]

    return of
