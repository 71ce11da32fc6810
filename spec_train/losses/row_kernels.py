"""Losses of rows of logits in one kernel each, for CUDA: imported where Triton is installed.

A program has one row. It reads the draft's logits once for the sum of their exponentials and the
largest, then once or twice more beside the teacher's logits, and overwrites them by the gradient.
All are read in the dtype of their product and summed in float32; probabilities are never stored.

With q the draft and p the teacher, every gradient is a q + b p + c q [q < m p] + d q sign(q - p)
with numbers a to d of a row; a hard target replaces p by 1 at its label. `menu` has the losses.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits that a program reads at a time
WARPS = 8
# the smallest normal float32; a number below it would have Triton compute in float64
TINY = tl.constexpr(2.0**-126)
FORMS = {"ce": 0, "kl": 1, "tv": 2, "lk-alpha": 3, "lk-lambda": 4, "ce+l1": 5}


@triton.jit
def _block(row, extra, columns, width, BIASED: tl.constexpr):
    """Return a block of logits in float32, with their bias; -inf behind the row's end."""
    inside = columns < width
    found = tl.load(row + columns, mask=inside, other=-float("inf")).to(tl.float32)
    if BIASED:
        found += tl.load(extra + columns, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def _sums(row, extra, width, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the log of the sum of exp of a row, its mean logit, and where the largest is."""
    peak, mass, level, best = -float("inf"), 0.0, 0.0, 0
    for start in range(0, width, BLOCK):
        x = _block(row, extra, start + tl.arange(0, BLOCK), width, BIASED)
        top = tl.max(x, 0)
        best = tl.where(top > peak, start + tl.argmax(x, 0), best)
        newer = tl.maximum(peak, top)
        base = tl.where(newer == -float("inf"), 0.0, newer)
        share, shrink = tl.exp(x - base), tl.exp(peak - base)
        mass = mass * shrink + tl.sum(share, 0)
        level = level * shrink + tl.sum(tl.where(share > 0, share * x, 0.0), 0)
        peak = newer
    return peak + tl.log(mass), level / mass, best


@triton.jit
def _row_sums(x, sums, entropies, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total, level, _ = _sums(x + row * width, x, width, False, BLOCK)
    tl.store(sums + row, total)
    tl.store(entropies + row, total - level)


@triton.jit
def _row_loss(
    x, z, biases, teacher_of, bias_of, totals, masses, entropies, labels, first, second, figures,
    best, rows, width, steps, scale, decay, slope, cap,
    FORM: tl.constexpr, INDEXED: tl.constexpr, BIASED: tl.constexpr, SHARED: tl.constexpr,
    MASS: tl.constexpr, HARD: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = row // steps
    taught = slot
    if INDEXED:
        taught = tl.load(teacher_of + slot)
    x += row * width
    z += taught * width
    total_p = tl.load(totals + taught)
    if BIASED:
        given = row
        if SHARED:
            given = tl.load(bias_of + row)
        biases += given * width
    label, at_label = -1, 0.0
    if HARD:  # read before anything is overwritten
        label = tl.load(labels + slot)
        at_label = tl.load(x + label).to(tl.float32)
        if BIASED:
            at_label += tl.load(biases + label).to(tl.float32)
    m = 1.0
    if MASS:
        m = tl.load(masses + taught)
    w, l1 = tl.load(first + row), 0.0
    if FORM == 5:
        l1 = tl.load(second + row)

    total, _, top = _sums(x, biases, width, BIASED, BLOCK)
    agreement, accepted, overlap, inside, signed = 0.0, 0.0, 0.0, 0.0, 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        y = _block(x, biases, columns, width, BIASED)
        p = tl.exp(_block(z, z, columns, width, False) - total_p)
        q = tl.exp(y - total)
        agreement += tl.sum(tl.where(p > 0, p * y, 0.0), 0)
        accepted += tl.sum(tl.minimum(m * p, q), 0)
        overlap += tl.sum(tl.minimum(p, q), 0)
        inside += tl.sum(tl.where(q < m * p, q, 0.0), 0)
        signed += tl.sum(tl.where(q > p, q, tl.where(q < p, -q, 0.0)), 0)
        if FORM <= 1:  # no sum of this pass is needed
            goal = tl.where(columns == label, 1.0, 0.0) if HARD else p
            change = w * slope * (q - goal)
            if CAPPED:
                change *= 1 - (y / cap) * (y / cap)
            tl.store(x + columns, change.to(x.dtype.element_ty), mask=columns < width)
    if MASS:
        accepted = tl.where(m == m, accepted, m)  # not measured
    cross = total - (at_label if HARD else agreement)
    loss = cross
    a, b, c, d = w, -w, 0.0, 0.0
    if FORM == 1 and not HARD:
        loss = cross - tl.load(entropies + taught)
    if FORM == 2:
        loss = 1 - accepted
        a, b, c = w * inside, 0.0, -w
    if FORM == 3:
        safe = tl.maximum(accepted, TINY)
        loss = -tl.log(safe)
        a, b, c = w * inside / safe, 0.0, -w / safe
    if FORM == 4:
        r = scale * tl.exp(-decay * accepted)
        loss = r * cross + (1 - r) * (1 - accepted)
        a, b, c = w * (r + (1 - r) * inside), -w * r, w * (r - 1)
    weighted = w * loss
    if FORM == 5:
        weighted += l1 * 2 * (1 - overlap)
        a, d = w - l1 * signed, l1
    if FORM > 1:
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            y = _block(x, biases, columns, width, BIASED)
            p = tl.exp(_block(z, z, columns, width, False) - total_p)
            q = tl.exp(y - total)
            goal = tl.where(columns == label, 1.0, 0.0) if HARD else p
            change = a * q + b * goal + tl.where(q < m * p, c * q, 0.0)
            change += tl.where(q > p, d * q, tl.where(q < p, -d * q, 0.0))
            change *= slope
            if CAPPED:
                change *= 1 - (y / cap) * (y / cap)
            tl.store(x + columns, change.to(x.dtype.element_ty), mask=columns < width)
    tl.store(figures + row, weighted)
    tl.store(figures + rows + row, loss)
    tl.store(figures + 2 * rows + row, accepted)
    tl.store(figures + 3 * rows + row, cross)
    tl.store(figures + 4 * rows + row, overlap)
    tl.store(best + row, top.to(tl.int64))


@triton.jit
def _group_sums(x, ends, sums, width, BLOCK: tl.constexpr):
    """Sum the consecutive rows of a group, in float32."""
    group = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(ends + group - 1, mask=group > 0, other=0)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(first, tl.load(ends + group)):
        total += tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(sums + group * width + columns, total.to(sums.dtype.element_ty), mask=columns < width)


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which kernels are started on the device of `x`.

    Triton takes the current one, and another reads foreign addresses.
    """
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def row_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log of the sum of exp, and entropy of the softmax, float32 [n] of logits [n, V]."""
    logits, rows = logits.contiguous(), len(logits)
    sums, entropies = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    if rows:
        given = logits, sums, entropies, logits.shape[1]
        with _on(logits):
            _row_sums[(rows,)](*given, BLOCK=BLOCK, num_warps=WARPS)
    return sums, entropies


def row_loss(
    logits: Tensor,  # [n, ..., V], contiguous; overwritten by the gradient
    # the teacher's logits [k, V], their `row_sums`, and between these the mass m [k]
    taught: tuple[Tensor, Tensor, Tensor | None, Tensor],
    index: Tensor | None,  # row of `taught` of each of the n, int64; None: k = n
    labels: Tensor | None,  # of hard targets, int64 [n]
    weights: tuple[Tensor, Tensor | None],  # of the loss, and of L1 in "ce+l1", float32 [n, ...]
    form: str,  # of FORMS
    parameters: tuple[float, float, float, float | None],  # of lk-lambda; the head's scale, softcap
    bias: tuple[Tensor | None, Tensor | None],  # values [g, V], and which of them a row has, int64
) -> tuple[Tensor, ...]:
    """Return weighted loss, loss, acceptance, choice, cross-entropy, overlap, each [n, ...]."""
    shape, width, rows = logits.shape[:-1], logits.shape[-1], logits.shape[:-1].numel()
    figures = torch.empty(5, *shape, dtype=torch.float32, device=logits.device)
    best = torch.empty(shape, dtype=torch.int64, device=logits.device)
    (z, totals, masses, entropies), (values, value_of), (first, second) = taught, bias, weights
    scale, decay, slope, cap = parameters

    def numbers(x: Tensor | None, like: Tensor) -> Tensor:
        """Return what a pointer of the kernel, which may be unused, points to."""
        return like if x is None else x.contiguous()

    if rows:
        with _on(logits):
            _row_loss[(rows,)](
                logits, z, numbers(values, logits), numbers(index, best), numbers(value_of, best),
                totals, numbers(masses, totals), entropies, numbers(labels, best),
                first.contiguous(), numbers(second, first), figures, best,
                rows, width, rows // len(logits), scale, decay, slope, cap or 1.0,
                FORM=FORMS[form], INDEXED=index is not None, BIASED=values is not None,
                SHARED=value_of is not None, MASS=masses is not None, HARD=labels is not None,
                CAPPED=cap is not None, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
    weighted, loss, accepted, cross, overlap = figures
    return weighted, loss, accepted, best, cross, overlap


def group_sums(slopes: Tensor, group_of: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return the sums [groups, V], in `dtype`, of the rows [n, V] of each group.

    `group_of`, int64 [n], is ascending and has every group.
    """
    sums = torch.empty(groups, slopes.shape[1], dtype=dtype, device=slopes.device)
    numbers = torch.arange(groups, device=slopes.device)
    ends = torch.searchsorted(group_of, numbers, right=True)
    grid = groups, triton.cdiv(slopes.shape[1], BLOCK)
    with _on(slopes):
        _group_sums[grid](slopes, ends, sums, slopes.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return sums
