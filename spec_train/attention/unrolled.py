"""Attention of the EAGLE-3 unroll: step-0 keys of a document, plus a slot's own later keys.

At unroll step s, a query of slot t sees the step-0 keys of slots <= t of its document, and of steps
1..s only the keys of slot t itself (a diagonal). One softmax runs over both. Three back ends, which
tests keep equal; `unrolled_backends` chooses:

- "dense": the joint softmax written out, with A x T scores per step. It is the reference.
- "merged": a kernel of `lse_kernels` over the step-0 keys, whose log-sum-exp is merged with the
  diagonal terms. Kernels have no gradient through the log-sum-exp. So, as in ring attention, the
  kernel's backward is called with the merged output and the merged log-sum-exp, and recomputes the
  joint probabilities from them.
- "flex": on CUDA, flex_attention, whose log-sum-exp has a gradient, and the same merge.

Only slots whose output is used are queries. A key of a later step is seen only by its own slot, so
slots of a prompt are needed as step-0 keys only. The memory of the last two back ends is linear in
T: a mask is two numbers per query, and what the steps share exists once.

At step s, slot t is at position t + s, as in serving. In a layer with a window of W positions it
sees the step-0 keys after slot t + s - W and the newest W of its own keys: the window moves on with
the steps. From step W on, no step-0 key is left.

B packs, T slots, A active slots (queries), h / g query / key-value heads, d head size, s later
steps.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from spec_train.attention.flex import Case, flex, flex_problem, tried
from spec_train.attention.plain import repeat_heads

# -- lse kernels -----------------------------------------------------------------------------------
# torch's attention kernels that return the log-sum-exp of their scores, forward and backward.
#
# The merge of the unroll (see `unrolled`) needs the log-sum-exp forward, and a backward pass that
# recomputes probabilities from a log-sum-exp that it is handed.
#
# - CPU: the flash kernel.
# - CUDA: the memory-efficient kernel, the only one there with a bias and a log-sum-exp. Its rules:
#   the head size and the rows of the bias are multiples of 8 (both are padded here), the log-sum-
#   exp
#   has its queries padded to a multiple of 32, and the backward pass assumes the memory layout
#   [B, Q, h, d] of the output that it is handed, without a check.
#
# B packs, Q queries, T keys, h heads (repeated: one key-value head per query head), d head size.


ALIGNED = 8
"""Elements that the CUDA kernel reads at a time, of any dtype that it knows, at most."""
LSE_ROWS = 32
"""The CUDA kernel pads the queries of a log-sum-exp to a multiple of this."""

Parts = tuple[Tensor, Tensor, Tensor]


def attend_lse(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend, without a graph.

    Args:
        q: queries [B, h, Q, d].
        k, v: keys and values [B, h, T, d], of the dtype of `q`.
        bias: added to the scaled scores [1, 1, Q, T], of the dtype of `q`; from `empty_bias`.
        scale: multiplies the scores.

    Returns:
        Heads [B, h, Q, d], and the log-sum-exp [B, h, Q] in at least float32.
    """
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, attn_mask=bias, scale=scale)
    wide = bias.expand(q.shape[0], q.shape[1], -1, -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse = efficient(*map(_padded, (q, k, v)), wide, True, scale=scale)[:2]
    return out[..., : q.shape[3]], lse[..., : q.shape[2]]


def attend_lse_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor,
    scale: float,
) -> Parts:  # fmt: skip
    """Return the gradients of q, k and v for the gradient `grad` [B, h, Q, d] of the heads.

    The probabilities are exp(score - lse). With the output and the log-sum-exp of more keys than
    `k` holds, the gradients are those of the joint softmax.
    """
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale)
    wide = bias.expand(q.shape[0], q.shape[1], -1, -1)
    unused = torch.zeros((), dtype=torch.long, device=q.device)  # seed and offset of dropout
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    dq, dk, dv, _ = efficient(
        _by_slot(_padded(grad)),
        *map(_padded, (q, k, v)),
        wide,
        _by_slot(_padded(out)),
        _padded_lse(lse),
        unused,
        unused,
        0.0,
        [True, True, True, False],
        scale=scale,
    )
    size = q.shape[3]
    return dq[..., :size], dk[..., :size], dv[..., :size]


def empty_bias(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a bias of zeros [1, 1, Q, T] whose rows are as far apart as the kernels want."""
    width = keys if device.type == "cpu" else -(-keys // ALIGNED) * ALIGNED
    return torch.zeros(1, 1, queries, width, dtype=dtype, device=device)[..., :keys]


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


def _padded_lse(lse: Tensor) -> Tensor:
    """Pad the queries of [B, h, Q] as the kernel does; infinity makes probabilities of zero."""
    if torch.version.hip is not None:  # ROCm's kernel pads nothing
        return lse.contiguous()
    return F.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=math.inf).contiguous()


# -- unrolled --------------------------------------------------------------------------------------


BACKENDS = ("dense", "merged", "flex")
CHUNK = 128  # queries of one kernel call
CHUNK_ON_DEVICES = 1024  # a GPU needs more of them to be busy; their bias is 8 MB at T = 4096

Diagonal = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of the later steps, oldest first, each [B, g, A, d]."""


def active_slots(used: Tensor) -> Tensor:
    """Return the indices, int64 [B, A], of the True slots of `used`, bool [B, T], ascending.

    A pack with fewer than A such slots repeats its last one (its last slot if it has none).
    """
    slots = torch.arange(used.shape[1], device=used.device)  # [T]
    width = max(int(used.sum(1).max()), 1)  # A
    order = torch.argsort((~used).to(torch.int8), dim=1, stable=True)[:, :width]  # [B, A]
    last = torch.where(used, slots, -1).amax(1, keepdim=True)  # [B, 1]
    last = torch.where(last < 0, used.shape[1] - 1, last)
    return torch.where(used.gather(1, order), order, last)


@dataclass(frozen=True)
class Chunk:
    """Queries of one pack that are computed together, and the span of keys that they see."""

    pack: int
    queries: slice
    keys: slice
    first: Tensor  # int64 [queries], the first slot that each query sees
    last: Tensor  # int64 [queries], each query's own slot

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return 0 where a query sees a key, else -inf, [1, 1, queries, keys] in `dtype`."""
        keys = torch.arange(self.keys.start, self.keys.stop, device=self.first.device)
        unseen = (keys < self.first[:, None]) | (keys > self.last[:, None])
        bias = empty_bias(len(unseen), len(keys), dtype, keys.device)
        return bias.masked_fill_(unseen, float("-inf"))


@dataclass(frozen=True)
class Queries:
    """Which step-0 keys the active slots see, prepared for one back end once per batch."""

    backend: str
    first: Tensor  # int64 [B, A], the first slot that each query sees: of its document or window
    last: Tensor  # int64 [B, A], each query's own slot
    width: int  # T
    chunks: tuple[Chunk, ...] = ()  # merged
    block_mask: Any = None  # flex

    @classmethod
    def prepare(cls, first: Tensor, active: Tensor, width: int, backend: str) -> "Queries":
        """Prepare the queries for a back end.

        Args:
            first: first slot that each query sees, int64 [B, A]; at most its own slot.
            active: each query's own slot, int64 [B, A].
            width: T.
            backend: one of BACKENDS.

        Raises:
            ValueError: no such back end.
        """
        if backend not in BACKENDS:
            raise ValueError(f"backend = {backend!r}: choose from {', '.join(BACKENDS)}")
        chunks: tuple[Chunk, ...] = ()
        block_mask = None
        if backend == "merged":
            chunks = _chunks(first, active)
        elif backend == "flex":

            def sees(pack: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return (key >= first[pack, query]) & (key <= active[pack, query])

            extents = active.shape[0], None, active.shape[1], width
            block_mask = create_block_mask(sees, *extents, device=active.device.type)
        return cls(backend, first, active, width, chunks, block_mask)

    def dense(self) -> Tensor:
        """Return the table of who sees what, bool [B, 1, A, T]."""
        keys = torch.arange(self.width, device=self.last.device)
        return ((keys >= self.first[..., None]) & (keys <= self.last[..., None]))[:, None]


class StepQueries:
    """The step-0 keys that the active slots see in every step and layer, prepared as needed."""

    def __init__(self, first: Tensor, active: Tensor, width: int, backend: str) -> None:
        """Prepare for layers without a window; the arguments are those of `Queries.prepare`.

        `first` is the slot at which each query's document begins.
        """
        self._all = Queries.prepare(first, active, width, backend)
        self._kept: dict[tuple[int, int], Queries] = {}  # by window and step

    def narrowed(self, part: Tensor) -> "StepQueries":
        """Return the queries of some of the active slots: their indices, int64 [B, A']."""
        every = self._all
        first, last = every.first.gather(1, part), every.last.gather(1, part)
        return StepQueries(first, last, every.width, every.backend)

    def of(self, step: int, window: int | None = None) -> Queries | None:
        """Return the queries of a step, from 0, in a layer with this window.

        None: the window, which begins after slot + step - window, holds no step-0 key.
        """
        every = self._all
        if window is None:
            return every
        if step >= window:
            return None
        if (window, step) not in self._kept:
            first = torch.maximum(every.first, every.last + (step - window + 1))
            # a window longer than all documents changes nothing and needs no preparation
            longer = torch.equal(first, every.first)
            self._kept[window, step] = (
                every if longer else Queries.prepare(first, every.last, every.width, every.backend)
            )
        return self._kept[window, step]

    def attend(
        self,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        diagonal: Diagonal,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend as `unrolled_attention` does, in step s = len(diagonal), within the window."""
        queries = self.of(len(diagonal), window)
        own = diagonal if window is None else diagonal[-window:]
        if queries is None:
            return _own_only(q, own, scale)
        return unrolled_attention(q, k0, v0, own, queries, scale)


def _chunks(first: Tensor, last: Tensor) -> tuple[Chunk, ...]:
    """Cut queries into chunks, each with the span of keys that it sees.

    The kernels compute every score that they get, also of other documents and later tokens.
    `first` and `last` are int64 [B, A], as in Queries.
    """
    size = CHUNK if last.device.type == "cpu" else CHUNK_ON_DEVICES
    parts = [slice(i, min(i + size, last.shape[1])) for i in range(0, last.shape[1], size)]
    # [chunks, 2, B]: first and last key that any query of a chunk sees
    edges = torch.stack([torch.stack([first[:, p].amin(1), last[:, p].amax(1)]) for p in parts])
    chunks = []
    for part, (starts, ends) in zip(parts, edges.tolist(), strict=True):
        for pack, (start, end) in enumerate(zip(starts, ends, strict=True)):
            chunks.append(
                Chunk(pack, part, slice(start, end + 1), first[pack, part], last[pack, part])
            )
    return tuple(chunks)


def narrowed_pairs(diagonal: Diagonal, part: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return later keys and values [B, g, A', d] of the active slots `part`, int64 [B, A']."""
    return [
        (k.gather(2, at), v.gather(2, at))
        for k, v in diagonal
        for at in [part[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])]
    ]


def unrolled_attention(
    q: Tensor, k0: Tensor, v0: Tensor, diagonal: Diagonal, queries: Queries, scale: float
) -> Tensor:
    """Attend from each query to the step-0 keys that it sees and to its own diagonal keys.

    Args:
        q: queries [B, h, A, d], rotated.
        k0, v0: step-0 keys and values [B, g, T, d]; g divides h.
        diagonal: keys and values of the s later steps.
        queries: `Queries.prepare` of the active slots.
        scale: multiplies the scores.

    Returns:
        [B, h, A, d], in the dtype of the values. Queries and keys are cast to it: under autocast,
        norms return float32 and projections do not, and a kernel takes one dtype.
    """
    q, k0 = q.to(v0.dtype), k0.to(v0.dtype)
    diagonal = [(k.to(v.dtype), v) for k, v in diagonal]
    if queries.backend == "flex":
        return _flex(q, k0, v0, diagonal, queries, scale)
    k0, v0 = repeat_heads(k0, q.shape[1]), repeat_heads(v0, q.shape[1])
    if queries.backend == "merged":
        flat = [x for pair in diagonal for x in pair]
        return _MergedAttention.apply(q, k0, v0, queries.chunks, scale, *flat)
    scores = ((q @ k0.mT) * scale).masked_fill(~queries.dense(), float("-inf"))  # [B, h, A, T]
    own = _own_scores(q, diagonal, scale)  # [B, h, A, s]
    joint = torch.cat([scores, own], dim=-1).softmax(dim=-1)  # [B, h, A, T + s]
    first, later = joint.split([k0.shape[2], len(diagonal)], dim=-1)
    return _add_own(first @ v0, later.to(v0.dtype), diagonal)


def _flex(
    q: Tensor, k0: Tensor, v0: Tensor, diagonal: Diagonal, queries: Queries, scale: float
) -> Tensor:
    """Compute `unrolled_attention` with flex_attention, merged with the diagonal."""
    out, aux = flex(q)(
        q,
        k0,
        v0,
        block_mask=queries.block_mask,
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    if not diagonal:
        return out
    own = _own_scores(q, diagonal, scale).to(aux.lse.dtype)  # [B, h, A, s]
    lse = torch.logaddexp(aux.lse, own.logsumexp(-1))  # [B, h, A], of all keys together
    out = out * torch.exp(aux.lse - lse)[..., None].to(out.dtype)
    return _add_own(out, torch.exp(own - lse[..., None]).to(out.dtype), diagonal)


def _own_only(q: Tensor, diagonal: Diagonal, scale: float) -> Tensor:
    """Attend from queries [B, h, A, d] to their own later keys only; there is at least one."""
    scores = _own_scores(q, diagonal, scale)  # [B, h, A, s]
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return _add_own(torch.zeros_like(q), scores.softmax(-1).to(q.dtype), diagonal)


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """View `x` [B, h, ...] as [B, g, h/g, ...], where g is the number of heads of `like`."""
    return x.unflatten(1, (like.shape[1], -1))


def _own_scores(q: Tensor, diagonal: Diagonal, scale: float) -> Tensor:
    """Return the scores [B, h, A, s] of queries [B, h, A, d] with their own later keys."""
    parts = [(_grouped(q, k) * k[:, :, None]).sum(-1).flatten(1, 2) for k, _ in diagonal]
    return torch.stack(parts, -1) * scale if parts else q.new_zeros(*q.shape[:3], 0)


def _add_own(out: Tensor, share: Tensor, diagonal: Diagonal) -> Tensor:
    """Add the diagonal values, weighted by `share` [B, h, A, s], to `out` [B, h, A, d]."""
    for s, (_, v) in enumerate(diagonal):
        out = out + (_grouped(share[..., s, None], v) * v[:, :, None]).flatten(1, 2)
    return out


class _MergedAttention(torch.autograd.Function):
    """A kernel's attention over step-0 keys, merged exactly with the diagonal (see the module).

    q [B, h, A, d]; k0, v0 [B, h, T, d] (heads repeated); `flat` is the diagonal, flattened.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        chunks: tuple[Chunk, ...],
        scale: float,
        *flat: Tensor,
    ) -> Tensor:
        out, lse = torch.empty_like(q), None
        for chunk in chunks:
            part, queries, keys = slice(chunk.pack, chunk.pack + 1), chunk.queries, chunk.keys
            seen = k0[part, :, keys], v0[part, :, keys]
            chunk_out, chunk_lse = attend_lse(
                q[part, :, queries], *seen, chunk.bias(q.dtype), scale
            )
            lse = chunk_lse.new_empty(q.shape[:3]) if lse is None else lse
            out[part, :, queries], lse[part, :, queries] = chunk_out, chunk_lse
        if lse is None:
            raise ValueError("attention without queries")
        diagonal = list(zip(flat[::2], flat[1::2], strict=True))
        if diagonal:
            own = _own_scores(q, diagonal, scale).to(lse.dtype)
            first, lse = lse, torch.logaddexp(lse, own.logsumexp(-1))
            out = out * torch.exp(first - lse)[..., None].to(q.dtype)
            out = _add_own(out, torch.exp(own - lse[..., None]).to(q.dtype), diagonal)
        ctx.save_for_backward(q, k0, v0, out, lse, *flat)
        ctx.chunks, ctx.scale = chunks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, out, lse, *flat = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk0, dv0 = torch.empty_like(q), torch.zeros_like(k0), torch.zeros_like(v0)
        for chunk in ctx.chunks:
            part, queries, keys = slice(chunk.pack, chunk.pack + 1), chunk.queries, chunk.keys
            parts = attend_lse_backward(
                grad[part, :, queries],
                q[part, :, queries],
                k0[part, :, keys],
                v0[part, :, keys],
                out[part, :, queries],
                lse[part, :, queries],
                chunk.bias(q.dtype),
                ctx.scale,
            )
            dq[part, :, queries] = parts[0]
            dk0[part, :, keys] += parts[1]
            dv0[part, :, keys] += parts[2]
        diagonal = list(zip(flat[::2], flat[1::2], strict=True))
        d_flat: list[Tensor] = []
        if diagonal:
            own = _own_scores(q, diagonal, ctx.scale).to(lse.dtype)
            shares = torch.exp(own - lse[..., None]).to(q.dtype)  # [B, h, A, s], probabilities
            delta = (grad * out).sum(-1)  # [B, h, A]
            for s, (k, v) in enumerate(diagonal):
                share = shares[..., s]  # [B, h, A]
                gain = (_grouped(grad, v) * v[:, :, None]).sum(-1).flatten(1, 2)  # [B, h, A]
                # gradient of the score, [B, g, h/g, A, 1]
                score = _grouped((share * (gain - delta) * ctx.scale)[..., None], k)
                dq += (score * k[:, :, None]).flatten(1, 2)
                d_flat.append((score * _grouped(q, k)).sum(2))
                d_flat.append((_grouped(share[..., None], v) * _grouped(grad, v)).sum(2))
        return dq, dk0, dv0, None, None, *d_flat


# -- unrolled backends -----------------------------------------------------------------------------
# Which back end of `unrolled` serves a device, dtype and head size.
#
# On a CPU it is "merged". On a GPU it is the first of "flex" and "merged" that a trial shows to be
# right. "dense", which holds A x T scores per step, remains for float64 on a GPU, and where both
# kernels fail there; the log then says so.


log = logging.getLogger(__name__)


@cache
def default_backend(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """Return the back end for a device, dtype and head size; decided once and logged."""
    case = device_type, dtype, head_dim
    backend = next((b for b in _candidates(*case) if _serves(b, *case)), "dense")
    log.info("draft attention on %s, %s, head_dim %d: %s", device_type, dtype, head_dim, backend)
    if backend == "dense" and device_type != "cpu":
        log.warning(
            "no attention kernel for %s and head size %d here: every step of the unroll holds a "
            "score for each pair of slots; shorten --seq-len if memory does not suffice",
            dtype,
            head_dim,
        )
    return backend


def _candidates(device_type: str, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return the back ends that the rules of their kernels allow, the preferred one first."""
    flex = device_type == "cuda" and flex_problem(dtype, head_dim) is None
    merged = dtype in kernel_dtypes(device_type)
    return ["flex"] * flex + ["merged"] * merged


def _serves(backend: str, device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a back end is right here; that of CPUs is part of torch and proven by tests."""
    if device_type == "cpu":
        return True
    case = partial(unrolled_case, backend, device_type, dtype, head_dim)
    return tried(f"attention of the unroll ({backend}, {dtype}, head size {head_dim})", case)


def unrolled_case(backend: str, device: str, dtype: torch.dtype, head_dim: int) -> Case:
    """Return a small case of two later steps: a back end's heads, and those of "dense" in float32.

    Two packs; grouped heads; documents that end inside a pack; slots that are no query.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int, slots: int) -> Tensor:
        shape = 2, heads, slots, head_dim
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()

    width = 200
    slots = torch.arange(width, device=device)
    ends = torch.tensor([[90], [150]], device=device)  # of the first document of each pack
    used = (slots % 3 > 0).expand(2, -1)
    active = active_slots(used)  # [2, A]
    first = torch.where(active < ends, 0, ends)
    inputs = [draw(2, active.shape[1]), *(draw(1, width) for _ in range(2))]
    inputs += [draw(1, active.shape[1]) for _ in range(4)]
    scale = head_dim**-0.5

    def heads_of(kind: str, tensors: list[Tensor]) -> Tensor:
        queries = Queries.prepare(first, active, width, kind)
        q, k0, v0, *flat = tensors
        diagonal = list(zip(flat[::2], flat[1::2], strict=True))
        return unrolled_attention(q, k0, v0, diagonal, queries, scale)

    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        inputs,
        [heads_of(backend, inputs)],
        [heads_of("dense", [x.to(exact) for x in inputs])],
    )
