"""The unroll's attention on CUDA: the memory-efficient kernel, merged with the diagonal."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from spec_train.attention import flex, masked
from spec_train.attention.flex import Case, flex_problem, tried
from spec_train.attention.masked import Attending, _MergedAttention, default_backend, small_case
from spec_train.attention.masks import span_mask
from tests.gpu.fake_cuda import FakeCuda, cuda_autocast, download, upload
from tests.gpu.machine import Context
from tests.tolerance import LAYER, close, close_in_norm

CPU = torch.device("cpu")
LESS = flex.smaller_options(torch.bfloat16)


def _inputs(size: int, dtype: torch.dtype, steps: int = 2) -> tuple[list[Tensor], Tensor, Tensor]:
    """Two query heads of one key-value head; the first slot and the slot of each query."""
    generator = torch.Generator().manual_seed(1)

    def draw(slots: int, heads: int = 2) -> Tensor:
        return torch.randn(2, heads, slots, size, generator=generator, dtype=dtype)

    active = torch.tensor([[1, 2, 4, 5, 7], [0, 3, 4, 6, 6]])
    first = torch.tensor([[0, 0, 3, 3, 3], [0, 0, 4, 4, 4]])
    tensors = [draw(5), draw(8, 1), draw(8, 1), *(draw(5, 1) for _ in range(2 * steps))]
    return tensors, first, active


@pytest.mark.parametrize("size", [8, 12, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [2, 0])
def test_the_kernel_of_cuda_equals_float64_in_values_and_gradients(
    size: int, dtype: torch.dtype, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head sizes that must be padded, chunks of 2 queries, spans of keys that are not aligned; with
    a diagonal, or sinks."""
    monkeypatch.setattr(masked, "CHUNK_ON_DEVICES", 2)
    tensors, first, active = _inputs(size, dtype, steps)
    if not steps:
        tensors.append(torch.tensor([0.7, -1.5], dtype=dtype))
    exact = [x.double().requires_grad_() for x in tensors]
    q, k0, v0, *flat = exact
    sinks = None if steps else flat.pop()
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    scale = size**-0.5
    attending = Attending.prepare(span_mask(first, active, 8), "dense")
    dense = attending(q, k0, v0, scale, pairs, sinks)
    pull = torch.linspace(-1, 2, dense.numel(), dtype=torch.float64).view_as(dense)
    expected = [dense, *torch.autograd.grad((dense * pull).sum(), exact)]
    context = Context()
    with FakeCuda(), torch.no_grad():
        mask = span_mask(upload(first), upload(active), 8)
        chunks = Attending.prepare(mask, "merged").prepared
        on_device = upload(tensors)
        more = (None, *on_device[3:]) if steps else on_device[3:]
        given = *on_device[:3], chunks, scale, *more
        out = _MergedAttention.forward(context, *given)
        grads = _MergedAttention.backward(context, upload(pull.to(dtype)))
        assert all(x.is_cuda for x in (out, *filter(lambda g: g is not None, grads)))
        found = download([out, *(g for g in grads if g is not None)])
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if dtype == torch.float32:
            close(a.double(), b.detach(), terms=2 * LAYER, dtype=dtype)
        else:
            close_in_norm(a, b, dtype, terms=24)


def test_a_wrong_memory_layout_of_the_output_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masked, "_by_slot", lambda x: x.contiguous())
    with pytest.raises(RuntimeError, match="reads other numbers"):
        test_the_kernel_of_cuda_equals_float64_in_values_and_gradients(
            12, torch.float32, 2, monkeypatch
        )


def test_one_dtype_reaches_the_kernel_under_autocast() -> None:
    """Norms return float32 and projections bfloat16; sums are float32 on CUDA alone."""
    tensors, first, active = _inputs(16, torch.float32)
    tensors = [x if i in (0, 1, 3, 5) else x.bfloat16() for i, x in enumerate(tensors)]
    results = []
    for backend in ("merged", "dense"):
        with FakeCuda(), torch.no_grad(), cuda_autocast():
            queries = Attending.prepare(span_mask(upload(first), upload(active), 8), backend)
            q, k0, v0, *flat = upload(tensors)
            out = queries(q, k0, v0, 0.25, list(zip(flat[::2], flat[1::2], strict=True)))
        assert out.dtype == torch.bfloat16
        results.append(download(out))
    close_in_norm(results[0], results[1].double(), torch.bfloat16, terms=24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode])
def test_a_trial_is_independent_of_the_modes_around_it(dtype: torch.dtype, outer: type) -> None:
    """The first batch of a run is a validation without gradients, under autocast."""
    state = torch.get_rng_state()
    with outer(), torch.autocast("cpu", torch.bfloat16):
        assert tried("merged", lambda: small_case("merged", CPU, dtype, (2, 1, 24)))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("fault", ["value", "gradient", "nan", "raises"])
def test_a_trial_finds_a_wrong_kernel(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, back = masked.attend_lse, masked.attend_lse_backward

    def attend(*args: Tensor) -> tuple[Tensor, Tensor]:
        if fault == "raises":
            raise RuntimeError("no kernel image is available\nmore")
        out, lse = right(*args)
        return out, lse + {"value": 0.3, "nan": float("nan")}.get(fault, 0.0)

    def backward(*args: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for dq, dk, dv in back(*args):
            yield dq, dk * (1.1 if fault == "gradient" else 1.0), dv

    monkeypatch.setattr(masked, "attend_lse", attend)
    monkeypatch.setattr(masked, "attend_lse_backward", backward)
    with caplog.at_level("WARNING"):
        assert not tried("merged", lambda: small_case("merged", CPU, torch.float32, (2, 1, 16)))
    said = "(no kernel image is available)" if fault == "raises" else "is wrong on this machine"
    assert said in caplog.text


def test_a_trial_compares_every_output_and_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    assert Case([x], [x * 2], [x * 2]).error() == 0
    assert Case([x], [x * 2, x], [x * 2, x.detach() * 3 + x * 0]).error() > 0.5


def test_the_back_end_by_device_dtype_and_head_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Dense remains for float64 on a GPU, and where every kernel fails."""
    tries: list[str] = []
    failing: tuple[str, ...] = ()

    def trial(name: str, make: object) -> bool:
        tries.append(name)
        return not any(word in name for word in failing)

    monkeypatch.setattr(masked, "tried", trial)

    def choose(kind: str, dtype: torch.dtype, size: int) -> str:
        return default_backend.__wrapped__(torch.device(kind), dtype, (4, 2, size))

    low = torch.bfloat16
    assert choose("cpu", torch.float32, 32) == choose("cpu", torch.float64, 7) == "merged"
    assert not tries
    assert choose("cuda", low, 16) == choose("cuda:1", low, 256) == "flex"
    assert len(tries) == 2 and all("bfloat16" in name for name in tries)  # no other dtype
    failing = ("flex",)
    assert choose("cuda", low, 8) == choose("cuda", low, 256) == "merged"
    assert not caplog.messages
    assert choose("cuda", torch.float64, 64) == "dense"
    assert caplog.messages[0].startswith("warning[kernel]: no attention kernel for torch.float64")
    failing = ("flex", "merged")
    assert choose("cuda", low, 64) == choose("xpu", low, 64) == "dense"


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without", "ignore:The .grad attribute:UserWarning"
)
@pytest.mark.parametrize("enough", [*(pytest.param(x, marks=pytest.mark.long) for x in LESS), None])
def test_flex_is_tried_again_with_less_shared_memory(
    enough: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a GPU whose shared memory does not hold what the kernel takes by itself."""
    asked: list[Any] = []
    attend = flex.flex_attention

    def small_gpu(*args: Any, kernel_options: Any, **given: Any) -> Any:
        asked.append(kernel_options)
        if enough is None or kernel_options != enough:
            raise RuntimeError("out of resource: shared memory, Required: 102400")
        return attend(*args, **given)

    monkeypatch.setattr(flex, "flex_attention", small_gpu)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # refuses a CPU's
    monkeypatch.setattr(flex, "OPTIONS", {})
    heads = 4, 2, 16
    assert masked._serves("flex", CPU, torch.bfloat16, heads) == (enough is not None)
    order = [options for options, last in zip(asked, [{}, *asked], strict=False) if options != last]
    assert order == [None, *LESS][: len(order)] and order[-1] == (enough or LESS[-1])
    assert list(flex.OPTIONS.values()) == ([] if enough is None else [enough])  # what a run uses


def test_flex_refuses_only_what_no_gpu_can_do() -> None:
    assert flex_problem(torch.bfloat16, 96) is None
    assert "below 16" in (flex_problem(torch.bfloat16, 8) or "")
    assert "float64" in (flex_problem(torch.float64, 64) or "")
