"""The menu of losses of one slot, in plain loops: an oracle that the references of all drafts use.

It shares no code with `spec_train.losses.menu`: every loss is a sum over the draft vocabulary, in
float64, and gradients come from autograd.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOSSES = ("ce", "kl", "reverse-kl", "jsd", "tv", "lk-alpha", "lk-lambda")


@dataclass(frozen=True, kw_only=True)
class SlotLoss:
    """Which loss a slot has, and the weights of the tokens of a round ((): as published)."""

    name: str = "ce"
    hard: bool = False
    scale: float = 1.0
    decay: float = 3.0
    weights: tuple[float, ...] = ()

    def __call__(self, p: Tensor, full: Sequence[Tensor], log_q: Tensor, token: int) -> Tensor:
        """Return the loss of a slot.

        `p` and `full` are the target's probabilities of the draft vocabulary: p adds up to 1, full
        is the target's own. `token` is the draft index of a hard target.
        """
        ids = range(len(log_q))
        if self.hard:
            one = torch.ones((), dtype=torch.float64)
            p = torch.stack([one if v == token else one * 0 for v in ids])
            full = list(p)
        q = log_q.exp()
        accepted = entropy = torch.zeros(())
        if self.name in ("tv", "lk-alpha", "lk-lambda"):
            accepted = sum((torch.minimum(full[v], q[v]) for v in ids), accepted)
        if self.name in ("ce", "kl", "lk-lambda"):
            entropy = sum((-p[v] * log_q[v] for v in ids), entropy)
        if self.name == "ce":
            return entropy
        if self.name == "kl":
            return entropy + sum(p[v] * p[v].log() for v in ids if p[v] > 0)
        if self.name == "reverse-kl":
            return sum((q[v] * (log_q[v] - p[v].log()) for v in ids), torch.zeros(()))
        if self.name == "jsd":
            middle = [(p[v] + q[v]) / 2 for v in ids]
            there = sum(p[v] * (p[v] / middle[v]).log() for v in ids if p[v] > 0)
            return (there + sum(q[v] * (q[v] / middle[v]).log() for v in ids)) / 2
        if self.name == "tv":
            return 1 - accepted
        if self.name == "lk-alpha":
            return -accepted.log()
        assert self.name == "lk-lambda", self.name
        r = self.scale * torch.exp(-self.decay * accepted.detach())
        return r * entropy + (1 - r) * (1 - accepted)

    def weight(self, place: int, published: float) -> float:
        """Return the weight of the token at `place` of a round."""
        return self.weights[place] if self.weights else published


CROSS_ENTROPY = SlotLoss()
KL = SlotLoss(name="kl")
