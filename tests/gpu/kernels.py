"""The arithmetic of kernels that only CUDA has, in float64, with the rules that they state."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LSE_ROWS = 32


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise RuntimeError(f"memory-efficient attention: {rule}")


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> None:
    """Check the rules of the kernel in PyTorch's mem_eff_attention/kernel_{for,back}ward.h."""
    aligned = 16 // q.element_size()
    _require(q.dtype in (torch.float32, torch.bfloat16, torch.float16), f"no kernel for {q.dtype}")
    _require(len({q.dtype, k.dtype, v.dtype, bias.dtype}) == 1, "dtypes differ")
    for x in (q, k, v):
        _require(x.stride(-1) == 1, "the last dimension is not contiguous")
        _require(x.stride(1) % aligned == 0 and x.stride(2) % aligned == 0, "not aligned")
        _require(x.shape[-1] % aligned == 0, "head size not aligned")
    wanted = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    _require(tuple(bias.shape) == wanted, f"bias {tuple(bias.shape)} is not {wanted}")
    _require(bias.stride(-1) == 1, "the bias is not contiguous in the last dimension")
    _require(bias.stride(2) % aligned == 0 or q.shape[2] == 1, "rows of the bias not aligned")


def _scores(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> Tensor:
    return (q.double() @ k.double().mT) * scale + bias.double()


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, with_lse: bool, p: float = 0.0,
    causal: bool = False, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """aten._scaled_dot_product_efficient_attention: heads, and the log-sum-exp with padded rows."""
    _check(q, k, v, bias)
    _require(with_lse and not p and not causal, "only what this project asks for")
    scores = _scores(q, k, bias, scale)
    out = (scores.softmax(-1) @ v.double()).to(q.dtype)
    lse = F.pad(scores.logsumexp(-1).float(), (0, -q.shape[2] % LSE_ROWS), value=math.inf)
    zero = torch.zeros((), dtype=torch.long)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse, zero, zero


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor,
    seed: Tensor, offset: Tensor, p: float, wanted: list[bool], causal: bool = False, *,
    scale: float,
) -> tuple[Any, ...]:  # fmt: skip
    """aten._scaled_dot_product_efficient_attention_backward.

    It reads the output as [B, Q, h, d]; in any other layout, it would silently read other numbers.
    """
    _check(q, k, v, bias)
    rows = q.shape[2]
    _require(lse.shape[2] == rows + -rows % LSE_ROWS and lse.is_contiguous(), "lse not padded")
    _require(not wanted[3] and all(wanted[:3]), "only what this project asks for")
    _require(grad.dtype == out.dtype == q.dtype, "dtypes differ")
    right = rows == 1 or out.stride(2) == out.shape[1] * out.shape[3]
    _require(right, "reads other numbers than those of this output")
    shares = (_scores(q, k, bias, scale) - lse[:, :, :rows, None].double()).exp()
    wide, pull = grad.double(), grad.double() @ v.double().mT
    delta = (wide * out.double()).sum(-1, keepdim=True)
    slope = shares * (pull - delta) * scale
    found = slope @ k.double(), slope.mT @ q.double(), shares.mT @ wide
    return *(x.to(q.dtype) for x in found), None


KERNELS = {
    torch.ops.aten._scaled_dot_product_efficient_attention: attention,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: attention_backward,
}
