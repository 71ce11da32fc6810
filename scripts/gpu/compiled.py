"""What the compiler makes of this project's GPU code: a table of kernels, without a GPU.

    python scripts/gpu/compiled.py                        every kernel, for an H200
    python scripts/gpu/compiled.py --card l40s --only flex --json flex.json
    python scripts/gpu/compiled.py --list                 names for --only

Three kinds: flex_attention by head size and dtype; the chains (`fused`) that a step of each draft
calls, with the shapes of Qwen3-8B, one of each form; and the losses of rows. Each goes through
torch's own Dynamo, AOTAutograd and Inductor up to the code that a GPU would load, forward and
backward, and Triton's ptxas builds it for the card. Nothing runs: that the numbers are right, and
how long they take, only a GPU shows (`scripts/prove_gpu.py`).

"registers" and "stack" are those of a thread, "shared" the bytes of a block, each of the kernel
that has most; "calls" are kernels that are not generated, such as a matrix product; "doubles" are
float64 instructions, of which there should be none. Sizes are the first that Inductor would try. A
flex_attention that does not fit is made again with less, as `masked.default_backend` does.
Exit code 1: something cannot be lowered or built, asks for more shared memory than the card has, or
computes in float64.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
# not this folder itself, where Python looks first: its kernels.py is no package `kernels`
sys.path[:] = [str(HERE.parent), str(HERE.parent / "bench"), str(HERE.parents[1])] + [
    path for path in sys.path if Path(path or ".").resolve() != HERE
]

from gpu import pretended  # noqa: E402

pretended.load()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten  # noqa: E402

from spec_train.attention import flex, fused  # noqa: E402
from spec_train.attention.masks import AttentionMask  # noqa: E402
from spec_train.drafts import DRAFTS  # noqa: E402

HEADS = ((64, 32, 8), (80, 32, 8), (96, 32, 8), (128, 32, 8), (128, 5, 1), (256, 16, 8))
"""Head sizes, query heads, key heads."""
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
TOKENS, SLOTS = 8192, 4915


@dataclass(frozen=True)
class Case:
    """A name, and a function that lowers it; () -> the kernels that need no lowering."""

    name: str
    lower: Callable[[], None] | None = None
    programs: Callable[[], Mapping[str, tuple[Any, int]]] | None = None
    """The programs of Triton by name, with their warps."""
    again: Sequence[Callable[[], None]] = ()
    """Lower it with less shared memory, and with less again."""


# -- flex_attention --------------------------------------------------------------------------------


def flex_cases() -> Iterator[Case]:
    """Yield flex_attention with every head size in both dtypes."""
    for kind, dtype in DTYPES.items():
        for size, heads, key_heads in HEADS:
            name = f"flex {kind} {heads}/{key_heads} heads of {size}"
            lower = partial(_flex, dtype, size, heads, key_heads)
            again = [partial(lower, options) for options in flex.smaller_options(dtype)]
            yield Case(name, lower, again=again)


def _flex(
    dtype: torch.dtype,
    size: int,
    heads: int,
    key_heads: int,
    options: Mapping[str, Any] | None = None,
) -> None:
    def made(count: int, slots: int) -> Tensor:
        shape = 1, count, slots, size
        return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True)

    ends = torch.empty(1, SLOTS, 4, device="cuda", dtype=torch.int64)
    blocks = flex.flex_mask(AttentionMask(TOKENS, ends))
    q, k, v = made(heads, SLOTS), made(key_heads, TOKENS), made(key_heads, TOKENS)
    with mock.patch.dict(flex.OPTIONS, {} if options is None else {(dtype, size): options}):
        out, sums = flex.flex(q, k, v, blocks, size**-0.5)
    (out.float().sum() + sums.sum()).backward()


# -- chains ----------------------------------------------------------------------------------------


def chain_cases(drafts: list[str]) -> Iterator[Case]:
    """Yield each form of each chain that a step of the drafts calls, once."""
    known: dict[Any, str] = {}
    count: dict[str, int] = {}
    for draft in drafts:
        for function, args in _calls_of(draft):
            key = function, _form(args)
            if key in known:
                continue
            name = function.__name__.strip("_")
            count[name] = count.get(name, 0) + 1
            known[key] = f"chain {name} {count[name]} ({draft})"
            yield Case(known[key], partial(_chain, function, args))


def _calls_of(draft: str) -> list[tuple[Any, Any]]:
    """Return the chains that a step calls, with their arguments: tensors without numbers."""
    import costs

    calls: list[tuple[Any, Any]] = []
    apply, chain = costs._Chain.apply, costs.World.chain
    inside = False

    def with_gradient(world: Any, function: Any, spec: Any, *leaves: Any) -> Any:
        nonlocal inside
        calls.append((function, _described(tree_unflatten(leaves, spec))))
        inside = True
        try:
            return apply(world, function, spec, *leaves)
        finally:
            inside = False

    def without(world: Any, function: Any, args: Any) -> Any:
        if world.counting and not inside and function.__name__ != "gradients":
            calls.append((function, _described(args)))
        return chain(world, function, args)

    rows = costs.losses.kernels
    for places in (rows.KERNELS_ON, ()):  # a loss in the kernel of its rows, and as a chain
        with (
            mock.patch.object(rows, "KERNELS_ON", places),
            mock.patch.object(costs._Chain, "apply", with_gradient),
            mock.patch.object(costs.World, "chain", without),
        ):
            costs.step_cost(draft, replace(costs.QWEN, tokens=TOKENS), "merged")
    return calls


@dataclass(frozen=True)
class Described:
    """A tensor: what a compiler knows of it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool

    def made(self) -> Tensor:
        """Return a fake tensor of this kind on the pretended GPU."""
        given = {"dtype": self.dtype, "device": "cuda"}
        found = torch.empty_strided(self.shape, self.stride, **given)
        return found.requires_grad_(self.gradient)


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Change the tensors of arguments, or what describes them; dataclasses have some too."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([_mapped_leaf(leaf, change) for leaf in leaves], spec)


def _mapped_leaf(leaf: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, Tensor | Described):
        return change(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        parts = {f.name: _mapped(getattr(leaf, f.name), change) for f in fields(leaf) if f.init}
        return replace(leaf, **parts)
    return leaf


def _described(args: Any) -> Any:
    def describe(x: Any) -> Described:
        gradient = x.requires_grad and x.dtype.is_floating_point
        return Described(tuple(x.shape), x.stride(), x.dtype, gradient)

    return _mapped(args, describe)


def _form(args: Any) -> str:
    """Return what tells two graphs apart: all but whole numbers, and counts of tokens or rows."""
    parts = []

    def note(x: Described) -> Described:
        width = x.shape[-1:] if x.dtype.is_floating_point and len(x.shape) > 1 else ()
        parts.append((len(x.shape), width, x.dtype, x.gradient))
        return x

    leaves = tree_leaves(_mapped(args, lambda x: note(x) and None))
    return repr((parts, [x for x in leaves if type(x) is not int]))


def _chain(function: Any, args: Any) -> None:
    out = fused.run_fused(function, *_mapped(args, Described.made))
    outs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
    if outs:
        torch.autograd.backward([x.float().sum() for x in outs])


# -- losses of rows --------------------------------------------------------------------------------

_SUMS = ("totals", "masses", "entropies", "first", "second", "figures", "sums")
_WHOLE = ("teacher_of", "bias_of", "labels", "best", "ends")


def row_cases() -> Iterator[Case]:
    """Yield the kernels of `row_kernels`, each loss with all that it can have."""
    from spec_train.losses import row_kernels

    for form in row_kernels.FORMS:
        for kind in DTYPES:
            programs = partial(_row_programs, form, kind)
            yield Case(f"rows {form} {kind}", programs=programs)
    yield Case("rows sums bf16", programs=lambda: {"row_sums": _program("_row_sums", "bf16")})
    yield Case("rows groups bf16", programs=lambda: {"group_sums": _program("_group_sums", "bf16")})


def _row_programs(form: str, kind: str) -> dict[str, tuple[Any, int]]:
    from spec_train.losses import row_kernels

    number = row_kernels.FORMS[form]
    shapes = {
        "plain": dict.fromkeys(("INDEXED", "BIASED", "SHARED", "MASS", "HARD", "CAPPED"), False),
        "hard": {"HARD": True, "INDEXED": True, "BIASED": False, "SHARED": False, "MASS": False},
        "whole": dict.fromkeys(("INDEXED", "BIASED", "SHARED", "MASS", "CAPPED"), True),
    }
    usual = {"HARD": False, "CAPPED": False, "FORM": number}
    return {name: _program("_row_loss", kind, usual | more) for name, more in shapes.items()}


def _program(name: str, kind: str, constants: Mapping[str, Any] = {}) -> tuple[Any, int]:
    from triton.compiler import ASTSource

    from spec_train.losses import row_kernels

    kernel: Any = getattr(row_kernels, name)
    kinds = dict.fromkeys(("x", "z", "biases"), f"*{kind if kind == 'bf16' else 'fp32'}")
    kinds |= dict.fromkeys(_SUMS, "*fp32") | dict.fromkeys(_WHOLE, "*i64")
    kinds |= dict.fromkeys(("rows", "width", "steps"), "i32")
    kinds |= dict.fromkeys(("scale", "decay", "slope", "cap"), "fp32")
    constants = {**constants, "BLOCK": row_kernels.BLOCK}
    signature = {x: kinds.get(x, "constexpr") for x in kernel.arg_names}
    constants = {x: value for x, value in constants.items() if x in signature}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants), row_kernels.WARPS


# -- the table -------------------------------------------------------------------------------------


def rows_of(case: Case, card: pretended.Card) -> list[dict[str, Any]]:
    """Return a row for each graph: its kernels, and the most that one of them takes."""
    rows = list(_rows_of(case, card.capability))
    for number, again in enumerate(case.again, 1):
        if all(row["shared"] <= card.shared for row in rows):
            break
        rows = list(_rows_of(Case(f"{case.name}, try {number + 1}", again), card.capability))
    return rows


def _rows_of(case: Case, capability: int) -> Iterator[dict[str, Any]]:
    if case.programs is not None:
        made = {
            name: pretended.build_program(program, capability, num_warps=warps)
            for name, (program, warps) in case.programs().items()
        }
        yield {"case": case.name, "way": "", "calls": []} | _most(made)
        return
    assert case.lower is not None
    seen: list[pretended.Lowered] = []
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    fused._compiled.cache_clear()
    fused._refused.clear()
    flex.COMPILER = fused.COMPILER = pretended.recorder(seen)
    with pretended.fake_tensors():
        case.lower()
    if fused._refused or not seen:
        raise RuntimeError("it was not compiled")
    for graph in seen:
        made = {name: pretended.build(code, capability) for name, code in graph.kernels()}
        yield {"case": case.name, "way": graph.way, "calls": graph.outside()} | _most(made)


def _most(made: Mapping[str, pretended.Built]) -> dict[str, Any]:
    names = ("registers", "stack", "shared", "doubles")
    most = {name: max((getattr(x, name) for x in made.values()), default=0) for name in names}
    return {"kernels": len(made)} | most


def problem_of(row: Mapping[str, Any], card: pretended.Card) -> str | None:
    """Return why a row does not hold on a card; None: it does."""
    if row["shared"] > card.shared:
        return f"{row['shared']:,} bytes of shared memory of {card.shared:,}"
    if row["doubles"]:
        return f"{row['doubles']} instructions of float64"
    return None


def main() -> int:
    """Print a row for each graph; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", default="h200", choices=pretended.CARDS)
    parser.add_argument("--only", default=[""], nargs="+", help="cases whose name has one")
    parser.add_argument("--drafts", nargs="+", default=sorted(DRAFTS), choices=sorted(DRAFTS))
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    card = pretended.CARDS[args.card]
    chains = list(chain_cases(args.drafts))  # before torch sees a GPU: a step runs on the CPU
    every = [*flex_cases(), *chains, *row_cases()]
    cases = [case for case in every if any(text in case.name for text in args.only)]
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    pretended.pretend(card)
    fused._works = lambda device: True
    rows: list[dict[str, Any]] = []
    columns = ("kernels", "registers", "stack", "shared", "doubles")
    print("| case | way | kernels | registers | stack | shared | doubles | calls |")
    print("| --- " * 8 + "|")
    for case in cases:
        try:
            found = rows_of(case, card)
        except Exception as error:  # of Dynamo, Inductor, Triton or ptxas: anything
            lines = str(error).strip().splitlines() or [""]
            found = [{"case": case.name, "problem": f"{type(error).__name__}: {lines[0]}"}]
        for row in found:
            if "problem" not in row:
                cells = [row["case"], row["way"], *(f"{row[n]:,}" for n in columns)]
                print("|", " | ".join([*cells, " ".join(row["calls"])]), "|", flush=True)
                row["problem"] = problem_of(row, card)
            if row["problem"]:
                print(f"FAILED {row['case']}: {row['problem']}", flush=True)
        rows += found
        if args.json:
            text = json.dumps({"card": card.name, "rows": rows}, indent=1)
            args.json.write_text(text + "\n", encoding="utf-8")
    failed = sum(row["problem"] is not None for row in rows)
    print(f"{len(rows)} rows of {len(cases)} cases, {failed} failed", flush=True)
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
