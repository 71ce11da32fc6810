"""Where the kernels of `row_kernels` serve: on CUDA, where a trial in the dtype of a run is right.

Each kernel is tried by itself. Elsewhere the same losses are chains of torch's operations (`menu`),
compiled on a GPU. A kernel moves what its loops say; how often a compiled chain reads the logits is
up to its compiler.
"""

from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_train.attention.flex import Case, tried

KERNELS_ON = ("cuda",)
"""Kinds of devices on which losses run in kernels."""


SUMS, GROUPS = "sums", "groups"
"""Names of the kernels that are no loss: sums of rows, and of groups of rows."""


def serves(device: torch.device, dtype: torch.dtype, kernel: str) -> bool:
    """Return whether rows of logits of a dtype have a kernel on a device.

    `kernel` is a loss, of `row_kernels.FORMS`, or SUMS or GROUPS. One that is wrong is left out
    alone: the others serve.
    """
    fits = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return device.type in KERNELS_ON and fits and _works(device, dtype, kernel)


def kernels() -> ModuleType:
    """Return the module that needs Triton."""
    from spec_train.losses import row_kernels

    return row_kernels


@cache
def _works(device: torch.device, dtype: torch.dtype, kernel: str) -> bool:
    case = partial(small_case, device, dtype, kernel)
    return tried(f"the kernel of losses {kernel!r} ({dtype})", case)


def small_case(device: torch.device, dtype: torch.dtype, kernel: str) -> Case:
    """Return a small case of a kernel, and what autograd makes of the formula in float32.

    The vocabulary is longer than a block; rows share a teacher and a bias; a mass is not measured.
    """
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    rows, width = 6, kernels().BLOCK + 77
    x = (2 * draw(rows, width)).to(dtype).requires_grad_()
    z, values = (2 * draw(3, width)).to(dtype), draw(2, width).to(dtype)
    index, value_of = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1]], device=device)
    log_p = z.float().log_softmax(-1)
    if kernel == GROUPS:
        found = kernels().group_sums(x.detach(), index, 3, torch.float32)
        return Case([], [found], [x.detach().float().view(3, 2, width).sum(1)], dtype)
    total, entropy = kernels().row_sums(z)
    if kernel == SUMS:
        exact = [z.float().logsumexp(-1), -(log_p.exp() * log_p).sum(-1)]
        return Case([], [total, entropy], exact, dtype)
    labels, first, second = index * 7, draw(rows).abs(), draw(rows).abs()
    mass = torch.tensor([0.7, 0.9, 1.0], device=device)
    taught, bias = (z, total, mass, entropy), (values, value_of)
    found, expected, wide = [], [], x.float() + values[value_of].float()
    log_p, log_q = log_p[index], wide.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    accepted = torch.minimum(p * mass[index, None], q).sum(-1)
    apart = 2 * (1 - torch.minimum(p, q).sum(-1))
    for hard in (False, True) if kernel in ("ce", "kl", "ce+l1") else (False,):
        cross = -(F.one_hot(labels, width) if hard else p).mul(log_q).sum(-1)
        r, rest = torch.exp(-3 * accepted.detach()), 1 - accepted
        loss = {
            "ce": cross,
            "kl": cross + (0 if hard else (p * log_p).sum(-1)),
            "ce+l1": cross,
            "tv": rest,
            "lk-alpha": -accepted.log(),
            "lk-lambda": r * (cross - rest) + rest,
        }[kernel]
        expected.append(first * loss + (second * apart if kernel == "ce+l1" else 0))
        given = index, labels if hard else None, (first, second), kernel, (1.0, 3.0, 1.0, None)
        found.append(KernelLoss.apply(x, (taught, *given, bias)))
    return Case([x], found, expected)


class KernelLoss(torch.autograd.Function):
    """The weighted losses of a kernel, with the gradient that it writes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: tuple[Any, ...]) -> Tensor:
        slope = x.detach().clone()
        weighted = kernels().row_loss(slope, *given)[0]
        ctx.save_for_backward(slope)
        return weighted.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (ctx.saved_tensors[0] * grads[0][:, None]).to(ctx.saved_tensors[0].dtype), None
