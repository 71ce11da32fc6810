"""Attention in parts gives the plain states, without anything of the size of a whole row."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.flex_attention import WrappedFlexAttention, flex_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from spec_data.capture import attention_in_parts as module
from spec_data.capture import model as model_module
from spec_data.capture import proofs
from spec_data.capture.attention_in_parts import RuleMask, attention_in_parts, spans_of
from spec_data.capture.hooks import States
from spec_data.capture.mask_forms import FLEX, KERNELS, PER_DOCUMENT, VARLEN, mask_forms
from spec_data.capture.model import Target
from spec_data.capture.proofs import proof_documents, proof_length, prove_isolation
from spec_data.models.reading import text_config
from spec_data.shards.errors import RunError, TargetError
from spec_data.shards.packing import row_layout
from tests.families import FAMILIES, WINDOW, tiny_model
from tests.spec_data.capture.test_model import ids_of
from tests.tolerance import close, network

CHOSEN, LENGTH = (0, 2, 4), 200
EAGER_BY_DEFAULT = ("gemma2", "gpt_oss")
ONCE = ("qwen3", "qwen3_moe", "phi3", "mistral-sliding", "gemma3", "gpt2", "granite", "cohere")
"""Families whose own attention, `eager`, is tried in the long run alone."""
FORWARD = {"terms": network(6), "dtype": torch.float32}


class Largest(TorchDispatchMode):
    """Remember the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.numel())
        return out


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 queries, for documents of over 64 tokens."""
    monkeypatch.setattr(module, "QUERIES", 16)
    monkeypatch.setattr(model_module, "LONG_ROW", 64)


def target_of(family: str, attn: str) -> Target:
    model = tiny_model(family)
    assert (model.config._attn_implementation == "eager") == (family in EAGER_BY_DEFAULT)
    if attn == "eager":
        model.set_attn_implementation("eager")
    return Target(model, CHOSEN)


def capture(target: Target, ids: Tensor) -> tuple[States, int]:
    """Capture a document alone; return its states, and the elements of the largest tensor."""
    layout = row_layout([[len(ids)]], len(ids))
    with Largest() as largest:
        captured = target.forward(ids[None], *layout, None)
    return captured, largest.elements


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("family", "attn"),
    [
        pytest.param(family, attn, marks=[pytest.mark.long] * (family in ONCE and attn == "eager"))
        for family in (*FAMILIES, "gemma4", "phi3-longrope", "deepseek_v3")
        for attn in (["eager"] if family in EAGER_BY_DEFAULT else ["default", "eager"])
    ],
)
def test_a_long_document_has_the_states_of_output_hidden_states_in_bounded_memory(family, attn):
    target, (ids,) = target_of(family, attn), ids_of(LENGTH)
    with torch.no_grad(), Largest() as dense:
        plain = target.model(ids[None], output_hidden_states=True, use_cache=False)
    capture(target, ids)  # the first one proves the chunks, against a plain forward
    captured, elements = capture(target, ids)
    for k in CHOSEN:
        close(captured.layers[k], plain.hidden_states[k + 1], **FORWARD, name=f"layer {k}")
    close(captured.final, plain.hidden_states[-1], **FORWARD)
    with pytest.raises(KeyboardInterrupt), attention_in_parts(target.model, target.attn):
        raise KeyboardInterrupt
    assert target.config._attn_implementation == target.attn  # as it was, after an error too
    assert elements < LENGTH * LENGTH
    windowed = getattr(text_config(target.config), "sliding_window", None)
    if target.attn == "eager" or windowed or family == "deepseek_v3":
        assert target._chunks == {True: True}
        assert dense.elements >= LENGTH * LENGTH, "the plain forward has what chunks avoid"
    else:
        assert not target._chunks  # plain causal attention needs no mask


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_chunks_that_lose_the_window_are_found_and_not_used(family, monkeypatch, caplog):
    """The planted failure: chunks whose queries see every earlier token."""

    def everything(self: RuleMask, row: int, start: int, stop: int, first: int, _: Any) -> Tensor:
        return (torch.arange(start, stop)[:, None] >= torch.arange(first, stop))[None, None]

    monkeypatch.setattr(RuleMask, "of", everything)
    whole = RuleMask.parts
    monkeypatch.setattr(
        RuleMask, "parts", lambda *given: ((0, a, b, 0, a) for _, a, b, *_ in whole(*given))
    )
    target, (ids,) = target_of(family, "default"), ids_of(LENGTH)
    plain = target.model(ids[None], output_hidden_states=True, use_cache=False)
    captured, _ = capture(target, ids)
    assert target._chunks == {True: False}
    assert "warning[long-rows]" in caplog.text
    assert "captured without chunks (states differ by" in caplog.text
    close(captured.final, plain.hidden_states[-1], **FORWARD)


@pytest.mark.usefixtures("small")
def test_the_first_document_beyond_the_window_is_compared_as_well():
    target = target_of("mistral-sliding", "default")
    target.config.sliding_window = 100
    for length, proven in ((80, {False: True}), (LENGTH, {False: True, True: True})):
        (ids,) = ids_of(length)
        plain = target.model(ids[None], output_hidden_states=True, use_cache=False)
        captured, _ = capture(target, ids)
        assert target._chunks == proven
        close(captured.final, plain.hidden_states[-1], **FORWARD)


@pytest.mark.usefixtures("small")
def test_a_family_that_does_not_accept_the_rule_is_captured_plainly(monkeypatch, caplog):
    def slices_its_mask(*_given: Any) -> Tensor:
        raise TypeError("'RuleMask' object is not subscriptable")

    monkeypatch.setattr(RuleMask, "of", slices_its_mask)
    target, (ids,) = target_of("llama", "eager"), ids_of(LENGTH)
    plain = target.model(ids[None], output_hidden_states=True, use_cache=False)
    captured, _ = capture(target, ids)
    assert "without chunks (the family does not accept it (TypeError))" in caplog.text
    close(captured.final, plain.hidden_states[-1], **FORWARD)


def test_a_document_alone_has_no_mask_argument_in_any_packed_form():
    """So sdpa builds no mask at all, and windows are the model's own."""
    target = target_of("llama", "default")
    seen: list[Any] = []
    target.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    one, two = row_layout([[12]], 12), row_layout([[5, 7]], 12)
    ids = ids_of(12)[0][None]
    for form in mask_forms(target.config, target.attn)[:-2]:
        target.forward(ids, *one, form)
        target.forward(ids, *two, form)
    # per document, block-causal, position ids
    assert [mask is None for mask in seen] == [True, True, True, False, True, True]


# --- documents of a pack ---

LENGTHS = [[5, 30, 11], [3, 17], [2 * WINDOW]]
DOCUMENTS = (5, 30, 11, 3, 17, 26, 9)
SDPA = ["gpt2", "mistral-sliding", "gemma3", "qwen3_moe", "deepseek_v3"]
EAGER = ["llama", "gemma2", "gpt_oss"]


@pytest.mark.parametrize(
    ("family", "attn"), [(f, "sdpa") for f in SDPA] + [(f, "eager") for f in EAGER]
)
def test_states_are_those_of_documents_alone(family: str, attn: str) -> None:
    compare_with_documents_alone(family, attn, PER_DOCUMENT, LENGTHS)


def compare_with_documents_alone(family: str, attn: str, form: str, lengths: Any) -> None:
    target, most = target_of(family, attn), max(map(sum, lengths))
    assert target.attn == attn
    documents = [ids_of(*row, seed=b) for b, row in enumerate(lengths)]
    ids = torch.zeros(len(lengths), most + 2, dtype=torch.long)
    for row, parts in zip(ids, documents, strict=True):
        row[: sum(map(len, parts))] = torch.cat(parts)
    layout = row_layout(lengths, most + 2)
    largest = Largest()
    with largest if form == PER_DOCUMENT else nullcontext():
        packed = target.forward(ids, *layout, form)
    with pytest.raises(KeyboardInterrupt), attention_in_parts(target.model, attn, layout[0]):
        raise KeyboardInterrupt
    assert target.config._attn_implementation == attn  # as it was, after an error too
    longest = max(max(row) for row in lengths)
    heads, slots = text_config(target.config).num_attention_heads, ids.numel()
    width = max(p.shape[0] for p in target.model.parameters())  # of activations
    experts = ("gpt_oss", "qwen3_moe", "deepseek_v3")  # they have larger tensors
    if form == PER_DOCUMENT and family not in experts:
        assert largest.elements <= max(heads * longest**2, slots * width)
    for row, parts in enumerate(documents):
        start = 0
        for part in parts:
            alone = target.forward(part[None], *row_layout([[len(part)]], len(part)), None)
            for k in target.layers:
                found = packed.layers[k][row, start : start + len(part)]
                close(found, alone.layers[k][0], **FORWARD)
            close(packed.final[row, start : start + len(part)], alone.final[0], **FORWARD)
            start += len(part)


def slow_varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, bounds_k: Tensor, longest: int, longest_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """What `torch.nn.attention.varlen` computes: q [N, h, d], k and v [N, g, d], token by token."""
    assert enable_gqa == (q.shape[1] != k.shape[1]) and window_size[1] == 0
    assert torch.equal(bounds, bounds_k) and bounds.dtype == torch.int32
    assert longest == longest_k == int(bounds.diff().max())
    out, group = torch.zeros_like(q), q.shape[1] // k.shape[1]
    for start, stop in itertools.pairwise(bounds.tolist()):
        for i in range(start, stop):
            first = start if window_size[0] < 0 else max(start, i - window_size[0])
            for h in range(q.shape[1]):
                scores = k[first : i + 1, h // group].double() @ q[i, h].double() * scale
                out[i, h] = (scores.softmax(0) @ v[first : i + 1, h // group].double()).to(q.dtype)
    return out


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3"])
def test_one_kernel_for_all_documents_gives_their_states(family, monkeypatch):
    """A kernel of CUDA alone; windows, and fewer key heads than query heads."""
    monkeypatch.setattr(varlen, "varlen_attn", slow_varlen)
    compare_with_documents_alone(family, "sdpa", VARLEN, [[5, 3], [2, 9], [WINDOW + 4]])


# --- flex_attention ---

WIDE = [[130, 9, 150], [260]]  # documents that end within blocks of 128, and a whole block


@pytest.mark.parametrize(
    ("family", "attn", "lengths"),
    [
        ("mistral-sliding", "sdpa", WIDE),
        ("gemma3", "sdpa", LENGTHS),  # two kinds of layers
        ("gemma2", "eager", LENGTHS),  # scores with a cap
        ("qwen3_moe", "sdpa", LENGTHS),
        ("deepseek_v3", "sdpa", LENGTHS),  # values of another size
    ],
)
def test_flex_attention_gives_the_states_of_documents_alone(family, attn, lengths):
    compare_with_documents_alone(family, attn, FLEX, lengths)


@pytest.mark.parametrize("reach", [None, 5, 128, 200])
@pytest.mark.parametrize("length", [40, 256, 700])
def test_the_blocks_of_flex_attention_are_those_of_a_table_of_all_pairs(length, reach):
    spans = [[(0, length // 3), (length // 3, length - 7)], [(0, length)]]
    document = torch.full((2, length), -1)
    for row, some in enumerate(spans):
        for number, (start, stop) in enumerate(some):
            document[row, start:stop] = number
    document = torch.where(document < 0, -1 - torch.arange(length), document)  # alone

    def rule(pack: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = query - key < (reach or length)
        return (key <= query) & near & (document[pack, query] == document[pack, key])

    mask = RuleMask(rule=rule, reach=reach, spans=spans, always=True)
    made = mask.block_mask(length, torch.device("cpu"))
    exact = create_block_mask(rule, 2, None, length, length, device="cpu")
    count = exact.kv_num_blocks.shape[-1]
    for kind in ("kv", "full_kv"):
        some, all_ = (getattr(b, f"{kind}_num_blocks")[..., :count] for b in (made, exact))
        assert torch.equal(some, all_), kind
        some, all_ = (getattr(b, f"{kind}_indices") for b in (made, exact))
        for row, last in itertools.product(range(2), range(count)):
            n = int(getattr(exact, f"{kind}_num_blocks")[row, 0, last])
            assert set(some[row, 0, last, :n].tolist()) == set(all_[row, 0, last, :n].tolist())
    pairs = torch.arange(length)
    grid = torch.arange(2)[:, None, None], 0, pairs[:, None], pairs
    assert torch.equal(made.mask_mod(*grid), rule(*grid))


def test_the_blocks_cost_no_table_of_all_pairs():
    length = 1 << 14
    mask = RuleMask(rule=lambda *_: None, reach=None, spans=[[(0, length)]], always=True)
    with Largest() as largest:
        blocks = mask.block_mask(length, torch.device("cpu"))
    assert largest.elements <= 2 * length
    assert int((blocks.kv_num_blocks + blocks.full_kv_num_blocks).sum()) == 128 * 129 // 2
    assert mask.block_mask(length, torch.device("cpu")) is blocks  # one for all layers of a kind


@pytest.fixture
def compiled(monkeypatch):
    """flex_attention is compiled, as on a GPU, by all of the compiler but its last stage."""
    torch._dynamo.reset()
    call = torch.compile(flex_attention, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(module, "UNCOMPILED", ())
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: call)
    yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.usefixtures("compiled")
def test_compiled_flex_attention_gives_them_too_in_few_graphs(compiled):
    before = compiled["unique_graphs"]
    for lengths in ([[130, 9]], [[140, 20]], [[4, 90, 200], [30]]):
        compare_with_documents_alone("mistral-sliding", "sdpa", FLEX, lengths)
    assert 0 < compiled["unique_graphs"] - before <= 3


@pytest.mark.usefixtures("compiled")
def test_too_many_graphs_are_an_error_and_not_a_table_of_all_scores(monkeypatch):
    monkeypatch.setattr(module, "_GRAPHS", 1)
    target, rows = target_of("llama", "sdpa"), ([[5, 3]], [[4, 6], [7]])
    with pytest.raises(RunError, match=r"compiled 1 times.*\[2, .*--packing per-document"):
        for lengths in rows:
            ids = torch.zeros(len(lengths), 10, dtype=torch.long)
            target.forward(ids, *row_layout(lengths, 10), FLEX)


def test_what_flex_attention_cannot_do_is_said_in_a_line(monkeypatch):
    """Attention sinks need its sums, which no CPU gives; a compiler may raise anything."""
    documents = ids_of(5, WINDOW + 6, 3)
    with pytest.raises(TargetError, match=r"no kernel here .*sinks cannot be run on CPU"):
        prove_isolation(target_of("gpt_oss", "eager"), documents, 24, packing=FLEX)

    class OutOfResources(Exception):
        pass

    def fails(*_given: Any) -> Any:
        raise OutOfResources("shared memory, Required: 9\nmore")

    target = target_of("llama", "sdpa")
    assert prove_isolation(target, documents, 24, packing=FLEX).form == FLEX
    monkeypatch.setattr(RuleMask, "block_mask", fails)
    with pytest.raises(TargetError, match=r"no kernel here \(OutOfResources: shared .*: 9\)"):
        prove_isolation(target, documents, 24, packing=FLEX)
    with pytest.raises(OutOfResources):  # of a form that is plain Python, it is an error of ours
        monkeypatch.setattr(RuleMask, "parts", fails)
        prove_isolation(target, documents, 24, packing=PER_DOCUMENT)


def test_a_cpu_tries_no_kernel():
    target = target_of("llama", "sdpa")
    assert not set(KERNELS) & set(mask_forms(target.config, "sdpa", "cpu"))


@pytest.mark.parametrize(
    ("fastest", "planted"),
    [
        (VARLEN, ""),
        (FLEX, ""),
        ("block-causal-window", ""),
        (PER_DOCUMENT, "window"),
        (PER_DOCUMENT, "no"),
    ],
)
def test_a_gpu_takes_the_fastest_of_the_forms_that_are_proven(fastest, planted, monkeypatch):
    """Planted: the kernel loses the window, or does not run."""

    def kernel(*given: Any, window_size: tuple[int, int], **options: Any) -> Tensor:
        if planted == "no":
            raise RuntimeError("no kernel image is available")
        window = (-1, 0) if planted == "window" else window_size
        return slow_varlen(*given, window_size=window, **options)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    target, seen = target_of("mistral-sliding", "sdpa"), []
    on_gpu = SimpleNamespace(
        config=target.config, attn="sdpa", dtype=target.dtype, capture=target.capture,
        device=SimpleNamespace(type="cuda"),
    )  # fmt: skip

    def choose(forms: list[str], run: Any) -> str:
        seen.extend(forms)
        assert run(forms[0])
        return fastest

    monkeypatch.setattr(proofs, "_fastest", choose)
    proof = prove_isolation(on_gpu, ids_of(5, WINDOW + 6, 3), 24)
    assert proof.form == fastest and proof.form in proof.differences
    assert seen == [VARLEN] * (not planted) + [FLEX, PER_DOCUMENT, "block-causal-window"]
    assert (VARLEN in proof.differences) == (bool(planted) or fastest == VARLEN)


def test_the_fastest_form_is_timed(monkeypatch):
    clock = {"slow": 0.3, "fast": 0.1, "middle": 0.2}
    times = {"now": 0.0}

    def run(form: str) -> None:
        times["now"] += clock[form]

    monkeypatch.setattr(proofs, "perf_counter", lambda: times["now"])
    assert proofs._fastest(list(clock), run) == "fast"


@pytest.mark.parametrize(
    ("family", "attn", "form"),
    [("mistral-sliding", "sdpa", "block-causal-window"), ("llama", "eager", "block-causal")],
)
def test_a_family_with_attention_of_its_own_falls_back(family, attn, form, monkeypatch):
    """Planted: it makes its masks without asking, or its eager attention is in another module."""
    target = target_of(family, attn)
    registry = ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(registry._local_mapping, "spec_data_parts_sdpa", lambda **o: None)
    monkeypatch.setattr(type(target.model.model.layers[0].self_attn), "__module__", "typing")
    proof = prove_isolation(target, ids_of(*DOCUMENTS), 48)
    assert "does not accept it" in str(proof.differences[PER_DOCUMENT])
    assert proof.form == form
    assert mask_forms(target.config, attn, "cuda")[:3] == [*KERNELS, PER_DOCUMENT]


@pytest.mark.parametrize("form", [PER_DOCUMENT, FLEX])
@pytest.mark.parametrize("planted", ["spans", "window"])
def test_documents_that_are_cut_wrongly_fail_the_proof(
    form: str, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted == "spans":

        def one_span(document_ids: torch.Tensor) -> Any:
            return [[(row[0][0], row[-1][1])] for row in spans_of(document_ids)]

        monkeypatch.setattr(module, "spans_of", one_span)
    else:
        monkeypatch.setattr(RuleMask, "of", lambda *a: None)
        made = RuleMask.block_mask
        monkeypatch.setattr(
            RuleMask, "block_mask", lambda mask, *a: made(replace(mask, reach=None, blocks={}), *a)
        )
    target = target_of("mistral-sliding", "sdpa")
    with pytest.raises(TargetError, match="does not isolate"):
        prove_isolation(target, ids_of(*DOCUMENTS), 48, packing=form)


# --- proofs --------------------------------------------------------------------------------------


def test_one_long_document_does_not_lengthen_the_proof():
    """The planted failure: the proof ran rows as long as the longest document."""
    lengths = [30] * 40 + [20_000]
    chosen = proof_documents(lengths, 2048, limit=2048)
    assert 40 in chosen and len(chosen) > 8
    assert sum(min(lengths[d], 2048) for d in chosen) <= 4096
    target, widths = target_of("mistral-sliding", "default"), []
    run = target.forward

    def counted(input_ids: Tensor, *args: Any, **options: Any) -> Any:
        widths.append(input_ids.shape[1])
        return run(input_ids, *args, **options)

    target.forward = counted  # type: ignore[method-assign]
    proof = prove_isolation(target, ids_of(250, 9, 12, 7), 48)
    assert max(widths) == proof.longest == 48
    assert proof.form == PER_DOCUMENT


@pytest.mark.parametrize(
    ("family", "window", "switch", "pack_length", "expected"),
    [
        ("llama", None, None, 512, 512),  # never more than a pack holds
        ("llama", None, None, 20_000, 2048),
        ("mistral-sliding", WINDOW, None, 20_000, 2048),  # the window is within
        ("mistral-sliding", 4096, None, 20_000, 8192),
        ("mistral-sliding", 4096, None, 6000, 6000),
        ("mistral-sliding", 4096, None, 2048, 2048),  # no packed document reaches the window
        ("phi3-longrope", None, 4096, 20_000, 4160),
    ],
)
def test_the_proof_reads_what_a_target_can_make_different(
    family, window, switch, pack_length, expected
):
    config = tiny_model(family).config
    config.sliding_window = window
    if switch:
        config.rope_parameters["original_max_position_embeddings"] = switch
    assert proof_length(config, pack_length) == expected


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral-sliding"])
def test_a_lost_window_is_found_in_a_document_that_was_cut(family):
    target = target_of(family, "default")
    with pytest.raises(TargetError, match="does not isolate"):
        prove_isolation(target, ids_of(200, *[9] * 6), 3 * WINDOW, packing="block-causal")


def test_a_mask_is_that_of_its_part_and_device() -> None:
    """Layers of a kind may have other numbers of heads, and lie on other devices."""
    given = {"rule": module.causal_mask_function, "reach": None, "always": True}
    mask = RuleMask(**given, spans=[[(0, 9)]])
    for stop, device in ((4, "cpu"), (9, "cpu"), (9, "meta")):
        made = mask.of(0, 0, stop, 0, torch.device(device))
        assert made.shape == (1, 1, stop, stop) and made.device.type == device
