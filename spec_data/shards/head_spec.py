"""The target's LM head as data: logits = softcap(scale * (W f + b)).

Both programs derive logits from `hidden.final` with this one function, so what generation proved
against the model is what training and verification use.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Everything about the head but its tensors. `scale` multiplies, `softcap` is c*tanh(z/c)."""

    vocab_size: int
    hidden_size: int
    tied: bool
    has_bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


def apply_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: HeadSpec) -> Tensor:
    """Logits [..., V'] of final hidden states [..., H] for head rows `weight` [V', H].

    Computed in the dtype of the inputs, in the order of operations the models use. `weight` (and
    `bias` [V']) may be a selection of rows: a draft vocabulary.
    """
    logits = F.linear(hidden, weight, bias)
    if spec.scale != 1.0:
        logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    return logits
