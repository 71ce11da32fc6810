"""Losses between a teacher and a draft distribution over the draft vocabulary.

`head_loss` combines head and loss: it takes rows of normed draft states, returns a scalar, and
computes the gradients in the forward pass, chunk by chunk. So at most one chunk of logits exists at
any time, for any number of slots, and a teacher row is computed once for all unroll steps that need
it. In return, second derivatives are not available.

With q the draft, p the teacher renormalised over the draft vocabulary, m the target's probability
of the whole draft vocabulary (1 if it is the target's), serving accepts with m p:
    a           sum_v min(m p, q), the probability that rejection sampling keeps a draw from q
    ce          -sum_v p log q
    kl          sum_v p log(p / q)
    reverse-kl  sum_v q log(q / p); with m p instead of p it only differs by the constant log m
    jsd         (sum_v p log(p / w) + sum_v q log(q / w)) / 2,   w = (p + q) / 2
    tv          1 - a, the total variation distance from the target's full distribution
    lk-alpha    -log a                       (LK losses, arXiv 2602.23881)
    lk-lambda   r ce + (1 - r) (1 - a),      r = scale exp(-decay a), no gradient through r
A hard target replaces m p and p by 1 at one token. Logarithms are taken of numbers that are at
least the smallest normal one, so nothing is infinite where p or q are 0.
All are per slot: r depends only on its own slot, so sums over micro-batches add up exactly.

A teacher of K logits (see `teacher.topk_teacher`) knows p only at some tokens; the others share the
probability `rest`. It counts in a as rejected. Everywhere else it is one more token, which the
draft proposes with the sum of its own probabilities there: p is completed by rest q_v / sum of
these q, without a gradient, which leads to that very value and gradient.

N teacher rows, S unroll steps, H hidden size, Vd draft vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.errors import DraftError
from spec_data.shards.schema import HeadSpec, apply_head
from spec_train.attention.fused import overwriting
from spec_train.losses.kernels import GROUPS, kernels, serves
from spec_train.losses.own import OwnLoss, asked, note_rows
from spec_train.losses.teacher_rows import SharedRows, SomeRows, TeacherLogits, TeacherRows
from spec_train.losses.tiles import by_tiles, dot, product, softmax_sums, tiles, wide
from spec_train.options.draft_options import KINDS

# Logits of one chunk: few fit in a CPU's cache, and a GPU needs many rows to be busy. Every chunk
# reads all rows of the head and updates their gradient; if a chunk has few rows and the vocabulary
# is large, this is most of the work.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}
LEAST_ROWS = 256


def rows_per_chunk(width: int, device: torch.device) -> int:
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
    """The name of a loss (of KINDS), its target, and the two parameters of "lk-lambda"."""

    name: str = "ce"
    hard: bool = False  # compare with one token, `TeacherRows.label`
    scale: float = 1.0
    decay: float = 3.0

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise DraftError(f"loss {self.name!r}: choose from {', '.join(KINDS)}")

    @property
    def needs_mass(self) -> bool:
        """Whether the loss, not only a figure beside it, depends on m."""
        return self.name in ("tv", "lk-alpha", "lk-lambda")

    @classmethod
    def of(cls, options: Any) -> Self:
        """Return the loss that the options of a draft name (see `draft_options`)."""
        hard = getattr(options, "compared_with", options.loss_target) != "soft"
        return cls(name=options.loss, hard=hard)


CROSS_ENTROPY = LossKind()


def distribution_loss(
    logits: Tensor,  # draft logits [N, S, Vd], float32 or float64; overwritten
    teacher: TeacherRows,  # of the N rows, same dtype
    kind: LossKind,  # which loss
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute loss, expected acceptance, gradient for the draft logits, and the draft's choice.

    Every pass over the logits costs a noticeable share of the head's product. So there are few
    passes, they overwrite what is no longer needed, and a CPU's cache should hold the logits.

    Returns:
        loss [N, S], acceptance sum_v min(m p, q) [N, S] with the target's own distribution, also
        if the loss has a hard target, NaN where m is; d loss / d logits [N, S, Vd], and the largest
        logit's index, int64 [N, S].
    """
    wanted = teacher.hardened() if kind.hard else teacher
    agreement = dot(wanted.p[:, None], logits)
    q, total, best = softmax_sums(logits, None if by_tiles(logits.device) else logits)
    acceptance = _acceptance(teacher, q)
    p, tail = wanted.completed(q)  # [N, 1 or S, Vd], [N, S]
    if kind.name in ("reverse-kl", "jsd"):
        loss, slope = _divergence(q, p, kind.name)
        return loss, acceptance, slope, best
    if wanted.rest is None or tail is None:
        entropy = total - agreement  # = -sum p log q, for sum p = 1
    else:
        rest = wanted.rest[:, None]
        entropy = (1 - rest) * total - agreement - rest * tail.log()
    if kind.name in ("ce", "kl"):
        loss = entropy
        if kind.name == "kl":
            smallest = wanted.with_entropy().entropy
            assert smallest is not None
            loss = entropy - smallest[:, None]
        return loss, acceptance, torch.sub(q, p, out=logits), best
    full = wanted.full()[:, None]
    accepted = torch.minimum(full, q).sum(-1) if kind.hard else acceptance
    loss, slope = _acceptance_loss(q, full, accepted, kind, entropy, p)
    return loss, acceptance, slope, best


def _acceptance(teacher: TeacherRows, q: Tensor) -> Tensor:
    """Return sum_v min(m p, q) [N, S] of q [N, S, Vd]; NaN where m is."""
    if teacher.mass is None or not by_tiles(q.device):  # a GPU would wait for the number of rows
        return torch.minimum(teacher.full()[:, None], q).sum(-1)
    measured = (~teacher.mass.isnan()).nonzero().squeeze(1)
    out = q.new_full(q.shape[:2], math.nan)
    out[measured] = torch.minimum(teacher[measured].full()[:, None], q[measured]).sum(-1)
    return out


def _divergence(q: Tensor, p: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return "reverse-kl" or "jsd" of q [N, S, Vd] and p [N, 1 or S, Vd], and d loss / d logits."""
    tiny = torch.finfo(q.dtype).tiny
    if name == "reverse-kl":
        gap = q.clamp_min(tiny).log_().sub_(p.clamp_min(tiny).log())
        loss = (q * gap).sum(-1)
        return loss, gap.sub_(loss[..., None]).mul_(q)
    middle = ((p + q) / 2).clamp_min_(tiny)  # [N, S, Vd]
    gap = q.clamp_min(tiny).div_(middle).log_()
    mean_gap = (q * gap).sum(-1)
    loss = (torch.xlogy(p, p / middle).sum(-1) + mean_gap) / 2
    return loss, gap.sub_(mean_gap[..., None]).mul_(q / 2)


def _acceptance_loss(
    q: Tensor,  # the draft [N, S, Vd]
    full: Tensor,  # m p of the target of the loss [N, 1, Vd]
    accepted: Tensor,  # sum_v min(full, q) [N, S]
    kind: LossKind,
    entropy: Tensor,  # cross-entropy [N, S]
    p: Tensor,  # of the cross-entropy [N, 1 or S, Vd]
) -> tuple[Tensor, Tensor]:
    """Return "tv", "lk-alpha" or "lk-lambda", [N, S], and d loss / d logits [N, S, Vd]."""
    inside = q * (q < full)
    slope = inside - q * inside.sum(-1, keepdim=True)  # d accepted / d logits
    if kind.name == "tv":
        return 1 - accepted, slope.neg_()
    if kind.name == "lk-alpha":
        safe = accepted.clamp_min(torch.finfo(accepted.dtype).tiny)
        return -safe.log(), slope.mul_(-1 / safe[..., None])
    r = kind.scale * torch.exp(-kind.decay * accepted)
    loss = r * entropy + (1 - r) * (1 - accepted)
    return loss, slope.mul_((r - 1)[..., None]).add_(r[..., None] * (q - p))


@dataclass(frozen=True)
class RowStats:
    """Figures per teacher row and step, [N, S], or per row of a block draft, [N]; no gradients."""

    loss: Tensor  # float32 or float64
    acceptance: Tensor  # sum_v min(m p, q); NaN: not measured
    best: Tensor  # int64, index of the largest draft logit
    cross_entropy: Tensor | None = None  # of block drafts
    overlap: Tensor | None = None  # of block drafts: sum_v min(p, q) = 1 - L1 / 2
    candidates: Tensor | None = None  # the K largest logits' indices, best first, int64 [N, K]
    probability: Tensor | None = None  # m p at these [N, K]


def head_loss(
    hidden: Tensor,  # states that enter the head [N, S, H]
    weight: Tensor,  # head [Vd, H]
    # returns the teacher of a slice of the N rows; called once per chunk
    teacher: Callable[[slice], SomeRows],
    weights: Tensor,  # of the rows [N, S], float32; 0 leaves a row out
    kind: LossKind,  # which loss
    # rows of logits (of N * S) that exist at a time; None: `rows_per_chunk`
    chunk_rows: int | None = None,
    bias: Tensor | None = None,  # of the head [Vd], frozen
    spec: HeadSpec | None = None,  # scale and softcap of a target's head; None: a plain product
) -> tuple[Tensor, RowStats]:
    """Sum `weights` times the loss of every row, through the head `weight`.

    No gradient is computed for a tensor that does not require one, so a frozen head costs nothing.

    Returns:
        The sum, a float32 (or float64) scalar that can be differentiated, and figures per row.
    """

    own, differentiate = asked().loss_fn, torch.is_grad_enabled()

    def score(logits: Tensor, rows: SomeRows, part: slice) -> tuple[Tensor, ...]:
        if own is not None:
            return own_rows(own, logits, rows, weights[part], spec, differentiate)
        labels = rows.label if kind.hard else None
        found = in_kernel(logits, rows, labels, (weights[part], None), kind, spec)
        return found[:4] or _weighted_loss(logits, rows, weights[part], kind, spec)

    def logits_of(part: Tensor, buffer: Tensor) -> Tensor:
        if spec is None:
            return product(part, weight, bias, buffer)
        return apply_head(part, weight, bias, spec)

    def plain_logits(part: Tensor) -> Tensor:
        if spec is None:
            return F.linear(part.to(weight.dtype), weight, bias)
        return apply_head(part.to(weight.dtype), weight, bias, spec)

    note_rows(hidden, plain_logits, teacher, weights)
    rows = chunk_rows or rows_per_chunk(len(weight), weight.device)
    rows = max(1, rows // hidden.shape[1])
    return scored_rows(hidden, weight, teacher, score, rows, logits_of)


def own_rows(
    own: OwnLoss,
    logits: Tensor,  # [n, S, Vd]; they receive the gradient
    given: SomeRows,
    weights: Tensor,  # [n, S]
    spec: HeadSpec | None,
    differentiate: bool,
) -> tuple[Tensor, ...]:
    """Serve `head_loss` as a `Score` with a loss of one's own, which sees one step at a time."""
    precise, teacher = wide(logits), given.spread()
    inner = _head_slope(precise, spec)
    q, _, best = softmax_sums(precise)
    acceptance = _acceptance(teacher, q)
    weighted, slope = torch.zeros_like(weights), q.zero_()
    for s in range(logits.shape[1]):
        losses, gradient = own.of(precise[:, s], teacher, weights[:, s], differentiate)
        weighted[:, s] = losses
        if gradient is not None:
            slope[:, s] = gradient
    overwrite(logits, slope, torch.as_tensor(inner, dtype=slope.dtype, device=slope.device))
    loss = torch.where(weights != 0, weighted / weights, 0.0)
    return weighted, loss, acceptance, best


@overwriting(1)
def _weighted_loss(
    logits: Tensor, given: SomeRows, weights: Tensor, kind: LossKind, spec: HeadSpec | None
) -> tuple[Tensor, ...]:
    """Serve `head_loss` as a `Score`, with the weights [n, S] of its rows."""
    precise, teacher = wide(logits), given.spread()
    inner = _head_slope(precise, spec)
    loss, acceptance, slope, best = distribution_loss(precise, teacher, kind)
    overwrite(logits, slope, weights[..., None] * inner)
    return loss * weights, loss, acceptance, best


def in_kernel(
    logits: Tensor,  # [n, ..., Vd]
    given: SomeRows,
    labels: Tensor | None,  # of hard targets, int64 [n]
    weights: tuple[Tensor, Tensor | None],  # of the loss, and of L1 beside it [n, ...]
    kind: LossKind | None,  # None: cross-entropy and L1
    spec: HeadSpec | None = None,
    bias: tuple[Tensor | None, Tensor | None] = (None, None),  # see `LowRank.of`
    candidates: int | Tensor = 0,  # as for `candidate_ids`; 0: none
) -> tuple[Tensor, ...]:
    """Serve as a `Score` by a kernel that overwrites the logits; () where none is for the loss."""
    shared = given if isinstance(given, SharedRows) else None
    rows, index = (given, None) if shared is None else (shared.rows, shared.index)
    name = "ce+l1" if kind is None else kind.name
    kind = kind or CROSS_ENTROPY
    if not isinstance(rows, TeacherLogits) or name in ("reverse-kl", "jsd"):
        return ()
    asked = isinstance(candidates, Tensor) or candidates > 0
    if (kind.hard and kind.needs_mass) or (asked and bias[0] is not None):
        return ()
    if not serves(logits.device, logits.dtype, name):
        return ()
    tops: tuple[Tensor, ...] = ()
    if asked:
        ids = candidate_ids(logits, candidates)
        tops = ids, rows.at(ids, index)
    head = (1.0, None) if spec is None else (spec.scale, spec.softcap)
    taught = rows.logits, rows.total, rows.mass, rows.entropy
    parameters = kind.scale, kind.decay, *head
    found = kernels().row_loss(logits, taught, index, labels, weights, name, parameters, bias)
    return *found, *tops


def candidate_ids(logits: Tensor, candidates: int | Tensor) -> Tensor:
    """Return the indices of so many largest logits of [n, V], best first, int64 [n, K].

    Known candidates, int64 [n, K], are returned: another product may round to others.
    """
    return candidates if isinstance(candidates, Tensor) else logits.topk(candidates).indices


def overwrite(logits: Tensor, slope: Tensor, factor: Tensor) -> None:
    """Write slope times factor to the logits; all are [..., V] or broadcast to it."""
    if logits.dtype == slope.dtype:
        torch.mul(slope, factor, out=logits)
    else:
        logits.copy_(slope * factor)


Score = Callable[[Tensor, SomeRows, slice], tuple[Tensor, ...]]
"""Draft logits [n, ..., Vd], their teacher, and which of the N rows they are: returns the weighted
losses and the fields of `RowStats`, [n, ...] each. The logits receive the gradient of the summed
weighted losses. They are wide, or of the dtype of a product."""


def scored_rows(
    hidden: Tensor,
    weight: Tensor,
    teacher: Callable[[slice], SomeRows],
    score: Score,
    rows: int,
    logits_of: Callable[[Tensor, Tensor], Tensor] | None = None,
    low_rank: "LowRank | None" = None,
) -> tuple[Tensor, RowStats]:
    """Sum the weighted losses of all rows, `rows` of them at a time; `head_loss` has the rest.

    `logits_of` maps states and a buffer (see `product`) to logits; None: the plain product.
    `low_rank` is added to the logits.
    """
    inputs = hidden, weight, *((low_rank.latent, low_rank.w2) if low_rank else (None, None))
    wanted = tuple(
        x is not None and torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)
    )
    if logits_of is None:

        def logits_of(part: Tensor, buffer: Tensor) -> Tensor:
            return product(part, weight, None, buffer)

    plan = teacher, score, rows, wanted, logits_of, low_rank
    total, *stats = _HeadLoss.apply(*inputs, plan)
    return total, RowStats(*stats)


class LowRank:
    """A bias W2 g on the logits of rows, and the sums for its gradients.

    Rows may share a latent vector g: its bias is then computed once for a chunk, and so is its
    gradient.
    """

    def __init__(
        self, latent: Tensor, w2: Tensor, latent_of: tuple[Tensor, list[int]] | None = None
    ) -> None:
        """Take g [M, r] and W2 [Vd, r] of N rows.

        `latent_of` is the latent vector of every row, int64 [N], ascending without gaps, and the
        same as a list; None: every row has its own, M = N.
        """
        self.latent, self.w2, self.latent_of = latent, w2, latent_of

    def begin(self, dtype: torch.dtype) -> None:
        """Start with no gradient; the logits have this dtype."""
        self.dtype = dtype
        self.d_latent = torch.zeros_like(self.latent)
        self.d_w2 = torch.zeros_like(self.w2, dtype=dtype)

    def start(self, part: slice) -> None:
        """Compute the biases of a chunk's latent vectors."""
        self.latent_rows, self.index = part, None
        self.slopes: Tensor | None
        if self.latent_of is not None:
            index, bounds = self.latent_of
            self.latent_rows = slice(bounds[part.start], bounds[part.stop - 1] + 1)
            self.index = index[part] - self.latent_rows.start
        self.first, self.slopes = part.start, None
        self.values = F.linear(self.latent[self.latent_rows], self.w2)

    def of(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return biases [g, Vd] of some of the chunk's rows, and which of them each row has, int64
        [n]; None: one each.
        """
        tile = slice(part.start - self.first, part.stop - self.first)
        return (self.values[tile], None) if self.index is None else (self.values, self.index[tile])

    def at(self, rows: Tensor) -> Tensor:
        """Return the biases [n, Vd] of rows, int64 [n], with a graph."""
        places = rows if self.latent_of is None else self.latent_of[0][rows]
        return F.linear(self.latent[places], self.w2)

    def collect(self, slope: Tensor, tile: slice) -> None:
        """Sum slopes [n, Vd] of a tile over the rows of every latent vector."""
        if self.index is None:
            return
        if serves(slope.device, slope.dtype, GROUPS):  # the chunk is one tile
            sums = kernels().group_sums(slope, self.index, len(self.values), self.w2.dtype)
            self.slopes = sums
            return
        if self.slopes is None:
            self.slopes = torch.zeros_like(self.values, dtype=self.dtype)
        self.slopes.index_add_(0, self.index[tile], slope.to(self.dtype))

    def finish(self, slopes: Tensor) -> None:
        """Add the gradients of a chunk, whose slopes are [n, Vd]."""
        total = (slopes if self.slopes is None else self.slopes).to(self.w2.dtype)
        # A latent vector may have rows in two chunks.
        self.d_latent[self.latent_rows] += (total @ self.w2).to(self.d_latent.dtype)
        add_product(self.d_w2, total, self.latent[self.latent_rows].to(total.dtype))


def _head_slope(logits: Tensor, spec: HeadSpec | None) -> Tensor | float:
    """Return d logits / d (plain product): one number, or in the shape of the logits."""
    if spec is None or spec.softcap is None:
        return 1.0 if spec is None else spec.scale
    return (1 - (logits / spec.softcap).square()).mul_(spec.scale)


class _HeadLoss(torch.autograd.Function):
    """`scored_rows`: forward also computes the gradients, so backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        latent: Tensor | None,
        w2: Tensor | None,
        plan: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        teacher, score, rows, wanted, logits_of, low_rank = plan
        n, width = len(hidden), hidden[0, ..., 0].numel() * len(weight)
        double = hidden.dtype == torch.float64
        total = hidden.new_zeros((), dtype=torch.float64 if double else torch.float32)
        figures: list[tuple[Tensor, ...]] = []
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=total.dtype) if wanted[1] else None
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        unused = autocast or hidden.dtype != total.dtype  # see `product`
        buffer = total.new_empty(0 if unused else min(n, rows) * width)
        if low_rank is not None:
            low_rank.begin(total.dtype)
        for start in range(0, n, rows):
            part, done = slice(start, min(start + rows, n)), len(figures)
            logits = logits_of(hidden[part], buffer)
            targets = teacher(part).to(total.dtype)
            if low_rank is not None:
                low_rank.start(part)
            for tile in tiles(len(logits), width, logits.device):
                tile_rows, some = slice(start + tile.start, start + tile.stop), logits[tile]
                figures.append(score(some, targets[tile], tile_rows))
                if low_rank is not None and any(wanted):
                    low_rank.collect(some, tile)
            total += torch.cat([weighted for weighted, *_ in figures[done:]]).sum()
            if not any(wanted):
                continue
            slopes = logits.to(torch.get_autocast_dtype(kind) if autocast else weight.dtype)
            if d_hidden is not None:
                d_hidden[part] = (slopes @ weight).to(hidden.dtype)
            if d_weight is not None:
                states = hidden[part].flatten(0, -2).to(slopes.dtype)
                add_product(d_weight, slopes.flatten(0, -2), states)
            if low_rank is not None:
                low_rank.finish(logits)
        stats = [torch.cat(column) for column in list(zip(*figures, strict=True))[1:]]
        small = (None, None)
        if low_rank is not None and any(wanted):
            small = low_rank.d_latent, low_rank.d_w2.to(low_rank.w2.dtype)
        sums = None if d_weight is None else d_weight.to(weight.dtype)
        ctx.save_for_backward(d_hidden, sums, *small)
        ctx.mark_non_differentiable(*stats)
        return total, *stats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if d is None else d * grads[0].to(d.dtype) for d in ctx.saved_tensors]
        return *gradients, None
