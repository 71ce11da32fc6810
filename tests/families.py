"""Tiny random targets of real families, float32, vocabulary 96, six blocks, window 8 if sliding.

Those of `current_families.py` are here by name, too.
"""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.current_families import COMMON, NESTED, VOCAB, WINDOW, current_config

LAYERS = 6
_COMMON = COMMON | {"num_hidden_layers": LAYERS}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_HALF = ["sliding_attention", "full_attention"] * (LAYERS // 2)

_GEMMA4 = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": _HALF,
    "hidden_size_per_layer_input": 0,
    "per_layer_config": {str(k): {"head_dim": 16} for k in range(1, LAYERS, 2)},
}

FAMILIES: dict[str, Callable[[], object]] = {
    "llama": lambda: LlamaConfig(**_COMMON, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=8, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_COMMON, **_MOE, head_dim=8),
    "phi3": lambda: Phi3Config(**_COMMON, sliding_window=None),
    "mistral-sliding": lambda: MistralConfig(**_COMMON, head_dim=8, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **_COMMON, head_dim=8, sliding_window=WINDOW, layer_types=_HALF, query_pre_attn_scalar=8
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_COMMON, head_dim=8, sliding_window=WINDOW, layer_types=_HALF, query_pre_attn_scalar=8
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=_HALF,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.15,
    ),
    "granite": lambda: GraniteConfig(**_COMMON, logits_scaling=4.0),
    "cohere": lambda: CohereConfig(**_COMMON, logit_scale=0.25),
}

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_PHI3_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 4.0],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128,
}

# More families that a draft can be built for; capture and decoding are tested on those above.
MORE_FAMILIES: dict[str, Callable[[], object]] = {
    "llama3-rope": lambda: LlamaConfig(
        **_COMMON,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-linear": lambda: LlamaConfig(
        **_COMMON, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama-dynamic": lambda: LlamaConfig(
        **_COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "phi3-longrope": lambda: Phi3Config(
        **_COMMON, sliding_window=None, rope_parameters=dict(_PHI3_LONG)
    ),
    "qwen2": lambda: Qwen2Config(**_COMMON),
    "olmo2": lambda: Olmo2Config(**_COMMON),
    "glm4": lambda: Glm4Config(**_COMMON, head_dim=8),
    "gpt_oss-yarn": lambda: GptOssConfig(
        **_COMMON,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=_HALF,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            **_YARN,
            "truncate": False,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **_COMMON | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        rope_parameters={
            **_YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "gemma4": lambda: Gemma4TextConfig(**_COMMON, **_GEMMA4),
    "gemma3-nested": lambda: Gemma3Config(
        text_config={
            **_COMMON,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": _HALF,
            "query_pre_attn_scalar": 8,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    ),
}

# Recurrent and linear attention carry state across documents under every mask.
LEAKY: dict[str, Callable[[], object]] = {
    "mamba": lambda: MambaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        state_size=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_COMMON,
        **_MOE,
        head_dim=8,
        shared_expert_intermediate_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model of a family, in evaluation mode."""
    torch.manual_seed(seed)
    own = FAMILIES | MORE_FAMILIES | LEAKY
    config = own[name]() if name in own else current_config(name)
    auto = AutoModelForImageTextToText if name in NESTED else AutoModelForCausalLM
    model = auto.from_config(config).eval().requires_grad_(False)
    model.config.architectures = [type(model).__name__]  # as a checkpoint on disk has it
    return model
