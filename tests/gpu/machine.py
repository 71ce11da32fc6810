"""A machine with one GPU, as far as a test can make one: `spec-train fit --device cuda` runs on it.

The arithmetic, the devices of all tensors and the host syncs are real (see fake_cuda). Gradients
are not, as there is no graph: every custom autograd function runs its forward and its backward pass
as plain functions, and every parameter then receives the same small gradient. Page-locked memory,
events and `torch.cuda.synchronize` do nothing here.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.draft_options import DRAFT_OPTIONS
from spec_train.options import FitConfig
from spec_train.training import setup, trainer
from tests.gpu.fake_cuda import FakeCuda, Syncs, counting, cuda_autocast, upload
from tests.spec_train.drafts.any_draft import SMALL


class Event:
    """An event that has always happened."""

    def record(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


class Context:
    """What autograd hands to the passes of a custom function."""

    saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for the backward pass."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Do nothing."""


def apply(function: Any, *args: Any) -> Any:
    """Run a custom function forward, and backward with a gradient of ones; return its output."""
    context, training = Context(), torch.is_grad_enabled()
    with torch.no_grad():
        out = function.forward(context, *args)
        if training:
            _backward(function, context, out, args)
    return out


def _backward(function: Any, context: Context, out: Any, args: Any) -> None:
    outputs = out if isinstance(out, tuple) else (out,)
    pulls = [torch.ones_like(outputs[0]), *(None for _ in outputs[1:])]
    gradients = function.backward(context, *pulls)
    for x, gradient in zip(args, gradients, strict=True):
        if gradient is not None:
            assert gradient.is_cuda and gradient.shape == x.shape, function
            assert gradient.dtype == x.dtype, function


@dataclass
class Trained:
    """What the steps of a run did."""

    syncs: list[Syncs] = field(default_factory=list)  # of every optimizer step
    losses: list[float] = field(default_factory=list)
    trainer: Any = None


def install(patch: pytest.MonkeyPatch, done: Trained) -> None:
    """Replace what would need a GPU, for as long as `patch` lasts."""

    class Watched(trainer.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            done.trainer = self

        def _next_step(self, steps: Any) -> Any:
            with counting() as before:
                step = super()._next_step(steps)
            done.syncs.append(before)
            return step

        def _train_step(self, step: Any) -> None:
            with counting() as syncs:
                super()._train_step(step)
            done.syncs[-1] += syncs
            done.losses.append(self._step_loss)

    def backward(loss: torch.Tensor) -> None:
        assert loss.is_cuda and not loss.ndim
        for parameter in done.trainer.masters.params:
            parameter.grad = upload(torch.full(parameter.shape, 1e-3))

    patch.setattr(setup, "Trainer", Watched)
    patch.setattr(setup, "usable_device", torch.device)
    patch.setattr(trainer, "arithmetic", lambda device, dtype: cuda_autocast(dtype))
    patch.setattr(torch.autograd.Function, "apply", classmethod(apply))
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(FakeCuda, "backward", staticmethod(backward))


@contextlib.contextmanager
def gpu() -> Iterator[None]:
    """Make CUDA available to modules too: their parameters are replaced when they move."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with FakeCuda(), torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def fit_on_gpu(name: str, data: Path, out: Path, steps: int = 2, **changes: Any) -> Trained:
    """Run `spec-train fit` of a small draft on the fake GPU, in bfloat16."""
    done = Trained()
    settings: dict[str, Any] = {"batch_size": 1, "accumulation": 2, "seq_len": 64, "seed": 3}
    settings |= {"steps": steps, "validation": 0.2, "eval_every": steps, "save_every": steps}
    config = FitConfig(data=(str(data),), out=str(out), device="cuda", **settings | changes)
    with pytest.MonkeyPatch.context() as patch, gpu():
        install(patch, done)
        setup.fit(name, config, DRAFT_OPTIONS[name](**SMALL[name]))
    return done
