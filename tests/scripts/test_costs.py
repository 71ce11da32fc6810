"""The cost model of a training step: its peak, and what operations count."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts" / "bench"))

import costs  # noqa: E402
import fit_problem  # noqa: E402
from fit_problem import Size, fresh_draft, random_batch  # noqa: E402

from spec_train.training.loss import cast_draft  # noqa: E402

SMALL = Size(hidden=128, heads=4, head_dim=32, vocab=4096, draft_vocab=2048, tokens=768)


def measured_peak(name: str, size: Size) -> int:
    """Return the most bytes that tensors of a step hold on the CPU, by torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        head, batch = random_batch(size)
        fit_problem._states.cache_clear()
        draft = fresh_draft(name, head, size, published=True)
        cast_draft(draft, torch.float32)
        torch.manual_seed(0)
        counts = draft.slot_counts(batch)
        torch.manual_seed(0)
        with record_function("step"):
            draft(batch, head, counts).loss.backward()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    start = next(e.start_ns() for e in events if e.name() == "step")
    held = peak = 0
    for when, change in sorted(
        (e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"
    ):
        held += change
        peak = max(peak, held if when >= start else 0)
    return peak


def test_the_peak_is_that_of_torchs_allocator() -> None:
    measured = measured_peak("eagle3", SMALL)
    counted = costs.step_cost("eagle3", SMALL, "merged", "cpu", torch.float32).peak
    assert abs(counted - measured) <= 0.1 * measured


def test_operations_count_what_they_read_and_write() -> None:
    with costs.world_of("cuda") as world:
        a, b = (world.ghost(6, 5, dtype=torch.bfloat16) for _ in range(2))
        weight = world.ghost(4, 5, dtype=torch.float32)
        assert a.device.type == "cuda"
        world.cost = costs.Cost(peak=world.cost.peak)

        def moved(operation: Callable[[], Tensor]) -> tuple[int, int]:
            world.cost.bytes.clear()
            world.cost.flops = 0
            operation()
            return sum(world.cost.bytes.values()), world.cost.flops

        assert moved(lambda: a + b) == (3 * 60, 0)
        assert moved(lambda: a.float()) == (60 + 120, 0)
        assert moved(lambda: a.T) == (0, 0)
        assert moved(lambda: a[:, :1].expand(6, 5).clone()) == (12 + 60, 0)
        assert moved(lambda: a[torch.tensor([0, 2])]) == (2 * 20 + 16, 0)
        assert moved(lambda: a.zero_()) == (60, 0)
        with torch.autocast("cuda", torch.bfloat16):  # the weight is cast, with autocast's dtype
            assert moved(lambda: torch.nn.functional.linear(a, weight)) == (80 + 40, 2 * 6 * 5 * 4)
            assert moved(lambda: a.sum(-1)) == (60 + 120 + 120 + 24, 0)
        held, before = world._held, world.cost.peak
        more = [world.ghost(1000, dtype=torch.float32) for _ in range(3)]
        assert world._held == held + 12000 and world.cost.peak >= before
        views = [x[:2] for x in more]
        del more
        assert world._held == held + 12000
        del views
        assert world._held == held
        with pytest.raises(RuntimeError, match="numbers of a ghost"):
            a.sum().item()


def test_the_table_of_the_docs_is_what_the_model_counts() -> None:
    lines = (ROOT / "docs" / "gpu.md").read_text().splitlines()
    rows = [re.findall(r"[\w.]+", line) for line in lines if line.startswith("| `")]
    assert sorted(row[0] for row in rows) == sorted(costs.DRAFTS)
    table = {row[0]: row[1:] for row in rows}  # before and after, of four figures
    for name in ("eagle3", "dflash"):  # the others would take as long again
        flex, fallback = (costs.step_cost(name, costs.QWEN, way) for way in costs.WAYS)
        assert table[name][1::2] == [
            f"{flex.gb_per_tflop:.1f}",
            f"{fallback.gb_per_tflop:.1f}",
            str(flex.kernels.total()),
            f"{flex.peak / 2**30:.1f}",
        ]
        assert flex.gb_per_tflop <= 1.0
