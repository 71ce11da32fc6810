"""Softmax attention under an `AttentionMask`, with three back ends that tests keep equal.

A query may also have keys that no other query sees, one per step of EAGLE-3's unroll: its diagonal.
A head may have a sink: a trained score without a value. One softmax runs over all of them.

- "dense": the softmax written out, in at least float32. It is the reference.
- "merged": torch's kernels that return a log-sum-exp, for a chunk of queries of a pack at a time
  and one span of keys that they see, so keys masked for all of them cost nothing and none is
  copied. Neighbours among the queries should see nearly the same keys. The parts are merged by
  their log-sum-exp, with the diagonal, too. Kernels have no gradient through it. So, as in ring
  attention, the kernel's backward is called with the merged output and the merged log-sum-exp, and
  recomputes the joint probabilities. (Autograd would save keys, values and a float copy of the
  table of every chunk: Q x T numbers.)
- "flex": flex_attention, which evaluates the mask and skips parts that no query sees, without a
  Q x T table; its log-sum-exp has a gradient (flex.py).

B packs, Q queries, T keys, h / g query / key-value heads, d head size, s steps of a diagonal.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_train.attention import flex as compiling
from spec_train.attention.flex import Case, flex, flex_mask, flex_problem, tried
from spec_train.attention.fused import fused, overwriting
from spec_train.attention.masks import AttentionMask
from spec_train.attention.plain import repeat_heads

log = logging.getLogger(__name__)

BACKENDS = ("dense", "merged", "flex")
CHUNK = 128  # queries of one kernel call
CHUNK_ON_DEVICES = 1024  # a GPU needs more of them to be busy; their bias is 8 MB at T = 4096
UNSEEN = -1e30
"""Added to the score of a key that a query does not see. Finite: a query may see no key of a span,
and then its log-sum-exp makes nothing of that span."""

Diagonal = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of the later steps, oldest first, each [B, g, Q, d]: one per query and step."""


# -- lse kernels -----------------------------------------------------------------------------------
# torch's attention kernels that return the log-sum-exp of their scores, forward and backward.
#
# - CPU: the flash kernel.
# - CUDA: the memory-efficient kernel, the only one there with a bias and a log-sum-exp. Its rules:
#   the head size and the rows of the bias are multiples of 8 (both are padded here), the log-sum-
#   exp has its queries padded to a multiple of 32, and the backward pass assumes the memory layout
#   [B, Q, h, d] of the output that it is handed, without a check.


ALIGNED = 8  # elements that the CUDA kernel reads at a time, of any dtype that it knows, at most
LSE_ROWS = 32  # the CUDA kernel pads the queries of a log-sum-exp to a multiple of this


def attend_lse(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend, without a graph: heads [B, h, Q, d], and the log-sum-exp [B, h, Q], at least float32.

    `q` is [B, h, Q, d], `k` and `v` are [B, h, T, d]. `bias` [1, 1, Q, T], of `Span.bias`, is
    added to the scaled scores. All have one dtype.
    """
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, attn_mask=bias, scale=scale)
    wide = bias.expand(q.shape[0], q.shape[1], -1, -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse = efficient(*map(_padded, (q, k, v)), wide, True, scale=scale)[:2]
    return out[..., : q.shape[3]], lse[..., : q.shape[2]]


def attend_lse_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float,
    spans: Iterable[tuple[Tensor, Tensor, Tensor]],
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Yield the gradients of q, k and v for each k, v and bias of `spans`.

    `grad` [B, h, Q, d] is that of the heads. The probabilities are exp(score - lse): with the
    output and the log-sum-exp over all spans, and more keys, those of the joint softmax.
    """
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for k, v, bias in spans:
            yield flash(grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale)
        return
    size = q.shape[3]
    unused = torch.zeros((), dtype=torch.long, device=q.device)  # seed and offset of dropout
    if torch.version.hip is None:  # as the kernel pads it, but for ROCm's; exp(-inf) is zero
        lse = F.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=math.inf)
    grad, q, out, lse = (
        _by_slot(_padded(grad)),
        _padded(q),
        _by_slot(_padded(out)),
        lse.contiguous(),
    )
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    for k, v, bias in spans:
        k, v, wide = _padded(k), _padded(v), bias.expand(q.shape[0], q.shape[1], -1, -1)
        found = efficient(grad, q, k, v, wide, out, lse, unused, unused, 0.0, wanted, scale=scale)
        yield found[0][..., :size], found[1][..., :size], found[2][..., :size]


def kernel_dtypes(device_type: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes that the kernels of a device know; none where there is no kernel."""
    low = (torch.float32, torch.bfloat16, torch.float16)
    return {"cpu": (*low, torch.float64), "cuda": low}.get(device_type, ())


def _padded(x: Tensor) -> Tensor:
    """Pad the head size of [B, h, n, d] with zeros to a multiple of ALIGNED."""
    more = -x.shape[-1] % ALIGNED
    return F.pad(x, (0, more)) if more else x


def _by_slot(x: Tensor) -> Tensor:
    """Return [B, h, Q, d] with the memory layout [B, Q, h, d]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# -- chunks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Consecutive keys that queries of a chunk see."""

    keys: slice
    ends: Tensor  # first and last key of every query in the span, int64 [n, 2]

    def part(self, x: Tensor, heads: int) -> Tensor:
        """View keys or values [g, T, d] of a pack in the span, as [g, h/g, keys, d] for h heads."""
        return x[:, None, self.keys].expand(-1, heads // x.shape[0], -1, -1)

    def bias(self, zero: Tensor) -> Tensor:
        """Return `zero`, a number, where a query sees a key, and about `UNSEEN` elsewhere.

        [1, 1, n, keys], in the dtype of `zero`; its rows are as far apart as the kernels want.
        """
        keys, device = self.keys.stop - self.keys.start, self.ends.device
        width = keys if device.type == "cpu" else -(-keys // ALIGNED) * ALIGNED
        key = torch.arange(self.keys.start, self.keys.start + width, device=device)
        return _bias(zero, key, self.ends)[..., :keys]


@fused
def _bias(zero: Tensor, key: Tensor, ends: Tensor) -> Tensor:
    unseen = (key < ends[:, :1]) | (key > ends[:, 1:])
    low = zero + max(UNSEEN, torch.finfo(zero.dtype).min)
    return torch.where(unseen, low, zero)[None, None]


@dataclass(frozen=True)
class Chunk:
    """Queries of one pack that are computed together, and the spans of keys that they see."""

    pack: int
    queries: slice
    spans: tuple[Span, ...]  # one or two

    def part(self, x: Tensor, groups: int) -> Tensor:
        """View of [B, h, Q, ...] what belongs to the queries: [g, h/g, n, ...]."""
        return x[self.pack, :, self.queries].unflatten(0, (groups, -1))


def _chunks(mask: AttentionMask) -> tuple[Chunk, ...]:
    """Cut the queries into chunks, each with the spans of keys that it sees."""
    count = mask.ends.shape[1]
    size = CHUNK if mask.ends.device.type == "cpu" else CHUNK_ON_DEVICES
    parts = [slice(i, min(i + size, count)) for i in range(0, count, size)]
    # [B, Q, 2] each, of both spans; an empty span does not widen that of the chunk
    low, high = mask.ends[..., ::2], mask.ends[..., 1::2]
    empty = high < low
    low, high = low.masked_fill(empty, mask.keys), high.masked_fill(empty, -1)
    edges = [torch.stack([low[:, p].amin(1), high[:, p].amax(1)], dim=-1) for p in parts]
    chunks = []  # edges: per chunk [B, 2, 2], first and last key of both spans
    for part, packs in zip(parts, torch.stack(edges).tolist(), strict=True):
        for pack, bounds in enumerate(packs):
            rows = mask.ends[pack, part]  # [queries, 4]
            spans = [
                Span(slice(start, end + 1), rows[:, 2 * i : 2 * i + 2])
                for i, (start, end) in enumerate(bounds)
                if end >= start
            ]
            chunks.append(Chunk(pack, part, tuple(spans)))
    return tuple(chunks)


# -- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attending:
    """A mask prepared for one back end; done once per batch, for all layers and steps."""

    backend: str
    mask: AttentionMask
    prepared: Any = None  # merged: tuple of Chunk; flex: BlockMask

    @classmethod
    def prepare(cls, mask: AttentionMask, backend: str) -> "Attending":
        """Prepare a mask for a back end, one of `BACKENDS`."""
        if backend not in BACKENDS:
            raise ValueError(f"backend = {backend!r}: choose from {', '.join(BACKENDS)}")
        prepared = {"merged": _chunks, "flex": flex_mask}.get(backend)
        return cls(backend, mask, prepared and prepared(mask))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        diagonal: Diagonal = (),
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from each query to the keys that it sees and to its own of the diagonal.

        Args:
            q: queries [B, h, Q, d].
            k, v: keys and values [B, g, T, d]; g divides h.
            scale: multiplies the scores.
            diagonal: keys and values of the s later steps.
            sinks: a score of each head [h] that joins its softmax and has no value.

        Returns:
            [B, h, Q, d], in the dtype of the values. Queries and keys are cast to it: under
            autocast, norms return float32 and projections do not, and a kernel takes one dtype.
        """
        q, k = q.to(v.dtype), k.to(v.dtype)
        diagonal = [(key.to(value.dtype), value) for key, value in diagonal]
        if self.backend == "flex":
            out, first = flex(q, k, v, self.prepared, scale)
            if sinks is not None:
                out, first = _with_sinks(out, first, sinks)
            return _joined(out, first, q, scale, diagonal)[0] if diagonal else out
        if self.backend == "merged" and v.dtype in kernel_dtypes(v.device.type):
            flat = [x for pair in diagonal for x in pair]
            return _MergedAttention.apply(q, k, v, self.prepared, scale, sinks, *flat)
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        scores = ((q @ k.mT) * scale).masked_fill(~self.mask.dense(), float("-inf"))
        parts = [scores, _own_scores(q, diagonal, scale)]
        if sinks is not None:
            parts.append(sinks.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1))
        joint = _softmax(torch.cat(parts, dim=-1)).to(v.dtype)
        first, later = joint[..., : k.shape[2]], joint[..., k.shape[2] :]
        return _add_own(first @ v, later, diagonal)


def own_only(q: Tensor, diagonal: Diagonal, scale: float) -> Tensor:
    """Attend from queries [B, h, Q, d] to their own later keys only; there is at least one."""
    share = _softmax(_own_scores(q, diagonal, scale))  # [B, h, Q, s]
    return _add_own(torch.zeros_like(q), share.to(q.dtype), diagonal)


def _softmax(scores: Tensor) -> Tensor:
    return (scores if scores.dtype == torch.float64 else scores.float()).softmax(-1)


@fused
def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return heads and log-sum-exp over keys and a sink of each head, of those over keys."""
    joint = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * torch.exp(lse - joint)[..., None]).to(out.dtype), joint


@fused
def _joined(
    out: Tensor, first: Tensor, q: Tensor, scale: float, diagonal: Diagonal
) -> tuple[Tensor, Tensor]:
    """Return heads and log-sum-exp over all keys, of those over the first keys."""
    own_scores = _own_scores(q, diagonal, scale).to(first.dtype)  # [B, h, Q, s]
    lse = torch.logaddexp(first, own_scores.logsumexp(-1))  # [B, h, Q]
    out = out * torch.exp(first - lse)[..., None].to(out.dtype)
    return _add_own(out, torch.exp(own_scores - lse[..., None]).to(out.dtype), diagonal), lse


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """View `x` [B, h, ...] as [B, g, h/g, ...], where g is the number of heads of `like`."""
    return x.unflatten(1, (like.shape[1], -1))


def _own_scores(q: Tensor, diagonal: Diagonal, scale: float) -> Tensor:
    """Return the scores [B, h, Q, s] of queries [B, h, Q, d] with their own later keys."""
    parts = [(_grouped(q, k) * k[:, :, None]).sum(-1).flatten(1, 2) for k, _ in diagonal]
    return torch.stack(parts, -1) * scale if parts else q.new_zeros(*q.shape[:3], 0)


def _add_own(out: Tensor, share: Tensor, diagonal: Diagonal) -> Tensor:
    """Add the diagonal values, weighted by `share` [B, h, Q, s], to `out` [B, h, Q, d]."""
    for s, (_, v) in enumerate(diagonal):
        out = out + (_grouped(share[..., s, None], v) * v[:, :, None]).flatten(1, 2)
    return out


class _MergedAttention(torch.autograd.Function):
    """A kernel's attention chunk by chunk, merged exactly with the diagonal (see the module).

    q [B, h, Q, d]; k, v [B, g, T, d]; `flat` is the diagonal, flattened. Key-value heads are the
    kernel's batch, so that none is repeated in memory. The backward pass makes biases again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunks: Sequence[Chunk],
        scale: float,
        sinks: Tensor | None,
        *flat: Tensor,
    ) -> Tensor:
        if not chunks:
            raise ValueError("attention without queries")
        heads, groups = q.shape[1], k.shape[1]
        exact = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=exact)
        zero = q.new_zeros(())
        for chunk in chunks:
            part, keys, values = chunk.part(q, groups), k[chunk.pack], v[chunk.pack]
            found = [
                attend_lse(part, s.part(keys, heads), s.part(values, heads), s.bias(zero), scale)
                for s in chunk.spans
            ]
            _store(chunk.part(out, groups), chunk.part(lse, groups), *found)
        if sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        diagonal = list(zip(flat[::2], flat[1::2], strict=True))
        if diagonal:
            out, lse = _joined(out, lse, q, scale, diagonal)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *flat)
        ctx.chunks, ctx.scale = chunks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *flat = ctx.saved_tensors
        heads, groups = q.shape[1], k.shape[1]
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        zero = q.new_zeros(())
        for chunk in ctx.chunks:
            kv = k[chunk.pack], v[chunk.pack]
            spans = ((*(s.part(x, heads) for x in kv), s.bias(zero)) for s in chunk.spans)
            d_part, q_part, out_part, lse_part = (
                chunk.part(x, groups) for x in (grad, q, out, lse)
            )
            found = list(attend_lse_backward(d_part, q_part, out_part, lse_part, ctx.scale, spans))
            place, parts = chunk.part(dq, groups), [part for part, _, _ in found]
            place.copy_(parts[0]) if len(parts) == 1 else torch.add(*parts, out=place)
            for span, (_, *more) in zip(chunk.spans, found, strict=True):
                for total, part in zip((dk, dv), more, strict=True):
                    _add_heads(total[chunk.pack, :, span.keys], part)
        diagonal = list(zip(flat[::2], flat[1::2], strict=True))
        d_flat: list[Tensor] = []
        if diagonal:
            dq, d_flat = _joined_backward(dq, grad, q, out, lse, ctx.scale, diagonal)
        d_sinks = None
        if sinks is not None:  # d score = share * (gain - delta); the gain of a sink is 0
            share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)  # [B, h, Q]
            delta = (grad.to(lse.dtype) * out).sum(-1)
            d_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, None, None, d_sinks, *d_flat


@overwriting(2)
def _store(
    heads: Tensor, lse: Tensor, one: tuple[Tensor, Tensor], *two: tuple[Tensor, Tensor]
) -> None:
    """Store the heads [.., d] and log-sum-exp over the keys of one span, or of two."""
    if two:
        joint = torch.logaddexp(one[1], two[0][1])
        share, other = (torch.exp(x - joint)[..., None] for x in (one[1], two[0][1]))
        one = one[0] * share + two[0][0] * other, joint
    heads.copy_(one[0])
    lse.copy_(one[1])


@overwriting(1)
def _add_heads(total: Tensor, part: Tensor) -> None:
    """Add to gradients [g, n, d] those of all query heads, [g, h/g, n, d], in place."""
    total += part.sum(1)


@overwriting(1)
def _joined_backward(
    dq: Tensor,
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    diagonal: Diagonal,
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of the queries, added to `dq`, and of the diagonal, flattened."""
    d_flat = []
    own_scores = _own_scores(q, diagonal, scale).to(lse.dtype)
    shares = torch.exp(own_scores - lse[..., None]).to(q.dtype)  # [B, h, Q, s]
    delta = (grad * out).sum(-1)  # [B, h, Q]
    for s, (key, value) in enumerate(diagonal):
        share = shares[..., s]  # [B, h, Q]
        gain = (_grouped(grad, value) * value[:, :, None]).sum(-1).flatten(1, 2)
        # gradient of the score, [B, g, h/g, Q, 1]
        score = _grouped((share * (gain - delta) * scale)[..., None], key)
        dq += (score * key[:, :, None]).flatten(1, 2)
        d_flat.append((score * _grouped(q, key)).sum(2))
        d_flat.append((_grouped(share[..., None], value) * _grouped(grad, value)).sum(2))
    return dq, d_flat


# -- back end --------------------------------------------------------------------------------------
# On a CPU it is "merged". On a GPU it is the first of "flex" and "merged" that a trial shows to be
# right, in the dtype of the run. "dense", which holds Q x T scores, remains for float64 on a GPU,
# and where both kernels fail there; the log then says so.


@cache
def default_backend(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> str:
    """Return the back end for `heads`, (h, g, d); decided once in a process."""
    head_dim = heads[2]
    flex = device.type in compiling.COMPILED and flex_problem(dtype, head_dim) is None
    candidates = ["flex"] * flex + ["merged"] * (dtype in kernel_dtypes(device.type))
    backend = next((b for b in candidates if _serves(b, device, dtype, heads)), "dense")
    if backend == "dense" and device.type != "cpu":
        log.warning(
            "warning[kernel]: no attention kernel for %s and head size %d here: every layer and "
            "step holds a score "
            "for each query and key; shorten --seq-len if memory does not suffice",
            dtype,
            head_dim,
        )
    return backend


def _serves(
    backend: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]
) -> bool:
    """Whether a back end is right here; that of CPUs is part of torch and proven by tests."""
    if backend == "merged" and device.type == "cpu":
        return True
    case = partial(small_case, backend, device, dtype, heads)
    name = f"draft attention ({backend}, {dtype}, head size {heads[2]}"
    if tried(f"{name})", case):
        return True
    if backend != "flex":
        return False
    for options in compiling.smaller_options(dtype):
        compiling.OPTIONS[dtype, heads[2]] = options
        if tried(f"{name}, with less shared memory)", case):
            log.warning("warning[kernel]: %s) is used after all, with less shared memory", name)
            return True
    del compiling.OPTIONS[dtype, heads[2]]
    return False


def small_case(
    backend: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]
) -> Case:
    """Return a small case: a back end's heads, and those of "dense" in float32.

    Two packs; documents that end inside a pack; slots that are no query; two spans of keys; two
    later steps.
    """
    generator = torch.Generator(device).manual_seed(0)
    number, groups, head_dim = heads

    def draw(count: int, slots: int) -> Tensor:
        shape = 2, count, slots, head_dim
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()

    width, more = 200, 50  # keys of documents, and further ones
    ends = torch.tensor([[90], [150]], device=device)  # of the first document of each pack
    active = torch.arange(width, device=device)[None, 1::3].expand(2, -1)  # [2, Q]
    own = width + active % more
    spans = [torch.where(active < ends, 0, ends), active, own, own]
    mask = AttentionMask(width + more, torch.stack(spans, dim=-1))
    inputs = [draw(number, active.shape[1]), *(draw(groups, mask.keys) for _ in range(2))]
    inputs += [draw(groups, active.shape[1]) for _ in range(4)]

    def heads_of(kind: str, tensors: list[Tensor]) -> Tensor:
        q, k0, v0, *flat = tensors
        diagonal = list(zip(flat[::2], flat[1::2], strict=True))
        return Attending.prepare(mask, kind)(q, k0, v0, head_dim**-0.5, diagonal)

    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        inputs,
        [heads_of(backend, inputs)],
        [heads_of("dense", [x.to(exact) for x in inputs])],
    )
