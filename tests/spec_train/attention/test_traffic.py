"""What a step moves through memory where flex_attention cannot be used: bytes of every operation.

A decoder layer at the sizes of Qwen3-8B is run on meta tensors, which have shapes only, with the
chunks and the kernel of a GPU. Matrix products and attention kernels are left out: they are the
same either way.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_train.attention import masked
from spec_train.attention.masked import Attending, Chunk, _MergedAttention, attend_lse
from spec_train.attention.masks import AttentionMask, block_mask, parallel_mask
from spec_train.drafts.layers import DecoderLayer

aten = torch.ops.aten
LEFT_OUT = (
    aten.mm, aten.bmm, aten.addmm, aten.empty, aten.empty_like, aten._unsafe_view,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
)  # fmt: skip
SHAPE = SimpleNamespace(
    hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, rms_norm_eps=1e-6, attention_bias=False, mlp_bias=False, qk_norm=True,
    hidden_act="silu",
)  # fmt: skip


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, and those of the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func.overloadpacket not in LEFT_OUT and not func.is_view:
            made, read = (
                [x.numel() * x.element_size() for x in tree_leaves(tree) if isinstance(x, Tensor)]
                for tree in (out, (args, kwargs))
            )
            self.bytes += sum(made + read)
            self.largest = max([self.largest, *made])
        return out


def parallel(length: int) -> AttentionMask:
    """One document with half as many deeper elements as slots: depths 1 and 2 at every fourth."""
    deep = torch.arange(0, length, 4).repeat_interleave(2)
    anchors = torch.cat([torch.arange(length), deep])[None]
    depths = torch.cat([torch.zeros(length).long(), torch.tensor([1, 2]).repeat(len(deep) // 2)])
    return parallel_mask(0 * anchors, anchors, depths[None], length)


def blocks(length: int) -> AttentionMask:
    """One document with a block of eight slots at every eighth."""
    anchors = torch.arange(8, length, 8)[None]
    return block_mask(torch.zeros(1, length).long(), anchors, anchors > 0, 8)


def chunks_of(mask: AttentionMask) -> list[Chunk]:
    """Return the chunks without their numbers."""
    return [
        replace(chunk, spans=tuple(replace(s, ends=s.ends.to("meta")) for s in chunk.spans))
        for chunk in Attending.prepare(mask, "merged").prepared
    ]


def merged(chunks: list[Chunk], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _MergedAttention.apply(q, k, v, chunks, 0.1, None)


def by_autograd(chunks: list[Chunk], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The planted fault: every chunk leaves autograd a gradient of the size of all keys."""
    parts = []
    for chunk in chunks:
        keys, values, zero = k[chunk.pack], v[chunk.pack], q.new_zeros(())
        heads = [
            attend_lse(chunk.part(q, 8), s.part(keys, 32), s.part(values, 32), s.bias(zero), 0.1)[0]
            for s in chunk.spans
        ]
        parts.append(sum(heads).flatten(0, 1)[None])
    return torch.cat(parts, dim=2)


class _Fused(torch.autograd.Function):
    """flex_attention: a kernel each way."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def fused(chunks: list[Chunk], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _Fused.apply(q, k, v)


def step(mask: AttentionMask, attend: Callable[..., Tensor]) -> Traffic:
    """Run the layer forward and backward: its queries are the last rows of the keys."""
    queries, chunks = mask.ends.shape[1], chunks_of(mask)
    with torch.device("meta"):
        layer = DecoderLayer(SHAPE).bfloat16()
        x = torch.empty(1, mask.keys, SHAPE.hidden_size, dtype=torch.bfloat16)
        cos, sin = torch.empty(2, 1, mask.keys, SHAPE.head_dim)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = attend(chunks, q[:, :, -queries:].to(v.dtype), k.to(v.dtype), v)
            return torch.cat([q[:, :, :-queries].to(v.dtype), heads], dim=2)

        with Traffic() as traffic:
            layer(x.requires_grad_(), cos, sin, attention).sum().backward()
    return traffic


@pytest.mark.parametrize("make", [parallel, blocks])
def test_the_fallback_moves_little_more_than_flex(
    make: Callable[[int], AttentionMask], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked, "CHUNK", masked.CHUNK_ON_DEVICES)
    short, long = (
        [step(make(length), attend) for attend in (fused, merged, by_autograd)]
        for length in (2048, 4096)
    )
    flex, fallback, planted = (traffic.bytes for traffic in long)
    assert flex < fallback <= 1.3 * flex
    assert planted - flex > 1.25 * (fallback - flex)
    assert long[1].largest <= 2.05 * short[1].largest  # linear in the length
