"""Shapes of drafts in the forms of engines: what each form holds, and which engine serves it."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_data.models.rope_settings import config_table, yarn_scales
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.evaluation.exporting import find_target
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.preflight import REFUSE, WARN, Subject, preflight
from spec_train.formats.write import write_form
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft

dataset, head = any_draft.dataset, any_draft.head
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}


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


def by(engines: str, words: str) -> dict[str, str]:
    return dict.fromkeys(engines.split(), words)


BIAS = "attention_bias: its class"
SAME_ACT = by("vllm sglang", "only silu")
ALL = "vllm sglang llama.cpp speculators"
RULES: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("eagle", {"hidden_act": "gelu"}, by("vllm sglang", "hidden_act gelu")),
    ("eagle", {"qk_norm": True}, by("vllm sglang", "qk_norm")),
    ("eagle", {"mlp_bias": "true"}, by("sglang", "mlp_bias")),
    ("eagle", {"train_embeddings": True}, by("sglang", "train_embeddings")),
    ("eagle3", {"hidden_act": "gelu"}, SAME_ACT | by("llama.cpp", "silently computes silu")),
    ("eagle3", {"qk_norm": True}, by("sglang", "silently drops") | by("llama.cpp", "qk_norm is")),
    (
        "eagle3",
        {"qk_norm": True, "attention_bias": "true"},
        by("vllm", "no bias of o_proj") | by("sglang llama.cpp", BIAS),
    ),
    (
        "eagle3",
        {"qk_norm": True, "mlp_bias": "true"},
        by("vllm speculators", "no biases of the MLP") | by("sglang llama.cpp", "mlp_bias"),
    ),
    ("eagle3", {"attention_bias": "true"}, by("sglang llama.cpp", BIAS)),
    ("eagle3", {"norm_before_residual": True}, by("sglang", "it ignores the key")),
    ("eagle3", {"norm_before_fc": True}, {}),
    ("eagle3", {"train_embeddings": True}, by("sglang", "always uses the target's embedding")),
    ("eagle3", {"num_layers": 2}, by("llama.cpp", "exactly one")),
    ("eagle3", {"layers": "1"}, by("sglang", "and skips fc") | by("llama.cpp", "1 aux states")),
    ("eagle3", {"layers": "0,1"}, by("llama.cpp", "2 aux states")),
    ("eagle3", {"fc_norm": True}, by("llama.cpp", "fc_norm")),
    ("eagle3", {"norm_output": True}, by("llama.cpp", "norm_output")),
    ("peagle", {"qk_norm": True}, {}),
    ("peagle", {"hidden_act": "gelu"}, by("vllm", "only silu")),
    ("peagle", {"qk_norm": True, "mlp_bias": "true"}, by("vllm speculators", "MLP")),
    ("dspark", {"hidden_act": "gelu"}, SAME_ACT | by("llama.cpp", "silently computes silu")),
    ("dspark", {"markov_head_type": "gated"}, by("vllm llama.cpp", "gated Markov head")),
    ("dspark", {"draft_vocab_size": 40}, by("sglang", "a reduced vocabulary")),
    ("dspark", {"markov_rank": 0, "confidence_weight": 0.0}, by("sglang", "no Markov head")),
    ("dflash", {"layout": "anchor"}, by("sglang", "no Markov head")),
    ("dspark", {"confidence_head_with_markov": False}, by("llama.cpp", "with_markov = false")),
    ("dspark", {"attention_bias": "true"}, by("llama.cpp", BIAS)),
    ("dspark", {"train_embeddings": True}, by("sglang", "target's emb") | by("llama.cpp", "ties")),
    ("dflash", {"qk_norm": False}, by(ALL, "always have norms of queries and keys")),
    ("dflash", {"mlp_bias": "true"}, by(ALL, "no such biases")),
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


@pytest.mark.parametrize(
    ("options", "form", "words"),
    [
        ({"num_layers": 2}, "vllm", "needs --format sglang"),
        ({"num_layers": 2}, "sglang", "needs --format sglang"),
        ({"layers": "0,2"}, "vllm", "2 aux states"),
        ({"norm_output": True}, "vllm", "earlier ones silently ignore"),
    ],
)
def test_warnings_of_sglang(dataset, head, options, form, words):
    own = own_files("eagle3", dataset, head, **options)
    found = preflight(Subject(own, find_target(None), form))["sglang"]
    assert any(words in f.text for f in found if f.level == WARN) == (form == "vllm")


def test_vllm_drafts_with_every_mtp_block_of_a_target_that_has_several(dataset, head):
    own = own_files("mtp", dataset, head)
    for count in (1, 3):
        section = own.config[SECTION]
        section = section | {"target": section["target"] | {"num_nextn_predict_layers": count}}
        some = dataclasses.replace(own, config=own.config | {SECTION: section})
        found = preflight(Subject(some, find_target(None), "target"))["vllm"]
        assert any(f"{count} MTP blocks" in f.text for f in found) == (count > 1)


def test_llama_cpp_serves_a_dflash2_whose_scores_fit_into_a_state(dataset, head):
    for count, refused in ((4, False), (5, False), (6, True)):  # 20, 30 and 42 numbers in 32
        own = own_files("dflash2", dataset, head, selector_top_k=count)
        found = preflight(Subject(own, find_target(None), "vllm"))["llama.cpp"]
        assert [f.text.startswith("6 candidates") for f in found if f.level == REFUSE] == (
            [True] if refused else []
        )


@pytest.mark.parametrize(
    ("kind", "rope", "refused"),
    [
        ("eagle3", {"rope_type": "default", "partial_rotary_factor": 0.5}, "llama.cpp"),
        ("dflash", {"rope_type": "default", "partial_rotary_factor": 0.5}, ""),
        ("eagle3", {"rope_type": "llama3"}, ""),
        ("dflash", {"rope_type": "llama3"}, "llama.cpp"),
        ("eagle3", {"rope_type": "longrope"}, "llama.cpp"),
        ("dspark", {"rope_type": "longrope"}, "llama.cpp vllm"),
        ("eagle3", {"rope_type": "proportional"}, "llama.cpp"),
        ("dspark", {"rope_type": "proportional"}, "llama.cpp"),
        ("dflash", {"rope_type": "dynamic"}, "sglang"),
        ("dspark", YARN, ""),
        ("dspark", YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "llama.cpp"),
        ("eagle3", YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}, "llama.cpp"),
        ("eagle3", YARN | {"mscale": 1.0}, ""),  # one of both is not read by anyone
        ("eagle3", YARN | {"attention_factor": 1.0}, "sglang llama.cpp"),
        ("dflash", YARN | {"attention_factor": 1.2079441541679836}, ""),  # as in OLMo 3: the usual
        ("dspark", {"rope_type": "linear"}, ""),
    ],
)
def test_the_preflight_knows_the_ropes_that_an_engine_drops(dataset, head, kind, rope, refused):
    own = own_files(kind, dataset, head)
    own = dataclasses.replace(own, config={**own.config, "rope_parameters": rope})
    found = preflight(Subject(own, find_target(None), "vllm"))
    words = ("rope type", "partial_rotary_factor", "scale of its yarn", "attention_factor of its")
    named = {
        engine
        for engine in ("vllm", "sglang", "llama.cpp", "speculators")
        if any(f.level == REFUSE and f.text.startswith(words) for f in found[engine])
    }
    assert named == set(refused.split())


def test_yarns_scales_are_those_of_transformers():
    shape = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "rope_parameters": None}
    for more in ({}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"attention_factor": 0.4}):
        config = SimpleNamespace(**shape | {"max_position_embeddings": 64})
        config.rope_parameters = YARN | {"rope_theta": 1e4} | more
        trained = config_table(config).factor
        assert yarn_scales(config.rope_parameters)["trained"] == pytest.approx(trained, abs=5e-4)


@pytest.mark.parametrize(("truncate", "warned"), [(False, True), (True, False)])
def test_llama_cpp_does_not_read_that_yarn_is_not_truncated(dataset, head, truncate, warned):
    own = own_files("eagle3", dataset, head)
    rope = YARN | {"truncate": truncate}
    own = dataclasses.replace(own, config={**own.config, "rope_parameters": rope})
    found = preflight(Subject(own, find_target(None), "vllm"))
    by = {name for name, rows in found.items() if any("truncate" in f.text for f in rows)}
    assert by == ({"llama.cpp"} if warned else set())


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_sinks_of_block_drafts_are_written_where_engines_read_them(dataset, head, kind):
    own, target = own_files(kind, dataset, head, attention_sink_bias=True), find_target(None)
    found = preflight(Subject(own, target, "sglang"))
    named = {
        name: finding.level
        for name, rows in found.items()
        for finding in rows
        if finding.text.startswith("attention sinks")
    }
    assert named.pop("sglang") == WARN
    assert "llama.cpp" not in named and named["speculators"] == REFUSE
    form = write_form(own, "sglang", target)
    assert form.config["dflash_config"]["attention_sink_bias"] is True
    sinks = form.tensors["layers.0.self_attn.attention_sink_bias"]
    assert sinks.shape == (own.config["num_attention_heads"],)


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "LlamaForCausalLM"])
def test_sglangs_class_of_deepseek_reads_ids_as_outputs_only_if_the_first_is_1(dataset, head, name):
    facts = dataclasses.replace(find_target(None), architectures=(name,))
    for layers, shifted in (("1,2", False), ("0,1", True), ("0", True)):
        own = own_files("eagle3", dataset, head, layers=layers)
        texts = [f.text for f in preflight(Subject(own, facts, "sglang"))["sglang"]]
        found = any("states of one block before" in text for text in texts)
        assert found == (shifted and name != "LlamaForCausalLM")


def test_a_trained_embedding_is_not_taken_for_one_of_another_target(dataset, head):
    target = dataclasses.replace(find_target(None), embedding=head.embed_weight)
    own = own_files("eagle3", dataset, head, train_embeddings=True)
    assert not torch.equal(own.tensors["embed_tokens.weight"], head.embed_weight)
    found = preflight(Subject(own, target, "vllm"))["spec-train"]
    assert not [f for f in found if f.level == REFUSE]
    frozen = dataclasses.replace(own, config={**own.config, "train_embeddings": False})
    found = preflight(Subject(frozen, target, "vllm"))["spec-train"]
    assert any("embed_tokens is not the target's" in f.text for f in found if f.level == REFUSE)


def test_an_embedding_that_is_not_found_in_a_target_is_said(dataset, head):
    own = own_files("eagle3", dataset, head)
    for size in (None, 32):  # None: no target was given, and the draft names its class
        names = ("AnotherForCausalLM",)
        target = dataclasses.replace(find_target(None), architectures=names, hidden_size=size)
        found = preflight(Subject(own, target, "vllm"))["spec-train"]
        said = [f for f in found if "embedding was not found" in f.text]
        assert len(said) == (size is not None) and all(f.level == WARN for f in said)


def test_vllm_without_a_gpu(dataset, head):
    for name, words in (("dspark", "needs Triton"), ("dflash", "k_norm of layer 0")):
        subject = Subject(own_files(name, dataset, head), find_target(None), "vllm")
        assert any(words in f.text for f in preflight(subject)["vllm-cpu"])
