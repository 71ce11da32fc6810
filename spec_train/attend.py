"""Softmax attention under an `AttentionMask`: three back ends, equal by test.

- "dense": the softmax written out, in at least float32: the reference.
- "sdpa": torch's scaled_dot_product_attention with the boolean table.
- "flex": flex_attention, which reads the predicate block by block and skips what nothing sees: no
  table of Q x T scores or booleans. The default where its compiled form works (see flex.py).

B rows, Q queries, T keys, h / g query / key-value heads, d head size.
"""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

from spec_train.flex import flex, flex_works
from spec_train.masks import AttentionMask

log = logging.getLogger(__name__)

BACKENDS = ("dense", "sdpa", "flex")


@cache
def default_backend(device_type: str, head_dim: int) -> str:
    """The back end for a device and head size: decided once and logged."""
    backend = "flex" if flex_works(device_type, head_dim) else "sdpa"
    log.info("draft attention on %s, head_dim %d: %s", device_type, head_dim, backend)
    return backend


@dataclass(frozen=True)
class Attending:
    """A mask made ready for one back end, once per batch, for every layer and step that uses it."""

    backend: str
    mask: Any  # the boolean table [B, 1, Q, T], or flex's BlockMask

    @classmethod
    def prepare(cls, mask: AttentionMask, head_dim: int, backend: str = "auto") -> "Attending":
        """Make of a mask what the back end reads; "auto" takes `default_backend`'s."""
        if backend == "auto":
            backend = default_backend(mask.device.type, head_dim)
        if backend not in BACKENDS:
            raise ValueError(f"backend = {backend!r}: choose from {', '.join(BACKENDS)}")
        if backend != "flex":
            return cls(backend, mask.dense())

        def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask.sees(row, query, key)

        extents = mask.batch, None, mask.queries, mask.keys
        return cls(backend, create_block_mask(mask_mod, *extents, device=mask.device.type))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Heads [B, h, Q, d] of queries [B, h, Q, d] over keys and values [B, g, T, d]."""
        if self.backend == "flex":
            return flex(q)(q, k, v, block_mask=self.mask, scale=scale, enable_gqa=True)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if self.backend == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=scale)
        scores = (q @ k.mT) * scale
        scores = scores if scores.dtype == torch.float64 else scores.float()
        weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return weights.to(v.dtype) @ v
