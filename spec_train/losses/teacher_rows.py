"""The target's distribution at slots, over the draft vocabulary.

n rows, S drafts of a row, Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from spec_train.attention.fused import fused
from spec_train.losses.kernels import SUMS, kernels, serves
from spec_train.losses.tiles import dot, softmax_sums, tiles, wide


@fused
def _distribution(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax [n, V], log of the sum of exp [n] and entropy [n] of logits [n, V]."""
    logits = wide(logits)
    p, total = torch.empty_like(logits), logits.new_empty(len(logits))
    entropy = torch.empty_like(total)
    for tile in tiles(len(logits), logits.shape[1], logits.device):
        _, total[tile], _ = softmax_sums(logits[tile], p[tile])
        entropy[tile] = total[tile] - dot(p[tile], logits[tile])
    return p, total, entropy


class _Rows:
    """What the distributions of n slots have in common, however they are stored."""

    label: Tensor | None

    def __getitem__(self, rows: Tensor | slice) -> Self:
        """Return the rows of an index, int64 [k], or of a slice, without a copy."""
        return self._each(lambda x: x[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        given: Any = self
        values = {f.name: getattr(self, f.name) for f in fields(given)}
        return replace(given, **{k: change(v) for k, v in values.items() if v is not None})

    def labelled(self, label: Tensor) -> Self:
        """Return the rows with the tokens of hard targets, int64 [n]; -1 becomes 0 (no loss)."""
        given: Any = self
        return replace(given, label=label.clamp_min(0))


@dataclass(frozen=True)
class TeacherRows(_Rows):
    """The target's distribution at n slots, over the draft vocabulary."""

    p: Tensor  # probabilities over the draft vocabulary [n, Vd]: rows add up to 1 - rest
    # the target's probability of the draft vocabulary [n], NaN: not measured; None: 1
    mass: Tensor | None = None
    rest: Tensor | None = None  # probability of all tokens where p is 0 [n]; None: 0
    label: Tensor | None = None  # the one token of a hard target, int64 [n]
    entropy: Tensor | None = None  # -sum_v p log p - rest log rest [n], if it is known already

    @classmethod
    def of_logits(cls, logits: Tensor, logsumexp: Tensor | None) -> "SlotRows":
        """Make rows from the target's logits of the draft vocabulary [n, Vd].

        `logsumexp` [n] is over the full vocabulary; None: the draft vocabulary is the full one.
        """
        by_kernel = serves(logits.device, logits.dtype, SUMS)
        p, total, entropy = (
            (logits, *kernels().row_sums(logits)) if by_kernel else _distribution(logits)
        )
        mass = None
        if logsumexp is not None:
            # Stored states are rounded and the stored sum is not, so the quotient may exceed 1.
            mass = (total - logsumexp.to(total.dtype)).exp().clamp(max=1.0)
        if by_kernel:
            return TeacherLogits(logits.contiguous(), total, mass, entropy)
        return cls(p, mass, entropy=entropy)

    def full(self) -> Tensor:
        """Return the known probabilities [n, Vd] of the target's full distribution."""
        return self.p if self.mass is None else self.p * self.mass[:, None]

    def spread(self) -> "TeacherRows":
        """Return the rows: every slot has one of its own."""
        return self

    def to(self, dtype: torch.dtype) -> "TeacherRows":
        return self._each(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def hardened(self) -> "TeacherRows":
        """Return rows in which every distribution is 1 at `label`."""
        assert self.label is not None  # the loss that asks for hard targets has set it
        return TeacherRows(torch.zeros_like(self.p).scatter_(1, self.label[:, None], 1.0))

    def with_entropy(self) -> "TeacherRows":
        """Return the rows with `entropy`, so that it is computed once for several drafts."""
        if self.entropy is not None:
            return self
        entropy = -torch.xlogy(self.p, self.p).sum(-1)
        if self.rest is not None:
            entropy = entropy - torch.xlogy(self.rest, self.rest)
        return replace(self, entropy=entropy)

    def completed(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return p with the rest distributed like the draft `q` [n, S, Vd]: [n, 1 or S, Vd].

        The second value is the draft's probability of the tokens that share the rest, [n, S];
        None where there is no rest.
        """
        p = self.p[:, None]
        if self.rest is None:
            return p, None
        outside = q * (p == 0)
        tail = outside.sum(-1).clamp_min(torch.finfo(q.dtype).tiny)  # [n, S]
        return outside.mul_((self.rest[:, None] / tail)[..., None]).add_(p), tail


@dataclass(frozen=True)
class TeacherLogits(_Rows):
    """The same as logits, which kernels read: no probability is stored."""

    logits: Tensor  # [n, Vd], contiguous, in the dtype of a product
    total: Tensor  # log of the sum of their exp, float32 [n]
    mass: Tensor | None  # as in `TeacherRows`
    entropy: Tensor  # [n]
    label: Tensor | None = None

    def spread(self) -> TeacherRows:
        """Return the rows with probabilities."""
        p = (wide(self.logits) - self.total[:, None]).exp()
        return TeacherRows(p, self.mass, label=self.label, entropy=self.entropy)

    def at(self, ids: Tensor, index: Tensor | None) -> Tensor:
        """Return the target's full probability of tokens [k, K], of the rows of an index [k]."""
        rows = torch.arange(len(ids), device=ids.device) if index is None else index
        p = (wide(self.logits[rows[:, None], ids]) - self.total[rows, None]).exp()
        return p if self.mass is None else p * self.mass[rows, None]

    def to(self, dtype: torch.dtype) -> "TeacherLogits":
        """Return the rows, which have their dtypes."""
        return self

    def with_entropy(self) -> "TeacherLogits":
        """Return the rows, which have it."""
        return self


SlotRows = TeacherRows | TeacherLogits


@dataclass(frozen=True)
class SharedRows:
    """The distributions of n slots of which several have the same one, each stored once."""

    rows: SlotRows
    index: Tensor  # int64 [n]: the row of every slot
    label: Tensor | None = None  # of the n slots, as in `TeacherRows`

    def to(self, dtype: torch.dtype) -> "SharedRows":
        return replace(self, rows=self.rows.to(dtype))

    def labelled(self, label: Tensor) -> "SharedRows":
        """Return the slots with the tokens of hard targets, int64 [n]; -1 becomes 0 (no loss)."""
        return replace(self, label=label.clamp_min(0))

    def __getitem__(self, slots: slice) -> "SharedRows":
        """Return a slice of the slots, without a copy."""
        label = None if self.label is None else self.label[slots]
        return SharedRows(self.rows, self.index[slots], label)

    def spread(self) -> TeacherRows:
        """Return the distribution of every slot, as copies."""
        rows = self.rows[self.index].spread()
        return rows if self.label is None else rows.labelled(self.label)


SomeRows = SlotRows | SharedRows
"""Indexed by a slice of the n slots, either returns these; `spread` makes `TeacherRows` of them."""
