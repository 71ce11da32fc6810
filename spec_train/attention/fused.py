"""Chains of elementwise operations: on CUDA compiled by Inductor into a kernel or two.

One after the other, they read and write all their intermediate results, which costs a step as much
time as its matrix products. On a CPU they run as they are written. Whether Inductor works on this
machine is tried once, as for flex_attention; a chain that it cannot compile runs as on a CPU.
"""

import logging
from collections.abc import Callable
from functools import cache, update_wrapper
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from spec_train.attention.flex import Case, compiler_settings, tried

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

FUSED_ON = ("cuda",)
"""Kinds of devices on which chains are compiled."""
COMPILER = "inductor"


def fuses(device: torch.device) -> bool:
    """Return whether chains are compiled on a device."""
    return device.type in FUSED_ON and _works(device)


@cache
def _works(device: torch.device) -> bool:
    def small() -> Case:
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(70, 300, generator=generator, device=device).requires_grad_()
        return Case([x], [_compiled(_chain)(x)], [_chain(x)])

    return tried("the compiler of elementwise chains", small)


def _chain(x: Tensor) -> Tensor:
    return x.softmax(-1) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=COMPILER)


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of tensors, the first of which decides the device.

    It must be one graph for torch.compile: no branch that depends on numbers. In inference mode
    (decoding, `doctor`) it runs as it is written: for a few tokens a call of the compiled one costs
    more than it saves, and lengths that change would be compiled while decoding is timed.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        plain = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
        if plain or not fuses(first.device):
            return function(*args, **kwargs)
        return run_fused(function, *args, **kwargs)

    return update_wrapper(call, function)


def run_fused(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the compiled function, or the function itself if it cannot be compiled."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    if function in _refused:
        return function(*args, **kwargs)
    try:  # the backward pass is compiled with the forward pass, so that an error comes here
        with compiler_settings(), _backward_too():
            return _compiled(function)(*args, **kwargs)
    except (FailOnRecompileLimitHit, TorchDynamoException) as problem:
        _refused.add(function)
        name, lines = getattr(function, "__name__", ""), str(problem).splitlines() or [""]
        log.warning("warning[kernel]: %s runs without being compiled: %s", name, lines[0])
        return function(*args, **kwargs)


@cache
def _backward_too() -> Any:
    """Return a setting, which is entered again as those of `compiler_settings`."""
    from torch._functorch import config

    return config.patch(force_non_lazy_backward_lowering=True)


_refused: set[Callable[..., Any]] = set()
