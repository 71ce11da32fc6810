"""Medusa (arXiv 2401.10774): heads that each draft one token, all from one final hidden state.

spec-train fit medusa.py:Medusa --data DATA --out RUN
spec-train eval --draft RUN --data DATA --draft-code medusa.py:Medusa
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from cyclopts import Parameter
from torch import nn
from torch.nn import functional as F

from spec_train.drafts import DraftConfig, HeadsDraft
from spec_train.options.draft_options import LossOptions, Positive, Ratio


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MedusaOptions(LossOptions):
    """Options of the Medusa draft (arXiv 2401.10774): heads over the final hidden state."""

    rounds: ClassVar[str] = "heads"
    heads: Positive = 4
    """Heads, and tokens drafted at once: head k drafts the token k + 2 after that of the state."""
    head_decay: Ratio = 0.8
    """Weight of the loss of head k: head_decay ** k, counted from 0."""


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(DraftConfig):
    """Shapes of the draft: the number of heads beside the target's sizes."""

    draft: ClassVar[str] = "medusa"
    reads_layers: ClassVar[bool] = False
    heads: int


class Medusa(HeadsDraft):
    """Head k is softmax(W_k (x + silu(V_k x))); V_k starts as 0, W_k as the target's head."""

    config_class, options_class = MedusaConfig, MedusaOptions

    def __init__(self, config, options=None):
        super().__init__(config, options)
        size, vocab = config.hidden_size, config.vocab_size
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(config.heads))
        self.lm_head = nn.ModuleList(nn.Linear(size, vocab, bias=False) for _ in self.blocks)

    @torch.no_grad()
    def adopt(self, head):
        """Start as the target says: its head for every head, and blocks that change nothing."""
        super().adopt(head)
        for block, own in zip(self.blocks, self.lm_head, strict=True):
            block.weight.zero_(), block.bias.zero_(), own.weight.copy_(head.head_weight)

    @property
    def shares(self):
        return [self.options.head_decay**k for k in range(self.config.heads)]

    def at_depth(self, states):
        """Return a function of slots and k: what enters head k there [n, H], and W_k [V, H]."""

        def entering(slots, k):
            x = self.cast(states[slots])
            return x + F.silu(self.blocks[k](x)), self.lm_head[k].weight

        return entering
