"""Compiled chains: each is one graph, and a step of every draft with them is the step without."""

import contextvars
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch

from spec_data.shards.batch import DraftBatch
from spec_data.shards.errors import RunError
from spec_train.attention import fused
from spec_train.drafts import layers
from spec_train.losses.menu import LossKind, head_loss
from spec_train.losses.teacher_rows import SharedRows, TeacherRows
from spec_train.options.draft_options import KINDS
from tests.marks import long_but
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import SMALL, build_draft, packed
from tests.tolerance import close, network

dataset, head = any_draft.dataset, any_draft.head


@pytest.fixture(scope="module")
def compiler() -> Iterator[None]:
    """Compile as on a GPU, but to torch's own operations; gradients donate their buffers."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, functorch.patch(donated_buffer=True):
        patch.setattr(fused, "COMPILER", "aot_eager_decomp_partition")
        fused._compiled.cache_clear()
        yield
    fused._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def on(compiler: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what switches compiled chains on, on CPUs, and counts the calls of each."""
    calls: dict[str, int] = {}
    run = fused.run_fused

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls[function.__name__] = calls.get(function.__name__, 0) + 1
        return run(function, *args, **kwargs)

    def switch() -> dict[str, int]:
        fused._works.cache_clear()
        monkeypatch.setattr(fused, "FUSED_ON", ("cpu",))
        monkeypatch.setattr(fused, "run_fused", counted)
        return calls

    yield switch
    fused._works.cache_clear()


CHAINS = {
    "eagle": {"_weighted_loss", "_distribution"},
    "eagle3": {"_weighted_loss", "_distribution", "_log_sum", "_joined", "_joined_backward"},
    "peagle": {"_weighted_loss", "_distribution", "_log_sum"},
    "dspark": {"_weighted_rows", "_distribution"},
    "dflash": {"_weighted_rows", "_distribution"},
    "dflash2": {"_weighted_rows", "_distribution", "convolved"},
    "domino": {"_weighted_rows", "_distribution"},
    "xpress": {"_weighted_rows", "_distribution"},
    "lilicorr": {"_weighted_rows", "_distribution"},
    "mtp": {"_weighted_loss", "_distribution", "_joined", "_joined_backward"},
}
LAYERS = {"rms_norm", "gated", "turned"}
ATTENTION = {"_bias", "_store", "_add_heads"}


EVERY = long_but(["dspark"], SMALL)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("name", EVERY)
def test_a_step_with_compiled_chains_is_the_step_without(
    name: str, on: Any, dataset: Any, head: Any
) -> None:
    """A chain that is no single graph raises."""
    draft = build_draft(name, dataset, head)
    batch: DraftBatch = packed(dataset)

    def step() -> tuple[Any, dict[str, Any]]:
        draft.zero_grad()
        torch.manual_seed(3)
        result = draft.loss(batch, head)
        result.loss.backward()
        return result, {n: p.grad for n, p in draft.named_parameters() if p.grad is not None}

    plain, gradients = step()
    calls = on()
    result, compiled = step()
    # the block of an MTP draft is transformers' own
    assert set(calls) == CHAINS[name] | ATTENTION | (LAYERS if name != "mtp" else set())
    terms = network(4, backward=True, slots=64)
    close(result.loss.detach(), plain.loss.detach(), terms=terms)
    for key, value in plain.sums.items():
        close(result.sums[key], value, terms=terms, dtype=torch.float32)
    for key, gradient in gradients.items():
        close(compiled[key], gradient, terms=terms, magnitude=float(gradient.abs().max()) + 1e-4)


# a hard target is another teacher of the same chains
LOSSES = [*((name, False) for name in KINDS), ("ce", True), ("jsd", True), ("lk-lambda", True)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "hard"), LOSSES)
def test_every_loss_of_rows_compiles_to_its_values(name: str, hard: bool, on: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 2, 6, generator=draw).bfloat16()
    weight = torch.randn(50, 6, generator=draw).bfloat16().requires_grad_()
    p = (2 * torch.randn(4, 50, generator=draw)).softmax(-1)
    mass, label = torch.rand(4, generator=draw), torch.randint(50, (9,), generator=draw)
    index = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3])
    teacher = SharedRows(TeacherRows(p, mass), index, label)
    weights = torch.rand(9, 2, generator=draw)

    def loss() -> tuple[Any, ...]:
        kind = LossKind(name=name, hard=hard)
        total, stats = head_loss(hidden, weight, teacher.__getitem__, weights, kind, chunk_rows=8)
        (gradient,) = torch.autograd.grad(total, weight)
        return total.detach(), stats.loss, stats.acceptance, gradient

    plain = loss()
    calls = on()
    for value, expected in zip(loss(), plain, strict=True):
        close(value, expected, terms=400, dtype=torch.float32 if value.ndim else None)
    assert calls["_weighted_loss"] == 3


def test_in_decoding_no_chain_is_compiled(on: Any) -> None:
    """Each length of a prompt would be, within the seconds that are measured."""
    calls = on()
    x = torch.randn(1, 3, 8)
    with torch.inference_mode():
        layers.rms_norm(x, torch.ones(8), 1e-6, None)
    assert not calls
    layers.rms_norm(x, torch.ones(8), 1e-6, None)
    assert calls == {"rms_norm": 1}


def test_calls_of_a_chain_leave_nothing_in_memory(on: Any) -> None:
    """Each `config.patch` of torch leaves a context variable; a run has millions of calls."""
    on()
    x, weight, sizes = torch.randn(1, 3, 8), torch.ones(8), []
    for _ in range(3):
        layers.rms_norm(x, weight, 1e-6, None)
        sizes.append(len(contextvars.copy_context()))
    assert sizes[1] == sizes[2]


def test_a_compiler_that_does_not_work_is_not_used(
    on: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on()
    monkeypatch.setattr(fused, "COMPILER", "no such compiler")
    fused._compiled.cache_clear()
    assert not fused.fuses(torch.device("cpu"))
    assert (
        "warning[kernel]: the compiler of elementwise chains cannot be used on this machine"
        in caplog.text
    )
    fused._compiled.cache_clear()


def test_a_chain_that_cannot_be_compiled_runs_all_the_same(
    on: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: a chain that depends on a number, after it has overwritten its input: compiling
    writes nothing. The next call does not try again."""

    def branching(x: torch.Tensor) -> torch.Tensor:
        x.exp_()
        return x + 1 if x.sum() > 0 else x

    calls = on()
    for _ in range(2):
        x = torch.ones(3)
        assert torch.equal(fused.fused(branching)(x), torch.ones(3).exp() + 1)
        assert torch.equal(x, torch.ones(3).exp())
    assert calls == {"branching": 2}
    assert (
        caplog.text.count("warning[kernel]: branching runs without being compiled: Data-dependent")
        == 1
    )


@pytest.mark.parametrize("starts", [0, 1])
def test_a_kernel_that_does_not_start_runs_no_chain_twice_on_what_it_overwrote(
    starts: int, on: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: kernels that write, then fail as Triton does. The first run is on copies; a failure
    after one that started is an error."""
    left = [starts]

    def compiled(function: Any) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            out = function(x)
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("No valid triton configs. OutOfMemoryError: out of resource")
            return out

        return call

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 0

    on()
    assert fused.fuses(torch.device("cpu"))
    monkeypatch.setattr(fused, "_compiled", compiled)
    x = torch.ones(3)
    if starts:
        with pytest.raises(RunError, match=r"failed while it overwrote .* the last checkpoint"):
            fused.overwriting(1)(doubled)(x)
        return
    assert torch.equal(fused.overwriting(1)(doubled)(x), torch.full((3,), 2.0))
    assert torch.equal(x, torch.full((3,), 2.0))
    assert "warning[kernel]: doubled runs without being compiled: No valid triton" in caplog.text


def test_a_chain_whose_kernel_does_not_start_runs_as_written(
    on: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("No valid triton configs")

    on()
    assert fused.fuses(torch.device("cpu"))
    monkeypatch.setattr(fused, "_compiled", lambda function: fails)
    assert torch.equal(fused.fused(lambda x: x + 1)(torch.ones(2)), torch.full((2,), 2.0))
    assert "warning[kernel]" in caplog.text
