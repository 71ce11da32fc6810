"""flex_attention where it can be used: compiled on CUDA, eager elsewhere; tried before trusted.

Inductor supports head sizes that are powers of two from 16 on. Whether its kernels build on the
machine at hand (a compiler, a driver, enough shared memory) is found out by running a small case,
forward and backward, once: never by an exception in the middle of training.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

log = logging.getLogger(__name__)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def flex(q: Tensor) -> Any:
    """flex_attention for the device of `q`."""
    return _compiled() if q.is_cuda else flex_attention


@cache
def flex_works(device_type: str, head_dim: int) -> bool:
    """Whether compiled flex_attention runs here, with its gradient, for this head size."""
    if device_type != "cuda" or head_dim < 16 or head_dim & (head_dim - 1):
        return False
    try:
        q = torch.randn(1, 2, 200, head_dim, device="cuda", requires_grad=True)
        causal = create_block_mask(lambda b, h, i, j: i >= j, 1, None, 200, 200, device="cuda")
        out = flex(q)(q, q[:, :1], q[:, :1], block_mask=causal, enable_gqa=True)
        out.square().sum().backward()
    except Exception as error:  # whatever the compiler or the driver raises
        log.warning("flex_attention cannot be compiled here (%s)", str(error).splitlines()[0])
        return False
    return bool(q.grad is not None and q.grad.isfinite().all())
