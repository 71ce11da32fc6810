"""A loss of one's own, and the rows of a head as tensors: what is asked for beside the usual.

Every draft computes its loss by `losses.menu`, so what is asked for stands here meanwhile, and no
kind of draft hands it on.

n rows of a chunk, N rows of a batch, S unroll steps, Vd draft vocabulary, H hidden size.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spec_data.shards.errors import ConfigError
from spec_train.losses.teacher_rows import SomeRows, TeacherRows

LossFunction = Callable[[Tensor, TeacherRows, Tensor], Tensor]
"""Logits [n, Vd], the target's distributions, weights [n] -> the sum over rows of weight times
loss, or these products [n]."""

_TOLERANCE = 1e-3  # of the sums of a loss in float32
_MEANING = (
    "it is called for some rows at a time, with weights that hold all denominators: return the sum "
    "of weights * loss, and no mean"
)


class OwnLoss:
    """A `LossFunction`, called for chunks of rows."""

    def __init__(self, function: LossFunction) -> None:
        """Use `function`.

        Raises:
            ConfigError: it cannot be called, or it is a module with parameters: the optimizer of
                the draft does not have them.
        """
        if not callable(function):
            raise ConfigError(
                f"loss_fn = {function!r}: expected a function of logits, teacher and weights"
            )
        if isinstance(function, nn.Module) and any(p.requires_grad for p in function.parameters()):
            raise ConfigError(
                f"loss_fn = {type(function).__name__}: it has parameters, and only those of the "
                "draft are trained; freeze them with requires_grad_(False)"
            )
        self.function = function
        self._checked = False

    @property
    def name(self) -> str:
        """What it is called."""
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))

    def of(
        self, logits: Tensor, teacher: TeacherRows, weights: Tensor, differentiate: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted losses of rows [n], and d sum / d logits [n, Vd].

        The losses of a function that returns their sum are shares of it by the weights.

        Raises:
            ConfigError: the function returns no such thing, or does not add up over rows.
        """
        if not self._checked and len(logits) > 1 and bool((weights != 0).any()):
            self._check(logits, teacher, weights)
        if not differentiate:
            with torch.no_grad():
                return self._rows(self._call(logits, teacher, weights), weights), None
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            value = self._call(leaf, teacher, weights)
            if not value.requires_grad:
                raise ConfigError(f"loss {self.name}: it does not depend on the logits")
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        return self._rows(value.detach(), weights), slope

    def _call(self, logits: Tensor, teacher: TeacherRows, weights: Tensor) -> Tensor:
        value = self.function(logits, teacher, weights)
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape not in ((), (len(logits),)):
            raise ConfigError(
                f"loss {self.name}: expected a tensor [] or [{len(logits)}] for {len(logits)} rows "
                f"of logits, found {shape}"
            )
        return value

    @staticmethod
    def _rows(value: Tensor, weights: Tensor) -> Tensor:
        if value.ndim:
            return value.to(weights.dtype)
        total = weights.sum()
        return value * torch.where(total != 0, weights / total, 1 / len(weights))

    @torch.no_grad()
    def _check(self, logits: Tensor, teacher: TeacherRows, weights: Tensor) -> None:
        """Refuse a mean, and a loss that leaves its weights out: both depend on the chunks."""
        middle = len(logits) // 2

        def total(part: slice, factor: float = 1.0) -> float:
            some = logits[part].clone(), teacher[part], weights[part] * factor
            return float(self._call(*some).sum())

        whole = total(slice(None))
        halves = total(slice(0, middle)), total(slice(middle, None))
        nothing, twice = total(slice(None), 0.0), total(slice(None), 2.0)
        size = _TOLERANCE * max(map(abs, (whole, *halves)))
        self._checked = True
        if not math.isfinite(whole):
            return  # the run refuses the step, and says of which documents
        if not (abs(nothing) <= size and abs(twice - 2 * whole) <= 2 * size):
            raise ConfigError(
                f"loss {self.name} is not weights * loss: it is {whole:.6g}, with all weights "
                f"doubled {twice:.6g}, with weights of 0 {nothing:.6g}; {_MEANING}"
            )
        if abs(sum(halves) - whole) > size:
            raise ConfigError(
                f"loss {self.name} does not add up over rows: it is {whole:.6g}, and "
                f"{halves[0]:.6g} and {halves[1]:.6g} for two halves of the rows; {_MEANING}"
            )


@dataclass
class ScoredRows:
    """What a head's loss was computed of; logits and teachers are made when somebody asks."""

    hidden: Tensor  # states that entered the head [N, H] or [N, S, H], with their graph
    logits_of: Callable[[Tensor], Tensor]  # states [n, H] -> logits [n, Vd], without `bias`
    teacher: Callable[[slice], SomeRows]  # of a slice of the N rows
    weights: Tensor  # [N] or [N, S]; 0: the row has no loss
    bias: Callable[[Tensor], Tensor] | None = None  # rows, int64 [n] -> what is added, [n, Vd]

    def detach(self) -> None:
        """Forget the graph."""
        self.hidden = self.hidden.detach()


@dataclass(frozen=True)
class Asked:
    """What is asked of a loss: another function, and where its rows are to be noted."""

    loss_fn: OwnLoss | None = None
    rows: list[ScoredRows] | None = None


_NOTHING = Asked()
_ASKED: ContextVar[Asked] = ContextVar("asked", default=_NOTHING)


@contextlib.contextmanager
def asking(what: Asked = _NOTHING) -> Iterator[None]:
    """Ask for it inside; nothing, without an argument."""
    token = _ASKED.set(what)
    try:
        yield
    finally:
        _ASKED.reset(token)


def asked() -> Asked:
    """Return what is asked for now."""
    return _ASKED.get()


def note_rows(*values: Any) -> None:
    """Keep what `ScoredRows` takes, if somebody has asked for it."""
    if (rows := asked().rows) is not None:
        rows.append(ScoredRows(*values))
