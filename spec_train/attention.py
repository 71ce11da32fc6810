"""Attention of the EAGLE-3 unroll: step-0 keys of a document, plus a slot's own later keys.

At unroll step s a query of slot t sees the step-0 keys of slots <= t of its document and the keys
of steps 1..s at slot t alone (a diagonal). One softmax runs over both. Two back ends, equal by
test:

- "dense": the joint softmax written out. T x T scores per step: the reference.
- "merged": a flash kernel over the step-0 keys that also returns its log-sum-exp, merged with the
  diagonal terms. No score matrix. Kernels give no gradient through the log-sum-exp; as in ring
  attention, the kernel's backward is called with the merged output and the merged log-sum-exp,
  from which it recomputes the joint probabilities.

Only slots whose output is used anywhere are queries: a later step's key is seen by its own slot
alone, so a prompt's slots matter as step-0 keys and nothing else.

B rows, T slots, A active slots (queries), h / g query / key-value heads, d head size, s later
steps.
"""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

BACKENDS = ("dense", "merged")
BLOCK = 128  # queries of one kernel call


def active_slots(used: Tensor) -> Tensor:
    """Indices int64 [B, A] of the True slots of `used` [B, T], ascending in each row.

    Shorter rows are padded with their last active slot (the last slot when they have none).
    """
    slots = torch.arange(used.shape[1], device=used.device)
    width = max(int(used.sum(1).max()), 1)
    order = torch.argsort((~used).to(torch.int8), dim=1, stable=True)[:, :width]
    last = torch.where(used, slots, -1).amax(1, keepdim=True)
    last = torch.where(last < 0, used.shape[1] - 1, last)
    return torch.where(used.gather(1, order), order, last)


def active_mask(document_ids: Tensor, active: Tensor) -> Tensor:
    """Boolean mask [B, 1, A, T] of a block-causal attention from slots `active` [B, A] to all.

    True where the key's slot is not after the query's and in the same document. Padding counts as
    one more document, so that no row is empty.
    """
    slots = torch.arange(document_ids.shape[1], device=document_ids.device)
    same = document_ids.gather(1, active)[:, :, None] == document_ids[:, None, :]
    return (same & (slots <= active[:, :, None]))[:, None]


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key-value heads [B, g, ...] to [B, heads, ...]; consecutive query heads share one."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


@cache
def default_backend(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """The back end for a device, element type and head size: decided once and logged."""
    supported = device_type == "cpu" and dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
    )
    backend = "merged" if supported else "dense"
    log.info("eagle3 attention on %s, %s, head_dim %d: %s", device_type, dtype, head_dim, backend)
    return backend


@dataclass(frozen=True)
class Block:
    """Queries of one row that are computed together, and the keys that any of them sees."""

    row: int
    queries: slice
    keys: slice
    bias: Tensor  # [1, 1, queries, keys], 0 where seen, -inf elsewhere


@dataclass(frozen=True)
class PreparedMask:
    """A boolean mask [B, 1, A, T] and, for the merged back end, the blocks that it leaves."""

    seen: Tensor
    blocks: tuple[Block, ...] = ()


def prepare_mask(mask: Tensor, backend: str, dtype: torch.dtype) -> PreparedMask:
    """Make of a boolean mask what the back end reads; do it once per batch, not per step.

    The kernel on the CPU computes every score it is given. Cutting queries into blocks, each with
    the span of keys it sees, skips what other documents and later tokens would cost.
    """
    if backend == "dense":
        return PreparedMask(mask)
    starts = range(0, mask.shape[2], BLOCK)
    edges = []
    for start in starts:
        columns = mask[:, 0, start : start + BLOCK].any(1).to(torch.int8)  # [B, T]
        past = mask.shape[3] - columns.flip(1).argmax(1)
        edges.append(torch.stack([columns.argmax(1), past]))
    blocks = []
    for start, (firsts, pasts) in zip(starts, torch.stack(edges).tolist(), strict=True):
        queries = slice(start, min(start + BLOCK, mask.shape[2]))
        for row, (first, past) in enumerate(zip(firsts, pasts, strict=True)):
            seen = mask[row : row + 1, :, queries, first:past]
            bias = torch.zeros(seen.shape, dtype=dtype, device=mask.device)
            bias.masked_fill_(~seen, float("-inf"))
            blocks.append(Block(row, queries, slice(first, past), bias))
    return PreparedMask(mask, tuple(blocks))


def unrolled_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    diag_k: Tensor,
    diag_v: Tensor,
    mask: Tensor | PreparedMask,
    scale: float,
    backend: str = "dense",
) -> Tensor:
    """Attend from `q` to step-0 keys under `mask` and to each query's own diagonal keys.

    Args:
        q: queries [B, h, A, d], rotated.
        k0, v0: step-0 keys and values [B, g, T, d], g dividing h.
        diag_k, diag_v: keys and values of later steps [B, g, s, A, d]; s may be 0.
        mask: boolean [B, 1, A, T], or `prepare_mask` of it; no row may be empty.
        scale: multiplies the scores.
        backend: "dense" or "merged".

    Returns:
        [B, h, A, d].
    """
    heads = q.shape[1]
    k0, v0 = repeat_heads(k0, heads), repeat_heads(v0, heads)
    diag_k, diag_v = repeat_heads(diag_k, heads), repeat_heads(diag_v, heads)
    if not isinstance(mask, PreparedMask):
        mask = prepare_mask(mask, backend, q.dtype)
    if backend == "merged":
        return _MergedAttention.apply(q, k0, v0, diag_k, diag_v, mask.blocks, scale)
    return _dense(q, k0, v0, diag_k, diag_v, mask.seen, scale)


def _dense(
    q: Tensor, k0: Tensor, v0: Tensor, diag_k: Tensor, diag_v: Tensor, mask: Tensor, scale: float
) -> Tensor:
    scores = ((q @ k0.mT) * scale).masked_fill(~mask, float("-inf"))
    own = _diagonal_scores(q, diag_k, scale)
    joint = torch.cat([scores, own], dim=-1).softmax(dim=-1)
    first, later = joint.split([k0.shape[2], diag_k.shape[2]], dim=-1)
    return first @ v0 + torch.einsum("bhas,bhsad->bhad", later, diag_v)


def _diagonal_scores(q: Tensor, diag_k: Tensor, scale: float) -> Tensor:
    """Scores [B, h, A, s] of queries [B, h, A, d] with their own later keys [B, h, s, A, d]."""
    return (q[:, :, None] * diag_k).sum(-1).transpose(2, 3) * scale


class _MergedAttention(torch.autograd.Function):
    """Flash attention over step-0 keys, merged exactly with the diagonal (see the module)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        diag_k: Tensor,
        diag_v: Tensor,
        blocks: tuple[Block, ...],
        scale: float,
    ) -> Tensor:
        out, lse = torch.empty_like(q), None
        for block in blocks:
            part, queries, keys = slice(block.row, block.row + 1), block.queries, block.keys
            block_out, block_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[part, :, queries],
                k0[part, :, keys],
                v0[part, :, keys],
                attn_mask=block.bias,
                scale=scale,
            )
            lse = block_lse.new_empty(q.shape[:3]) if lse is None else lse
            out[part, :, queries], lse[part, :, queries] = block_out, block_lse
        if lse is None:
            raise ValueError("attention without queries")
        if diag_k.shape[2]:
            own = _diagonal_scores(q, diag_k, scale).to(lse.dtype)
            first, lse = lse, torch.logaddexp(lse, own.logsumexp(-1))
            share = torch.exp(own - lse[..., None]).to(q.dtype)
            out *= torch.exp(first - lse)[..., None].to(q.dtype)
            out += torch.einsum("bhas,bhsad->bhad", share, diag_v)
        ctx.save_for_backward(q, k0, v0, diag_k, diag_v, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, diag_k, diag_v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk0, dv0 = torch.empty_like(q), torch.zeros_like(k0), torch.zeros_like(v0)
        for block in ctx.blocks:
            part, queries, keys = slice(block.row, block.row + 1), block.queries, block.keys
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[part, :, queries],
                q[part, :, queries],
                k0[part, :, keys],
                v0[part, :, keys],
                out[part, :, queries],
                lse[part, :, queries],
                0.0,
                False,
                attn_mask=block.bias,
                scale=ctx.scale,
            )
            dq[part, :, queries] = parts[0]
            dk0[part, :, keys] += parts[1]
            dv0[part, :, keys] += parts[2]
        if not diag_k.shape[2]:
            return dq, dk0, dv0, diag_k, diag_v, None, None  # empty, as are their gradients
        own = _diagonal_scores(q, diag_k, ctx.scale).to(lse.dtype)
        share = torch.exp(own - lse[..., None]).to(q.dtype)
        delta = (grad * out).sum(-1, keepdim=True)
        gain = (grad[:, :, None] * diag_v).sum(-1).transpose(2, 3)
        dscore = (share * (gain - delta) * ctx.scale).transpose(2, 3)[..., None]
        dq += (dscore * diag_k).sum(2)
        ddv = share.transpose(2, 3)[..., None] * grad[:, :, None]
        return dq, dk0, dv0, dscore * q[:, :, None], ddv, None, None
