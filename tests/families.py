"""Tiny random targets of real families, float32, vocabulary 96, six blocks, window 8 if sliding.

Those of `current_families.py` are here by name, too.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from spec_data.models.reading import drops_softcap
from tests.current_families import COMMON, NESTED, VOCAB, WINDOW, current_config

LAYERS = 6
_COMMON = COMMON | {"num_hidden_layers": LAYERS}
_HEADS = {"head_dim": 8}
_MOE = _HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_HALF = _HEADS | {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}
_GEMMA3 = _HALF | {"query_pre_attn_scalar": 8}
_GPT_OSS = _HALF | {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_theta": 1e4}
_FROM_64 = _ROPE | {"original_max_position_embeddings": 64}
_YARN = _FROM_64 | {"rope_type": "yarn", "factor": 4.0}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}


def _config(kind: str, own: dict[str, Any], common: dict[str, Any] = _COMMON) -> PreTrainedConfig:
    return CONFIG_MAPPING[kind](**deepcopy(common | own))


def _rope(kind: str, **rope: Any) -> partial:
    return partial(_config, kind, {"rope_parameters": rope})


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": partial(_config, "llama", {"tie_word_embeddings": False}),
    "qwen3": partial(_config, "qwen3", _HEADS | {"tie_word_embeddings": True}),
    "qwen3_moe": partial(_config, "qwen3_moe", _MOE),
    "phi3": partial(_config, "phi3", {"sliding_window": None}),
    "mistral-sliding": partial(_config, "mistral", _HEADS | {"sliding_window": WINDOW}),
    "gemma2": partial(_config, "gemma2", _GEMMA3),
    "gemma3": partial(_config, "gemma3_text", _GEMMA3),
    "gpt_oss": partial(_config, "gpt_oss", _GPT_OSS),
    "gpt2": partial(
        _config,
        "gpt2",
        {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 256},
        _TOKENS | {"initializer_range": 0.15},
    ),
    "granite": partial(_config, "granite", {"logits_scaling": 4.0}),
    "cohere": partial(_config, "cohere", {"logit_scale": 0.25}),
}

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_PHI3_LONG = _ROPE | {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 4.0],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128,
}
_DEEPSEEK_V3 = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}

# More families that a draft can be built for; capture and decoding are tested on those above.
MORE_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama3-rope": partial(
        _config, "llama", {"tie_word_embeddings": False, "rope_parameters": _FROM_64 | _LLAMA3}
    ),
    "llama-linear": _rope("llama", **_ROPE, rope_type="linear", factor=2.0),
    "llama-dynamic": _rope("llama", **_ROPE, rope_type="dynamic", factor=2.0),
    "phi3-longrope": partial(
        _config, "phi3", {"sliding_window": None, "rope_parameters": _PHI3_LONG}
    ),
    "qwen2": partial(_config, "qwen2", {}),
    "olmo2": partial(_config, "olmo2", {}),
    "glm4": partial(_config, "glm4", _HEADS),
    "gpt_oss-yarn": partial(
        _config,
        "gpt_oss",
        _GPT_OSS
        | {"rope_parameters": _YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}},
    ),
    "deepseek_v3": partial(_config, "deepseek_v3", _DEEPSEEK_V3),
    "gemma4": partial(
        _config,
        "gemma4_text",
        _HALF
        | {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,  # as of E2B and E4B
            "per_layer_config": {str(k): {"head_dim": 16} for k in range(1, LAYERS, 2)},
        },
    ),
    "gemma3-nested": partial(
        _config,
        "gemma3",
        {"text_config": _COMMON | _GEMMA3, "vision_config": _VISION, "mm_tokens_per_image": 4},
        {},
    ),
}

# Recurrent and linear attention carry state across documents under every mask.
LEAKY: dict[str, Callable[[], PreTrainedConfig]] = {
    "mamba": partial(
        _config,
        "mamba",
        {"hidden_size": 32, "num_hidden_layers": LAYERS, "state_size": 4, "pad_token_id": 0},
        _TOKENS,
    ),
    "qwen3_next": partial(
        _config,
        "qwen3_next",
        _MOE
        | {
            "shared_expert_intermediate_size": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model of a family, in evaluation mode."""
    torch.manual_seed(seed)
    own = FAMILIES | MORE_FAMILIES | LEAKY
    config = own[name]() if name in own else current_config(name)
    # `load_target` takes the text class where there is one; the other of Llama 4 fails in 5.24.0.
    multimodal = (name in NESTED and name != "llama4-nested") or name == "glm5_next-nested"
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    attention = "eager" if drops_softcap(config, "sdpa") else None  # as `load_model` has it
    model = auto.from_config(config, attn_implementation=attention).eval().requires_grad_(False)
    with torch.no_grad():  # hyper-connections begin as if there were one stream
        for key, weight in model.named_parameters():
            if key.rpartition(".")[2] in ("hc_fn", "hc_base", "fn", "base"):
                torch.nn.init.normal_(weight, std=0.3)
    model.config.architectures = [type(model).__name__]  # as a checkpoint on disk has it
    return model
