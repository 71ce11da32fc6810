"""Shapes of drafts in the forms of engines: what each form holds, and which engine serves it."""

import dataclasses
from typing import Any

import pytest
import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.evaluation.exporting import find_target
from spec_train.formats.forms import write_form
from spec_train.formats.preflight import REFUSE, WARN, Subject, preflight
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft

dataset, head = any_draft.dataset, any_draft.head


def own_files(name: str, dataset: HiddenStatesDataset, head: TargetHead, **options: Any) -> Any:
    draft = build_draft(name, dataset, head, **options)
    with torch.no_grad():
        for number, parameter in enumerate(draft.trainable_parameters()):
            parameter += 0.01 * (number + 1)
    return draft.files(torch.float32, "own")


def test_sglang_reads_the_input_norm_of_later_layers_under_another_name(dataset, head):
    own = own_files("eagle3", dataset, head, num_layers=2)
    target = find_target(None)
    written = write_form(own, "sglang", target).tensors
    assert "layers.1.hidden_norm.weight" in written
    assert "layers.1.input_layernorm.weight" not in written
    assert {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"} <= set(written)
    assert "layers.1.input_layernorm.weight" in write_form(own, "vllm", target).tensors


def test_norms_of_queries_and_keys_name_qwen3s_class(dataset, head):
    for name in ("eagle3", "peagle"):
        config = own_files(name, dataset, head, qk_norm=True).config
        assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"]
        assert config["model_type"] == "qwen3"
    form = write_form(own_files("eagle3", dataset, head), "vllm", find_target(None))
    assert form.config["architectures"] == ["LlamaForCausalLMEagle3"]


RULES: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    (
        "eagle",
        {"hidden_act": "gelu"},
        {"vllm": "hidden_act gelu: it supports only silu", "sglang": "hidden_act gelu"},
    ),
    ("eagle", {"qk_norm": True}, {"vllm": "qk_norm", "sglang": "qk_norm"}),
    ("eagle", {"mlp_bias": "true"}, {"sglang": "mlp_bias"}),
    ("eagle", {"train_embeddings": True}, {"sglang": "train_embeddings"}),
    (
        "eagle3",
        {"hidden_act": "gelu"},
        {"vllm": "only silu", "sglang": "only silu", "llama.cpp": "silently computes silu"},
    ),
    (
        "eagle3",
        {"qk_norm": True},
        {"sglang": "silently drops norms", "llama.cpp": "qk_norm is not supported"},
    ),
    (
        "eagle3",
        {"qk_norm": True, "attention_bias": "true"},
        {
            "vllm": "no bias of o_proj",
            "sglang": "attention_bias: its class",
            "llama.cpp": "attention_bias: its class",
        },
    ),
    (
        "eagle3",
        {"qk_norm": True, "mlp_bias": "true"},
        {
            "vllm": "no biases of the MLP",
            "sglang": "mlp_bias",
            "llama.cpp": "mlp_bias: its class",
            "speculators": "no biases of the MLP",
        },
    ),
    (
        "eagle3",
        {"attention_bias": "true"},
        {"sglang": "attention_bias: its class", "llama.cpp": "attention_bias: its class"},
    ),
    ("eagle3", {"norm_before_residual": True}, {"sglang": "it ignores the key"}),
    ("eagle3", {"norm_before_fc": True}, {}),
    ("eagle3", {"train_embeddings": True}, {"sglang": "always uses the target's embedding"}),
    ("eagle3", {"num_layers": 2}, {"llama.cpp": "exactly one"}),
    ("eagle3", {"layers": "1"}, {"sglang": "and skips fc", "llama.cpp": "1 aux states"}),
    ("eagle3", {"layers": "0,1"}, {"llama.cpp": "2 aux states"}),
    ("peagle", {"qk_norm": True}, {}),
    ("peagle", {"hidden_act": "gelu"}, {"vllm": "only silu"}),
    ("peagle", {"qk_norm": True, "mlp_bias": "true"}, {"vllm": "MLP", "speculators": "MLP"}),
    (
        "dspark",
        {"hidden_act": "gelu"},
        {"vllm": "only silu", "sglang": "only silu", "llama.cpp": "silently computes silu"},
    ),
    (
        "dspark",
        {"markov_head_type": "gated"},
        {"vllm": "gated Markov head", "llama.cpp": "gated Markov head"},
    ),
    ("dspark", {"draft_vocab_size": 40}, {"sglang": "a reduced vocabulary"}),
    (
        "dspark",
        {"confidence_head_with_markov": False},
        {"llama.cpp": "confidence_head_with_markov = false"},
    ),
    ("dspark", {"attention_bias": "true"}, {"llama.cpp": "attention_bias: its class"}),
    (
        "dspark",
        {"train_embeddings": True},
        {"sglang": "always uses the target's embedding", "llama.cpp": "it ties the head"},
    ),
    *(
        (
            "dflash",
            {name: value},
            dict.fromkeys(("vllm", "sglang", "llama.cpp", "speculators"), words),
        )
        for name, value, words in (
            ("qk_norm", False, "always have norms of queries and keys"),
            ("mlp_bias", "true", "no such biases"),
        )
    ),
]


@pytest.mark.parametrize(("name", "options", "refused"), RULES)
def test_the_preflight_knows_who_serves_a_shape(dataset, head, name, options, refused):
    """Compared with a draft of the default shape: exactly these engines refuse it as well."""
    target = find_target(None)
    plain = preflight(Subject(own_files(name, dataset, head), target, "vllm"))
    found = preflight(Subject(own_files(name, dataset, head, **options), target, "vllm"))
    new = {
        engine: " ".join(f.text for f in findings if f.level == REFUSE and f not in plain[engine])
        for engine, findings in found.items()
    }
    engines = ("vllm", "sglang", "llama.cpp", "speculators")
    assert {engine for engine in engines if new[engine]} == set(refused)
    for engine, words in refused.items():
        assert words in new[engine]


def test_several_layers_need_the_form_of_sglang(dataset, head):
    own, target = own_files("eagle3", dataset, head, num_layers=2), find_target(None)
    for form, needed in (("vllm", True), ("sglang", False)):
        found = preflight(Subject(own, target, form))["sglang"]
        assert needed == any("needs --format sglang" in f.text for f in found if f.level == WARN)


def test_a_trained_embedding_is_not_taken_for_one_of_another_target(dataset, head):
    target = dataclasses.replace(find_target(None), embedding=head.embed_weight)
    own = own_files("eagle3", dataset, head, train_embeddings=True)
    assert not torch.equal(own.tensors["embed_tokens.weight"], head.embed_weight)
    found = preflight(Subject(own, target, "vllm"))["spec-train"]
    assert not [f for f in found if f.level == REFUSE]
    frozen = dataclasses.replace(own, config={**own.config, "train_embeddings": False})
    found = preflight(Subject(frozen, target, "vllm"))["spec-train"]
    assert any("embed_tokens is not the target's" in f.text for f in found if f.level == REFUSE)


def test_vllm_without_a_gpu(dataset, head):
    for name, words in (("dspark", "needs Triton"), ("dflash", "k_norm of layer 0")):
        subject = Subject(own_files(name, dataset, head), find_target(None), "vllm")
        assert any(words in f.text for f in preflight(subject)["vllm-cpu"])
