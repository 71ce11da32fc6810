"""The cost model of a training step: its peak, and what operations count."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
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

from spec_train.losses.menu import LossKind, in_kernel  # noqa: E402
from spec_train.losses.teacher_rows import TeacherRows  # noqa: E402
from spec_train.training.loss import cast_draft  # noqa: E402

SLOW = [pytest.param(name, marks=pytest.mark.long) for name in costs.DRAFTS]
PEAKS = ("dspark", "dflash", "peagle")
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
            draft.batch_loss(batch, head, counts).loss.backward()
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["eagle3", *PEAKS])
def test_the_peak_is_that_of_torchs_allocator(name: str) -> None:
    measured = measured_peak(name, SMALL)
    counted = costs.step_cost(name, SMALL, "merged", "cpu", torch.float32).peak
    assert abs(counted - measured) <= 0.1 * measured


def test_operations_count_what_they_read_and_write() -> None:
    with costs.world_of("cuda") as world:
        a, b = (world.ghost(6, 5, dtype=torch.bfloat16) for _ in range(2))
        weight = world.ghost(4, 5, dtype=torch.float32)
        assert a.device.type == "cuda"
        part = torch.arange(5) < 2
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
        assert moved(lambda: a[..., part]) == (2 * 24 + 5, 0)
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


@pytest.mark.parametrize(("form", "read"), [("ce", 2 + 1), ("tv", 3 + 2)])
def test_a_kernel_of_losses_reads_logits_in_every_loop(form: str, read: int) -> None:
    with costs.world_of("cuda") as world:
        logits, taught = (world.ghost(6, 5000, dtype=torch.bfloat16) for _ in range(2))
        rows = TeacherRows.of_logits(taught, None)
        weights = torch.ones(6), None
        assert in_kernel(logits, rows, None, weights, LossKind(name=form))
    assert world.cost.bytes["row_sums"] == 60_048
    assert world.cost.bytes["row_loss"] == 60_000 * (read + 1) + 240


LIMITS = {"lilicorr": 1.5, "mtp": 1.4, "domino": 1.1, "xpress": 1.1}
"""GB of elementwise passes per TFLOP with flex_attention, at most; others 1.0."""


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")  # of recomputed forwards
@pytest.mark.parametrize("name", ["eagle3", *[x for x in SLOW if x.values[0] != "eagle3"]])
def test_the_table_of_the_docs_is_what_the_model_counts(name: str) -> None:
    lines = (ROOT / "docs" / "gpu.md").read_text().splitlines()
    rows = [re.findall(r"[\w.]+", line) for line in lines if line.startswith("| `")]
    assert sorted(row[0] for row in rows) == sorted(costs.DRAFTS)
    table = {row[0]: row[1:] for row in rows}  # before and after, of four figures
    flex, fallback = (costs.step_cost(name, costs.QWEN, way) for way in costs.WAYS)
    assert table[name][1::2] == [
        f"{flex.gb_per_tflop:.1f}",
        f"{fallback.gb_per_tflop:.1f}",
        str(flex.kernels.total()),
        f"{flex.peak / 2**30:.1f}",
    ]
    assert flex.gb_per_tflop <= LIMITS.get(name, 1.0)
    # of P-EAGLE 1.33: its attention moves as much as before, and a head that is not trained less
    assert fallback.bytes.total() <= 1.35 * flex.bytes.total()


@pytest.mark.long
@pytest.mark.parametrize("way", costs.WAYS)
@pytest.mark.parametrize("name", ["peagle", "eagle3"])
def test_the_peak_grows_with_the_tokens_not_with_their_square(name: str, way: str) -> None:
    lengths = 2048, 4096, 8192, 16384
    short, more, long, longest = (
        costs.step_cost(name, replace(costs.QWEN, tokens=length, vocab=32000), way).peak
        for length in lengths
    )
    assert 0 < longest - long <= 1.1 * 2 * (long - more) <= 1.1**2 * 4 * (more - short)
