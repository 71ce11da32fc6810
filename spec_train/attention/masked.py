"""Softmax attention under an `AttentionMask`, with three back ends that tests keep equal.

- "dense": the softmax written out, in at least float32. It is the reference.
- "sdpa": torch's scaled_dot_product_attention with the boolean table, for a chunk of queries at a
  time and only the keys that any query of the chunk sees, so keys masked for all of them cost
  nothing. On CPUs the flash kernel is called directly: autograd would save keys, values and a float
  copy of the table of every chunk for the backward pass, which adds up to Q x T.
- "flex": flex_attention, which evaluates the predicate and skips parts that no query sees, without
  a Q x T table of scores or booleans. It is the default where its compiled form works (flex.py).

B packs, Q queries, T keys, h / g query / key-value heads, d head size.
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

CHUNK = 256  # queries that "sdpa" computes at a time
BACKENDS = ("dense", "sdpa", "flex")


@cache
def default_backend(device_type: str, head_dim: int) -> str:
    """Return the back end for a device and head size; decided once and logged."""
    backend = "flex" if flex_works(device_type, head_dim) else "sdpa"
    log.info("draft attention on %s, head_dim %d: %s", device_type, head_dim, backend)
    return backend


@dataclass(frozen=True)
class _Chunk:
    """Some queries, the n keys that any of them sees, and their part of the mask."""

    queries: slice
    keys: Tensor | None  # int64 [n]; None: all T keys
    table: Tensor  # bool [B, 1, queries, n]

    def pick(self, x: Tensor) -> Tensor:
        """Select from keys or values [B, h, T, d] those that the chunk sees: [B, h, n, d]."""
        return x if self.keys is None else x.index_select(2, self.keys)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return 0 where a query sees a key and -inf elsewhere, [B, 1, queries, n] in `dtype`."""
        zero = torch.zeros((), dtype=dtype, device=self.table.device)
        return torch.where(self.table, zero, float("-inf"))


def _chunks(mask: AttentionMask) -> list[_Chunk]:
    """Cut the table into chunks of queries, without the keys that no query of a chunk sees."""
    chunks = []
    for start in range(0, mask.queries, CHUNK):
        stop = min(start + CHUNK, mask.queries)
        table = mask.dense(start, stop)  # bool [B, 1, queries, T]
        keys = table.flatten(0, 2).any(0).nonzero().squeeze(1)  # int64 [n]
        if len(keys) == mask.keys:
            chunks.append(_Chunk(slice(start, stop), None, table))
        else:
            chunks.append(_Chunk(slice(start, stop), keys, table[..., keys]))
    return chunks


@dataclass(frozen=True)
class Attending:
    """A mask prepared for one back end; done once per batch, for all layers and steps."""

    backend: str
    mask: Any  # dense: bool [B, 1, Q, T]; sdpa: list of _Chunk; flex: BlockMask

    @classmethod
    def prepare(cls, mask: AttentionMask, head_dim: int, backend: str = "auto") -> "Attending":
        """Prepare a mask for a back end; "auto" takes `default_backend`.

        Raises:
            ValueError: no such back end.
        """
        if backend == "auto":
            backend = default_backend(mask.device.type, head_dim)
        if backend not in BACKENDS:
            raise ValueError(f"backend = {backend!r}: choose from {', '.join(BACKENDS)}")
        if backend == "dense":
            return cls(backend, mask.dense())
        if backend == "sdpa":
            return cls(backend, _chunks(mask))

        def mask_mod(pack: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask.sees(pack, query, key)

        extents = mask.batch, None, mask.queries, mask.keys
        return cls(backend, create_block_mask(mask_mod, *extents, device=mask.device.type))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend from queries [B, h, Q, d] to keys and values [B, g, T, d]: [B, h, Q, d]."""
        if self.backend == "flex":
            return flex(q)(q, k, v, block_mask=self.mask, scale=scale, enable_gqa=True)
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        if self.backend == "sdpa" and len(self.mask) > 1 and q.device.type == "cpu":
            return _ChunksOnCPU.apply(q.to(v.dtype), k.to(v.dtype), v, self.mask, scale)
        if self.backend == "sdpa":
            parts = [
                F.scaled_dot_product_attention(
                    q[:, :, chunk.queries],
                    chunk.pick(k),
                    chunk.pick(v),
                    attn_mask=chunk.table,
                    scale=scale,
                )
                for chunk in self.mask
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        scores = (q @ k.mT) * scale
        scores = scores if scores.dtype == torch.float64 else scores.float()
        weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return weights.to(v.dtype) @ v


class _ChunksOnCPU(torch.autograd.Function):
    """The CPU's flash kernel, chunk by chunk. Backward selects keys and makes biases again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, chunks: list[_Chunk], scale: float
    ) -> Tensor:
        """Attend from q [B, h, Q, d] to k, v [B, h, T, d], heads repeated: [B, h, Q, d]."""
        parts = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, chunk.queries],
                chunk.pick(k),
                chunk.pick(v),
                attn_mask=chunk.bias(q.dtype),
                scale=scale,
            )
            for chunk in chunks
        ]
        # [B, h, Q, d] and log-sum-exp [B, h, Q]
        out, lse = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.chunks, ctx.scale = chunks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for chunk in ctx.chunks:
            part = chunk.queries
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, part],
                q[:, :, part],
                chunk.pick(k),
                chunk.pick(v),
                out[:, :, part],
                lse[:, :, part],
                0.0,
                False,
                attn_mask=chunk.bias(q.dtype),
                scale=ctx.scale,
            )
            dq[:, :, part] = found[0]
            for total, own in ((dk, found[1]), (dv, found[2])):
                if chunk.keys is None:
                    total += own
                else:
                    total.index_add_(2, chunk.keys, own)
        return dq, dk, dv, None, None
