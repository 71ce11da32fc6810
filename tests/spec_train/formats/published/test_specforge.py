"""SpecForge's EAGLE-3 and EAGLE-3.1, as its templates in `configs/*.json` and its class write them.

Source: SpecForge 0.2, `modeling/draft/llama3_eagle.py` and `configs/`. Layer ids in `eagle_config`
are outputs of decoder blocks, as SGLang takes them. TorchSpec writes the same form.
"""

import logging
from typing import Any

import pytest
import torch

from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.published.tiny import VD, H, V

TEMPLATE = tiny.PLAIN | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "max_window_layers": 36,
    "mlp_bias": False,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
    "draft_vocab_size": VD,
}
IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 9]}}
TEMPLATES: dict[str, dict[str, Any]] = {
    "llama3": {},
    "kimi-k25": IDS | {"eagle_config": IDS["eagle_config"] | {"use_aux_hidden_state": True}},
    "qwen3-4b, tied": {"tie_word_embeddings": True},  # its lm_head is its own all the same
    "gemma3": {
        "sliding_window": 512,
        "target_model_type": "gemma3_text",
        "additional_fc": False,
        "reuse_target_lm_head": True,
    },
    "gpt-oss, dense": {"model_type": "gpt_oss", "num_local_experts": 16, "experts_per_token": 4},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "qwen3-vl": {  # for text, M-RoPE is plain
        "target_model_type": "qwen3_vl_moe",
        "max_window_layers": None,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [1, 1, 0]},
    },
    "qwen2.5-vl": {
        "architectures": ["Eagle3Qwen2_5vlForCausalLM"],
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
    },
    "full vocabulary": {"draft_vocab_size": V},
    "TorchSpec": {"num_aux_hidden_states": 3, "target_hidden_size": H},
}


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_eagle3_has_the_logits_of_its_own_class(tmp_path, name, embedded):
    torch.manual_seed(12)
    config, facts = TEMPLATE | TEMPLATES[name], tiny.target()
    full = config["draft_vocab_size"] == V
    ids = torch.arange(V) if full else tiny.some_ids()
    tensors = tiny.eagle3_tensors(size=len(ids)) | tiny.maps(ids)
    if embedded:
        tensors["embed_tokens.weight"] = facts.embedding.clone()
    act = config["hidden_act"]
    draft = tiny.eagle3_as_defined(tmp_path, config, tensors, facts, ids=ids, act=act)
    assert draft.config.layers == ((1, 4, 9) if name == "kimi-k25" else (1, 5, 8))


@pytest.mark.parametrize("norm_output", [True, False])
def test_eagle31_norms_each_state_and_its_own_output(tmp_path, norm_output, caplog):
    """As of its pull request 879; releases up to 0.2.0 trained such drafts as EAGLE-3."""
    torch.manual_seed(13)
    facts, ids = tiny.target(), tiny.some_ids()
    tensors = tiny.eagle3_tensors() | tiny.maps(ids)
    tensors |= {f"fc_norm.{i}.weight": tiny.gain(H) for i in range(3)}
    config = TEMPLATE | {"fc_norm": True, "norm_output": norm_output}
    with caplog.at_level(logging.WARNING):
        tiny.eagle3_as_defined(tmp_path, config, tensors, facts, norm_output=norm_output)
    assert ("SpecForge up to 0.2.0" in caplog.text) == norm_output
    assert ("warning[assumed]" in caplog.text) == norm_output


@pytest.mark.parametrize("said", [True, False])
def test_norms_that_the_config_denies_are_refused(tmp_path, said):
    tensors = tiny.eagle3_tensors() | tiny.maps(torch.arange(VD))
    if not said:
        tensors |= {f"fc_norm.{i}.weight": tiny.gain(H) for i in range(3)}
    folder = tiny.write(tmp_path, TEMPLATE | {"fc_norm": said}, tensors)
    with pytest.raises(DraftError, match=rf"fc_norm = {said}, but the norms .* say".lower()):
        load_draft(folder, tiny.target())


def test_norms_of_each_state_that_were_lost_are_no_other_norm(tmp_path):
    """The norm over all states is in the file, and says nothing about those of each state."""
    tensors = tiny.eagle3_tensors() | tiny.maps(torch.arange(VD))
    tensors |= {"input_norm.weight": tiny.gain(3 * H)}
    keys = {"norm_before_fc": True, "fc_norm": True}
    folder = tiny.write(tmp_path, TEMPLATE | keys, tensors)
    with pytest.raises(DraftError, match=r"fc_norm = true, but the norms .* say"):
        load_draft(folder, tiny.target())


def test_a_head_that_is_tied_and_absent_is_the_embedding(tmp_path):
    torch.manual_seed(14)
    facts = tiny.target()
    tensors = tiny.eagle3_tensors(size=V) | {"embed_tokens.weight": facts.embedding.clone()}
    del tensors["lm_head.weight"]
    config = TEMPLATE | {"tie_word_embeddings": True, "draft_vocab_size": V}
    whole = tensors | {"lm_head.weight": facts.embedding}
    tiny.eagle3_as_defined(tmp_path / "draft", config, tensors, facts, tensors=whole)
    reduced = TEMPLATE | {"tie_word_embeddings": True}
    folder = tiny.write(tmp_path / "reduced", reduced, tensors | tiny.maps(torch.arange(VD)))
    with pytest.raises(DraftError, match="tie_word_embeddings = true with a reduced"):
        load_draft(folder, facts)


REFUSED: dict[str, tuple[str, str]] = {
    "deepseek-v3": ("midlayer.self_attn.kv_b_proj.weight", "multi-head latent attention"),
    "gpt-oss-20B-eagle3-moe": ("midlayer.mlp.experts.0.up_proj.weight", "a mixture of experts"),
    "a router": ("midlayer.mlp.gate.weight", "a mixture of experts"),
    "LoRA": ("midlayer.self_attn.q_proj.lora_A.weight", "LoRA adapters; merge"),
    "HASS": ("embed_layernorm.weight", "the extra norms of HASS"),
}


QUANTISED = {
    "awq": ("self_attn.q_proj.qzeros", "AWQ or GPTQ"),
    "gptq": ("mlp.up_proj.g_idx", "AWQ or GPTQ"),
    "fp8": ("self_attn.q_proj.weight_scale", "compressed-tensors or FP8"),
    "bitsandbytes": ("mlp.down_proj.weight.absmax", "bitsandbytes"),
}


@pytest.mark.parametrize("method", QUANTISED)
@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
def test_quantised_weights_are_named_with_their_method(tmp_path, method, prefix):
    """By a tensor, with and without the key; by the key alone; a block draft's too."""
    name, by = QUANTISED[method]
    config = TEMPLATE if prefix == "midlayer" else {"architectures": ["DFlashDraftModel"]}
    plain = tiny.eagle3_tensors() | tiny.maps(torch.arange(VD))
    tensors = plain | {f"{prefix}.{name}": torch.ones(2)}
    said = {"quantization_config": {"quant_method": method, "bits": 4}}
    for keys, shown in (({}, by), (said, method)):
        folder = tiny.write(tmp_path / f"{len(keys)}", config | keys, tensors)
        with pytest.raises(DraftError, match=rf"quantised weights \({shown}\); .* in bfloat16"):
            load_draft(folder)
    folder = tiny.write(tmp_path / "key", config | said, plain)
    with pytest.raises(DraftError, match=rf"quantised \({method}\), and no tensor is"):
        load_draft(folder)


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_no_draft_here_has_are_refused_in_words(tmp_path, name):
    tensor, words = REFUSED[name]
    tensors = tiny.eagle3_tensors() | tiny.maps(torch.arange(VD)) | {tensor: torch.ones(2)}
    folder = tiny.write(tmp_path / "draft", TEMPLATE, tensors)
    with pytest.raises(DraftError, match=rf"model\.safetensors: .*{words}.* cannot be represented"):
        load_draft(folder, tiny.target())
