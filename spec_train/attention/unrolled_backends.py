"""Which back end of `unrolled` serves a device, dtype and head size.

On a CPU it is "merged". On a GPU it is the first of "flex" and "merged" that a trial shows to be
right. "dense", which holds A x T scores per step, remains for float64 on a GPU, and where both
kernels fail there; the log then says so.
"""

import logging
from functools import cache, partial

import torch
from torch import Tensor

from spec_train.attention.flex import flex_problem
from spec_train.attention.lse_kernels import kernel_dtypes
from spec_train.attention.trial import Case, tried
from spec_train.attention.unrolled import Queries, active_slots, unrolled_attention

log = logging.getLogger(__name__)


@cache
def default_backend(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """Return the back end for a device, dtype and head size; decided once and logged."""
    case = device_type, dtype, head_dim
    backend = next((b for b in _candidates(*case) if _serves(b, *case)), "dense")
    log.info("draft attention on %s, %s, head_dim %d: %s", device_type, dtype, head_dim, backend)
    if backend == "dense" and device_type != "cpu":
        log.warning(
            "no attention kernel for %s and head size %d here: every step of the unroll holds a "
            "score for each pair of slots; shorten --seq-len if memory does not suffice",
            dtype,
            head_dim,
        )
    return backend


def _candidates(device_type: str, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return the back ends that the rules of their kernels allow, the preferred one first."""
    flex = device_type == "cuda" and flex_problem(dtype, head_dim) is None
    merged = dtype in kernel_dtypes(device_type)
    return ["flex"] * flex + ["merged"] * merged


def _serves(backend: str, device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a back end is right here; that of CPUs is part of torch and proven by tests."""
    if device_type == "cpu":
        return True
    case = partial(unrolled_case, backend, device_type, dtype, head_dim)
    return tried(f"attention of the unroll ({backend}, {dtype}, head size {head_dim})", case)


def unrolled_case(backend: str, device: str, dtype: torch.dtype, head_dim: int) -> Case:
    """Return a small case of two later steps: a back end's heads, and those of "dense" in float32.

    Two packs; grouped heads; documents that end inside a pack; slots that are no query.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int, slots: int) -> Tensor:
        shape = 2, heads, slots, head_dim
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()

    width = 200
    slots = torch.arange(width, device=device)
    ends = torch.tensor([[90], [150]], device=device)  # of the first document of each pack
    used = (slots % 3 > 0).expand(2, -1)
    active = active_slots(used)  # [2, A]
    first = torch.where(active < ends, 0, ends)
    inputs = [draw(2, active.shape[1]), *(draw(1, width) for _ in range(2))]
    inputs += [draw(1, active.shape[1]) for _ in range(4)]
    scale = head_dim**-0.5

    def heads_of(kind: str, tensors: list[Tensor]) -> Tensor:
        queries = Queries.prepare(first, active, width, kind)
        q, k0, v0, *flat = tensors
        diagonal = list(zip(flat[::2], flat[1::2], strict=True))
        return unrolled_attention(q, k0, v0, diagonal, queries, scale)

    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        inputs,
        [heads_of(backend, inputs)],
        [heads_of("dense", [x.to(exact) for x in inputs])],
    )
