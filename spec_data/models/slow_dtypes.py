"""Which dtypes this CPU computes slowly: half precision, where it has no instructions for it."""

import time

import torch
from torch import nn

SLOW = 4.0
"""A dtype is called slow where a matrix product takes this many times as long as in float32."""

_SIZE = 256  # rows and columns of the product that is timed: 33 MFLOP, 30 ms where it is slow
_REPEATS = 3
_SMALL = 1_000_000  # parameters: smaller models are fast in any dtype


def slow_model(model: nn.Module) -> str | None:
    """Return the warning of `slow_dtype` for a model that is large enough to be worth it."""
    weight = next(model.parameters())
    if sum(p.numel() for p in model.parameters()) < _SMALL:
        return None
    return slow_dtype(weight.dtype, weight.device)


def slow_dtype(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a warning if `device` is a CPU that computes in `dtype` slowly, else None.

    A CPU without AVX-512 BF16 or AMX multiplies bfloat16 matrices with scalar code. The matrix
    product is timed here, because what is fast depends on PyTorch's build too.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return None
    ratio = _seconds(dtype) / max(_seconds(torch.float32), 1e-9)
    if ratio < SLOW:
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"this CPU multiplies {name} matrices about {ratio:.0f} times more slowly than float32 "
        "ones; --dtype float32 is faster here, but the states then differ from those of a target "
        f"that is served in {name} by its rounding"
    )


def _seconds(dtype: torch.dtype) -> float:
    """Return the seconds of one matrix product, the shortest of a few."""
    values = torch.ones(_SIZE, _SIZE, dtype=dtype)
    times = []
    for _ in range(_REPEATS + 1):  # the first one also prepares kernels
        start = time.perf_counter()
        torch.mm(values, values)
        times.append(time.perf_counter() - start)
    return min(times)
