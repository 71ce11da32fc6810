"""flex_attention: compiled on CUDA, eager elsewhere, and tried before it is used.

Inductor pads head sizes to powers of two itself. Whether its kernels build on this machine
(compiler, driver, enough shared memory for a head size) and are right is tried once, on a small
case forward and backward, so that training does not fail in the middle (`masked.default_backend`).
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from spec_data.shards.errors import RunError
from spec_train.attention.masks import AttentionMask, seen_between

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

    inputs: Sequence[Tensor]  # none: no gradient is compared
    outputs: Sequence[Tensor]
    expected: Sequence[Tensor]
    dtype: torch.dtype | None = None  # of the arithmetic; None: that of the inputs

    def error(self) -> float:
        """Return the largest relative error of outputs and gradients; nan if any is not finite."""
        pairs = list(zip(self.outputs, self.expected, strict=True))
        pairs += zip(*(self._gradients(x) for x in (self.outputs, self.expected)), strict=True)
        doubles = [(a.detach().double(), b.detach().double()) for a, b in pairs]
        return torch.stack([(a - b).norm() / b.norm() for a, b in doubles]).max().item()

    def _gradients(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not self.inputs:
            return ()
        total = sum((x.double().square().sum() for x in outputs), torch.zeros(()).double())
        return torch.autograd.grad(total, list(self.inputs))

    def allowed(self) -> float:
        """Return the largest accepted error for the dtype."""
        return ALLOWED.get(self.dtype or self.inputs[0].dtype, ALLOWED_LOW)


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
        log.warning("warning[kernel]: %s cannot be used on this machine (%s)", name, lines[0])
        return False
    if error <= allowed:
        return True
    log.warning(
        "warning[kernel]: %s is wrong on this machine: relative error %.2g, %.2g allowed; it is "
        "not used",
        name,
        error,
        allowed,
    )
    return False


# -- masks -----------------------------------------------------------------------------------------


BLOCK = 128  # queries, and keys, of a block of flex_attention


def flex_mask(mask: AttentionMask) -> BlockMask:
    """Return the blocks of keys that a block of queries sees in part, and those that it sees all.

    They come from the ends of the spans. `create_block_mask` gives the same, from a table of every
    query and key. Blocks are two at least each way: a size of one would be compiled by itself
    (PyTorch 2.15 cuts the blocks of queries to what there is, so these are made here, too).
    """
    seen, ends = seen_keys(mask), mask.ends.int().movedim(-1, 0).contiguous().unbind()

    def sees(pack: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen_between(key, *(end[pack, query] for end in ends))

    # blocks seen in part and seen whole, [2, B, 1, R, C]
    blocks = torch.stack([(seen > 0) & (seen < BLOCK**2), seen == BLOCK**2])[:, :, None].int()

    def ordered(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return how many blocks of each kind a row has, and which: they come first in a row."""
        number = rows.sum(-1).int()
        order = torch.argsort(rows, dim=-1, descending=True, stable=True).int()
        return number[0], order[0], number[1], order[1]

    return BlockMask(
        (mask.ends.shape[1], mask.keys),
        *ordered(blocks),
        *ordered(blocks.mT.contiguous()),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
    )


def seen_keys(mask: AttentionMask) -> Tensor:
    """Return how many pairs of a query and a key each block has in the mask, int64 [B, R, C]."""
    batch, queries, _ = mask.ends.shape
    rows, columns = (max(2, -(-count // BLOCK)) for count in (queries, mask.keys))
    first, last = mask.ends[..., ::2], mask.ends[..., 1::2]  # [B, Q, 2]
    # A span is the keys from `first` on, less those from `stop` on. Keys from an edge on are
    # counted where they begin: in its block those after it, in the next block the others.
    changes = first.new_zeros(batch, rows, columns + 2)
    for edge, sign in ((first, 1), (torch.maximum(first, last + 1), -1)):
        edges = F.pad(edge, (0, 0, 0, rows * BLOCK - queries)).view(batch, rows, -1)
        block, before = edges // BLOCK, edges % BLOCK
        changes.scatter_add_(-1, block, sign * (BLOCK - before))
        changes.scatter_add_(-1, block + 1, sign * before)
    return changes.cumsum(-1)[..., :columns]


# -- flex ------------------------------------------------------------------------------------------


LEAST_SIZE = 16
"""The smallest head size that a matrix product of Triton accepts."""
COMPILED = ("cuda",)
"""Kinds of devices on which flex_attention is compiled."""
COMPILER = "inductor"
_FEWER_STAGES = {"fwd_num_stages": 2}
_SMALL_BLOCKS = {
    "num_stages": 1,
    "fwd_BLOCK_M": 32,
    "fwd_BLOCK_N": 32,
    "bwd_BLOCK_M1": 16,
    "bwd_BLOCK_N1": 32,
    "bwd_BLOCK_M2": 32,
    "bwd_BLOCK_N2": 16,
}
OPTIONS: dict[tuple[torch.dtype, int], Mapping[str, Any]] = {}
"""Options by dtype and head size, where a trial without them failed (`masked.default_backend`)."""


def smaller_options(dtype: torch.dtype) -> Sequence[Mapping[str, Any]]:
    """Return options of flex_attention that need less shared memory, in the order of trials.

    Small GPUs (RTX 30 and 40, L40S) have 101,376 bytes for a block. With its own choice, heads of
    128 in bfloat16 need 102,400; with fewer stages, heads of 256 still need 136,704. In float32
    heads of 80 to 256 need up to 182,528, and with fewer stages 117,248 with 17,024 bytes of a
    thread's registers in memory (A100); the smallest blocks need 100,352 at most, and 664 for heads
    of 80 (`scripts/gpu/compiled.py --only flex`).
    """
    return (_FEWER_STAGES,) * (dtype != torch.float32) + (_SMALL_BLOCKS,)


GRAPHS = 64
"""Graphs that a process may compile: four of a draft (one pack or several, with gradients or not),
for each dtype, head size and number of heads."""


class GraphLimitError(RunError):
    """flex_attention would be compiled again and again, and then run without being compiled."""


def flex_problem(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why flex_attention cannot serve this dtype and head size on any GPU; None: it may."""
    if head_dim < LEAST_SIZE:
        return f"head size {head_dim} is below {LEAST_SIZE}"
    return "no kernel for float64" if dtype == torch.float64 else None


def flex(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Attend; return the heads [B, h, Q, d] and the log-sum-exp of the scores [B, h, Q]."""
    call: Any = _compiled() if q.device.type in COMPILED else flex_attention
    # One memory layout, no views and no autocast, so that one graph serves all calls.
    q, k, v = (_NoView.apply(x.transpose(1, 2).contiguous().transpose(1, 2)) for x in (q, k, v))
    with torch.autocast(q.device.type, dtype=torch.bfloat16, enabled=False):
        aux = AuxRequest(lse=True)
        given: dict[str, Any] = {"block_mask": blocks, "scale": scale, "return_aux": aux}
        options = OPTIONS.get((q.dtype, q.shape[3]))
        out, stats = call(q, k, v, enable_gqa=True, kernel_options=options, **given)
    return out, stats.lse


class _NoView(torch.autograd.Function):
    """The same memory as a tensor that is no view: graphs depend on what a view is a view of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@cache
def _compiled() -> "_Compiled":
    return _Compiled()


class _Compiled:
    """flex_attention compiled for any sizes; it is an error if it cannot be, or too often."""

    def __init__(self) -> None:
        self.graphs = 0  # compiled so far
        # of torch's own look at inputs that it compiles for
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        self._call = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=COMPILER)

    def __call__(self, q: Tensor, *rest: Any, **options: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit
        from torch._dynamo.utils import counters

        before = counters["stats"]["unique_graphs"]
        try:
            with compiler_settings():
                return self._call(q, *rest, **options)
        except FailOnRecompileLimitHit as problem:
            raise GraphLimitError(
                f"flex_attention was compiled {self.graphs} times in this process, and tensors of "
                f"another kind came: {list(q.shape)}, {q.dtype}. TORCH_LOGS=recompiles names what "
                "differs; use fewer drafts or dtypes in one process"
            ) from problem
        finally:
            more = counters["stats"]["unique_graphs"] - before
            self.graphs += more
            if more:
                packs = "one pack" if len(q) == 1 else "several packs"
                mode = "with gradients" if q.requires_grad else "without gradients"
                kind = f"{q.dtype}, head size {q.shape[3]}, {packs}, {mode}"
                log.info("flex_attention: graph %d compiled (%s)", self.graphs, kind)


@contextlib.contextmanager
def compiler_settings() -> Iterator[None]:
    """Set what tracing reads: sizes that happen to be equal stay apart; DDP does not cut graphs.

    (DDP's own cuts refuse flex_attention.)
    """
    tracing, shapes = _settings()
    with tracing, shapes:
        yield


@cache
def _settings() -> tuple[Any, Any]:
    """Return the two patches. They are entered again: each new one would stay in memory."""
    from torch._dynamo import config
    from torch.fx.experimental import _config

    shapes: Any = _config
    tracing = config.patch(recompile_limit=GRAPHS, optimize_ddp=False)
    return tracing, shapes.patch(use_duck_shape=False)
