"""Every draft with every attention back end: against float32 on the CPU, and how fast it is."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from fit_problem import Size, fresh_draft, random_batch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gpu.bench import Bench
from spec_data.shards.batch import DraftBatch
from spec_train.attention import fused
from spec_train.drafts import DRAFTS
from spec_train.losses.head import TargetHead
from spec_train.options.training import Training
from spec_train.training.loss import arithmetic, cast_draft
from spec_train.training.optimizer import Masters

TINY = Size(hidden=32, heads=4, head_dim=16, vocab=64, draft_vocab=40, tokens=40)
SMALL = Size(hidden=256, heads=4, head_dim=64, vocab=4096, draft_vocab=2048, tokens=256)
QWEN = Size(4096, 32, 128, vocab=151936, draft_vocab=32000, tokens=8192, key_heads=8)
SHAPES = {
    "1 x 4096, H 2048, V 32k": Size(2048, 16, 128, vocab=32768, draft_vocab=16384, tokens=4096),
    "Qwen3-8B, 4 x 2048": replace(QWEN, tokens=2048, rows=4),
    "Qwen3-8B, 1 x 8192": QWEN,
    "Qwen3-8B, 4 x 2048, V 32k": replace(QWEN, tokens=2048, rows=4, vocab=32000, draft_vocab=0),
    "Qwen3-8B, 1 x 8192, V 32k": replace(QWEN, vocab=32000, draft_vocab=0),
}
"""What the speed of a step is measured on."""
ROUNDINGS = 80
"""Roundings to bfloat16, one after the other, in a loss of four layers or steps."""
STEPS, RATE = 50, 1e-3


@dataclass
class Run:
    """What a training of some steps gave, on the CPU."""

    losses: list[float]
    gradients: dict[str, Tensor]  # of the first step


def backends(bench: Bench) -> tuple[str, ...]:
    """Return the attention back ends on the device, the default one first."""
    return ("flex", "merged", "dense") if bench.on_gpu else ("merged", "dense")


def trained(
    name: str, size: Size, device: str, dtype: torch.dtype, backend: str, steps: int
) -> Run:
    """Train a fresh draft on the one random batch."""
    head, batch = random_batch(size)
    draft = fresh_draft(name, head, size).to(device)
    draft.attention_backend = backend
    draft.eval()  # drafts that sample draw the same elements on every device
    place = torch.device(device)
    head, batch = head.to(place).to(dtype), batch.to(place, dtype)
    parameters = cast_draft(draft, dtype)
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    run = Run([], {})
    for step in range(steps):
        loss = loss_of(draft, batch, head, dtype)
        loss.backward()
        run.losses.append(float(loss.detach()))
        if step == 0:
            names = {id(p): n for n, p in draft.named_parameters()}
            run.gradients = {names[id(p)]: p.grad.float().cpu() for p in parameters}
        optimizer.step()
        optimizer.zero_grad()
    return run


def loss_of(draft: Any, batch: DraftBatch, head: TargetHead, dtype: torch.dtype) -> Tensor:
    """Return the loss of a batch, in the arithmetic of a run in `dtype`."""
    torch.manual_seed(0)
    counts = draft.slot_counts(batch)
    torch.manual_seed(0)
    with arithmetic(batch.input_ids.device, dtype):
        return draft.loss(batch, head, counts).loss


def prove_drafts(bench: Bench) -> None:
    """Train every draft with every back end; compare loss and gradients with the CPU's."""
    size, steps = (TINY, 3) if bench.tiny else (SMALL, STEPS)
    dtype = torch.bfloat16
    for name in DRAFTS:
        exact: list[Run] = []

        def reference(name: str = name, exact: list[Run] = exact) -> tuple[bool, dict[str, Any]]:
            exact.append(trained(name, size, "cpu", torch.float32, "auto", steps))
            return exact[0].losses[-1] < exact[0].losses[0], {"loss": exact[0].losses[-1]}

        ways = {b: f"{name}, bf16, {b}" for b in backends(bench)}
        if all(bench.has("drafts", row) for row in ways.values()):
            continue
        bench.attempt("drafts", f"{name}, CPU float32", reference)
        if not exact:
            continue
        for backend, row in ways.items():
            if bench.has("drafts", row):
                continue
            bench.attempt(
                "drafts",
                row,
                lambda b=backend, e=exact[0], n=name: _compared(
                    e, trained(n, size, bench.device, dtype, b, steps), dtype
                ),
            )


def _compared(exact: Run, found: Run, dtype: torch.dtype) -> tuple[bool, dict[str, Any]]:
    """Compare a run with the exact one: first loss, first gradients, last loss."""
    allowed = torch.finfo(dtype).eps * ROUNDINGS**0.5
    first = abs(found.losses[0] - exact.losses[0]) / abs(exact.losses[0])
    total = sum(float(g.square().sum()) for g in exact.gradients.values())
    apart = sum(float((found.gradients[n] - g).square().sum()) for n, g in exact.gradients.items())
    gradient = (apart / total) ** 0.5
    last = abs(found.losses[-1] - exact.losses[-1]) / abs(exact.losses[0])
    right = max(first, gradient) <= allowed and last <= 2 * allowed
    return right and found.losses[-1] < found.losses[0], {
        "loss_error": first,
        "gradient_error": gradient,
        "last_loss_error": last,
        "allowed": allowed,
    }


def prove_speed(bench: Bench) -> None:
    """Time a step of every draft, forward and backward."""
    shapes = {"tiny": TINY} if bench.tiny else SHAPES
    for shape, size in shapes.items():
        for name in DRAFTS:
            for backend in backends(bench)[: 2 if bench.on_gpu else 1]:
                row = f"{name}, {backend}, {shape}"
                if not bench.has("speed", row):
                    bench.attempt("speed", row, partial(_timed, bench, name, backend, size))


def _timed(bench: Bench, name: str, backend: str, size: Size) -> tuple[bool | None, dict[str, Any]]:
    place, dtype = torch.device(bench.device), torch.bfloat16
    head, batch = random_batch(size, bench.device)
    draft = fresh_draft(name, head, size).to(place)
    head, batch = head.to(place).to(dtype), batch.to(place, dtype)
    cast_draft(draft, dtype)
    value: list[float] = []
    flops = _matmul_flops(_step(draft, batch, head, "merged", dtype, value))
    step = _step(draft, batch, head, backend, dtype, value)
    step()
    bench.reset_memory()
    seconds = bench.seconds(step)
    memory = bench.memory_gb()
    masters = Masters(draft, Training(data="", out="", lr=RATE))
    optimizer = bench.seconds(lambda: (masters.clip(), masters.step(RATE)))
    return None, {
        "tokens_s": size.rows * size.tokens / seconds,
        "share_of_peak": bench.share_of_peak(flops, seconds),
        "optimizer_ms": 1e3 * optimizer,
        "memory_gb": memory,
        "host_syncs": _host_syncs(step) if bench.on_gpu else None,
        "loss": value[-1],
        "kernels": _top_kernels(step),
    }


def _matmul_flops(step: Callable[[], None]) -> int:
    """Return the FLOPs of the matrix products of a step, without those inside attention, which
    differ by back end (flex_attention cannot be counted). Nothing can be compiled while it counts.
    """
    with mock.patch.object(fused, "FUSED_ON", ()), FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for op, count in counts.items() if "attention" not in str(op))


def _top_kernels(step: Callable[[], None], most: int = 8) -> list[str]:
    """Return the kernels that take the most time in a step, with their share of it."""
    with torch.profiler.profile() as profiler:
        step()
    spent = {e.key: e.self_device_time_total or e.self_cpu_time_total for e in _kernels(profiler)}
    total = max(1.0, sum(spent.values()))
    largest = sorted(spent, key=lambda name: -spent[name])[:most]
    return [f"{spent[name] / total:.0%} {name[:60]}" for name in largest]


def _kernels(profiler: torch.profiler.profile) -> list[Any]:
    """Return the events of the device, or those of the CPU where there is no other."""
    events = profiler.key_averages()
    return [e for e in events if e.self_device_time_total] or list(events)


def _host_syncs(step: Callable[[], None]) -> int:
    """Return how often the host waits for the GPU in a step."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in found)


def _step(
    draft: Any,
    batch: DraftBatch,
    head: TargetHead,
    backend: str,
    dtype: torch.dtype,
    value: list[float],
) -> Callable[[], None]:
    """Return a step: forward, loss, backward."""
    draft.attention_backend = backend

    def step() -> None:
        loss = loss_of(draft, batch, head, dtype)
        loss.backward()
        value.append(float(loss.detach()))
        draft.zero_grad()

    return step
