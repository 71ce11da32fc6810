"""A target is loaded completely, from safetensors alone, with the head that its config names."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from spec_data.capture.model import Target
from spec_data.models import loading
from spec_data.models.loading import load_model, shares_weight
from spec_data.models.weight_files import weight_files, weight_names, weights_hash
from spec_data.shards.errors import MissingError, TargetError
from spec_train.formats.target_facts import read_target
from tests.current_families import COMMON
from tests.families import tiny_model
from tests.spec_train.fitted import edit

WEIGHTS = "model.safetensors"


def saved(folder: Path, family: str = "llama") -> Path:
    tiny_model(family).save_pretrained(folder)
    return folder


def rewrite(folder: Path, **changes) -> None:
    """Change tensors of the weights: None removes one."""
    tensors = load_file(folder / WEIGHTS)
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value.contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load(folder: Path):
    return load_model(str(folder), device="cpu")


def refusal(folder: Path) -> str:
    with pytest.raises(TargetError) as caught:
        load(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "its weight files lack {}"),
        ("model.norm.weight", torch.ones(7), "{} in its weight files has another shape"),
    ],
)
def test_a_missing_tensor_is_refused_by_name_and_not_filled_with_random_numbers(
    name, value, said, tmp_path
):
    folder = saved(tmp_path)
    rewrite(folder, **{name: value})
    assert said.format(name) in refusal(folder)


def test_an_attention_that_drops_the_softcap_of_gemma_2_is_never_used(tmp_path, monkeypatch):
    """transformers before 5.21 loads it with sdpa."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    tiny_model("gemma2").save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).config._attn_implementation == "eager"
    with pytest.raises(TargetError, match="leaves out its softcapping"):
        Target(load_model(str(tmp_path), attn="sdpa"), (0, 1))


def test_weights_that_the_config_does_not_use_are_refused_or_named(tmp_path, caplog):
    folder = saved(tmp_path)
    for name in ("vision_tower.weight", "mtp.fc.weight", "model.layers.6.eh_proj.weight"):
        rewrite(folder, **{name: torch.ones(3)})
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})
    load(folder)
    assert "unused-weights" not in caplog.text
    for name in ("v_head.weight", "model.layers.0.self_attn.k_scale"):
        rewrite(folder, **{name: torch.ones(1)})
    load(folder)
    assert "warning[unused-weights]" in caplog.text
    assert "does not use model.layers.0.self_attn.k_scale, v_head.weight of its" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "lm_head.bias",
    ],
)
def test_a_part_of_the_decoder_that_the_config_leaves_out_is_refused(name, tmp_path):
    folder = saved(tmp_path)
    rewrite(folder, **{name: torch.ones(32)})
    assert f"does not use {name} of its weight files, so it is another model" in refusal(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3", "gemma3-nested"])
@pytest.mark.parametrize("more", [-1, 1, -3])
def test_a_config_with_another_number_of_blocks_is_refused(family, more, tmp_path):
    folder = saved(tmp_path, family)
    load(folder)
    raw = json.loads((folder / "config.json").read_text())
    table = raw.get("text_config", raw)
    table["n_layer" if family == "gpt2" else "num_hidden_layers"] = 6 + more
    table.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(raw))
    said = f"num_hidden_layers = {6 + more}, but the highest block of the weight files is 5 "
    assert said in refusal(folder) and "set num_hidden_layers to 6" in refusal(folder)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_an_mtp_block_is_left_out_and_never_taken_for_a_block(more, tmp_path):
    folder = saved(tmp_path)
    last = {n: t for n, t in load_file(folder / WEIGHTS).items() if ".layers.5." in n}
    rewrite(folder, **{n.replace(".5.", ".6."): t + 1 for n, t in last.items()})
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"):
        rewrite(folder, **{f"model.layers.6.{name}.weight": torch.ones(3)})
    if more == 0:
        load(folder)
        return
    edit(folder / "config.json", num_hidden_layers=6 + more)
    said = refusal(folder)
    assert "the highest block of the weight files is 5 " in said
    assert ("6 is the MTP block" in said) == (more == 1)


def test_a_config_with_fewer_experts_is_refused(tmp_path):
    folder = saved(tmp_path, "qwen3_moe")
    load(folder)
    edit(folder / "config.json", num_local_experts=3)
    assert "another shape than config.json describes" in refusal(folder)


def test_an_untied_config_without_a_head_in_the_files_is_refused(tmp_path):
    folder = saved(tmp_path)
    rewrite(folder, **{"lm_head.weight": None})
    assert "lack lm_head.weight" in refusal(folder)
    tied = saved(tmp_path / "tied", "qwen3")
    load(tied)
    edit(tied / "config.json", tie_word_embeddings=False)
    assert "lack lm_head.weight" in refusal(tied)


def test_a_tied_config_with_another_head_in_the_files_is_refused(tmp_path):
    folder = saved(tmp_path, "qwen3")
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    rewrite(folder, **{"lm_head.weight": embedding.clone()})
    load(folder)  # the same head, stored twice
    rewrite(folder, **{"lm_head.weight": 2 * embedding})
    assert "tie_word_embeddings true" in refusal(folder)


def test_the_config_of_the_model_that_holds_the_head_says_whether_it_is_tied(tmp_path):
    """Qwen3-VL-MoE: false outside, and absent inside, where the class has true."""
    text = COMMON | {"num_hidden_layers": 1, "num_experts": 2, "moe_intermediate_size": 8}
    text |= {"head_dim": 8, "num_experts_per_tok": 1}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2}
    vision |= {"num_position_embeddings": 16, "out_hidden_size": text["hidden_size"]}
    config = CONFIG_MAPPING["qwen3_vl_moe"](
        text_config=text,
        vision_config=vision | {"deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"].pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = load(tmp_path)
    assert model.config.get_text_config().tie_word_embeddings, "the test shows nothing"
    assert not shares_weight(model.get_output_embeddings(), model.get_input_embeddings())


def test_a_damaged_part_of_several_is_named_and_an_absent_one_too(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    parts = sorted(tmp_path.glob("*.safetensors"))
    assert len(parts) > 1
    whole = parts[1].read_bytes()
    for length in (9, -1):
        parts[1].write_bytes(whole[:length])
        assert f"{parts[1]}: truncated or damaged" in refusal(tmp_path)
    with pytest.raises(TargetError, match=parts[1].name):
        weights_hash(tmp_path)
    parts[1].unlink()
    with pytest.raises(MissingError, match=parts[1].name):
        load(tmp_path)
    parts[1].write_bytes(whole)
    load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    for name in ("é" * 128, "../x", "\ud800", 5):  # 256 bytes are too long for any name
        table["weight_map"]["model.norm.weight"] = name
        index.write_text(json.dumps(table))
        assert f"{index}: not an index of weights" in refusal(tmp_path)
        with pytest.raises(TargetError, match="not an index of weights"):
            read_target(tmp_path)
    index.write_text(index.read_text()[:-20])
    assert f"{index}: not valid JSON" in refusal(tmp_path)


def test_weights_in_a_folder_of_the_index_are_hashed(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "parts").mkdir()
    for file in tmp_path.glob("*.safetensors"):
        file.rename(tmp_path / "parts" / file.name)
    table = json.loads(index.read_text())
    table["weight_map"] = {name: f"parts/{file}" for name, file in table["weight_map"].items()}
    index.write_text(json.dumps(table))
    before, (first, *_) = weights_hash(tmp_path), weight_files(tmp_path)
    tensors = load_file(first)
    save_file({name: value + 1 for name, value in tensors.items()}, first)
    assert weights_hash(tmp_path) != before


def test_a_bin_file_is_never_loaded(tmp_path):
    folder = saved(tmp_path)
    other = tiny_model("llama", seed=1).state_dict()
    torch.save(other, folder / "pytorch_model.bin")
    loaded = load(folder).state_dict()["model.norm.weight"]
    assert torch.equal(loaded, load_file(folder / WEIGHTS)["model.norm.weight"])
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")
    assert "own form (Mistral's), which transformers does not read" in refusal(folder)
    (folder / "consolidated.safetensors").rename(folder / "other.safetensors")
    assert "weights under other names (other.safetensors)" in refusal(folder)
    (folder / "other.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "consolidated.safetensors").unlink()
    message = refusal(folder)
    assert "only pytorch_model.bin" in message and "convert" in message


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    folder = saved(tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    assert "merge it into the model" in refusal(folder)
    with pytest.raises(TargetError, match=r"adapter_config\.json"):
        weights_hash(folder)


@pytest.mark.parametrize(
    ("family", "processes", "wrong"),
    [
        ("llama", 4, "num_key_value_heads = 2, which 4 processes cannot share; start 2 or another"),
        ("llama", 3, "num_attention_heads = 4, which 3 processes cannot share; start 1 or another"),
        ("llama", 2, ""),
        ("gpt_oss", 4, ""),  # its plan splits attention in another way
    ],
)
def test_processes_that_cannot_share_the_heads_are_refused(family, processes, wrong, monkeypatch):
    monkeypatch.setattr(loading.dist, "get_world_size", lambda: processes)
    config = tiny_model(family).config
    if not wrong:
        return loading._check_heads("model", config)
    with pytest.raises(TargetError, match=f"--tp-plan: model has {wrong}"):
        loading._check_heads("model", config)


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "base_model.model.", "_fsdp_wrapped_module.", "llm."]
)
def test_weights_of_a_wrapped_model_are_named(prefix, tmp_path):
    folder = saved(tmp_path)
    tensors = {f"{prefix}{n}": t for n, t in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    said = refusal(folder)
    assert "saved from a wrapped model" in said and f"{prefix}lm_head.weight for lm_head" in said


def test_a_wrapped_model_with_a_tied_head_is_named(tmp_path):
    """No file has the head, the first of the missing tensors."""
    folder = saved(tmp_path)
    tensors = load_file(folder / WEIGHTS)
    del tensors["lm_head.weight"]
    wrapped = {f"base_model.model.{n}": t for n, t in tensors.items()}
    save_file(wrapped, folder / WEIGHTS, metadata={"format": "pt"})
    said = refusal(folder)
    assert "base_model.model.model.embed_tokens.weight for model.embed_tokens.weight" in said


def test_a_wrapped_block_is_named_and_another_form_too(tmp_path):
    folder = saved(tmp_path)
    tensors = load_file(folder / WEIGHTS)
    inner = {n.replace(".0.", ".0._checkpoint_wrapped_module."): t for n, t in tensors.items()}
    save_file(inner, folder / WEIGHTS, metadata={"format": "pt"})
    assert "model.layers.0._checkpoint_wrapped_module.input_layernorm" in refusal(folder)
    (folder / WEIGHTS).unlink()
    for name in ("model.onnx", "m.gguf", "tf_model.h5"):
        (folder / name).write_bytes(b"x")
        assert f"only {name}, which spec-data does not load" in refusal(folder)
        (folder / name).unlink()


def test_weights_quantised_by_mlx_are_named(tmp_path):
    folder = saved(tmp_path)
    edit(folder / "config.json", quantization={"group_size": 64, "bits": 4})
    assert "quantised by MLX" in refusal(folder)


@pytest.mark.parametrize("ratio", [55.0, 4.0, 3.9, 0.5])
def test_a_dtype_that_is_slow_on_this_cpu_is_said(ratio, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(loading, "_SMALL", 1000)
    monkeypatch.setattr(loading, "_seconds", lambda d: 1.0 if d == torch.float32 else ratio)
    folder = saved(tmp_path)
    load_model(str(folder), device="cpu")
    assert "slow-dtype" not in caplog.text
    load_model(str(folder), device="cpu", dtype="bfloat16")
    said = f"warning[slow-dtype]: this CPU multiplies bfloat16 matrices about {ratio:.0f} times"
    assert (said in caplog.text) == (ratio >= 4)
    monkeypatch.setattr(loading, "_SMALL", 10**9)
    monkeypatch.setattr(loading, "_seconds", lambda _: pytest.fail("a small model is timed"))
    load_model(str(folder), device="cpu", dtype="bfloat16")


def test_the_timing_itself():
    assert loading._seconds(torch.float32) > 0


def in_parts(folder: Path, seed: int = 0) -> Path:
    """Save another model of these sizes in parts, with their index; return the index."""
    tiny_model("llama", seed=seed).save_pretrained(folder, max_shard_size="60KB")
    return folder / "model.safetensors.index.json"


def test_a_model_beside_the_parts_of_another_is_refused(tmp_path):
    """transformers loads model.safetensors, vLLM what the index names."""
    index = in_parts(tmp_path / "parts", seed=1)
    folder = saved(tmp_path / "one")
    for file in index.parent.glob("model*"):
        file.rename(folder / file.name)
    assert "two models, model.safetensors and the files that" in refusal(folder)
    with pytest.raises(TargetError, match="two models"):
        weights_hash(folder)
    (folder / WEIGHTS).unlink()
    load(folder)


def test_parts_without_their_index_are_named_and_no_block_count_is_advised(tmp_path):
    index = in_parts(tmp_path)
    table, parts = json.loads(index.read_text()), sorted(tmp_path.glob("*.safetensors"))
    index.unlink()
    said = refusal(tmp_path)
    assert f"{len(parts)} of {len(parts)} parts of a model ({parts[0].name}" in said
    parts[-1].unlink()  # the highest blocks
    said = refusal(tmp_path)
    assert f"{len(parts) - 1} of {len(parts)} parts" in said and "num_hidden_layers" not in said
    assert "without model.safetensors.index.json" in said
    for metadata in ({}, {"metadata": []}):
        index.write_text(json.dumps({"weight_map": table["weight_map"]} | metadata))
        parts[-1].write_bytes(parts[0].read_bytes())
        assert f"{index}: no metadata, without which" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.safetensors", "model.fp16.safetensors"])
def test_weights_under_another_name_are_named(name, tmp_path):
    folder = saved(tmp_path)
    (folder / WEIGHTS).rename(folder / name)
    assert f"weights under other names ({name}) than transformers loads" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("global_step10/mp_rank_00_model_states.pt", "parts of several processes (global_step10)"),
        ("__0_0.distcp", "parts of several processes (__0_0.distcp)"),
        ("latest_checkpointed_iteration.txt", "parts of several processes (latest_"),
        ("llm/model.safetensors", "no .safetensors weights in this directory, only in"),
    ],
)
def test_weights_of_processes_and_of_other_folders_are_named(name, said, tmp_path):
    folder = saved(tmp_path)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / WEIGHTS).rename(folder / name)
    message = refusal(folder)
    assert said in message and "download" not in message


BLOCK = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("base_layer.weight", "lora_A.default.weight"), "an adapter that is not merged"),
        (("lora_A.weight", "lora_B.weight"), "an adapter that is not merged"),
        (("weight_scale_inv",), "quantised"),
        (("weight_scale", "weight_packed"), "quantised"),
        (("qweight", "qzeros", "scales"), "quantised"),
        (("SCB", "weight_format"), "quantised"),
        (("weight.absmax", "weight.quant_state.bitsandbytes__nf4"), "quantised"),
    ],
)
def test_adapters_and_quantised_weights_of_a_plain_config_are_named(names, said, gone, tmp_path):
    """With a config.json of the plain model, scales would be left out: another model."""
    folder = saved(tmp_path)
    added = {f"{BLOCK}.{name}": torch.ones(4) for name in names}
    rewrite(folder, **added, **({f"{BLOCK}.weight": None} if gone else {}))
    message = refusal(folder)
    assert said in message and f"{BLOCK}.{names[0]}" in message and "lack" not in message


def test_scales_of_a_cache_of_keys_may_be_left_out(tmp_path, caplog):
    folder = saved(tmp_path)
    rewrite(folder, **{"model.layers.1.self_attn.k_scale": torch.ones(1)})
    load(folder)
    assert "warning[unused-weights]" in caplog.text


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ([f"{BLOCK}.weight"], torch.int8),
        (["model.layers.0.mlp.up_proj.weight"], torch.uint8),
        (["model.embed_tokens.weight"], torch.int32),
        (["lm_head.weight"], torch.int8),
        ([f"{BLOCK}.weight", "model.layers.2.mlp.down_proj.weight"], torch.bool),
    ],
)
def test_whole_numbers_in_the_place_of_weights_are_refused(names, dtype, tmp_path):
    """transformers would load them as they are: a model of very large weights."""
    folder = saved(tmp_path)
    tensors = load_file(folder / WEIGHTS)
    rewrite(folder, **{name: (tensors[name].abs() * 100).to(dtype) for name in names})
    said = refusal(folder)
    assert f"its weights are whole numbers ({', '.join(names)})" in said
    assert "no quantization_config" in said


def test_weights_of_few_bits_that_are_numbers_of_their_own_are_loaded(tmp_path):
    folder = saved(tmp_path)
    name = f"{BLOCK}.weight"
    rewrite(folder, **{name: load_file(folder / WEIGHTS)[name].to(torch.float8_e4m3fn)})
    load(folder)


@pytest.mark.parametrize(
    ("family", "named", "said"),
    [
        ("qwen3", ["LlamaForCausalLM"], True),
        ("llama", ["MistralForCausalLM"], True),
        ("llama", ["LlamaForCausalLM"], False),
        ("llama", ["MyOwnForCausalLM"], False),  # which transformers does not know
        ("llama", ["MyOwnForCausalLM", "LlamaForCausalLM"], False),
        ("llama", None, False),
    ],
)
def test_a_class_of_another_model_type_is_named(family, named, said, tmp_path, caplog):
    folder = saved(tmp_path, family)
    edit(folder / "config.json", architectures=named)
    load(folder)
    assert ("warning[architectures]" in caplog.text) == said
    if said:
        assert f"names {named[0]} under architectures, which is no class of its" in caplog.text
        assert f"model_type {family}" in caplog.text


@pytest.mark.parametrize("other", ["model.fp16.safetensors", "pytorch_model.safetensors"])
@pytest.mark.parametrize("parts", [False, True])
def test_of_a_tensor_in_several_files_the_one_that_is_loaded_is_read(other, parts, tmp_path):
    folder = tmp_path if parts else saved(tmp_path)
    if parts:
        in_parts(tmp_path)
    right = load(folder).get_input_embeddings().weight
    save_file(
        {n: p.detach() + 1 for n, p in tiny_model("llama").state_dict().items()}, folder / other
    )
    assert torch.equal(load(folder).get_input_embeddings().weight, right)
    names = weight_names(folder)
    assert {file.name for file in names.values()}.isdisjoint({other})
