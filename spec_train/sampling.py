"""Which drafted tokens are kept: pure rules of distributions and uniform numbers.

Greedy keeps drafts that are the target's argmax. Sampling is rejection sampling (Leviathan et al.
2211.17192): a token drawn from q is kept with probability min(1, p / q), a rejected one replaced by
a draw from (p - q)+, so that what comes out has distribution p whatever q was. All randomness
enters as uniform numbers from one CPU generator: the same seed decides the same on every device,
and tests enumerate the numbers instead of sampling them. Distributions are float64.

Shapes: k drafts of a round, V / Vd target / draft vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def accept_probability(p: Tensor, q: Tensor) -> Tensor:
    """Probability [..., V] that a drafted token is kept: min(1, p / q); 1 where q = 0."""
    return torch.where(q > 0, p / q, 1.0).clamp(max=1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Distribution [..., V] of the token that replaces a rejected one: (p - q)+, normalised.

    Where q equals p nothing is ever rejected; rounding may say otherwise, and then p is right.
    """
    rest = (p - q).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def pick(probabilities: Tensor, uniform: Tensor | float) -> Tensor:
    """Inverse of the cumulative distribution: int64 [] for float64 weights [V], uniform in [0, 1).

    Never picks a token of probability zero.
    """
    cumulative = probabilities.cumsum(-1)
    last = torch.searchsorted(cumulative, cumulative[-1])
    found = torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True)
    return torch.minimum(found, last)


def reject_sampled(
    drafted: Sequence[int], q: Tensor, p: Tensor, uniforms: Sequence[float]
) -> tuple[int, int]:
    """Keep a prefix of the drafted tokens and give (its length, the target's next token).

    Args:
        drafted: k tokens, the j-th drawn from q[j].
        q: float64 [k, V], the draft's distributions over the target vocabulary.
        p: float64 [k + 1, V], the target's, after 0..k of the drafted tokens.
        uniforms: k + 1 independent numbers in [0, 1): one decision each, the last one the token.
    """
    for j, token in enumerate(drafted):
        if uniforms[j] >= float(accept_probability(p[j, token], q[j, token])):
            return j, int(pick(residual(p[j], q[j]), uniforms[-1]))
    return len(drafted), int(pick(p[len(drafted)], uniforms[-1]))


class Greedy:
    """Temperature 0: every choice is an argmax."""

    def first(self, logits: Tensor) -> int:
        """Choose from the target's logits [V]."""
        return int(logits.argmax())

    def draft(self, logits: Tensor, draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, None]:
        """Choose from the draft's logits [Vd]: the target id, int64 []."""
        return draft_ids[logits.argmax()], None

    def verify(self, drafted: Tensor, q: list[Any], logits: Tensor) -> tuple[list[int], int, int]:
        """Judge drafted ids [k] by the target's logits [k + 1, V]: (ids, accepted, next token)."""
        both = torch.cat([drafted, logits.argmax(-1)]).tolist()  # one wait for the device
        proposed, chosen = both[: len(drafted)], both[len(drafted) :]
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == chosen[accepted]:
            accepted += 1
        return proposed, accepted, chosen[accepted]


class Sampled:
    """Temperature above 0: rejection sampling. One CPU generator decides, on every device."""

    def __init__(self, temperature: float, seed: int) -> None:
        """Sample at `temperature`; the same seed gives the same choices."""
        self.temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def _uniforms(self, count: int) -> list[float]:
        return torch.rand(count, generator=self._generator, dtype=torch.float64).tolist()

    def probabilities(self, logits: Tensor) -> Tensor:
        """Float64 distribution of logits [..., V] at this temperature."""
        return torch.softmax(logits.double() / self.temperature, -1)

    def first(self, logits: Tensor) -> int:
        """Draw from the target's logits [V]."""
        return int(pick(self.probabilities(logits), self._uniforms(1)[0]))

    def draft(self, logits: Tensor, draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Draw from the draft's logits [Vd]: the target id and the distribution over V."""
        own = self.probabilities(logits)
        chosen = draft_ids[pick(own, self._uniforms(1)[0])]
        return chosen, own.new_zeros(vocab_size).scatter_(0, draft_ids, own)

    def verify(self, drafted: Tensor, q: list[Any], logits: Tensor) -> tuple[list[int], int, int]:
        """Judge drafted ids [k] by the target's logits [k + 1, V]: (ids, accepted, next token)."""
        proposed = drafted.tolist()
        p = self.probabilities(logits)
        accepted, chosen = reject_sampled(
            proposed, torch.stack(q) if q else p[:0], p, self._uniforms(len(proposed) + 1)
        )
        return proposed, accepted, chosen


Sampler = Greedy | Sampled


def make_sampler(temperature: float, seed: int) -> Sampler:
    """Greedy at temperature 0, else sampling."""
    return Sampled(temperature, seed) if temperature > 0 else Greedy()
