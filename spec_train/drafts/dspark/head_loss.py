"""Head, Markov bias and loss of block drafts in one function, computed in chunks.

In: states and latent vectors of drafts, their teacher and weights. Out: the weighted sum of the
losses, with a graph. The gradients are computed in the forward pass, so at most one chunk of logits
exists at a time.

Per row, with p the teacher renormalised over the draft vocabulary, m the target's probability of
the whole draft vocabulary, q = softmax(W y + W2 g) the draft and x the document's token:
    cross-entropy   -log q_x, or -sum_v p log q
    L1              sum_v |q - p| = 2 (1 - sum_v min(p, q)); not halved
    acceptance      sum_v min(m p, q) = (1 + m - sum_v |q - m p|) / 2, as min(a, b) = (a + b -
                    |a - b|) / 2; it equals 1 - L1 / 2 only if m = 1
A `LossKind` replaces the sum of the first two by one loss of `losses`; both are measured then.
W is the target's and gets no gradient. The price: gradients of gradients do not exist.

N rows, n rows of a chunk, H hidden size, r Markov rank, Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_train.losses import (
    LossKind,
    TeacherRows,
    add_product,
    distribution_loss,
    rows_per_chunk,
    wide,
)


@dataclass(frozen=True)
class RowFigures:
    """Figures of every row, no gradients."""

    cross_entropy: Tensor  # [N]
    overlap: Tensor  # sum_v min(p, q) = 1 - L1 / 2, [N]
    acceptance: Tensor  # sum_v min(m p, q), [N]
    best: Tensor  # the draft's choice as a draft index, int64 [N]
    loss: Tensor  # of the `LossKind` [N]; the cross-entropy where there is none


def block_rows_loss(
    hidden: Tensor,
    latent: Tensor | None,
    weight: Tensor,
    markov_w2: Tensor | None,
    teacher: Callable[[slice], TeacherRows],
    labels: Tensor | None,
    ce_weights: Tensor,
    l1_weights: Tensor,
    chunk_rows: int | None = None,
    kind: LossKind | None = None,
) -> tuple[Tensor, RowFigures]:
    """Return the sum over rows of ce_weights * cross-entropy + l1_weights * L1.

    With a `kind`, return the sum over rows of ce_weights * that loss.

    Args:
        hidden: y [N, H], in the dtype of `weight`.
        latent: g [N, r], which W2 multiplies; None without a Markov head.
        weight: rows of the target's head [Vd, H], frozen.
        markov_w2: W2 [Vd, r]; None without a Markov head.
        teacher: returns the teacher of a slice of the rows; called once per chunk.
        labels: draft index of the token that the cross-entropy, or a loss with a hard target, is
            taken with, int64 [N]; None: with p. A row whose token is not in the draft vocabulary
            has an arbitrary label and weight 0.
        ce_weights: weights of the cross-entropy [N].
        l1_weights: weights of the L1 term [N].
        chunk_rows: rows of a chunk; None: `rows_per_chunk`.
        kind: the loss instead of cross-entropy and L1; None: these two.

    Returns:
        The sum, a float32 (or float64) scalar with a graph, and the figures of every row.
    """
    total, *figures = _BlockRowsLoss.apply(
        hidden,
        latent,
        markov_w2,
        weight,
        teacher,
        labels,
        ce_weights,
        l1_weights,
        chunk_rows or rows_per_chunk(weight),
        torch.is_grad_enabled(),
        kind,
    )
    return total, RowFigures(*figures)


def _row_losses(
    logits: Tensor,
    teacher: TeacherRows,
    labels: Tensor | None,
    ce_weight: Tensor,
    l1_weight: Tensor,
) -> tuple[RowFigures, Tensor]:
    """Return the figures of n rows, and d loss / d logits [n, Vd].

    Args:
        logits: draft logits [n, Vd]; overwritten.
        teacher: of the n rows.
        labels: int64 [n], or None: cross-entropy with `p`.
        ce_weight: [n].
        l1_weight: [n].
    """
    p = teacher.p
    if labels is None:
        agreement = torch.einsum("nv,nv->n", p, logits)
    else:
        agreement = logits.gather(1, labels[:, None]).squeeze(1)
    peak, best = logits.max(-1, keepdim=True)
    q = logits.sub_(peak).exp_()  # [n, Vd], unnormalised until the division by `mass`
    mass = q.sum(-1, keepdim=True)
    q.div_(mass)
    total = (peak + mass.log()).squeeze(1)  # log of the sum of exp(logits)
    cross_entropy = total - agreement
    if teacher.rest is not None:
        whole, tail = teacher.completed(q[:, None])
        p, rest = whole.squeeze(1), teacher.rest
        if labels is None and tail is not None:
            cross_entropy = (1 - rest) * total - agreement - rest * tail.squeeze(1).log()
    slope = q - p
    overlap = 1 - slope.abs().sum(-1) / 2  # = sum_v min(p, q)
    overlap = overlap.clamp(0, 1)
    exact = teacher.mass is None and teacher.rest is None
    full = overlap if exact else torch.minimum(teacher.full(), q).sum(-1)
    slope.sign_()
    slope.sub_(torch.einsum("nv,nv->n", slope, q)[:, None])  # q times this is d L1 / d logits
    slope.mul_(l1_weight[:, None]).add_(ce_weight[:, None]).mul_(q)
    if labels is None:
        slope.addcmul_(p, ce_weight[:, None], value=-1)
    else:
        slope.scatter_add_(1, labels[:, None], -ce_weight[:, None])
    best = best.squeeze(1)
    return RowFigures(cross_entropy, overlap, full, best, cross_entropy), slope


def _kind_losses(
    logits: Tensor, teacher: TeacherRows, labels: Tensor | None, weight: Tensor, kind: LossKind
) -> tuple[RowFigures, Tensor]:
    """Return the figures of n rows, and the gradient of `weight` [n] times the loss `kind`.

    The other arguments and the gradient are those of `_row_losses`.
    """
    zero = torch.zeros_like(weight)
    figures, _ = _row_losses(logits.clone(), teacher, labels, zero, zero)
    rows = teacher if labels is None else teacher.labelled(labels)
    loss, _, slope, _ = distribution_loss(logits[:, None], rows, kind)  # [n, 1], ..., [n, 1, Vd]
    return replace(figures, loss=loss[:, 0]), slope[:, 0].mul_(weight[:, None])


class _BlockRowsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        markov_w2: Tensor | None,
        weight: Tensor,
        teacher: Callable[[slice], TeacherRows],
        labels: Tensor | None,
        ce_weights: Tensor,
        l1_weights: Tensor,
        chunk_rows: int,
        wanted: bool,
        kind: LossKind | None,
    ) -> tuple[Tensor, ...]:
        n = len(hidden)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = hidden.new_zeros((), dtype=dtype)
        parts: list[RowFigures] = []
        bias = None if latent is None or markov_w2 is None else (latent, markov_w2)
        d_hidden = torch.empty_like(hidden)
        d_bias = (
            None
            if bias is None
            else (torch.empty_like(bias[0]), torch.zeros_like(bias[1], dtype=dtype))
        )
        for start in range(0, n, chunk_rows):
            part = slice(start, min(start + chunk_rows, n))
            logits = wide(F.linear(hidden[part], weight))
            if bias is not None:
                logits += F.linear(bias[0][part], bias[1])
            ce, l1 = ce_weights[part].to(dtype), l1_weights[part].to(dtype)
            known = None if labels is None else labels[part]
            rows = teacher(part).to(dtype)
            if kind is None:
                figures, slope = _row_losses(logits, rows, known, ce, l1)
                total += (ce * figures.cross_entropy + l1 * 2 * (1 - figures.overlap)).sum()
            else:
                figures, slope = _kind_losses(logits, rows, known, ce, kind)
                total += (ce * figures.loss).sum()
            parts.append(figures)
            if not wanted:
                continue
            d_hidden[part] = (slope.to(weight.dtype) @ weight).to(hidden.dtype)
            if bias is not None and d_bias is not None:
                slope = slope.to(bias[1].dtype)
                d_bias[0][part] = (slope @ bias[1]).to(d_bias[0].dtype)
                add_product(d_bias[1], slope, bias[0][part].to(slope.dtype))
        if wanted:
            d_latent, d_w2 = (None, None) if d_bias is None else d_bias
            kept = d_w2 if d_w2 is None or markov_w2 is None else d_w2.to(markov_w2.dtype)
            ctx.save_for_backward(d_hidden, d_latent, kept)
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        found = [torch.cat(column) for column in columns]  # [N] each
        ctx.mark_non_differentiable(*found)
        return total, *found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        scaled = [None if d is None else d * scale.to(d.dtype) for d in ctx.saved_tensors]
        return (*scaled, *[None] * 8)
