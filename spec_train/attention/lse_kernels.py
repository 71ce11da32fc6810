"""torch's attention kernels that return the log-sum-exp of their scores, forward and backward.

The merge of the unroll (see `unrolled`) needs the log-sum-exp forward, and a backward pass that
recomputes probabilities from a log-sum-exp that it is handed.

- CPU: the flash kernel.
- CUDA: the memory-efficient kernel, the only one there with a bias and a log-sum-exp. Its rules:
  the head size and the rows of the bias are multiples of 8 (both are padded here), the log-sum-exp
  has its queries padded to a multiple of 32, and the backward pass assumes the memory layout
  [B, Q, h, d] of the output that it is handed, without a check.

B packs, Q queries, T keys, h heads (repeated: one key-value head per query head), d head size.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

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
