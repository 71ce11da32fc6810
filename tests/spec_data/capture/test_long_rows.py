"""Long documents: chunks of queries give the plain states, without anything of size T x T."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spec_data.capture import long_rows
from spec_data.capture import model as model_module
from spec_data.capture.hooks import Captured
from spec_data.capture.long_rows import ChunkedMask, attention_in_chunks
from spec_data.capture.mask_forms import PER_DOCUMENT, mask_forms
from spec_data.capture.model import Target
from spec_data.capture.proofs import proof_documents, proof_length, prove_isolation
from spec_data.shards.errors import TargetError
from spec_data.shards.packing import row_layout
from tests.families import FAMILIES, LEAKY, WINDOW, tiny_model
from tests.spec_data.capture.test_model import ids_of
from tests.tolerance import close, network

CHOSEN, LENGTH = (0, 2, 4), 200
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
    monkeypatch.setattr(long_rows, "QUERIES", 16)
    monkeypatch.setattr(model_module, "LONG_ROW", 64)


def target_of(family: str, attn: str) -> Target:
    model = tiny_model(family)
    if attn == "eager":
        model.set_attn_implementation("eager")
    return Target(model, CHOSEN)


def capture(target: Target, ids: Tensor) -> tuple[Captured, int]:
    """Capture a document alone; return its states, and the elements of the largest tensor."""
    layout = row_layout([[len(ids)]], len(ids))
    with Largest() as largest:
        captured, _ = target.capture(ids[None], *layout, None)
    return captured, largest.elements


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("attn", ["default", "eager"])
@pytest.mark.parametrize("family", [*FAMILIES, "gemma4", "phi3-longrope", "deepseek_v3"])
def test_a_long_document_has_the_states_of_output_hidden_states_in_bounded_memory(family, attn):
    target, (ids,) = target_of(family, attn), ids_of(LENGTH)
    with torch.no_grad(), Largest() as dense:
        plain = target.model(ids[None], output_hidden_states=True, use_cache=False)
    capture(target, ids)  # the first one proves the chunks, against a plain forward
    captured, elements = capture(target, ids)
    for k in CHOSEN:
        close(captured.layers[k], plain.hidden_states[k + 1], **FORWARD, name=f"layer {k}")
    close(captured.final, plain.hidden_states[-1], **FORWARD)
    with pytest.raises(KeyboardInterrupt), attention_in_chunks(target.model, target.attn):
        raise KeyboardInterrupt
    assert target.config._attn_implementation == target.attn  # as it was, after an error too
    assert elements < LENGTH * LENGTH
    windowed = getattr(target.text_config, "sliding_window", None)
    if target.attn == "eager" or windowed or family == "deepseek_v3":
        assert target._chunks == {True: True}
        assert dense.elements >= LENGTH * LENGTH, "the plain forward has what chunks avoid"
    else:
        assert not target._chunks  # plain causal attention needs no mask


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("family", LEAKY)
def test_a_recurrent_target_captures_long_documents_as_it_is(family):
    target, (ids,) = target_of(family, "default"), ids_of(LENGTH)
    plain = target.model(ids[None], output_hidden_states=True, use_cache=False)
    captured, _ = capture(target, ids)
    close(captured.final, plain.hidden_states[-1], **FORWARD)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_chunks_that_lose_the_window_are_found_and_not_used(family, monkeypatch, caplog):
    """The planted failure: chunks whose queries see every earlier token."""

    def everything(
        self: ChunkedMask, start: int, stop: int, device: torch.device
    ) -> tuple[int, Tensor]:
        rows = torch.arange(start, stop)[:, None] >= torch.arange(stop)[None]
        return 0, rows[None, None]

    monkeypatch.setattr(ChunkedMask, "part", everything)
    target, (ids,) = target_of(family, "default"), ids_of(LENGTH)
    plain = target.model(ids[None], output_hidden_states=True, use_cache=False)
    captured, _ = capture(target, ids)
    assert target._chunks == {True: False}
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
    def slices_its_mask(
        self: ChunkedMask, start: int, stop: int, device: torch.device
    ) -> tuple[int, Tensor]:
        raise TypeError("'ChunkedMask' object is not subscriptable")

    monkeypatch.setattr(ChunkedMask, "part", slices_its_mask)
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
        target.capture(ids, *one, form)
        target.capture(ids, *two, form)
    # per document, block-causal, position ids
    assert [mask is None for mask in seen] == [True, True, True, False, True, True]


# --- proofs --------------------------------------------------------------------------------------


def test_one_long_document_does_not_lengthen_the_proof():
    """The planted failure: the proof ran rows as long as the longest document."""
    lengths = [30] * 40 + [20_000]
    chosen = proof_documents(lengths, 2048, limit=2048)
    assert 40 in chosen and len(chosen) > 8
    assert sum(min(lengths[d], 2048) for d in chosen) <= 4096
    target, widths = target_of("mistral-sliding", "default"), []
    run = target.capture

    def counted(input_ids: Tensor, *args: Any, **options: Any) -> Any:
        widths.append(input_ids.shape[1])
        return run(input_ids, *args, **options)

    target.capture = counted  # type: ignore[method-assign]
    proof = prove_isolation(target, ids_of(250, 9, 12, 7), 48)
    assert max(widths) == proof.longest == 48
    assert proof.form == PER_DOCUMENT


@pytest.mark.parametrize(
    ("family", "pack_length", "expected"),
    [
        ("llama", 512, 512),  # never more than a pack holds
        ("llama", 20_000, 2048),
        ("mistral-sliding", 20_000, 2048),  # its window of 8 is within
    ],
)
def test_the_proof_reads_what_a_target_can_make_different(family, pack_length, expected):
    assert proof_length(tiny_model(family).config, pack_length) == expected


def test_the_proof_reads_beyond_a_long_window_and_a_late_switch():
    config = tiny_model("mistral-sliding").config
    config.sliding_window = 4096
    assert proof_length(config, 20_000) == 8192
    assert proof_length(config, 6000) == 6000  # all that a pack can hold
    assert proof_length(config, 2048) == 2048  # no packed document reaches the window
    config = tiny_model("phi3-longrope").config
    config.rope_parameters["original_max_position_embeddings"] = 4096
    assert proof_length(config, 20_000) == 4160


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral-sliding"])
def test_a_lost_window_is_found_in_a_document_that_was_cut(family):
    target = target_of(family, "default")
    with pytest.raises(TargetError, match="does not isolate"):
        prove_isolation(target, ids_of(200, *[9] * 6), 3 * WINDOW, packing="block-causal")
