"""flex_attention: compiled on CUDA, eager elsewhere, and tried before it is used.

Inductor pads head sizes to powers of two itself. Whether its kernels build on this machine
(compiler, driver, enough shared memory for a head size) and are right is tried once, on a small
case forward and backward, so that training does not fail in the middle.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

# -- trial -----------------------------------------------------------------------------------------
# Trials: is a kernel right on this machine? A small case, compared with the formula written out.
#
# A kernel that does not build, or computes something else, is found before a run starts with it. A
# trial runs when the first batch needs the answer, which may be inside a validation without
# gradients or under autocast. So it sets its own modes, and draws from generators of its own: the
# random numbers of a run do not depend on whether a trial took place.


log = logging.getLogger(__name__)

ALLOWED = {torch.float32: 4e-3, torch.float64: 1e-9}
"""Largest error of a kernel, relative in the norm. float32 products may run in TF32 (1e-3)."""
ALLOWED_LOW = 4e-2
"""The same for 16-bit dtypes: ten roundings of bfloat16, one after the other."""


@dataclass(frozen=True)
class Case:
    """Inputs that need gradients, what a kernel made of them, and what the formula makes."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    expected: Sequence[Tensor]

    def error(self) -> float:
        """Return the largest relative error of outputs and gradients; nan if any is not finite."""
        pairs = list(zip(self.outputs, self.expected, strict=True))
        pairs += zip(*(self._gradients(x) for x in (self.outputs, self.expected)), strict=True)
        doubles = [(a.detach().double(), b.detach().double()) for a, b in pairs]
        return torch.stack([(a - b).norm() / b.norm() for a, b in doubles]).max().item()

    def _gradients(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        total = sum((x.double().square().sum() for x in outputs), torch.zeros(()).double())
        return torch.autograd.grad(total, list(self.inputs))

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


# -- flex ------------------------------------------------------------------------------------------


LEAST_SIZE = 16
"""The smallest head size that a matrix product of Triton accepts."""


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def flex(q: Tensor) -> Any:
    """Return flex_attention for the device of `q`: compiled for CUDA."""
    return _compiled() if q.is_cuda else flex_attention


def flex_problem(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why flex_attention cannot serve this dtype and head size on any GPU; None: it may."""
    if head_dim < LEAST_SIZE:
        return f"head size {head_dim} is below {LEAST_SIZE}"
    return "no kernel for float64" if dtype == torch.float64 else None


@cache
def flex_works(device_type: str, head_dim: int) -> bool:
    """Return whether compiled flex_attention and its gradient are right here, for a head size.

    Tried in float32 and in bfloat16, whichever a run uses.
    """
    if device_type != "cuda" or flex_problem(torch.float32, head_dim):
        return False
    kinds = torch.float32, torch.bfloat16
    return all(tried("flex_attention", partial(_case, head_dim, dtype)) for dtype in kinds)


def _case(head_dim: int, dtype: torch.dtype, device: str = "cuda") -> Case:
    """Return a small causal case with grouped heads: outputs and gradients, and the true ones."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = 1, heads, 200, head_dim
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()

    inputs = q, k, v = draw(2), draw(1), draw(1)
    causal = create_block_mask(lambda b, h, i, j: i >= j, 1, None, 200, 200, device=device)
    scale = head_dim**-0.5
    result = flex(q)(
        q, k, v, block_mask=causal, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    unseen = torch.ones(200, 200, dtype=torch.bool, device=device).triu(1)
    scores = (q.float() @ k.float().mT * scale).masked_fill(unseen, float("-inf"))
    expected = scores.softmax(-1) @ v.float(), scores.logsumexp(-1)
    return Case(inputs, (result[0], result[1].lse), expected)
