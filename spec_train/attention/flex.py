"""flex_attention: compiled on CUDA, eager elsewhere, and tried before it is used.

Inductor pads head sizes to powers of two itself. Whether its kernels build on this machine
(compiler, driver, enough shared memory for a head size) and are right is tried once, on a small
case forward and backward, so that training does not fail in the middle.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from spec_train.attention.trial import Case, tried

LEAST_SIZE = 16
"""The smallest head size that a matrix product of Triton accepts."""


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def flex(q: Tensor) -> Any:
    """Return flex_attention for the device of `q`: compiled for CUDA."""
    return _compiled() if q.is_cuda else flex_attention


def flex_problem(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why flex_attention cannot serve this dtype and head size on any GPU; None: it may."""
    if head_dim < LEAST_SIZE:
        return f"head size {head_dim} is below {LEAST_SIZE}"
    return "no kernel for float64" if dtype == torch.float64 else None


@cache
def flex_works(device_type: str, head_dim: int) -> bool:
    """Return whether compiled flex_attention and its gradient are right here, for a head size.

    Tried in float32 and in bfloat16, whichever a run uses.
    """
    if device_type != "cuda" or flex_problem(torch.float32, head_dim):
        return False
    kinds = torch.float32, torch.bfloat16
    return all(tried("flex_attention", partial(_case, head_dim, dtype)) for dtype in kinds)


def _case(head_dim: int, dtype: torch.dtype, device: str = "cuda") -> Case:
    """Return a small causal case with grouped heads: outputs and gradients, and the true ones."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = 1, heads, 200, head_dim
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()

    inputs = q, k, v = draw(2), draw(1), draw(1)
    causal = create_block_mask(lambda b, h, i, j: i >= j, 1, None, 200, 200, device=device)
    scale = head_dim**-0.5
    found = flex(q)(
        q, k, v, block_mask=causal, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    unseen = torch.ones(200, 200, dtype=torch.bool, device=device).triu(1)
    scores = (q.float() @ k.float().mT * scale).masked_fill(unseen, float("-inf"))
    expected = scores.softmax(-1) @ v.float(), scores.logsumexp(-1)
    return Case(inputs, (found[0], found[1].lse), expected)
