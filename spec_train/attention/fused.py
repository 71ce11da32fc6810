"""Chains of elementwise operations: on CUDA compiled by Inductor into a kernel or two.

One after the other, they read and write all their intermediate results, which costs a step as much
time as its matrix products. On a CPU they run as they are written. Whether Inductor works on this
machine is tried once, as for flex_attention; a chain that it cannot compile, or that does
not start, runs as on a CPU.
"""

import logging
from collections.abc import Callable
from functools import cache, update_wrapper
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from spec_data.shards.errors import RunError
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


def overwriting(count: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """As `fused`, of a function that overwrites the first `count` of its tensors.

    Such a chain must not run a second time on what a first run has begun to overwrite. So it is
    first called once on copies of them, in the dtype and the width of the run.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        _overwrites[function] = count
        return fused(function)

    return decorate


def run_fused(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the compiled function, or the function itself if it cannot be compiled or started."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    if function in _refused:
        return function(*args, **kwargs)
    count = _overwrites.get(function, 0)
    started = not count
    try:  # the backward pass is compiled with the forward pass, so that an error comes here
        with compiler_settings(), _backward_too():
            if count:
                _start_on_copies(function, count, *args, **kwargs)
                started = True
            return _compiled(function)(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # Triton and the driver may raise anything when a kernel starts
        compiling = isinstance(problem, (FailOnRecompileLimitHit, TorchDynamoException))
        name, lines = getattr(function, "__name__", ""), str(problem).splitlines() or [""]
        if count and started and not compiling:
            raise RunError(
                f"the compiled {name} failed while it overwrote its inputs ({lines[0]}): run the "
                "same command again, which goes on from the last checkpoint"
            ) from problem
        _refused.add(function)
        log.warning("warning[kernel]: %s runs without being compiled: %s", name, lines[0])
        return function(*args, **kwargs)


def _start_on_copies(function: Callable[..., Any], count: int, *args: Any, **kwargs: Any) -> None:
    """Call a compiled chain once for each dtype and width, on copies of what it overwrites."""
    first = args[:count]
    key = function, *((x.dtype, x.shape[-1]) for x in first)
    if key in _started:
        return
    copies = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
              for x in first]  # fmt: skip
    _compiled(function)(*copies, *args[count:], **kwargs)
    if args[0].is_cuda:
        torch.cuda.synchronize(args[0].device)  # an error of a kernel comes late
    _started.add(key)


@cache
def _backward_too() -> Any:
    """Return a setting, which is entered again as those of `compiler_settings`."""
    from torch._functorch import config

    return config.patch(force_non_lazy_backward_lowering=True)


_overwrites: dict[Callable[..., Any], int] = {}
_started: set[tuple[Any, ...]] = set()
_refused: set[Callable[..., Any]] = set()
