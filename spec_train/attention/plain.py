"""Attention without a prepared mask: over everything, over a block, or causal over a cache.

B packs, n queries, T keys, h / g query / key-value heads (g divides h), d head size.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_train.attention.masks import BlockWindow


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key-value heads [B, g, ...] to [B, heads, ...]; consecutive query heads share one."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: BlockWindow | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from the slots of one block per sequence to all verified positions and to the block.

    Args:
        q: queries [B, h, S, d] of the slots, at the last S of the T positions.
        k, v: keys and values [B, g, T, d] at the positions 0 to T - 1, the slots included.
        scale: multiplies the scores.
        window: of the layer; None: every slot sees every key.
        sinks: a score of each head [h] that joins its softmax and has no value.

    Returns:
        Heads [B, h, S, d].
    """
    if window is None:
        return _attend(q, k, v, scale, None, sinks)
    slots, held = q.shape[2], k.shape[2]
    start = max(0, held - slots - window.size + 1)  # the first key that the first slot sees
    query = torch.arange(held - slots, held, device=q.device)[:, None]  # positions [S, 1]
    key = torch.arange(start, held, device=q.device)  # positions [keys]
    limit = query + (1 if window.causal else window.size)
    seen = (query - key < window.size) & (key < limit)  # bool [S, keys]
    return _attend(q, k[:, :, start:], v[:, :, start:], scale, seen, sinks)


def attend_cached(
    q: Tensor,  # queries [B, h, n, d] of the last n of the T rows
    k: Tensor,  # keys and values [B, g, T, d] of all rows, the new ones included
    v: Tensor,
    scale: float,  # multiplies the scores
    # True where a new row sees a row without the window, bool [n, T]; None: causal
    seen: Tensor | None = None,
    window: int | None = None,  # number of positions that a row sees; None: no limit
) -> Tensor:
    """Attend from the n newest rows of a cache to all of its rows.

    The rows that a row sees are one per position, in order and without gaps: a chain, or a path of
    a tree. So a window of W positions is the last W of them.

    Returns:
        Heads [B, h, n, d].
    """
    new, held = q.shape[2], k.shape[2]
    if seen is not None:
        if window is not None:  # the number of seen rows from a row to the last one, itself counted
            seen = seen & (seen.flip(-1).cumsum(-1).flip(-1) <= window)
        return _attend(q, k, v, scale, seen)
    start = 0 if window is None else max(0, held - new - window + 1)
    if start:  # rows that no new row sees
        k, v, held = k[:, :, start:], v[:, :, start:], held - start
    if new > 1:  # a single new row is the last one and sees all that is left
        # bool [n, T]: new row i is row T - n + i, and sees rows up to T - n + i
        seen = torch.ones(new, held, dtype=torch.bool, device=q.device).tril(held - new)
        if window is not None:
            seen = seen.triu(held - new - window + 1)
    return _attend(q, k, v, scale, seen)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seen: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from q [B, h, n, d] to k, v [B, g, T, d] where `seen`, bool [.., n, T], is True."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    if sinks is not None:  # a key of zeros, whose score is the sink
        bias = q.new_zeros(q.shape[1], q.shape[2], k.shape[2])
        if seen is not None:
            bias = bias.masked_fill(~seen, -math.inf)
        sink = sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[2], 1)
        seen, k, v = torch.cat([bias, sink], -1), F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
