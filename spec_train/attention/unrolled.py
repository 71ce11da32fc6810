"""Attention of the EAGLE-3 unroll: step-0 keys of a document, plus a slot's own later keys.

At unroll step s, a query of slot t sees the step-0 keys of slots <= t of its document, and of steps
1..s only the keys of slot t itself: a diagonal (see `masked`). Only slots whose output is used are
queries. A key of a later step is seen only by its own slot, so slots of a prompt are needed as
step-0 keys only. What the steps share is prepared once.

At step s, slot t is at position t + s, as in serving. In a layer with a window of W positions it
sees the step-0 keys after slot t + s - W and the newest W of its own keys: the window moves on with
the steps. From step W on, no step-0 key is left.

B packs, T slots, A active slots (queries), h / g query / key-value heads, d head size, s later
steps.
"""

import logging
from functools import cache, partial

import torch
from torch import Tensor

from spec_train.attention.flex import Case, flex_problem, tried
from spec_train.attention.masked import Attending, Diagonal, kernel_dtypes, own_only
from spec_train.attention.masks import span_mask

log = logging.getLogger(__name__)


def active_slots(used: Tensor) -> Tensor:
    """Return the indices, int64 [B, A], of the True slots of `used`, bool [B, T], ascending.

    A pack with fewer than A such slots repeats its last one (its last slot if it has none).
    """
    slots = torch.arange(used.shape[1], device=used.device)  # [T]
    width = max(int(used.sum(1).max()), 1)  # A
    order = torch.argsort((~used).to(torch.int8), dim=1, stable=True)[:, :width]  # [B, A]
    last = torch.where(used, slots, -1).amax(1, keepdim=True)  # [B, 1]
    last = torch.where(last < 0, used.shape[1] - 1, last)
    return torch.where(used.gather(1, order), order, last)


class StepQueries:
    """The step-0 keys that the active slots see in every step and layer, prepared as needed."""

    def __init__(self, first: Tensor, active: Tensor, width: int, backend: str) -> None:
        """Prepare for layers without a window; `width` is T.

        `first` is the slot at which each query's document begins, `active` its own slot, int64
        [B, A] each.
        """
        self._first, self._active, self._width, self._backend = first, active, width, backend
        self._all = self._prepare(first)
        self._prepared: dict[tuple[int, int], Attending] = {}  # by window and step

    def _prepare(self, first: Tensor) -> Attending:
        return Attending.prepare(span_mask(first, self._active, self._width), 0, self._backend)

    def narrowed(self, part: Tensor) -> "StepQueries":
        """Return the queries of some of the active slots: their indices, int64 [B, A']."""
        first, active = self._first.gather(1, part), self._active.gather(1, part)
        return StepQueries(first, active, self._width, self._backend)

    def of(self, step: int, window: int | None = None) -> Attending | None:
        """Return the attention of a step, from 0, in a layer with this window.

        None: the window, which begins after slot + step - window, holds no step-0 key.
        """
        if window is None:
            return self._all
        if step >= window:
            return None
        if (window, step) not in self._prepared:
            first = torch.maximum(self._first, self._active + (step - window + 1))
            # a window longer than all documents changes nothing and needs no preparation
            longer = torch.equal(first, self._first)
            self._prepared[window, step] = self._all if longer else self._prepare(first)
        return self._prepared[window, step]

    def attend(
        self,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        diagonal: Diagonal,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend from queries [B, h, A, d] in step s = len(diagonal), within the window.

        `k0` and `v0` are step-0 keys and values [B, g, T, d]; the rest as for `Attending`.
        """
        attending = self.of(len(diagonal), window)
        newest = diagonal if window is None else diagonal[-window:]
        if attending is None:
            return own_only(q, newest, scale)
        return attending(q, k0, v0, scale, newest)


def narrowed_pairs(diagonal: Diagonal, part: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return later keys and values [B, g, A', d] of the active slots `part`, int64 [B, A']."""
    return [
        (k.gather(2, at), v.gather(2, at))
        for k, v in diagonal
        for at in [part[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])]
    ]


# -- back end --------------------------------------------------------------------------------------
# On a CPU it is "merged". On a GPU it is the first of "flex" and "merged" that a trial shows to be
# right. "dense", which holds A x T scores per step, remains for float64 on a GPU, and where both
# kernels fail there; the log then says so.


@cache
def default_backend(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """Return the back end for a device, dtype and head size; decided once and logged."""
    case = device_type, dtype, head_dim
    flex = device_type == "cuda" and flex_problem(dtype, head_dim) is None
    candidates = ["flex"] * flex + ["merged"] * (dtype in kernel_dtypes(device_type))
    backend = next((b for b in candidates if _serves(b, *case)), "dense")
    log.info("draft attention on %s, %s, head_dim %d: %s", device_type, dtype, head_dim, backend)
    if backend == "dense" and device_type != "cpu":
        log.warning(
            "no attention kernel for %s and head size %d here: every step of the unroll holds a "
            "score for each pair of slots; shorten --seq-len if memory does not suffice",
            dtype,
            head_dim,
        )
    return backend


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
    active = active_slots((slots % 3 > 0).expand(2, -1))  # [2, A]
    mask = span_mask(torch.where(active < ends, 0, ends), active, width)
    inputs = [draw(2, active.shape[1]), *(draw(1, width) for _ in range(2))]
    inputs += [draw(1, active.shape[1]) for _ in range(4)]

    def heads_of(kind: str, tensors: list[Tensor]) -> Tensor:
        q, k0, v0, *flat = tensors
        diagonal = list(zip(flat[::2], flat[1::2], strict=True))
        return Attending.prepare(mask, head_dim, kind)(q, k0, v0, head_dim**-0.5, diagonal)

    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        inputs,
        [heads_of(backend, inputs)],
        [heads_of("dense", [x.to(exact) for x in inputs])],
    )
