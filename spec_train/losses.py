"""Losses between a teacher and a draft distribution over the draft vocabulary.

`head_loss` combines head and loss: it takes rows of normed draft states, returns a scalar, and
computes the gradients in the forward pass, chunk by chunk. So at most one chunk of logits exists at
any time, for any number of slots, and a teacher row is computed once for all unroll steps that need
it. In return, second derivatives are not available.

With q the draft, p the teacher renormalised over the draft vocabulary, and m the target's
probability of the whole draft vocabulary (1 if it is the target's), serving accepts with m p:
    a       sum_v min(m p, q), the probability that rejection sampling keeps a token drawn from q
    ce      -sum_v p log q
    alpha   -log a                       (LK losses, arXiv 2602.23881)
    lambda  r ce + (1 - r) (1 - a),      r = scale exp(-decay a), no gradient through r
All are per slot: r depends only on its own slot, so sums over micro-batches add up exactly.

N teacher rows, S unroll steps, H hidden size, Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.head_spec import HeadSpec, apply_head

KINDS = ("ce", "alpha", "lambda")
# Logits of one chunk: few fit in a CPU's cache, and a GPU needs many rows to be busy. Every chunk
# reads all rows of the head and updates their gradient; if a chunk has few rows and the vocabulary
# is large, this is most of the work.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
LEAST_ROWS = 256


def rows_per_chunk(weight: Tensor) -> int:
    """Return how many rows of logits, through the head `weight` [Vd, H], exist at a time."""
    return rows_of_width(weight.shape[0], weight.device)


def rows_of_width(width: int, device: torch.device) -> int:
    """Return how many rows of `width` float32 logits exist at a time on `device`."""
    elements = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])
    return max(LEAST_ROWS, elements // width)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left.T @ right, of [n, a] and [n, b], to `total` [a, b] in place.

    With equal dtypes and no autocast, no product of the size of `total` is allocated.
    """
    if left.dtype == right.dtype == total.dtype and not torch.is_autocast_enabled(left.device.type):
        total.addmm_(left.T, right)
    else:
        total += left.T @ right


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """The name of a loss (of KINDS), and the two parameters of "lambda"."""

    name: str = "ce"
    scale: float = 1.0
    decay: float = 3.0


def wide(x: Tensor) -> Tensor:
    """Return `x` (any shape) in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class TeacherRows:
    """The target's distribution at n slots, over the draft vocabulary."""

    p: Tensor  # probabilities renormalised over the draft vocabulary [n, Vd]: rows add up to 1
    mass: Tensor | None = None  # the target's probability of the draft vocabulary [n]; None: 1

    @classmethod
    def of_logits(cls, logits: Tensor, logsumexp: Tensor | None) -> "TeacherRows":
        """Make rows from the target's logits of the draft vocabulary [n, Vd].

        `logsumexp` [n] is over the full vocabulary; None: the draft vocabulary is the full one.
        """
        p = torch.softmax(logits, -1)
        if logsumexp is None:
            return cls(p)
        # Stored states are rounded and the stored sum is not, so the quotient may exceed 1.
        inside = logits.logsumexp(-1) - logsumexp.to(logits.dtype)
        return cls(p, inside.exp().clamp(max=1.0))

    def full(self) -> Tensor:
        """Return the probabilities [n, Vd] of the target's full distribution: rows add up to m."""
        return self.p if self.mass is None else self.p * self.mass[:, None]

    def to(self, dtype: torch.dtype) -> "TeacherRows":
        """Return the rows in another dtype."""
        return TeacherRows(self.p.to(dtype), None if self.mass is None else self.mass.to(dtype))

    def __getitem__(self, rows: Tensor) -> "TeacherRows":
        """Return the rows of an index, int64 [k]."""
        return TeacherRows(self.p[rows], None if self.mass is None else self.mass[rows])


def distribution_loss(
    logits: Tensor, teacher: TeacherRows, kind: LossKind
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute loss, expected acceptance, gradient for the draft logits, and the draft's choice.

    Every pass over the logits costs a noticeable share of the head's product. So there are few
    passes, and they overwrite what is no longer needed.

    Args:
        logits: draft logits [N, S, Vd], float32 or float64; overwritten.
        teacher: of the N rows, same dtype.
        kind: which loss.

    Returns:
        loss [N, S], acceptance sum_v min(m p, q) [N, S], d loss / d logits [N, S, Vd], and the
        largest logit's index, int64 [N, S].
    """
    agreement = torch.einsum("nv,nsv->ns", teacher.p, logits)
    peak, best = logits.max(-1, keepdim=True)
    q = logits.sub_(peak).exp_()
    mass = q.sum(-1, keepdim=True)
    q.div_(mass)
    entropy = (peak + mass.log()).squeeze(-1) - agreement  # = -sum p log q, for sum p = 1
    best = best.squeeze(-1)
    p, full = teacher.p[:, None], teacher.full()[:, None]  # [N, 1, Vd]
    acceptance = torch.minimum(full, q).sum(-1)
    if kind.name == "ce":
        return entropy, acceptance, q.sub_(p), best
    inside = q * (q < full)
    slope = inside - q * inside.sum(-1, keepdim=True)  # d acceptance / d logits
    if kind.name == "alpha":
        floor = torch.finfo(acceptance.dtype).tiny
        safe = acceptance.clamp_min(floor)
        return -safe.log(), acceptance, slope.mul_(-1 / safe[..., None]), best
    r = kind.scale * torch.exp(-kind.decay * acceptance)
    loss = r * entropy + (1 - r) * (1 - acceptance)
    slope = slope.mul_((r - 1)[..., None]).add_(r[..., None] * (q - p))
    return loss, acceptance, slope, best


@dataclass(frozen=True)
class RowStats:
    """Figures per teacher row and step, without gradients."""

    loss: Tensor  # [N, S], float32 or float64
    acceptance: Tensor  # [N, S], sum_v min(m p, q)
    best: Tensor  # int64 [N, S], index of the largest draft logit


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher: Callable[[slice], TeacherRows],
    weights: Tensor,
    kind: LossKind,
    chunk_rows: int | None = None,
    bias: Tensor | None = None,
    spec: HeadSpec | None = None,
) -> tuple[Tensor, RowStats]:
    """Sum `weights` times the loss of every row, through the head `weight`.

    No gradient is computed for a tensor that does not require one, so a frozen head costs nothing.

    Args:
        hidden: states that enter the head [N, S, H].
        weight: head [Vd, H].
        teacher: returns the teacher of a slice of the N rows; called once per chunk.
        weights: of the rows [N, S], float32; 0 leaves a row out.
        kind: which loss.
        chunk_rows: rows of logits (of N * S) that exist at a time; None: `rows_per_chunk`.
        bias: of the head [Vd], frozen.
        spec: scale and softcap of a target's head; None: a plain product.

    Returns:
        The sum, a float32 (or float64) scalar that can be differentiated, and figures per row.
    """
    rows = max(1, (chunk_rows or rows_per_chunk(weight)) // hidden.shape[1])
    wanted = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    total, *stats = _HeadLoss.apply(
        hidden, weight, teacher, weights, kind, rows, wanted, bias, spec
    )
    return total, RowStats(*stats)


def _head_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: HeadSpec | None
) -> tuple[Tensor, Tensor | float]:
    """Return logits [n, S, Vd] of states [n, S, H], and d logits / d (plain product).

    The derivative has the shape of the logits, or is one number.
    """
    if spec is None:
        return wide(F.linear(hidden, weight, bias)), 1.0
    logits = wide(apply_head(hidden, weight, bias, spec))
    if spec.softcap is None:
        return logits, spec.scale
    return logits, (1 - (logits / spec.softcap).square()).mul_(spec.scale)


class _HeadLoss(torch.autograd.Function):
    """`head_loss`: forward also computes the gradients, so backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher: Callable[[slice], TeacherRows],
        weights: Tensor,
        kind: LossKind,
        rows: int,
        wanted: tuple[bool, bool],
        bias: Tensor | None,
        spec: HeadSpec | None,
    ) -> tuple[Tensor, ...]:
        n, steps, size = hidden.shape
        double = hidden.dtype == torch.float64
        total = hidden.new_zeros((), dtype=torch.float64 if double else torch.float32)
        loss, acceptance = total.new_zeros(n, steps), total.new_zeros(n, steps)
        best = torch.zeros(n, steps, dtype=torch.long, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=total.dtype) if wanted[1] else None
        for start in range(0, n, rows):
            part = slice(start, min(start + rows, n))
            logits, inner = _head_logits(hidden[part], weight, bias, spec)
            row_loss, acceptance[part], slope, best[part] = distribution_loss(
                logits, teacher(part).to(logits.dtype), kind
            )
            loss[part] = row_loss
            total += (row_loss * weights[part]).sum()
            if not any(wanted):
                continue
            slope = slope.mul_(weights[part][..., None] * inner).to(weight.dtype)
            if d_hidden is not None:
                d_hidden[part] = (slope @ weight).to(hidden.dtype)
            if d_weight is not None:
                states = hidden[part].reshape(-1, size).to(slope.dtype)
                add_product(d_weight, slope.flatten(0, 1), states)
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        ctx.mark_non_differentiable(loss, acceptance, best)
        return total, loss, acceptance, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = [None if d is None else d * grads[0].to(d.dtype) for d in ctx.saved_tensors]
        return *own, *[None] * 7
