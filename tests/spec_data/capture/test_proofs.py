"""Packing is proven: every family agrees with unpacked capture, and leaks are found."""

import pytest
import torch

from spec_data.capture.model import Target
from spec_data.capture.proofs import proof_documents, prove_isolation
from spec_data.shards.errors import TargetError
from tests.families import LEAKY, WINDOW, tiny_model
from tests.spec_data.capture.test_model import ids_of

LENGTHS = (5, 30, 11, 3, 17, 26, 9)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "mistral-sliding"])
def test_a_packed_form_is_found_and_agrees(family):
    """In bfloat16; `test_families` proves every family in float32."""
    target = Target(tiny_model(family).to(torch.bfloat16), (0, 2, 4))
    proof = prove_isolation(target, ids_of(*LENGTHS), 48)
    assert proof.form not in ("rows", "single")
    assert proof.differences[proof.form] <= proof.tolerance
    assert proof.longest > WINDOW, "the proof must see documents longer than the window"


@pytest.mark.parametrize("family", LEAKY)
def test_families_that_carry_state_fall_back_to_rows(family):
    target = Target(tiny_model(family), (0, 2, 4))
    proof = prove_isolation(target, ids_of(*LENGTHS), 48)
    assert proof.form == "rows"
    measured = [v for k, v in proof.differences.items() if k != "rows" and isinstance(v, float)]
    assert measured, "the leak was measured, not assumed"
    assert min(measured) > 0.05 > proof.tolerance


def test_convolutions_leak_into_the_first_tokens_of_long_documents():
    """Few tokens of a document differ, less than rounding on average over all in bfloat16."""
    target = Target(tiny_model("lfm2").to(torch.bfloat16), (0, 1, 2))
    proof = prove_isolation(target, ids_of(900, 700, 800, 1000), 2048)
    assert proof.form == "rows"
    measured = [v for k, v in proof.differences.items() if k != "rows" and isinstance(v, float)]
    assert min(measured) > 5 * proof.tolerance


@pytest.mark.parametrize(("lengths", "packing"), [(LENGTHS, "rows"), ((30, 40), "auto")])
def test_rows_can_be_forced_and_stay_without_two_documents_in_a_pack(lengths, packing):
    target = Target(tiny_model("llama"), (0,))
    assert prove_isolation(target, ids_of(*lengths), 48, packing=packing).form == "rows"


def test_the_proof_packs_at_least_two_documents_together():
    """Two long documents that fill a pack each must not hide the short ones that share a pack."""
    lengths = [60, 64, *[6] * 40]
    chosen = proof_documents(lengths, 64, budget=64)
    assert sum(lengths[d] == 6 for d in chosen) >= 2
    target = Target(tiny_model("qwen3_next"), (0, 2, 4))
    documents = ids_of(*[lengths[d] for d in chosen])
    assert prove_isolation(target, documents, 64).form == "rows"


def test_packed_batches_of_a_leaky_target_are_refused():
    target = Target(tiny_model("qwen3_next"), (0, 2, 4))
    row = torch.cat(ids_of(30, 20))[None]
    ones = torch.ones_like(row)
    with pytest.raises(TargetError, match="carries state from one packed document"):
        target.generate_batch(row, ones, ones, seq_lens=[[30, 20]])
    target.generate_batch(row, ones, ones)
