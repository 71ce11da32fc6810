"""flex_attention: compiled on CUDA, eager elsewhere, and tested before it is used.

Inductor supports head sizes that are powers of two, from 16 on. Whether its kernels build on this
machine (compiler, driver, enough shared memory) is tested once, by running a small case forward and
backward, so that training does not fail in the middle.
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
    """Return flex_attention for the device of `q`: compiled for CUDA."""
    return _compiled() if q.is_cuda else flex_attention


@cache
def flex_works(device_type: str, head_dim: int) -> bool:
    """Return whether compiled flex_attention and its gradient work here, for this head size."""
    if device_type != "cuda" or head_dim < 16 or head_dim & (head_dim - 1):
        return False
    try:
        q = torch.randn(1, 2, 200, head_dim, device="cuda", requires_grad=True)
        causal = create_block_mask(lambda b, h, i, j: i >= j, 1, None, 200, 200, device="cuda")
        out = flex(q)(q, q[:, :1], q[:, :1], block_mask=causal, enable_gqa=True)
        out.square().sum().backward()
    except Exception as error:  # compiler and driver may raise anything
        log.warning(
            "flex_attention cannot be compiled on this machine (%s)", str(error).splitlines()[0]
        )
        return False
    return bool(q.grad is not None and q.grad.isfinite().all())
