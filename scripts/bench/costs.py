"""What a training step costs on a GPU, counted on a machine without one.

    python scripts/bench/costs.py             all drafts, lengths, vocabularies, ways of attention
    python scripts/bench/costs.py --drafts eagle3 --lengths 8192 --vocabs 151936 --operations 12

A step, forward and backward in bf16 at the sizes of Qwen3-8B, runs on ghosts: tensors with a shape
and no numbers, which take the paths of a GPU. Small tensors of whole numbers are real, because
shapes depend on them. Counted are

- FLOPs of matrix products and attention kernels (with flex_attention: of the blocks it visits);
- elementwise bytes: what all other operations read and write, each tensor once per operation. A
  chain that Inductor compiles (`fused`) is one operation each way: its backward pass reads the
  chain's arguments again;
- kernels: the number of all operations;
- the peak: bytes of weights, batch, gradients and everything else that exists at the same time.

The batch is one document whose last 60 % are supervised; 97 % of the target's choices are in the
draft vocabulary of 32,000. The optimizer is left out: it costs the same in every way.
"""

import argparse
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.flop_counter import flop_registry

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from fit_problem import LAYERS, Size, fresh_draft  # noqa: E402

from spec_data.shards.batch import DraftBatch  # noqa: E402
from spec_data.shards.schema import FINAL, HeadSpec, layer_column  # noqa: E402
from spec_train import losses  # noqa: E402
from spec_train.attention import fused, masked  # noqa: E402
from spec_train.attention.flex import BLOCK  # noqa: E402
from spec_train.drafts import DRAFTS  # noqa: E402
from spec_train.losses.head import TargetHead  # noqa: E402
from spec_train.training.loss import cast_draft  # noqa: E402

aten = torch.ops.aten
QWEN = Size(4096, 32, 128, vocab=151936, draft_vocab=32000, tokens=8192, key_heads=8)
LENGTHS, VOCABULARIES = (2048, 8192, 32768), (32000, 151936)
WAYS = ("flex", "merged")
REAL = 1 << 21  # numbers of a tensor of whole numbers that is real
READS_PART = {aten.index, aten.gather, aten.index_select, aten.embedding}  # of their first argument
WRITES_PART = {
    aten.index_put_,
    aten.scatter_,
    aten.scatter_add_,
    aten.index_add_,
    aten._index_put_impl_,
}
INDEXED = {aten.index, aten.index_put_, aten._index_put_impl_}
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
NO_READ = {  # of their first argument
    *(aten.copy_, aten.fill_, aten.zero_),
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_full),
}
FREE = {
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.empty_strided,
    aten._unsafe_view,
    aten.detach,
    aten.lift_fresh,
    aten.alias,
}


class Ghost(Tensor):
    """A tensor without numbers. Python sees it on `place`, autograd and autocast on the CPU."""

    held: Tensor  # on the meta device
    place: torch.device

    @staticmethod
    def __new__(cls, held: Tensor, place: torch.device) -> "Ghost":
        return Tensor._make_wrapper_subclass(
            cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device="cpu"
        )

    def __init__(self, held: Tensor, place: torch.device) -> None:
        self.held, self.place = held, place

    def __repr__(self, **_: Any) -> str:
        return f"Ghost({list(self.shape)}, {self.dtype})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a ghost outside of `World`")


@dataclass
class Cost:
    """What a step costs; bytes and operations by name of the operation."""

    flops: int = 0
    bytes: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    peak: int = 0  # bytes

    @property
    def gb_per_tflop(self) -> float:
        return sum(self.bytes.values()) / 1e9 / (self.flops / 1e12)


class World(TorchDispatchMode):
    """A context in which operations of ghosts run on shapes and are counted."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.cost = torch.device(place), Cost()
        self.counting, self._held, self._alive = True, 0, {}
        self._read: set[int] = set()  # of a chain

    def ghost(self, *shape: int, dtype: torch.dtype) -> Ghost:
        """Return a new ghost."""
        with torch.utils._python_dispatch._disable_current_modes():
            return self._made(torch.empty(shape, dtype=dtype, device="meta"))

    def _made(self, x: Tensor) -> Ghost:
        """Return the ghost of a meta tensor."""
        if self.counting:
            self._exists(x)
        return Ghost(x, self.place)

    def _exists(self, x: Tensor) -> None:
        """Count the memory of a meta tensor while any part of it exists."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            size = storage.nbytes()
            self._alive[key] = weakref.finalize(storage, self._freed, key, size)
            self._held += size
            self.cost.peak = max(self.cost.peak, self._held)

    def _freed(self, key: int, size: int) -> None:
        self._held -= size
        del self._alive[key]

    def chain(self, function: Callable[..., Any], args: Any) -> Any:
        """Run a compiled chain: what it makes in between costs nothing."""
        if not self.counting:  # part of another one
            return function(*args)
        given = {id(x): (x, x._version) for x in tensors_in(args)}
        self.counting, self._read = False, set()
        try:
            out = function(*args)
        finally:
            self.counting = True
        made = [x for x in tensors_in(out) if id(x) not in given]
        for x in made:
            if isinstance(x, Ghost):
                self._exists(x.held)
        written = [x for x, version in given.values() if x._version != version]
        name = getattr(function, "__name__", "chain")
        self.cost.kernels[name] += 1
        self.cost.bytes[name] += sum(size_of(x) for x, _ in given.values() if id(x) in self._read)
        self.cost.bytes[name] += sum(map(size_of, [*made, *written]))
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not self.counting:
            self._read |= {id(x) for x in given[func.overloadpacket in NO_READ :]}
        unreal = any(isinstance(x, Ghost) for x in given)
        if unreal and func.overloadpacket is aten.equal:
            return True
        waits = WAITS & set(func.tags) and func.overloadpacket not in INDEXED
        if unreal and waits:
            raise RuntimeError(f"{func}: shapes would depend on the numbers of a ghost")
        out = None if waits else self._on_shapes(func, args, kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not unreal and max([0, *(x.numel() for x in made)]) <= REAL:
            out = func(*args, **kwargs)
            self._count(func, args, given, [x for x in tree_leaves(out) if isinstance(x, Tensor)])
            return out
        self._count(func, args, given, made)
        written = {id(self._held_of(x)): x for x in given}
        return tree_map(lambda x: self._result(x, written) if isinstance(x, Tensor) else x, out)

    def _result(self, x: Tensor, written: dict[int, Tensor]) -> Tensor:
        """Return an argument that was written to, a ghost, or whole numbers: all 0, or True."""
        if id(x) in written:
            return written[id(x)]
        if x.dtype.is_floating_point or x.numel() > REAL:
            return self._made(x)
        return torch.full(x.shape, x.dtype == torch.bool, dtype=x.dtype)

    _metas: Any = None

    def _held_of(self, x: Tensor) -> Tensor | None:
        """Return the meta tensor of an argument of the current operation."""
        return x.held if isinstance(x, Ghost) else self._metas.get(id(x))  # a mask has none

    def _on_shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._metas = {}

        def meta(x: Any) -> Any:
            if isinstance(x, Ghost):
                return x.held
            if not isinstance(x, Tensor):
                return x
            if id(x) not in self._metas:
                self._metas[id(x)] = torch.empty_strided(
                    x.size(), x.stride(), dtype=x.dtype, device="meta"
                )
            return self._metas[id(x)]

        if func.overloadpacket in INDEXED:
            whole = [  # a mask is the numbers of its true entries
                part
                for x in args[1]
                for part in ([x] if x is None or x.dtype != torch.bool else x.nonzero().unbind(1))
            ]
            args = (args[0], whole, *args[2:])
        held = tree_map(meta, (args, kwargs))
        if "device" in held[1]:
            held[1]["device"] = "meta"
        return func(*held[0], **held[1])

    def _count(self, func: Any, args: Any, given: list[Tensor], made: list[Tensor]) -> None:
        packet, cost = func.overloadpacket, self.cost
        if not self.counting or func.is_view or packet in FREE:
            return
        name = str(packet)
        cost.kernels[name] += 1
        if packet in flop_registry:
            held = tree_map(lambda x: x.held if isinstance(x, Ghost) else x, args)
            cost.flops += flop_registry[packet](
                *held, out_val=made[0] if len(made) == 1 else tuple(made)
            )
            return
        cost.bytes[name] += moved(packet, given, made)


def size_of(x: Tensor) -> int:
    """Return the bytes of a tensor, without those of dimensions that only repeat it."""
    extent = (n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return math.prod(extent) * x.element_size()


def moved(packet: Any, given: list[Tensor], made: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    written = sum(map(size_of, made))
    if packet in READS_PART:
        return 2 * written + sum(map(size_of, given[1:]))
    if packet in WRITES_PART:  # where the last argument goes is read, and written
        return 2 * size_of(given[-1]) + sum(map(size_of, given[1:]))
    return written + sum(map(size_of, given[packet in NO_READ :]))


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of arguments; dataclasses have some too."""
    if is_dataclass(tree):
        return [x for f in fields(tree) for x in tensors_in(getattr(tree, f.name))]
    if isinstance(tree, tuple | list):
        return [x for part in tree for x in tensors_in(part)]
    return [tree] if isinstance(tree, Tensor) else []


class _Chain(torch.autograd.Function):
    """A compiled chain with a gradient: forward and backward are a kernel each."""

    @staticmethod
    def forward(ctx: Any, world: World, function: Any, spec: Any, *leaves: Any) -> Any:
        ctx.world, ctx.function, ctx.spec = world, function, spec
        ctx.others = [None if isinstance(x, Tensor) else x for x in leaves]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in leaves))
        return world.chain(function, tree_unflatten(leaves, spec))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needed = ctx.needs_input_grad[3:]

        def gradients(given: Any, grads: Any) -> Any:
            pairs = zip(given, ctx.others, strict=True)
            leaves = [other if x is None else x.detach() for x, other in pairs]
            wanted = [x for x, need in zip(leaves, needed, strict=True) if need]
            with torch.enable_grad():
                for x in wanted:
                    x.requires_grad_()
                out = tensors_in(ctx.function(*tree_unflatten(leaves, ctx.spec)))
                return torch.autograd.grad(out, wanted, grads, allow_unused=True)

        made = iter(ctx.world.chain(gradients, (ctx.saved_tensors, grads)))
        return None, None, None, *(next(made) if need else None for need in needed)


class _Flex(torch.autograd.Function):
    """flex_attention: a kernel each way."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Any, world: World) -> Any:
        pairs = int(blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum()) * BLOCK**2
        ctx.flops, ctx.world = (
            4 * pairs * q.shape[1] * q.shape[3] * len(q) // len(blocks.kv_num_blocks),
            world,
        )
        world.cost.flops += ctx.flops
        world.cost.kernels["flex"] += 1
        out, sums = torch.empty_like(q), world.ghost(*q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.world.cost.flops += ctx.flops * 5 // 2  # five products instead of two
        ctx.world.cost.kernels["flex"] += 2
        return *map(torch.empty_like, ctx.saved_tensors[:3]), None, None


class _LossKernels:
    """The kernels of `row_kernels`: each loop over rows reads them from memory again."""

    def __init__(self, world: World) -> None:
        self.world = world

    def _count(self, name: str, moved: int) -> None:
        self.world.cost.kernels[name] += 1
        self.world.cost.bytes[name] += moved

    def row_sums(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        self._count("row_sums", size_of(logits) + 8 * len(logits))
        out = [self.world.ghost(len(logits), dtype=torch.float32) for _ in range(2)]
        return out[0], out[1]

    def row_loss(
        self, logits: Tensor, taught: Any, index: Any, labels: Any, weights: Any, form: str,
        parameters: Any, bias: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        shape, loops = logits.shape[:-1], 2 if form in ("ce", "kl") else 3
        beside = [] if bias[0] is None else [bias[0].element_size() * loops]
        beside.append(taught[0].element_size() * (loops - 1))
        whole = size_of(logits) * (loops + 1) + logits.numel() * sum(beside)
        self._count("row_loss", whole + 40 * shape.numel())
        figures = [self.world.ghost(*shape, dtype=torch.float32) for _ in range(5)]
        best = torch.zeros(shape, dtype=torch.int64)
        return *figures[:3], best, *figures[3:]

    def group_sums(self, slopes: Tensor, of: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
        sums = self.world.ghost(groups, slopes.shape[1], dtype=dtype)
        self._count("group_sums", size_of(slopes) + size_of(sums))
        return sums


class _Places(torch.overrides.TorchFunctionMode):
    """Serves `device=` of the world's place, where there is no such device."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "pin_memory":
            return args[0]
        if getattr(func, "__name__", "") == "sum" and torch.is_autocast_enabled("cpu"):
            x = args[0]  # autocast on CUDA, unlike on a CPU, adds in float32
            if x.dtype == torch.bfloat16 and self.world.place.type == "cuda":
                args = x.float(), *args[1:]
        here = self.world.place
        args = tuple("cpu" if isinstance(x, torch.device) and x == here else x for x in args)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]) == here:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def world_of(place: str, compiled: bool = True) -> Iterator[World]:
    """Enter a world in which attention has the kernels and the sizes of `place`."""
    world = World(place)

    def flex(q: Tensor, k: Tensor, v: Tensor, blocks: Any, scale: float) -> Any:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        return _Flex.apply(q, k, v, blocks, world)

    enabled, dtype, autocast = (
        torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast,
    )  # fmt: skip

    def run_fused(function: Any, *args: Any) -> Any:
        leaves, spec = tree_flatten(args)
        graph = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        if graph and torch.is_grad_enabled() and world.counting:
            return _Chain.apply(world, function, spec, *leaves)
        return world.chain(function, args)

    run_backward: Any = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with _Places(world):  # a mode is off while it serves the call of `backward`
            return run_backward(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", backward))
        if place == "cuda":
            made = mock.patch.object(losses, "row_kernels", _LossKernels(world), create=True)
            stack.enter_context(made)
            for owner, name, value in (
                (masked, "flex", flex),
                (fused, "_works", lambda device: compiled),
                (losses.kernels, "_works", lambda *_: compiled),
                (fused, "run_fused", run_fused),
                (masked, "CHUNK", masked.CHUNK_ON_DEVICES),
                (torch, "is_autocast_enabled", lambda kind: enabled("cpu")),
                (torch, "get_autocast_dtype", lambda kind: dtype("cpu")),
                (torch, "autocast", lambda kind, *args, **more: autocast("cpu", *args, **more)),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_Places(world))
        stack.enter_context(world)
        yield world


def batch_of(size: Size, world: World, dtype: torch.dtype) -> tuple[TargetHead, DraftBatch]:
    """Return a ghost of a head, and a document whose ids, masks and choices are real."""
    draw = torch.Generator().manual_seed(0)
    slots = torch.arange(size.tokens)[None].repeat(size.rows, 1)
    ids = torch.randint(size.draft_vocab, slots.shape, generator=draw)
    outside = torch.rand(slots.shape, generator=draw) < 0.03
    choice = torch.where(outside & (size.vocab > size.draft_vocab), size.vocab - 1, ids)
    embedding, rows = (world.ghost(size.vocab, size.hidden, dtype=dtype) for _ in range(2))
    names = (*map(layer_column, LAYERS), FINAL)
    spec = HeadSpec(vocab_size=size.vocab, hidden_size=size.hidden, tied=False)
    return TargetHead(spec, embedding, rows), DraftBatch(
        input_ids=ids,
        loss_mask=slots >= 0.4 * size.tokens,
        position_ids=slots,
        document_ids=torch.zeros_like(slots),
        hidden={x: world.ghost(*slots.shape, size.hidden, dtype=dtype) for x in names},
        target_argmax=choice,
        target_logsumexp=world.ghost(*slots.shape, dtype=torch.float32),
        rows=[[row] for row in range(size.rows)],
    )


def step_cost(
    name: str,
    size: Size,
    way: str,
    place: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = True,  # chains, and the kernels of losses
) -> Cost:
    """Return what forward and backward of a step of a published draft cost."""
    with world_of(place, compiled) as world:
        head, batch = batch_of(size, world, dtype)
        draft = fresh_draft(name, head, size, published=True)
        draft.attention_backend = way
        for part in draft.modules():
            for key, x in part._parameters.items():
                if x is not None:
                    part._parameters[key] = nn.Parameter(
                        world.ghost(*x.shape, dtype=x.dtype), x.requires_grad
                    )
        cast_draft(draft, dtype)
        torch.manual_seed(0)
        counts = draft.slot_counts(batch)
        torch.manual_seed(0)
        del x
        world.cost = Cost(peak=world._held)
        with torch.autocast(place, dtype, enabled=dtype != torch.float32):
            loss = draft.batch_loss(batch, head, counts).loss
        loss.backward()
        return world.cost


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", nargs="+", default=sorted(DRAFTS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--vocabs", nargs="+", type=int, default=VOCABULARIES)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--uncompiled", action="store_true", help="without kernels of chains")
    parser.add_argument("--operations", type=int, default=0, help="of most bytes, to be printed")
    args = parser.parse_args()
    print("| draft | T | V | attention | TFLOP | GB | GB / TFLOP | kernels | peak GiB |")
    print("| --- " * 9 + "|")
    for name in args.drafts:
        for vocab in args.vocabs:
            for tokens in args.lengths:
                for way in args.ways:
                    size = replace(QWEN, vocab=vocab, tokens=tokens)
                    cost = step_cost(name, size, way, compiled=not args.uncompiled)
                    moved_gb, kernels = sum(cost.bytes.values()) / 1e9, sum(cost.kernels.values())
                    print(
                        f"| {name} | {tokens} | {vocab} | {way} | {cost.flops / 1e12:.1f} "
                        f"| {moved_gb:.0f} | {cost.gb_per_tflop:.2f} | {kernels} "
                        f"| {cost.peak / 2**30:.1f} |",
                        flush=True,
                    )
                    for operation, count in cost.bytes.most_common(args.operations):
                        print(
                            f"    {count / 1e9:8.1f} GB  {cost.kernels[operation]:5}  {operation}"
                        )


if __name__ == "__main__":
    main()
