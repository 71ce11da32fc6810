"""Passes over logits that stay in the CPU's cache.

A loss passes over its logits some ten times. A chunk of them (`losses.rows_per_chunk`) is made by
one matrix product and is far larger than a cache, so the passes run over a few rows at a time:
tiles. On a GPU a chunk is one tile. torch's CPU kernels for the largest entry with its index, the
log-sum-exp and the product of rows are several times slower than those used here.

n rows, V entries of a row.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.schema import largest
from spec_train.attention.fused import fused
from spec_train.losses.kernels import SUMS, kernels, serves

TILE_ELEMENTS = 1 << 18  # of a tile on a CPU: 1 MB of float32


def by_tiles(device: torch.device) -> bool:
    """Return whether passes take turns over tiles: on a CPU, but not in a compiled chain."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def tiles(rows: int, width: int, device: torch.device) -> list[slice]:
    """Cut `rows` rows of `width` entries into tiles."""
    if not by_tiles(device):
        return [slice(0, rows)] if rows else []
    size = max(1, TILE_ELEMENTS // max(width, 1))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the sums of products over the last dimension; the others broadcast."""
    return (left * right).sum(-1)


def softmax_sums(logits: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax [..., V], log of the sum of exp [...], and the largest logit's index [...].

    `out`, of the shape of the logits, receives the softmax. On a GPU it may share their memory,
    which saves a tensor of this size.
    """
    peak, best = largest(logits)
    if by_tiles(logits.device):
        q = torch.softmax(logits, -1) if out is None else torch.softmax(logits, -1, out=out)
        # The softmax of the largest logit is 1 / sum of exp(logit - peak).
        return q, peak - q.gather(-1, best[..., None]).squeeze(-1).log(), best
    q = torch.sub(logits, peak[..., None], out=out).exp_()
    mass = q.sum(-1, keepdim=True)
    return q.div_(mass), peak + mass.squeeze(-1).log(), best


def wide(x: Tensor) -> Tensor:
    """Return `x` (any shape) in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def log_sums(logits: Tensor) -> Tensor:
    """Return the log of the sum of exp over the last dimension: [n] of [n, V]."""
    if serves(logits.device, logits.dtype, SUMS):
        return kernels().row_sums(logits)[0]
    parts = tiles(len(logits), logits.shape[1], logits.device)
    return torch.cat([_log_sum(logits[tile]) for tile in parts])


@fused
def _log_sum(logits: Tensor) -> Tensor:
    return softmax_sums(wide(logits))[1]


def product(states: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Return states [..., H] times weight [V, H], plus a bias [V] or None, [..., V].

    They have the dtype in which products are computed: passes over logits widen what they read,
    which in a tile costs nothing. `buffer`, a flat tensor of the wide dtype with enough entries, is
    used if no dtype is to be changed.
    """
    plain = states.dtype == weight.dtype == buffer.dtype
    if not plain or torch.is_autocast_enabled(states.device.type):
        return F.linear(states, weight, bias)
    flat = states.reshape(-1, states.shape[-1])
    out = buffer[: len(flat) * len(weight)].view(len(flat), len(weight))
    torch.mm(flat, weight.T, out=out)
    if bias is not None:
        out += bias
    return out.view(*states.shape[:-1], len(weight))
