"""Trials: is a kernel right on this machine? A small case, compared with the formula written out.

A kernel that does not build, or computes something else, is found before a run starts with it. A
trial runs when the first batch needs the answer, which may be inside a validation without gradients
or under autocast. So it sets its own modes, and draws from generators of its own: the random
numbers of a run do not depend on whether a trial took place.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

log = logging.getLogger(__name__)

ALLOWED = {torch.float32: 4e-3, torch.float64: 1e-9}
"""Largest error of a kernel, relative in the norm. float32 products may run in TF32 (1e-3)."""
ALLOWED_LOW = 4e-2
"""The same for 16-bit dtypes: ten roundings of bfloat16, one after the other."""


@dataclass(frozen=True)
class Case:
    """Inputs that need gradients, what a kernel made of them, and what the formula makes."""

    inputs: Sequence[Tensor]
    found: Sequence[Tensor]
    expected: Sequence[Tensor]

    def error(self) -> float:
        """Return the largest relative error of outputs and gradients; nan if any is not finite."""
        pairs = list(zip(self.found, self.expected, strict=True))
        pairs += zip(*(self._gradients(x) for x in (self.found, self.expected)), strict=True)
        doubles = [(a.detach().double(), b.detach().double()) for a, b in pairs]
        return torch.stack([(a - b).norm() / b.norm() for a, b in doubles]).max().item()

    def _gradients(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        total = sum((x.double().square().sum() for x in outputs), torch.zeros(()).double())
        return torch.autograd.grad(total, list(self.inputs), retain_graph=True)

    def allowed(self) -> float:
        """Return the largest accepted error for the dtype of the inputs."""
        return ALLOWED.get(self.inputs[0].dtype, ALLOWED_LOW)


def tried(name: str, make: Callable[[], Case]) -> bool:
    """Return whether the kernel that `make` calls is right; log why not."""
    try:
        with contextlib.ExitStack() as modes:
            for kind in ("cpu", "cuda"):
                modes.enter_context(torch.autocast(kind, enabled=False))
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.enable_grad())
            case = make()
            error, allowed = case.error(), case.allowed()
    except Exception as problem:  # compiler, driver and kernel may raise anything
        lines = str(problem).splitlines() or [type(problem).__name__]
        log.warning("%s cannot be used on this machine (%s)", name, lines[0])
        return False
    if error <= allowed:
        return True
    log.warning(
        "%s is wrong on this machine: relative error %.2g, %.2g allowed; it is not used",
        name,
        error,
        allowed,
    )
    return False
