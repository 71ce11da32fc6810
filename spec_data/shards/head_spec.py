"""The target's LM head as data: logits = softcap(scale * (W f + b)).

Both programs compute logits from `hidden.final` with `apply_head`. Generation proves it against the
model, and training and verification then use the same function.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The head without its tensors: `scale` multiplies logits z, `softcap` c is c * tanh(z / c)."""

    vocab_size: int
    hidden_size: int
    tied: bool
    has_bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


def apply_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: HeadSpec) -> Tensor:
    """Compute logits [..., V'] of final hidden states [..., H].

    The dtype is that of the inputs, and the order of operations is that of the models.

    Args:
        hidden: final hidden states [..., H].
        weight: rows of the head [V', H]: all of them, or those of a draft vocabulary.
        bias: [V'] or None.
        spec: scale and softcap.
    """
    logits = F.linear(hidden, weight, bias)
    if spec.scale != 1.0:
        logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    return logits


def logit_error(logits: Tensor, argmax: Tensor, logsumexp: Tensor) -> Tensor:
    """Return the error of argmax (int64 [T]) and logsumexp (float32 [T]) against logits [T, V].

    It is float32 [T], relative to the largest |logit| of the token. `generate` measures it of what
    a codec leaves of the final states, and `verify` compares it with that.
    """
    scale = logits.abs().amax(-1).clamp_min(1e-6)
    gap = logits.amax(-1) - logits.gather(-1, argmax[:, None])[:, 0]
    return torch.maximum(gap, (logits.logsumexp(-1) - logsumexp).abs()) / scale
