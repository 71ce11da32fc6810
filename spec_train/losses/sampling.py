"""Which drafted tokens are kept: pure functions of distributions and uniform numbers.

Greedy decoding keeps drafted tokens that are the target's argmax. Sampling is rejection sampling
(Leviathan et al., arXiv 2211.17192): a token drawn from q is kept with probability min(1, p / q),
and a rejected one is replaced by a draw from (p - q)+, so the output has distribution p for any q.
All randomness comes as uniform numbers from one CPU generator. So a seed leads to the same choices
on every device, and tests can enumerate the numbers. Distributions are float64.

Shapes: k drafted tokens of a round, V / Vd target / draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def accept_probability(p: Tensor, q: Tensor) -> Tensor:
    """Return the probability that a drafted token is kept, min(1, p / q), or 1 where q = 0.

    `p`, `q` and the result are float64 [..., V] (or single probabilities []).
    """
    return torch.where(q > 0, p / q, 1.0).clamp(max=1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution of the token that replaces a rejected one: (p - q)+, normalised.

    `p`, `q` and the result are float64 [..., V]. If q equals p, no token can be rejected except by
    rounding; then the result is p.
    """
    rest = (p - q).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def pick(probabilities: Tensor, uniform: Tensor | float) -> Tensor:
    """Draw a token by inverting the cumulative distribution; never one of probability zero.

    `probabilities` are float64 weights [V], `uniform` is in [0, 1); the token is int64 [].
    """
    cumulative = probabilities.cumsum(-1)
    last = torch.searchsorted(cumulative, cumulative[-1])
    index = torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True)
    return torch.minimum(index, last)


def reject_sampled(
    drafted: Sequence[int],  # k tokens, the j-th drawn from q[j]
    q: Tensor,  # float64 [k, V], the draft's distributions over the target vocabulary
    # j to float64 [V], the target's distribution after j drafted tokens, asked in order as needed
    p: Callable[[int], Tensor],
    # k + 1 independent numbers in [0, 1). Number j decides on drafted token j; the last one draws
    # the next token
    uniforms: Sequence[float],
) -> tuple[int, int]:
    """Decide how many drafted tokens are kept; return (their number, the target's next token)."""
    for j, token in enumerate(drafted):
        row = p(j)
        if uniforms[j] >= float(accept_probability(row[token], q[j, token])):
            return j, int(pick(residual(row, q[j]), uniforms[-1]))
    return len(drafted), int(pick(p(len(drafted)), uniforms[-1]))


class Greedy:
    """Temperature 0: every choice is an argmax."""

    def first(self, logits: Tensor) -> int:
        """Choose from the target's logits [V]."""
        return int(logits.argmax())

    def draft(self, logits: Tensor, draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, None]:
        """Choose from the draft's logits [Vd]; return the target id, int64 []."""
        return draft_ids[logits.argmax()], None

    def verify(self, drafted: Tensor, q: list[Any], logits: Tensor) -> tuple[list[int], int, int]:
        """Compare drafted ids [k] with logits [k + 1, V]; return (ids, accepted, next token)."""
        both = torch.cat([drafted, logits.argmax(-1)]).tolist()  # waits for the device only once
        proposed, chosen = both[: len(drafted)], both[len(drafted) :]
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == chosen[accepted]:
            accepted += 1
        return proposed, accepted, chosen[accepted]

    def verify_stepwise(
        self, drafted: Tensor, q: list[Any], row: Callable[[int], Tensor]
    ) -> tuple[list[int], int, int]:
        """Return what `verify` does; `row(j)` gives logits [V] after j drafted tokens.

        It is asked for one after the other, and for none behind a rejected token.
        """
        proposed = drafted.tolist()
        for j, token in enumerate(proposed):
            if (chosen := self.first(row(j))) != token:
                return proposed, j, chosen
        return proposed, len(proposed), self.first(row(len(proposed)))


class Sampled:
    """Temperature above 0: rejection sampling, with one CPU generator for every device."""

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def _uniforms(self, count: int) -> list[float]:
        return torch.rand(count, generator=self._generator, dtype=torch.float64).tolist()

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution of logits [..., V] at this temperature, float64 [..., V]."""
        return torch.softmax(logits.double() / self.temperature, -1)

    def first(self, logits: Tensor) -> int:
        """Draw from the target's logits [V]."""
        return int(pick(self.probabilities(logits), self._uniforms(1)[0]))

    def draft(self, logits: Tensor, draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Draw from the draft's logits [Vd].

        Returns the target id, int64 [], and the draft's distribution over the target vocabulary,
        float64 [V]. `draft_ids` int64 [Vd] maps draft ids to target ids.
        """
        q = self.probabilities(logits)
        chosen = draft_ids[pick(q, self._uniforms(1)[0])]
        return chosen, q.new_zeros(vocab_size).scatter_(0, draft_ids, q)

    def verify(self, drafted: Tensor, q: list[Any], logits: Tensor) -> tuple[list[int], int, int]:
        """Compare drafted ids [k] with logits [k + 1, V]; return (ids, accepted, next token)."""
        proposed = drafted.tolist()
        p = self.probabilities(logits)
        accepted, chosen = reject_sampled(
            *(proposed, torch.stack(q) if q else p[:0], p.__getitem__),
            self._uniforms(len(proposed) + 1),
        )
        return proposed, accepted, chosen

    def verify_stepwise(
        self, drafted: Tensor, q: list[Any], row: Callable[[int], Tensor]
    ) -> tuple[list[int], int, int]:
        """Return what `verify` does, with as many random numbers, see `Greedy.verify_stepwise`."""
        proposed = drafted.tolist()
        accepted, chosen = reject_sampled(
            *(proposed, torch.stack(q) if q else drafted.new_zeros(0)),
            lambda j: self.probabilities(row(j)),
            self._uniforms(len(proposed) + 1),
        )
        return proposed, accepted, chosen


Sampler = Greedy | Sampled


def make_sampler(temperature: float, seed: int) -> Sampler:
    """Return Greedy for temperature 0, else Sampled."""
    return Sampled(temperature, seed) if temperature > 0 else Greedy()
