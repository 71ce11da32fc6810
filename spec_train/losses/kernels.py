"""Where the kernels of `row_kernels` serve: on CUDA, where a trial in the dtype of a run is right.

Elsewhere the same losses are chains of torch's operations (`menu`), compiled on a GPU. A kernel
moves what its loops say; how often a compiled chain reads the logits is up to its compiler.
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


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether rows of logits of a dtype have kernels on a device."""
    fits = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return device.type in KERNELS_ON and fits and _works(device, dtype)


def kernels() -> ModuleType:
    """Return the module that needs Triton."""
    from spec_train.losses import row_kernels

    return row_kernels


@cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    return tried(f"the kernel of losses ({dtype})", partial(small_case, device, dtype))


def small_case(device: torch.device, dtype: torch.dtype) -> Case:
    """Return a small case: every loss and sum of the kernels, and those of autograd in float32.

    The vocabulary is longer than a block; rows share a teacher and a bias; a mass is not measured.
    """
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    rows, width = 6, kernels().BLOCK + 77
    x = (2 * draw(rows, width)).to(dtype).requires_grad_()
    z, values = (2 * draw(3, width)).to(dtype), draw(2, width).to(dtype)
    index, value_of = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1]], device=device)
    labels, first, second = index * 7, draw(rows).abs(), draw(rows).abs()
    total, entropy = kernels().row_sums(z)
    mass = torch.tensor([0.7, 0.9, 1.0], device=device)
    taught, bias = (z, total, mass, entropy), (values, value_of)
    found, expected, wide = [], [], x.float() + values[value_of].float()
    log_p, log_q = z.float().log_softmax(-1)[index], wide.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    accepted = torch.minimum(p * mass[index, None], q).sum(-1)
    apart = 2 * (1 - torch.minimum(p, q).sum(-1))
    for hard in (False, True):
        cross = -(F.one_hot(labels, width) if hard else p).mul(log_q).sum(-1)
        r = torch.exp(-3 * accepted.detach())
        lost = 0 if hard else (p * log_p).sum(-1)
        losses = {"ce": cross, "kl": cross + lost, "ce+l1": cross}
        if not hard:
            rest = 1 - accepted
            losses |= {
                "tv": rest,
                "lk-alpha": -accepted.log(),
                "lk-lambda": r * (cross - rest) + rest,
            }
        for form, loss in losses.items():
            expected.append(first * loss + (second * apart if form == "ce+l1" else 0))
            given = index, labels if hard else None, (first, second), form, (1.0, 3.0, 1.0, None)
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
