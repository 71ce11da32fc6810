"""Softmax attention under an `AttentionMask`, with three back ends that tests keep equal.

- "dense": the softmax written out, in at least float32. It is the reference.
- "sdpa": torch's scaled_dot_product_attention, for a chunk of queries of a pack at a time and only
  the keys that any query of the chunk sees, so keys masked for all of them cost nothing. Neighbours
  among the queries should see nearly the same keys. On CPUs the flash kernel is called directly:
  autograd would save keys, values and a float copy of the table of every chunk for the backward
  pass, which adds up to Q x T.
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

CHUNK = 128  # queries that "sdpa" computes at a time
BACKENDS = ("dense", "sdpa", "flex")


@cache
def default_backend(device_type: str, head_dim: int) -> str:
    """Return the back end for a device and head size; decided once and logged."""
    backend = "flex" if flex_works(device_type, head_dim) else "sdpa"
    log.info("draft attention on %s, head_dim %d: %s", device_type, head_dim, backend)
    return backend


@dataclass(frozen=True)
class _Chunk:
    """Some queries of a pack, and the one or two spans of keys that hold all they see."""

    pack: slice  # one pack
    queries: slice
    keys: tuple[slice, ...]
    table: Tensor  # bool [1, 1, queries, n], n keys

    def pick(self, x: Tensor) -> Tensor:
        """Select from keys or values [B, h, T, d] those of the chunk: [1, h, n, d]."""
        parts = [x[self.pack, :, span] for span in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def spread(self, total: Tensor, part: Tensor) -> None:
        """Add `part` [1, h, n, d], of the chunk's keys, to `total` [B, h, T, d] in place."""
        start = 0
        for span in self.keys:
            width = span.stop - span.start
            total[self.pack, :, span] += part[:, :, start : start + width]
            start += width

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return 0 where a query sees a key and -inf elsewhere, [1, 1, queries, n] in `dtype`."""
        zero = torch.zeros((), dtype=dtype, device=self.table.device)
        return torch.where(self.table, zero, float("-inf"))


def _chunks(mask: AttentionMask) -> list[_Chunk]:
    """Cut the table into chunks of queries, each with the spans of keys that it sees."""
    spans = mask.make_spans()
    numbers = spans.stacked()  # [B, Q, 4]
    parts = [slice(i, min(i + CHUNK, mask.queries)) for i in range(0, mask.queries, CHUNK)]
    # [B, Q, 2] each, of both spans; an empty span does not widen that of the chunk
    low, high = numbers[..., ::2], numbers[..., 1::2]
    empty = high < low
    low, high = low.masked_fill(empty, mask.keys), high.masked_fill(empty, -1)
    edges = [torch.stack([low[:, p].amin(1), high[:, p].amax(1)], dim=-1) for p in parts]
    chunks = []  # edges: per chunk [B, 2, 2], first and last key of both spans
    for part, packs in zip(parts, torch.stack(edges).tolist(), strict=True):
        for pack, bounds in enumerate(packs):
            rows = numbers[pack, part]  # [queries, 4]
            keys, tables = [], []
            for (start, end), offset, ends in zip(
                bounds, (0, spans.common), (rows[:, :2], rows[:, 2:]), strict=True
            ):
                if end >= start:
                    key = torch.arange(start, end + 1, device=mask.device)
                    tables.append((key >= ends[:, :1]) & (key <= ends[:, 1:]))
                    keys.append(slice(offset + start, offset + end + 1))
            table = torch.cat(tables, dim=1)[None, None]
            chunks.append(_Chunk(slice(pack, pack + 1), part, tuple(keys), table))
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
        if self.backend == "sdpa" and q.device.type == "cpu":
            return _ChunksOnCPU.apply(q.to(v.dtype), k.to(v.dtype), v, self.mask, scale)
        if self.backend == "sdpa":
            return _chunks_by_autograd(q.to(v.dtype), k.to(v.dtype), v, self.mask, scale)
        scores = (q @ k.mT) * scale
        scores = scores if scores.dtype == torch.float64 else scores.float()
        weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return weights.to(v.dtype) @ v


def _chunks_by_autograd(
    q: Tensor, k: Tensor, v: Tensor, chunks: list[_Chunk], scale: float
) -> Tensor:
    """Attend chunk by chunk with torch's function: shapes as for `_ChunksOnCPU`."""
    packs: dict[int, list[Tensor]] = {}
    for chunk in chunks:
        part = F.scaled_dot_product_attention(
            q[chunk.pack, :, chunk.queries],
            chunk.pick(k),
            chunk.pick(v),
            attn_mask=chunk.table,
            scale=scale,
        )
        packs.setdefault(chunk.pack.start, []).append(part)
    return torch.cat([torch.cat(parts, dim=2) for parts in packs.values()])


class _ChunksOnCPU(torch.autograd.Function):
    """The CPU's flash kernel, chunk by chunk. Backward selects keys and makes biases again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, chunks: list[_Chunk], scale: float
    ) -> Tensor:
        """Attend from q [B, h, Q, d] to k, v [B, h, T, d], heads repeated: [B, h, Q, d]."""
        out, lse = torch.empty_like(q), None
        for chunk in chunks:
            found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[chunk.pack, :, chunk.queries],
                chunk.pick(k),
                chunk.pick(v),
                attn_mask=chunk.bias(q.dtype),
                scale=scale,
            )
            lse = sums.new_empty(q.shape[:3]) if lse is None else lse
            out[chunk.pack, :, chunk.queries], lse[chunk.pack, :, chunk.queries] = found, sums
        if lse is None:
            raise ValueError("attention without queries")
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.chunks, ctx.scale = chunks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for chunk in ctx.chunks:
            pack, part = chunk.pack, chunk.queries
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[pack, :, part],
                q[pack, :, part],
                chunk.pick(k),
                chunk.pick(v),
                out[pack, :, part],
                lse[pack, :, part],
                0.0,
                False,
                attn_mask=chunk.bias(q.dtype),
                scale=ctx.scale,
            )
            dq[pack, :, part] = found[0]
            chunk.spread(dk, found[1])
            chunk.spread(dv, found[2])
        return dq, dk, dv, None, None
