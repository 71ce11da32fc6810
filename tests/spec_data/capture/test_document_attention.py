"""Attention per document: the states of documents alone, and nothing of the size of a pack."""

from typing import Any

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from spec_data.capture import long_rows as document_attention
from spec_data.capture.long_rows import attention_per_document, spans_of
from spec_data.capture.mask_forms import PER_DOCUMENT, mask_forms
from spec_data.capture.proofs import prove_isolation
from spec_data.shards.errors import TargetError
from spec_data.shards.packing import row_layout
from tests.families import WINDOW
from tests.spec_data.capture.test_long_rows import Largest, target_of
from tests.spec_data.capture.test_model import ids_of
from tests.tolerance import close, network

LENGTHS = [[5, 30, 11], [3, 17], [2 * WINDOW]]
WIDTH = 48
FORWARD = {"terms": network(6), "dtype": torch.float32}
SDPA = ["gpt2", "mistral-sliding", "gemma3", "qwen3_moe", "deepseek_v3"]
EAGER = ["llama", "gemma2", "gpt_oss"]


@pytest.mark.parametrize(
    ("family", "attn"), [(f, "sdpa") for f in SDPA] + [(f, "eager") for f in EAGER]
)
def test_states_are_those_of_documents_alone(family: str, attn: str) -> None:
    target = target_of(family, attn)
    assert target.attn == attn
    documents = [ids_of(*row, seed=b) for b, row in enumerate(LENGTHS)]
    ids = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.long)
    for row, parts in zip(ids, documents, strict=True):
        row[: sum(map(len, parts))] = torch.cat(parts)
    layout = row_layout(LENGTHS, WIDTH)
    with Largest() as largest:
        packed, _ = target.capture(ids, *layout, PER_DOCUMENT)
    with pytest.raises(KeyboardInterrupt), attention_per_document(target.model, attn, layout[0]):
        raise KeyboardInterrupt
    assert target.config._attn_implementation == attn  # as it was, after an error too
    longest = max(max(row) for row in LENGTHS)
    heads, slots = target.text_config.num_attention_heads, ids.numel()
    width = max(p.shape[0] for p in target.model.parameters())  # of activations
    if family not in ("gpt_oss", "qwen3_moe", "deepseek_v3"):  # experts have larger tensors
        assert largest.elements <= max(heads * longest**2, slots * width)
    for row, parts in enumerate(documents):
        start = 0
        for part in parts:
            alone, _ = target.capture(part[None], *row_layout([[len(part)]], len(part)), None)
            for k in target.layers:
                found = packed.layers[k][row, start : start + len(part)]
                close(found, alone.layers[k][0], **FORWARD)
            close(packed.final[row, start : start + len(part)], alone.final[0], **FORWARD)
            start += len(part)


def test_it_is_the_first_form_on_a_cpu_and_no_form_elsewhere() -> None:
    config = target_of("llama", "sdpa").config
    assert mask_forms(config, "sdpa")[0] == mask_forms(config, "eager")[0] == PER_DOCUMENT
    assert PER_DOCUMENT not in mask_forms(config, "sdpa", "cuda")
    assert PER_DOCUMENT not in mask_forms(config, "flash_attention_2")


def test_a_family_with_attention_of_its_own_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the family makes its masks without asking."""
    target = target_of("mistral-sliding", "sdpa")
    registry = ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(registry._local_mapping, "spec_data_documents_sdpa", lambda **o: None)
    proof = prove_isolation(target, ids_of(5, 30, 11, 3, 17, 26, 9), 48)
    assert "does not accept it" in str(proof.differences[PER_DOCUMENT])
    assert proof.form == "block-causal-window"


def test_a_family_whose_eager_attention_is_not_found_falls_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: the function is in another module than the classes of the family."""
    target = target_of("llama", "eager")
    kind = type(target.model.model.layers[0].self_attn)
    monkeypatch.setattr(kind, "__module__", "typing")
    proof = prove_isolation(target, ids_of(5, 30, 11, 3, 17, 26, 9), 48)
    assert "does not accept it" in str(proof.differences[PER_DOCUMENT])
    assert proof.form == "block-causal"


@pytest.mark.parametrize("planted", ["spans", "window"])
def test_documents_that_are_cut_wrongly_fail_the_proof(
    planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted == "spans":

        def one_span(document_ids: torch.Tensor) -> Any:
            return [[(row[0][0], row[-1][1])] for row in spans_of(document_ids)]

        monkeypatch.setattr(document_attention, "spans_of", one_span)
    else:
        monkeypatch.setattr(document_attention.DocumentMask, "of", lambda *a: None)
    target = target_of("mistral-sliding", "sdpa")
    with pytest.raises(TargetError, match="does not isolate"):
        prove_isolation(target, ids_of(5, 30, 11, 3, 17, 26, 9), 48, packing=PER_DOCUMENT)
