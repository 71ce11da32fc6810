"""A machine with one GPU, as far as a test can make one: `spec-train fit --device cuda` runs on it.

The arithmetic, the devices of all tensors and the host syncs are real (see fake_cuda). Gradients
are not, as there is no graph: every custom autograd function runs its forward and its backward pass
as plain functions, and every parameter then receives the same small gradient. Copies run late, see
`late_streams`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_data.capture import model, proofs
from spec_data.capture.model import Target
from spec_data.models import loading
from spec_data.models.devices import usable_device
from spec_data.models.loading import load_model
from spec_train.attention import masked
from spec_train.attention.masked import default_backend
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training import fit as fitting
from spec_train.training import trainer, validation
from tests.gpu import fake_cuda, late_streams
from tests.gpu.fake_cuda import FakeCuda, Syncs, counting, cuda_autocast, page_locked, upload
from tests.spec_train.drafts.any_draft import SMALL


class Context:
    """What autograd hands to the passes of a custom function."""

    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for the backward pass."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Do nothing."""


def apply(function: Any, *args: Any) -> Any:
    """Run a custom function forward, and backward with a gradient of ones; return its output."""
    context, training = Context(), torch.is_grad_enabled()
    # There is no graph: every tensor of numbers may need one.
    context.needs_input_grad = tuple(
        training and isinstance(x, torch.Tensor) and x.is_floating_point() for x in args
    )
    with torch.no_grad():
        out = function.forward(context, *args)
        if training:
            _backward(function, context, out, args)
    return out


def _backward(function: Any, context: Context, out: Any, args: Any) -> None:
    outputs = out if isinstance(out, tuple) else (out,)
    pulls = [torch.ones_like(outputs[0]), *(None for _ in outputs[1:])]
    autocast = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", False)  # as in the trainer, whose backward is outside it
    gradients = function.backward(context, *pulls)
    torch.set_autocast_enabled("cuda", autocast)
    for x, gradient in zip(args, gradients, strict=True):
        if gradient is not None:
            made = gradient.is_cuda, gradient.shape, gradient.dtype
            assert made == (True, x.shape, x.dtype), function


@dataclass
class Trained:
    """What the steps of a run did."""

    syncs: list[Syncs] = field(default_factory=list)  # of every optimizer step
    validations: list[Syncs] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    trainer: Any = None


def watched(done: Trained) -> type[trainer.Trainer]:
    """Return the trainer, noting in `done` what its steps do."""

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

        def validate(self) -> None:
            with counting() as syncs:
                super().validate()
            done.validations.append(syncs)

        def _refuse_non_finite(self, step: Any, losses: list[float]) -> None:
            done.losses.append(sum(losses))
            super()._refuse_non_finite(step, losses)

    return Watched


def install(patch: pytest.MonkeyPatch, done: Trained) -> None:
    """Replace what a training step would need a GPU for."""

    def backward(loss: torch.Tensor) -> None:
        assert loss.is_cuda and not loss.ndim
        for parameter in done.trainer.masters.params:
            parameter.grad = upload(torch.full(parameter.shape, 1e-3))

    patch.setattr(fitting, "Trainer", watched(done))
    for module in (trainer, validation):
        patch.setattr(module, "arithmetic", lambda device, dtype: cuda_autocast(dtype))
    patch.setattr(FakeCuda, "backward", staticmethod(backward))


def _checked(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `torch.cuda` that refuses another device than that of the tensors."""

    def call(device: Any = None) -> Any:
        assert fake_cuda.on_cuda(device)
        return make()

    return call


@contextlib.contextmanager
def gpu(device: str = "cuda") -> Iterator[pytest.MonkeyPatch]:
    """Make CUDA available to commands and modules too: they move by replacing parameters.

    All tensors must be on `device`. The current device is cuda:0 and stays so: what names no device
    is refused where `device` is another one.
    Trials of kernels end as on a GPU without a compiler: drafts take "merged".
    """
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    default_backend.cache_clear()
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            FakeCuda(),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            patch.setattr(fake_cuda, "CUDA", torch.device("cuda", torch.device(device).index or 0))
            for module in [m for m in sys.modules.values() if m.__name__.startswith("spec_")]:
                if getattr(module, "usable_device", None) is usable_device:
                    patch.setattr(module, "usable_device", torch.device)
            patch.setattr(loading, "_where", lambda *_: {})  # read to the CPU, then moved
            patch.setattr(model, "load_model", lambda *a, **k: load_model(*a, **k).to(device))
            patch.setattr(proofs, "_fastest", lambda forms, _: forms[-1])  # a mask
            patch.setattr(Target, "peak_memory", lambda *_: None)  # there is none to measure
            patch.setattr(masked, "tried", lambda name, make: "merged" in name)
            patch.setattr(torch.autograd.Function, "apply", classmethod(apply))
            late_streams.install(patch)
            for name in ("Stream", "current_stream", "synchronize"):
                patch.setattr(torch.cuda, name, _checked(getattr(torch.cuda, name)))
            patch.setattr(torch.cuda, "set_device", fake_cuda.on_cuda)
            patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
            patch.setattr(torch.Tensor, "pin_memory", lambda x, *_: page_locked(x.clone()))
            patch.setattr(torch.cuda, "get_device_name", lambda *_: "no GPU")
            yield patch
    finally:
        default_backend.cache_clear()
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def fit_on(device: str, name: str, data: Path, out: Path, steps: int = 1) -> Trained:
    """Run `spec-train fit` of a small draft: two micro-batches per step, bfloat16 on the GPU."""
    done = Trained()
    config = Training(
        data=(str(data),), out=str(out), device=device, steps=steps, batch_size=1, accumulation=2,
        seq_len=64, seed=3, validation=0.2, eval_every=steps,
    )  # fmt: skip
    options = DRAFT_OPTIONS[name](**SMALL[name])
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(fitting, "Trainer", watched(done))
            fitting.fit(name, config, options)
            return done
        with gpu(device) as machine:
            install(machine, done)
            fitting.fit(name, config, options)
    return done
