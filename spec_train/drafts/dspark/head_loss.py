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
W is the target's and gets no gradient. Drafts of several blocks may have one latent vector, because
they follow the same token; its bias W2 g is computed once for a chunk, and so is its gradient. The
price: gradients of gradients do not exist.

N rows, n rows of a chunk, M latent vectors, H hidden size, r Markov rank, Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_train.losses.menu import LossKind, add_product, distribution_loss, rows_per_chunk
from spec_train.losses.teacher_rows import SomeRows, TeacherRows
from spec_train.losses.tiles import dot, product, softmax_sums, tiles


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
    teacher: Callable[[slice], SomeRows],
    labels: Tensor | None,
    ce_weights: Tensor,
    l1_weights: Tensor,
    chunk_rows: int | None = None,
    kind: LossKind | None = None,
    latent_of: tuple[Tensor, list[int]] | None = None,
) -> tuple[Tensor, RowFigures]:
    """Return the sum over rows of ce_weights * cross-entropy + l1_weights * L1.

    With a `kind`, return the sum over rows of ce_weights * that loss.

    Args:
        hidden: y [N, H], in the dtype of `weight`.
        latent: g [M, r], which W2 multiplies; None without a Markov head.
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
        latent_of: the latent vector of every row, int64 [N], ascending without gaps, and the same
            as a list; None: every row has its own, M = N.

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
        latent_of,
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


class _Bias:
    """The Markov bias of the rows, and the sums for its gradients; see `block_rows_loss`."""

    def __init__(
        self,
        latent: Tensor,
        w2: Tensor,
        latent_of: tuple[Tensor, list[int]] | None,
        dtype: torch.dtype,
    ) -> None:
        """Take latent vectors [M, r], W2 [Vd, r], the rows' vectors and the logits' dtype."""
        self.latent, self.w2, self.latent_of, self.dtype = latent, w2, latent_of, dtype
        self.d_latent, self.d_w2 = torch.zeros_like(latent), torch.zeros_like(w2, dtype=dtype)

    def start(self, part: slice) -> None:
        """Compute the biases of a chunk's latent vectors."""
        self.own, self.place = part, None
        if self.latent_of is not None:
            index, bounds = self.latent_of
            self.own = slice(bounds[part.start], bounds[part.stop - 1] + 1)
            self.place = index[part] - self.own.start
        self.values = F.linear(self.latent[self.own], self.w2).to(self.dtype)
        self.slopes = None if self.place is None else torch.zeros_like(self.values)

    def add_to(self, logits: Tensor, tile: slice) -> None:
        """Add the bias to the logits [n, Vd] of a tile of the chunk."""
        logits += self.values[tile] if self.place is None else self.values[self.place[tile]]

    def collect(self, slope: Tensor, tile: slice) -> None:
        """Sum slopes [n, Vd] of a tile over the rows of every latent vector."""
        if self.slopes is not None and self.place is not None:
            self.slopes.index_add_(0, self.place[tile], slope)

    def finish(self, slopes: Tensor) -> None:
        """Add the gradients of a chunk, whose slopes are [n, Vd]."""
        total = (slopes if self.slopes is None else self.slopes).to(self.w2.dtype)
        # A latent vector may have rows in two chunks.
        self.d_latent[self.own] += (total @ self.w2).to(self.d_latent.dtype)
        add_product(self.d_w2, total, self.latent[self.own].to(total.dtype))


class _BlockRowsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        markov_w2: Tensor | None,
        weight: Tensor,
        teacher: Callable[[slice], SomeRows],
        labels: Tensor | None,
        ce_weights: Tensor,
        l1_weights: Tensor,
        chunk_rows: int,
        wanted: bool,
        kind: LossKind | None,
        latent_of: tuple[Tensor, list[int]] | None,
    ) -> tuple[Tensor, ...]:
        n = len(hidden)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        parts: list[RowFigures] = []
        bias = None
        if latent is not None and markov_w2 is not None:
            bias = _Bias(latent, markov_w2, latent_of, dtype)
        d_hidden = torch.empty_like(hidden)
        buffer = hidden.new_empty(min(n, chunk_rows) * len(weight), dtype=dtype)
        ce_weights, l1_weights = ce_weights.to(dtype), l1_weights.to(dtype)
        for start in range(0, n, chunk_rows):
            part = slice(start, min(start + chunk_rows, n))
            logits = product(hidden[part], weight, None, buffer)  # [n, Vd]
            rows = teacher(part).to(dtype)
            if bias is not None:
                bias.start(part)
            for tile in tiles(len(logits), logits.shape[1], logits.device):
                own, some = slice(start + tile.start, start + tile.stop), logits[tile]
                if bias is not None:
                    bias.add_to(some, tile)
                known = None if labels is None else labels[own]
                weights = ce_weights[own], l1_weights[own]
                if kind is None:
                    figures, slope = _row_losses(some, rows[tile], known, *weights)
                else:
                    figures, slope = _kind_losses(some, rows[tile], known, weights[0], kind)
                    some.copy_(slope)
                parts.append(figures)
                if bias is not None and wanted:
                    bias.collect(some, tile)
            if wanted:
                d_hidden[part] = (logits.to(weight.dtype) @ weight).to(hidden.dtype)
            if bias is not None and wanted:
                bias.finish(logits)
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        found = [torch.cat(column) for column in columns]  # [N] each
        every = RowFigures(*found)
        total = (ce_weights * every.loss).sum()
        if kind is None:
            total = total + (l1_weights * 2 * (1 - every.overlap)).sum()
        if wanted:
            small = (None, None) if bias is None else (bias.d_latent, bias.d_w2.to(bias.w2.dtype))
            ctx.save_for_backward(d_hidden, *small)
        ctx.mark_non_differentiable(*found)
        return total, *found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        scaled = [None if d is None else d * scale.to(d.dtype) for d in ctx.saved_tensors]
        return (*scaled, *[None] * 9)
