"""The loss of block drafts per row: cross-entropy and L1, through the target's head and a bias.

Per row, with p the teacher renormalised over the draft vocabulary, m the target's probability of
the whole draft vocabulary, q = softmax(W y + W2 g) the draft and x the document's token:
    cross-entropy   -log q_x, or -sum_v p log q
    L1              sum_v |q - p| = 2 (1 - sum_v min(p, q)); not halved
    acceptance      sum_v min(m p, q) = (1 + m - sum_v |q - m p|) / 2, as min(a, b) = (a + b -
                    |a - b|) / 2; it equals 1 - L1 / 2 only if m = 1
A `LossKind` replaces the sum of the first two by one loss of `losses`; both are measured then.
W is the target's and gets no gradient.

N rows, n rows of a tile, H hidden size, r Markov rank, Vd draft vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spec_train.losses.menu import (
    LossKind,
    LowRank,
    RowStats,
    distribution_loss,
    rows_per_chunk,
    scored_rows,
    wide,
)
from spec_train.losses.teacher_rows import SomeRows, TeacherRows
from spec_train.losses.tiles import dot, softmax_sums


def block_rows_loss(
    hidden: Tensor,  # y [N, H], in the dtype of `weight`
    weight: Tensor,  # rows of the target's head [Vd, H], frozen
    # returns the teacher of a slice of the rows; called once per chunk
    teacher: Callable[[slice], SomeRows],
    # draft index of the token that the cross-entropy, or a loss with a hard target, is taken with,
    # int64 [N]; None: with p. A row whose token is not in the draft vocabulary has an arbitrary
    # label and weight 0
    labels: Tensor | None,
    ce_weights: Tensor,  # weights of the cross-entropy [N]
    l1_weights: Tensor,  # weights of the L1 term [N]
    low_rank: LowRank | None = None,  # the Markov bias; None without a Markov head
    kind: LossKind | None = None,  # the loss instead of cross-entropy and L1; None: these two
    chunk_rows: int | None = None,  # rows of a chunk; None: `rows_per_chunk`
) -> tuple[Tensor, RowStats]:
    """Return the sum over rows of ce_weights * cross-entropy + l1_weights * L1.

    With a `kind`, return the sum over rows of ce_weights * that loss.

    Returns:
        The sum, a float32 (or float64) scalar with a graph, and the figures of every row.
    """
    dtype = wide(hidden[:0]).dtype
    ce_weights, l1_weights = ce_weights.to(dtype), l1_weights.to(dtype)

    def score(logits: Tensor, rows: TeacherRows, part: slice) -> tuple[Tensor, ...]:
        known = None if labels is None else labels[part]
        ce, l1 = ce_weights[part], l1_weights[part]
        if kind is None:
            entropy, overlap, acceptance, best = _row_losses(logits, rows, known, ce, l1)
            weighted = ce * entropy + l1 * 2 * (1 - overlap)
            return weighted, entropy, acceptance, best, entropy, overlap
        zero = torch.zeros_like(ce)
        entropy, overlap, acceptance, best = _row_losses(logits.clone(), rows, known, zero, zero)
        rows = rows if known is None else rows.labelled(known)
        loss, _, slope, _ = distribution_loss(logits[:, None], rows, kind)  # [n, 1], ...
        torch.mul(slope[:, 0], ce[:, None], out=logits)
        return ce * loss[:, 0], loss[:, 0], acceptance, best, entropy, overlap

    rows = chunk_rows or rows_per_chunk(len(weight), weight.device)
    return scored_rows(hidden, weight, teacher, score, rows, low_rank=low_rank)


def _row_losses(
    logits: Tensor,  # of the draft [n, Vd]; overwritten by d loss / d logits
    teacher: TeacherRows,
    labels: Tensor | None,  # int64 [n]; None: cross-entropy with `p`
    ce_weight: Tensor,  # [n]
    l1_weight: Tensor,  # [n]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return cross-entropy, overlap, acceptance and the draft's choice of n rows, [n] each."""
    p = teacher.p
    if labels is None:
        agreement = dot(p, logits)
    else:
        agreement = logits.gather(1, labels[:, None]).squeeze(1)
    q, total, best = softmax_sums(logits)  # [n, Vd], [n], [n]
    cross_entropy = total - agreement
    if teacher.rest is not None:
        whole, tail = teacher.completed(q[:, None])
        p, rest = whole.squeeze(1), teacher.rest
        if labels is None and tail is not None:
            cross_entropy = (1 - rest) * total - agreement - rest * tail.squeeze(1).log()
    slope = torch.sub(q, p, out=logits)
    overlap = 1 - slope.abs().sum(-1) / 2  # = sum_v min(p, q)
    overlap = overlap.clamp(0, 1)
    exact = teacher.mass is None and teacher.rest is None
    full = overlap if exact else torch.minimum(teacher.full(), q).sum(-1)
    slope.sign_()  # q (slope - sum of q slope) is d L1 / d logits
    level = ce_weight - l1_weight * dot(slope, q)
    slope.mul_(l1_weight[:, None]).add_(level[:, None]).mul_(q)
    if labels is None:
        slope.addcmul_(p, ce_weight[:, None], value=-1)
    else:
        slope.scatter_add_(1, labels[:, None], -ce_weight[:, None])
    return cross_entropy, overlap, full, best
