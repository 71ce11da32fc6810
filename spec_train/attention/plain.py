"""Attention without a mask of its own: over everything, or causal over a cache.

B packs, n queries, T keys, h / g query / key-value heads (g divides h), d head size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key-value heads [B, g, ...] to [B, heads, ...]; consecutive query heads share one."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attend_all(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend from every query to every key.

    Args:
        q: queries [B, h, n, d].
        k, v: keys and values [B, g, T, d], of the dtype of `q`.
        scale: multiplies the scores.

    Returns:
        Heads [B, h, n, d].
    """
    return _attend(q, k, v, scale, None)


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None
) -> Tensor:
    """Attend from the n newest rows of a cache to all of its rows.

    Args:
        q: queries [B, h, n, d] of the last n of the T rows.
        k, v: keys and values [B, g, T, d] of all rows, the new ones included.
        scale: multiplies the scores.
        seen: True where a new row sees a row, bool [n, T]; None: causal.

    Returns:
        Heads [B, h, n, d].
    """
    new, held = q.shape[2], k.shape[2]
    if seen is None and new > 1:  # a single new row is the last one and sees all
        # bool [n, T]: new row i is row T - n + i, and sees rows 0 .. T - n + i
        seen = torch.ones(new, held, dtype=torch.bool, device=q.device).tril(held - new)
    return _attend(q, k, v, scale, seen)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    """Attend from q [B, h, n, d] to k, v [B, g, T, d] where `seen`, bool [n, T], is True."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
