"""Softmax attention under an `AttentionMask`: three back ends, equal by test.

- "dense": the softmax written out, in at least float32: the reference.
- "sdpa": torch's scaled_dot_product_attention with the boolean table, for some queries at a time
  and the keys that any of these sees: what is masked for all of them costs nothing. On CPUs its
  flash kernel is called by hand: left to autograd, every block would keep its own keys and values
  and a float copy of its table for the backward pass, which adds up to Q x T.
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

from spec_train.attention.flex import flex, flex_works
from spec_train.attention.masks import AttentionMask
from spec_train.attention.plain import repeat_heads

log = logging.getLogger(__name__)

BLOCK = 256  # queries that "sdpa" takes at a time
BACKENDS = ("dense", "sdpa", "flex")


@cache
def default_backend(device_type: str, head_dim: int) -> str:
    """The back end for a device and head size: decided once and logged."""
    backend = "flex" if flex_works(device_type, head_dim) else "sdpa"
    log.info("draft attention on %s, head_dim %d: %s", device_type, head_dim, backend)
    return backend


@dataclass(frozen=True)
class _Block:
    """Some queries, the keys that any of them sees (None: all), and who sees which of these."""

    queries: slice
    keys: Tensor | None  # int64 [n]
    table: Tensor  # bool [B, 1, queries, n]

    def pick(self, x: Tensor) -> Tensor:
        """The rows [B, h, n, d] of keys or values [B, h, T, d] that the block sees."""
        return x if self.keys is None else x.index_select(2, self.keys)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """0 where a query sees a key, -inf elsewhere, in the shape of the table."""
        zero = torch.zeros((), dtype=dtype, device=self.table.device)
        return torch.where(self.table, zero, float("-inf"))


def _blocks(mask: AttentionMask) -> list[_Block]:
    """The table in blocks of queries, without the keys that no query of a block sees."""
    blocks = []
    for start in range(0, mask.queries, BLOCK):
        stop = min(start + BLOCK, mask.queries)
        table = mask.dense(start, stop)
        keys = table.flatten(0, 2).any(0).nonzero().squeeze(1)
        if len(keys) == mask.keys:
            blocks.append(_Block(slice(start, stop), None, table))
        else:
            blocks.append(_Block(slice(start, stop), keys, table[..., keys]))
    return blocks


@dataclass(frozen=True)
class Attending:
    """A mask made ready for one back end, once per batch, for every layer and step that uses it."""

    backend: str
    mask: Any  # the boolean table [B, 1, Q, T], _Blocks of it, or flex's BlockMask

    @classmethod
    def prepare(cls, mask: AttentionMask, head_dim: int, backend: str = "auto") -> "Attending":
        """Make of a mask what the back end reads; "auto" takes `default_backend`'s."""
        if backend == "auto":
            backend = default_backend(mask.device.type, head_dim)
        if backend not in BACKENDS:
            raise ValueError(f"backend = {backend!r}: choose from {', '.join(BACKENDS)}")
        if backend == "dense":
            return cls(backend, mask.dense())
        if backend == "sdpa":
            return cls(backend, _blocks(mask))

        def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask.sees(row, query, key)

        extents = mask.batch, None, mask.queries, mask.keys
        return cls(backend, create_block_mask(mask_mod, *extents, device=mask.device.type))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Heads [B, h, Q, d] of queries [B, h, Q, d] over keys and values [B, g, T, d]."""
        if self.backend == "flex":
            return flex(q)(q, k, v, block_mask=self.mask, scale=scale, enable_gqa=True)
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        if self.backend == "sdpa" and len(self.mask) > 1 and q.device.type == "cpu":
            return _BlocksOnCPU.apply(q.to(v.dtype), k.to(v.dtype), v, self.mask, scale)
        if self.backend == "sdpa":
            parts = [
                F.scaled_dot_product_attention(
                    q[:, :, block.queries],
                    block.pick(k),
                    block.pick(v),
                    attn_mask=block.table,
                    scale=scale,
                )
                for block in self.mask
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        scores = (q @ k.mT) * scale
        scores = scores if scores.dtype == torch.float64 else scores.float()
        weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return weights.to(v.dtype) @ v


class _BlocksOnCPU(torch.autograd.Function):
    """The CPU's flash kernel block by block; the backward pass picks keys and makes biases anew."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[_Block], scale: float
    ) -> Tensor:
        parts = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, block.queries],
                block.pick(k),
                block.pick(v),
                attn_mask=block.bias(q.dtype),
                scale=scale,
            )
            for block in blocks
        ]
        out, lse = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            part = block.queries
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, part],
                q[:, :, part],
                block.pick(k),
                block.pick(v),
                out[:, :, part],
                lse[:, :, part],
                0.0,
                False,
                attn_mask=block.bias(q.dtype),
                scale=ctx.scale,
            )
            dq[:, :, part] = found[0]
            for total, own in ((dk, found[1]), (dv, found[2])):
                if block.keys is None:
                    total += own
                else:
                    total.index_add_(2, block.keys, own)
        return dq, dk, dv, None, None
