"""The loss of DSpark and DFlash, of plain tensors in the token frame.

In: a `BlockFrame`. Out: a `DraftLoss`. For draft d of the block at anchor a, with p the target's
distribution at position a+d renormalised over the draft vocabulary, m the target's probability of
that vocabulary, q the draft's (head and Markov bias over the document's previous token) and c its
confidence:

    0.1 * cross-entropy + 0.9 * |q - p|_1 + 1.0 * BCE(c, c*),    c* = sum_v min(m p, q), detached

That is --loss ce+l1. Any other loss of `losses` replaces the cross-entropy and the L1 term by one
term of weight 1, between p (or a hard target) and q.

c* is the probability that sampling with the target's full distribution keeps the draft. It equals
1 - |q - p|_1 / 2, as published, if m = 1. Each term is a mean over the drafts that count, weighted
by exp(-d / gamma). The cross-entropy is taken with the document's token, as published, with p, or
with the target's choice. The first term (the cross-entropy, or the other loss) has a denominator of
its own, because it may count at fewer drafts.
If the draft vocabulary is a selection of the target's, a draft whose target's choice is outside it
is not trained and counts as a miss; its c* still counts in tau and in the acceptance. A
cross-entropy with a token outside the draft vocabulary is left out.

Denominators are sums of weights over the whole optimizer step. Blocks are drawn at random, and the
denominators of a step are needed before the draw. So they are the expectation over the draw, which
makes the sampled loss an unbiased estimate of the loss over all blocks. They are exact if every
candidate is an anchor.

B packs, T tokens, N blocks of a pack, D drafts of a block, R drafts that count, H hidden size,
V / Vd target / draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_train.drafts.dspark.block_frame import BlockFrame, BlockInputs, tensor_block_frame
from spec_train.drafts.dspark.block_metrics import Forecasts, block_sums, kind_sums
from spec_train.drafts.dspark.blocks import batch_context, block_states
from spec_train.drafts.dspark.head_loss import RowFigures, block_rows_loss
from spec_train.drafts.dspark.model import DSparkModel
from spec_train.drafts.dspark.trained_rows import TrainedRows, draft_weights
from spec_train.drafts.protocol import DraftLoss
from spec_train.drafts.teacher import SharedTeacher, Teacher
from spec_train.head import TargetHead
from spec_train.losses import LossKind


def dspark_loss(
    draft: DSparkModel, *, head: TargetHead, counts: Tensor | None = None, **inputs: Any
) -> DraftLoss:
    """Compute the loss of given blocks. The weights of the terms and gamma are `draft.options`.

    Everything is in the token frame: index t is token t, nothing is shifted.

    Args:
        draft: the weights, as `DSparkDraft.from_pretrained` reads them.
        head: the target's; its rows also make the draft's logits.
        counts: denominators [2], of the first term and of the other terms, over the whole
            optimizer step; None: those of these blocks.
        **inputs: the fields of `block_frame.BlockInputs`, with their shapes there and in
            `frames.TokenInputs`: aux_hidden_states, input_ids, loss_mask, anchors; one teacher:
            final_hidden or logits; and optionally kept, target_argmax, target_logsumexp,
            document_ids, position_ids.

    Raises:
        DraftError: not exactly one teacher, anchors outside the pack, or inputs of the other frame.
        TypeError: an input is unknown or missing.
    """
    frame = tensor_block_frame(draft, BlockInputs(**inputs), head)
    return blocks_loss(draft, frame, head, counts)


def blocks_loss(
    draft: DSparkModel, frame: BlockFrame, head: TargetHead, counts: Tensor | None
) -> DraftLoss:
    """Compute the loss of a frame; `head` is the target's, `counts` [2] (see `dspark_loss`)."""
    chosen = TrainedRows.select(draft, frame)
    own = chosen.totals()  # [2]
    counts = own if counts is None else counts.to(own)
    shares = torch.where(counts > 0, 1 / counts, 0.0)  # [2]
    if chosen.rows.numel():
        documents, positions = frame.document_ids, frame.position_ids
        context = batch_context(draft, frame.aux, documents, positions)
        y = block_states(draft, context, frame.input_ids, documents, positions, frame.blocks)
        loss, figures, forecasts = _rows_loss(draft, y, chosen, head, frame.teacher, shares)
    else:
        loss, empty = draft.zero_loss(), own.new_zeros(0)
        figures = RowFigures(empty, empty, empty, chosen.rows, empty)
        forecasts = None if draft.confidence_head is None else Forecasts(empty, empty)
    options, mixed = draft.options, draft.options.mixed
    alphas = options.ce_weight * mixed, options.l1_weight * mixed, options.confidence_weight
    weights = draft_weights(draft).to(own.device)  # [D]
    sums = block_sums(figures, forecasts, chosen, weights, alphas)
    return DraftLoss(loss, sums if mixed else sums | kind_sums(figures, chosen))


def _rows_loss(
    draft: DSparkModel,
    y: Tensor,
    chosen: TrainedRows,
    head: TargetHead,
    teacher: Teacher,
    shares: Tensor,
) -> tuple[Tensor, RowFigures, Forecasts | None]:
    """Return the loss of the chosen drafts with a graph, their figures, and their confidence.

    Args:
        draft: the weights.
        y: states of the blocks [B, N, D, H].
        chosen: the R drafts.
        head: the target's.
        teacher: of flat slots.
        shares: one over the denominators, float64 [2].
    """
    options, rows = draft.options, chosen.rows
    hidden, latent, known, markov_w2 = y.flatten(0, 2)[rows], None, None, None  # hidden: [R, H]
    shared, latent_of = SharedTeacher(teacher, chosen.slot), None
    if draft.markov_head is not None:
        markov, markov_w2 = draft.markov_head, draft.markov_head.markov_w2.weight
        if markov.of_token_alone:  # drafts of one slot follow the same token
            latent_of = shared.index, shared.bounds
            latent = markov.markov_w1(chosen.token_before(shared.slots))  # [M, r], M slots
            known = latent[shared.index]  # [R, r]
        else:
            e = markov.markov_w1(chosen.previous)  # [B, N, D, r]
            latent = markov.block(e, y).flatten(0, 2)[rows]  # [R, r]
            known = e.flatten(0, 2)[rows]
    head_rows = draft.head_rows(head)  # [Vd, H]
    label = {"tokens": chosen.token, "hard": chosen.choice.clamp_min(0), "soft": None}
    first = chosen.weight * chosen.has_token * shares[0]  # [R]
    mixed = options.mixed
    loss, figures = block_rows_loss(
        hidden.to(head_rows.dtype),
        latent,
        head_rows,
        markov_w2,
        shared,
        label[options.compared_with],
        options.ce_weight * first if mixed else first,
        options.l1_weight * chosen.weight * shares[1],
        kind=None if mixed else LossKind.of(options),
        latent_of=latent_of,
    )
    if draft.confidence_head is None:
        return loss, figures, None
    logits = draft.confidence_head(hidden, known).to(figures.acceptance.dtype)  # [R]
    bce = F.binary_cross_entropy_with_logits(logits, figures.acceptance, reduction="none")  # [R]
    weight = options.confidence_weight * chosen.weight * shares[1]  # [R]
    loss = loss + (weight.to(bce.dtype) * bce).sum()
    return loss, figures, Forecasts(logits.detach().sigmoid(), bce.detach())
