"""What a draft returns for a batch: its loss, and the rows that it is made of, when asked for.

N supervised rows: a slot at an unroll step, or a slot of a block. Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_train.losses.own import ScoredRows
from spec_train.losses.teacher_rows import TeacherRows
from spec_train.losses.tiles import wide


@dataclass
class DraftOutput:
    """The loss of a batch and its metrics, and the rows that it was computed of.

    `logits`, `labels`, `teacher` and `weights` are of the N rows that have a loss, and are computed
    at their first use: all of them exist then at a time, which `loss` avoids.
    """

    loss: Tensor  # a scalar with a graph
    sums: dict[str, Tensor]  # float64, no graph, additive; `Draft.summarise` makes metrics of them

    def __post_init__(self) -> None:
        """Start without rows; no field, where wrappers of several processes look for tensors."""
        self._rows: list[ScoredRows] | None = None
        self._empty: Callable[[], Tensor] = lambda: torch.zeros(0, 0)

    def keep(self, rows: list[ScoredRows], empty: Callable[[], Tensor]) -> "DraftOutput":
        """Keep the rows of the loss; `empty` makes logits of none, [0, Vd]."""
        self._rows, self._empty = rows, empty
        return self

    @cached_property
    def _kept(self) -> list[tuple[ScoredRows, Tensor]]:
        """The rows, with the flat indices of those that have a loss, int64 [n]."""
        if self._rows is None:
            raise DraftError("these rows were not kept: call draft(batch) or draft.loss(batch)")
        kept = [(rows, rows.weights.flatten().nonzero().squeeze(1)) for rows in self._rows]
        return [(rows, chosen) for rows, chosen in kept if len(chosen)]

    @cached_property
    def logits(self) -> Tensor:
        """The draft's logits [N, Vd], float32 (or float64), with a graph.

        P-EAGLE in several segments has none: each was differentiated before the next one started.
        """
        parts = []
        for rows, chosen in self._kept:
            logits = wide(rows.logits_of(rows.hidden.flatten(0, -2)[chosen]))
            parts.append(logits if rows.bias is None else logits + rows.bias(chosen))
        return torch.cat(parts) if parts else self._empty()

    @cached_property
    def weights(self) -> Tensor:
        """The weights of the rows in the loss [N]; they hold its denominators."""
        parts = [rows.weights.flatten()[chosen] for rows, chosen in self._kept]
        return torch.cat(parts) if parts else self._empty()[:, 0]

    @cached_property
    @torch.no_grad()
    def teacher(self) -> TeacherRows:
        """The target's distributions at the rows: `p` [N, Vd] and others."""
        parts = []
        for rows, chosen in self._kept:
            steps = rows.weights[0].numel()
            known = rows.teacher(slice(0, len(rows.hidden))).spread()
            parts.append(known[chosen // steps].to(self._empty().dtype))
        return _joined(parts) if parts else TeacherRows(self._empty())

    @cached_property
    def labels(self) -> Tensor:
        """What a hard loss compares with, as indices of the draft vocabulary, int64 [N]."""
        label = self.teacher.label
        return self.teacher.p.argmax(-1) if label is None else label


def _joined(parts: list[TeacherRows]) -> TeacherRows:
    """Return the rows of all parts."""
    if len(parts) == 1:
        return parts[0]

    def column(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if any(value is None for value in values) else torch.cat(values)

    names = ("p", "mass", "rest", "label", "entropy")
    return TeacherRows(**{name: column(name) for name in names})


class Connected(torch.autograd.Function):
    """Return the loss; give every parameter the gradient `zero` (nan if a loss is not finite).

    Each parameter then joins the all-reduce, even if this rank's packs did not use it.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, zero: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(zero)
        ctx.params = [(p.shape, p.dtype) for p in params]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (zero,) = ctx.saved_tensors
        return grads[0], None, *(zero.to(dtype).expand(shape) for shape, dtype in ctx.params)
