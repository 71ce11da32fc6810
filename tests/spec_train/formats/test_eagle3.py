"""EAGLE-3 in every form: what engines read, and that it reads back bit for bit."""

import dataclasses
from typing import Any

import pytest
import torch

from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from tests.draft_tools import read_json, write_json
from tests.spec_train.drafts import any_draft
from tests.spec_train.formats import own_draft
from tests.spec_train.formats.own_draft import read
from tests.spec_train.formats.published.tiny import write
from tests.spec_train.formats.tools import ENGINES, export, nulls, same_weights

dataset, head, saved, facts = any_draft.dataset, any_draft.head, own_draft.saved, own_draft.facts

FORMS = ("hf", "vllm", "sglang", "speculators")
LONG = {"rope_theta": 1e4, "original_max_position_embeddings": 64}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    LONG | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    LONG | {"rope_type": "yarn", "factor": 4.0, "truncate": False},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r['rope_type']}-{len(r)}")
@pytest.mark.parametrize("form", FORMS)
def test_rope_survives_every_form(dataset, head, tmp_path, form, rope):
    draft = any_draft.build_draft("eagle3", dataset, head)
    draft.update_config(rope_parameters=rope)
    draft.save_pretrained(tmp_path / "own")
    out = export(tmp_path / "own", form, tmp_path / form, dataset.target_dir)
    assert load_draft(out).config.rope_parameters == rope
    raw, _ = read(out)
    layer = raw.get("transformer_layer_config", raw)
    assert layer["rope_parameters"] == rope and layer["rope_theta"] == rope["rope_theta"]
    assert ("rope_scaling" in layer) == (rope["rope_type"] != "default")


@pytest.mark.parametrize("layers", ["0,1,2", "0,2", "1"])
def test_engines_read_the_layers_that_it_was_trained_on(saved, dataset, tmp_path, layers):
    own = saved("eagle3", layers=layers)
    trained = [int(k) + 1 for k in layers.split(",")]  # hidden_states[k + 1] is block k's output
    for form, engines in (
        ("vllm", ("vllm", "llama.cpp")),
        ("sglang", ("sglang",)),
        ("hf", ("vllm", "llama.cpp", "sglang")),  # one directory for all three
        ("speculators", ("vllm", "llama.cpp")),
    ):
        if form == "sglang" and len(trained) == 1:
            with pytest.raises(DraftError, match=r"1 aux state: .* skips fc"):
                export(own, form, tmp_path / form, dataset.target_dir)
            continue
        raw, _ = read(export(own, form, tmp_path / form, dataset.target_dir))
        for engine in engines:
            assert ENGINES[engine](raw, 4) == trained, (form, engine)
        count = raw.get("transformer_layer_config", {}).get("num_aux_hidden_states")
        nested = raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [])
        assert len(trained) == (count or len(nested))  # what sizes vLLM's fc


@pytest.mark.parametrize("form", FORMS)
def test_keys_shapes_and_embedding(saved, dataset, head, tmp_path, form):
    own = saved("eagle3")
    raw, tensors = read(export(own, form, tmp_path / form, dataset.target_dir))
    prefix = "layers.0" if form == "speculators" else "midlayer"
    layer = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{x}_proj" for x in "qkvo"]
    layer += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    names = [
        "fc",
        "input_norm",
        "norm",
        "lm_head",
        "embed_tokens",
        *(f"{prefix}.{x}" for x in layer),
    ]
    assert set(tensors) == {f"{name}.weight" for name in names} | {"d2t", "t2d"}
    assert torch.equal(tensors["embed_tokens.weight"], head.embed_weight)
    assert tensors[f"{prefix}.self_attn.q_proj.weight"].shape == (32, 64)
    assert raw["draft_vocab_size"] == 40 and nulls(raw) == []
    assert raw["tie_word_embeddings"] is False and raw["norm_before_residual"] is False
    if form == "speculators":
        assert raw["speculators_model_type"] == "eagle3" and "model_type" not in raw
        assert raw["speculators_config"]["verifier"]["name_or_path"] == str(dataset.target_dir)
        (method,) = raw["speculators_config"]["proposal_methods"]
        assert method["speculative_tokens"] == 3  # the unroll steps
        assert raw["transformer_layer_config"]["vocab_size"] == 64
    else:
        assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["model_type"] == "llama"


def published(own, folder, prefix="midlayer.", **changes):
    """The draft as other tools publish it: no section of ours, few fields, no embedding or t2d."""
    raw, tensors = read(own)
    keep = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    keep += ("vocab_size", "draft_vocab_size", "rms_norm_eps", "rope_theta", "architectures")
    config = {name: raw[name] for name in keep} | {"num_hidden_layers": 1} | changes
    config = {name: value for name, value in config.items() if value is not ...}
    for name in ("embed_tokens.weight", "t2d"):
        del tensors[name]
    tensors = {name.replace("midlayer.", prefix): value for name, value in tensors.items()}
    return write(folder, config, tensors)


KEY = "eagle_aux_hidden_state_layer_ids"
IDS = {KEY: [1, 2, 3]}


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0."])
def test_a_published_draft_is_read_with_defaults(saved, facts, tmp_path, prefix):
    own = saved("eagle3")
    folder = published(own, tmp_path / "theirs", prefix, **IDS)
    again, ours = load_draft(folder, facts), load_draft(own)
    assert same_weights(again, ours) and torch.equal(again.draft_ids, ours.draft_ids)
    assert again.config.layers == (0, 1, 2) and again.config.origin == {}
    assert again.config.head_dim == 8 and again.options.ttt_steps == 7
    with pytest.raises(DraftError, match=r"no embed_tokens\.weight.*--target"):
        load_draft(folder)


def test_a_key_of_a_rope_table_that_is_unknown_is_named(saved, facts, tmp_path, caplog):
    rope = {"rope_type": "default", "rope_theta": 5e5, "squeeze": 3, "beta_fast": None}
    keys = IDS | {"rope_parameters": rope, "rope_theta": ...}
    folder = published(saved("eagle3"), tmp_path / "theirs", **keys)
    load_draft(folder, facts)
    assert "were not read: rope_parameters.squeeze." in caplog.text


@pytest.mark.parametrize("types", [["sliding_attention"], ["full_attention"]])
def test_the_rope_is_that_of_the_layers_types(saved, facts, tmp_path, types):
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    keys = IDS | {"layer_types": types, "sliding_window": 4, "rope_parameters": rope}
    keys |= {"rope_theta": ...}
    folder = published(saved("eagle3"), tmp_path / "theirs", **keys)
    found = load_draft(folder, facts).config.rope_parameters
    assert found["rope_theta"] == rope[types[0]]["rope_theta"]


@pytest.mark.parametrize(
    ("keys", "blocks", "layers"),
    [
        ({KEY: [2, 5, 6]}, None, (1, 4, 5)),  # inputs
        ({"eagle_config": {KEY: [1, 4, 5]}}, None, (1, 4, 5)),
        ({}, 32, (1, 15, 28)),  # every engine's default: inputs of blocks 2, L//2, L-3
    ],
)
def test_layers_of_published_drafts_follow_the_key_that_names_them(
    saved, facts, tmp_path, keys, blocks, layers
):
    folder = published(saved("eagle3"), tmp_path / "theirs", **keys)
    known = dataclasses.replace(facts, num_layers=blocks)
    assert load_draft(folder, known).config.layers == layers
    if blocks:
        with pytest.raises(DraftError, match="contains no layer ids"):
            load_draft(folder, dataclasses.replace(facts, num_layers=None))


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("Eagle3LlamaForCausalLM", {"eagle_config": {KEY: [1, 4, 5]}}, True),
        ("Eagle3Qwen3vlForCausalLM", {"eagle_config": {KEY: [1, 4, 5]}}, True),
        ("LlamaForCausalLMEagle3", {"eagle_config": {KEY: [1, 4, 5]}}, False),
        ("Eagle3LlamaForCausalLM", {KEY: [2, 5, 6]}, False),
        ("Eagle3LlamaForCausalLM", {KEY: [2, 5, 6], "eagle_config": {KEY: [1, 4, 5]}}, False),
    ],
)
def test_ids_that_two_programs_count_otherwise_are_said(
    saved, facts, tmp_path, caplog, name, keys, said
):
    keys = keys | {"architectures": [name]}
    folder = published(saved("eagle3"), tmp_path / "theirs", **keys)
    assert load_draft(folder, facts).config.layers == (1, 4, 5)
    assert ("two counts are possible: [1, 4, 5] are the outputs" in caplog.text) == said
    assert ("which are the outputs of [0, 3, 4]" in caplog.text) == said
    assert (f'"{KEY}": [2, 5, 6] (outputs) or [1, 4, 5] (inputs)' in caplog.text) == said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_fc": False}, "norm_before_fc = false, but the norms in"),
        ({"eagle_config": {"norm_before_fc": False}}, "norm_before_fc"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2"),
        ({"attention_bias": True}, "attention_bias = true, but .* has no such bias"),
        ({"hidden_act": "swilu"}, "no such activation"),
        ({"num_attention_heads": ...}, "missing num_attention_heads"),
        ({"architectures": ["MedusaModel"]}, "MedusaModel"),
    ],
)
def test_what_cannot_be_represented_is_refused(saved, facts, tmp_path, changes, message):
    folder = published(saved("eagle3"), tmp_path / "theirs", **IDS | changes)
    with pytest.raises(DraftError, match=message):
        load_draft(folder, facts)


def test_speculators_drafts_without_a_norm_are_read_as_vllm_serves_them(saved, tmp_path):
    out = export(saved("eagle3"), "speculators", tmp_path / "spec", "Some/Target")
    raw = read_json(out)
    write_json(out, {k: v for k, v in raw.items() if k != "norm_before_residual"})
    assert load_draft(out, accept_edited=True).config.norm_before_residual
    write_json(out, raw | {KEY: [1, 2, 4]})
    with pytest.raises(DraftError, match="contradicts itself"):
        load_draft(out, accept_edited=True)
    write_json(out, raw | {"speculators_model_type": "medusa"})
    with pytest.raises(DraftError, match="type medusa are unknown"):
        load_draft(out, accept_edited=True)
