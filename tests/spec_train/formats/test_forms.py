"""Every draft in every form: refused, or written and read back as the same draft, bit for bit."""

from typing import Any

import pytest
import torch

import spec_train
from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from tests.draft_tools import read_json
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft
from tests.spec_train.formats import own_draft
from tests.spec_train.formats.tools import nulls

dataset, head = any_draft.dataset, any_draft.head
target, facts = own_draft.target, own_draft.facts
FORMS = ("hf", "vllm", "sglang", "speculators", "deepspec", "transformers")
BIASES = {"attention_bias": "true", "mlp_bias": "true"}
MASK = {"layout": "mask", "block_size": 4}
MIXED = {"sliding_window": 6, "layer_types": "sliding_attention,full_attention"}
PLAIN = {"norm_before_fc": False}
BOTH_WAYS = {"sliding_window_non_causal": True}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("eagle", {}, "hf vllm sglang"),
    ("eagle", {"num_layers": 2, "attention_bias": "true"}, "hf vllm sglang"),
    ("eagle", {"qk_norm": True, "hidden_act": "gelu"}, "hf"),
    ("eagle", BIASES, "hf vllm"),
    ("eagle3", {}, "hf vllm sglang speculators"),
    ("eagle3", {"draft_vocab_size": 0}, "hf vllm sglang speculators"),
    ("eagle3", {"layers": "0,2", "ttt_steps": 3, "loss": "lk-alpha"}, "hf vllm sglang speculators"),
    ("eagle3", {"num_layers": 2}, "hf vllm sglang speculators"),
    ("eagle3", {"num_layers": 3, "qk_norm": True}, "hf vllm speculators"),
    ("eagle3", {"draft_vocab_size": 0, "qk_norm": True} | PLAIN, "hf vllm speculators deepspec"),
    ("eagle3", {"fc_norm": True, "norm_output": True}, "hf vllm sglang speculators"),
    ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}, "hf vllm speculators"),
    ("eagle3", {"train_embeddings": True}, "hf vllm speculators"),
    ("eagle3", {**BIASES, "head_dim": 16}, "hf vllm speculators"),
    ("eagle3", {"num_layers": 2} | MIXED, "hf vllm speculators"),
    ("peagle", {}, "hf vllm speculators"),
    ("peagle", {"qk_norm": True, "train_embeddings": True}, "hf vllm speculators"),
    ("peagle", {"norm_before_fc": True, "norm_before_residual": True}, "hf vllm speculators"),
    ("peagle", {"fc_norm": True, "draft_vocab_size": 0}, "hf vllm speculators"),
    ("dspark", {}, "hf vllm sglang speculators deepspec"),
    ("dspark", {"markov_head_type": "gated", "confidence_weight": 0.0}, "hf sglang deepspec"),
    ("dspark", {"draft_vocab_size": 40}, "hf vllm speculators"),
    (
        "dspark",
        {"layout": "mask", "confidence_head_with_markov": False},
        "hf vllm sglang speculators",
    ),
    ("dspark", {"train_embeddings": True}, "hf vllm speculators deepspec"),
    (
        "dspark",
        {"attention_bias": "true", "intermediate_size": 20},
        "hf vllm sglang speculators deepspec",
    ),
    ("dspark", MIXED, "hf vllm sglang speculators"),
    ("dspark", {"attention_sink_bias": True}, "hf vllm sglang"),
    ("dflash", MASK | {"attention_sink_bias": True}, "hf vllm sglang"),
    ("dflash", MASK, "hf vllm sglang speculators transformers"),
    ("dflash", {"layout": "anchor"}, "hf vllm speculators deepspec"),
    ("dflash", MASK | {"num_attention_heads": 2, "train_embeddings": True}, "hf vllm speculators"),
    ("dflash", MASK | MIXED, "hf vllm sglang"),
    ("dflash2", {}, "hf vllm sglang speculators"),
    ("dflash2", {"train_embeddings": True, "conv_kernel_size": 3}, "hf vllm speculators"),
    ("domino", {"block_size": 3}, "hf sglang"),
    ("xpress", {}, "hf vllm"),
    ("xpress", {"xpress_rank": 24}, "hf"),
    ("xpress", {"xpress_mlp_hidden": 96}, "hf"),
    ("lilicorr", {"lilicorr_candidate_topk": 4, "conv_kernel_size": 2}, "hf vllm sglang"),
    ("lilicorr", {"lilicorr_candidate_topk": 3}, "hf"),
    ("lilicorr", {"lilicorr_candidate_topk": 4, "train_embeddings": True}, "hf"),
    ("domino", MASK | {"pure_draft_prefix_len": 0}, "hf"),
    ("dflash", MASK | MIXED | BOTH_WAYS, "hf vllm sglang speculators transformers"),
]
"""(kind, options, the forms that hold it and whose engines read it right)."""


LATER = [case for place, case in enumerate(CASES) if place % 2 and case[1]]
"""Of each kind about half: every form writes the same names for an option."""


@pytest.mark.parametrize(
    ("kind", "options", "forms"),
    [pytest.param(*case, marks=pytest.mark.long) if case in LATER else case for case in CASES],
    ids=str,
)
def test_a_draft_is_the_same_in_every_form_that_holds_it(
    dataset, head, target, facts, tmp_path, kind, options, forms
):
    draft, own = build_draft(kind, dataset, head, **options), tmp_path / "own"
    with torch.no_grad():
        for number, parameter in enumerate(draft.trainable_parameters()):
            parameter += 0.01 * (number + 1)
    draft.save_pretrained(own)
    for form in FORMS:
        out = tmp_path / form
        if form not in forms.split():
            with pytest.raises(DraftError, match=f"cannot be exported as {form}"):
                spec_train.export(own, out, form, target)
            assert not out.exists()
            continue
        spec_train.export(own, out, form, target)
        assert nulls(read_json(out)) == [] or form == "transformers"
        load_draft(out, facts).save_pretrained(tmp_path / f"{form}-again")
        spec_train.export(out, tmp_path / f"{form}-twice", form, target)  # is the form itself
        for name in ("config.json", "model.safetensors"):
            again, twice = tmp_path / f"{form}-again" / name, tmp_path / f"{form}-twice" / name
            assert again.read_bytes() == (own / name).read_bytes(), form
            assert twice.read_bytes() == (out / name).read_bytes(), form


def test_an_export_for_transformers_has_the_table_in_which_engines_look(
    dataset, head, target, facts, tmp_path
):
    draft = build_draft("dflash", dataset, head, **MASK)
    draft.save_pretrained(tmp_path / "own")
    spec_train.export(tmp_path / "own", tmp_path / "out", "transformers", target)
    raw = read_json(tmp_path / "out")
    names = ("mask_token_id", "target_layer_ids", "block_size")
    assert raw["dflash_config"] == {name: raw[name] for name in names} | {"causal": False}
    assert raw["target_layer_ids"] == list(draft.config.layers)


def test_vllm_refines_the_whole_vocabulary_of_an_exported_xpress(dataset, head, target, tmp_path):
    build_draft("xpress", dataset, head).save_pretrained(tmp_path / "own")
    spec_train.export(tmp_path / "own", tmp_path / "out", "vllm", target)
    assert read_json(tmp_path / "out")["xpress_topc"] == 0
    spec_train.export(tmp_path / "out", tmp_path / "hf", "hf", target)
    own, again = (read_json(tmp_path / name) for name in ("own", "hf"))
    assert own == again
