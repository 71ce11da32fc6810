"""Tiny random targets of the current families: what `test_families.py` and docs/targets.md hold.

One entry per family: the model type of transformers, and what differs from `COMMON`. Every model is
float32 with vocabulary 96, hidden size 32 and four blocks, and has two experts if it is sparse.
"""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB, LAYERS, WINDOW = 96, 4, 8
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 8}
_WINDOWS = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
_LOCAL = {"num_local_experts": 2, "num_experts_per_tok": 1}
_ROUTED = {
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_DENSE_FIRST = {"first_k_dense_replace": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 64}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}

CURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", _HEADS | _EXPERTS | _WINDOWS | {"num_dense_layers": 1}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", _HEADS),
    "axk1": ("axk1", _LATENT | _ROUTED),
    "axk2": ("axk2", _LATENT | _ROUTED | _INDEXER),
    "bamba": ("bamba", _MAMBA | {"attn_layer_indices": [1, 3]}),
    "bitnet": ("bitnet", {}),
    "cohere2": ("cohere2", _HEADS | _WINDOWS),
    "cohere2_moe": ("cohere2_moe", _HEADS | _EXPERTS | _WINDOWS),
    "cwm": ("cwm", _HEADS | _WINDOWS),
    "deepseek_v2": ("deepseek_v2", _LATENT | _ROUTED | _DENSE_FIRST),
    "deepseek_v32": ("deepseek_v32", _LATENT | _ROUTED | _DENSE_FIRST | _INDEXER),
    "dots1": ("dots1", _HEADS | _ROUTED | _DENSE_FIRST | _WINDOWS | {"n_shared_experts": 1}),
    "ernie4_5": ("ernie4_5", _HEADS),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 16},
    ),
    "exaone4": ("exaone4", _HEADS | _WINDOWS),
    "exaone_moe": ("exaone_moe", _HEADS | _EXPERTS | _WINDOWS | {"first_k_dense_replace": 1}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_h1": ("falcon_h1", _HEADS | _MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    "flex_olmo": ("flex_olmo", _EXPERTS),
    "gemma": ("gemma", _HEADS),
    "glm": ("glm", _HEADS),
    "glm4_moe": ("glm4_moe", _HEADS | _ROUTED | _DENSE_FIRST),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT | _ROUTED),
    "glm_moe_dsa": ("glm_moe_dsa", _LATENT | _ROUTED | _INDEXER),
    "gpt_neox": ("gpt_neox", {}),
    "granite_swa": ("granite_swa", _WINDOWS),
    "granitemoe": ("granitemoe", _LOCAL),
    "granitemoe_swa": ("granitemoe_swa", _LOCAL | _WINDOWS | {"shared_intermediate_size": 16}),
    "granitemoehybrid": (
        "granitemoehybrid",
        _LOCAL
        | _MAMBA
        | {"layer_types": ["mamba", "attention"] * (LAYERS // 2), "shared_intermediate_size": 16},
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {
            "layer_types": ["full_attention"] * LAYERS,
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
        }
        | _MAMBA,
    ),
    "granitemoeshared": ("granitemoeshared", _LOCAL | {"shared_intermediate_size": 16}),
    "helium": ("helium", _HEADS),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _HEADS),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", _HEADS | {"num_experts": 2, "moe_topk": 1}),
    "hy_v3": ("hy_v3", _HEADS | _EXPERTS),
    "hyperclovax": ("hyperclovax", _HEADS | {"logits_scaling": 0.5}),
    "internlm3": ("internlm3", _HEADS),
    "jais2": ("jais2", _HEADS),
    "jamba": ("jamba", {"mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 2}),
    "kimi_linear": (
        "kimi_linear",
        _LATENT
        | _LOCAL
        | {"linear_head_dim": 8, "linear_num_heads": 2, "moe_intermediate_size": 16}
        | {"layer_types": _LINEAR["layer_types"]},
    ),
    "laguna": ("laguna", _HEADS | _EXPERTS | {"shared_expert_intermediate_size": 16}),
    "lfm2": (
        "lfm2",
        {"block_ff_dim": 48, "layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        _EXPERTS
        | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    ),
    "lfm3": ("lfm3", _HEADS | _EXPERTS),
    "llama4": (
        "llama4_text",
        _HEADS | _LOCAL | {"intermediate_size_mlp": 48, "attention_chunk_size": WINDOW},
    ),
    "mellum": ("mellum", _HEADS | _EXPERTS),
    "mimo_v2_flash": ("mimo_v2_flash", _HEADS | _ROUTED | _WINDOWS),
    "minimax": ("minimax", _HEADS | _LOCAL),
    "minimax_m2": ("minimax_m2", _HEADS | _LOCAL),
    "minimax_m3": ("minimax_m3_vl_text", _HEADS | _LOCAL | _INDEXER),
    "ministral": ("ministral", _HEADS | _WINDOWS),
    "ministral3": ("ministral3", _HEADS),
    "mixtral": ("mixtral", _HEADS | _LOCAL),
    "nanochat": ("nanochat", {}),
    "nemotron": ("nemotron", {}),
    "nemotron_h": (
        "nemotron_h",
        _HEADS
        | {
            "layers_block_type": ["mamba", "attention", "moe", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 4,
            "n_groups": 1,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 16,
        }
        | _ROUTED,
    ),
    "olmo": ("olmo", {}),
    "olmo3": ("olmo3", _WINDOWS),
    "olmo_hybrid": ("olmo_hybrid", _LINEAR),
    "olmoe": ("olmoe", _EXPERTS),
    "phi": ("phi", {}),
    "phimoe": ("phimoe", _LOCAL),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_5": ("qwen3_5_text", _HEADS | _LINEAR),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        _HEADS | _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 16},
    ),
    "qwen3next": (
        "qwen3_next",
        _HEADS | _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 16},
    ),
    "seed_oss": ("seed_oss", _HEADS),
    "smollm3": ("smollm3", {}),
    "solar_open": ("solar_open", _HEADS | _ROUTED),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {}),
    "vaultgemma": ("vaultgemma", _HEADS | _WINDOWS),
    "youtu": ("youtu", _LATENT),
}

# Recurrent and convolutional blocks carry state across documents under every mask.
ONE_PER_ROW = {
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3"),
    *("minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3next"),
    *("qwen3_5-nested", "qwen3_5_moe-nested"),
}

# Also refused by real decoding: a cache of indices, and a family that may have recurrent blocks.
NOT_DECODED = ONE_PER_ROW | {"axk2", "deepseek_v32", "glm_moe_dsa", "granitemoehybrid-dense"}

# Multimodal names, of which the text part is captured: model type, and the family of that part.
NESTED = {
    "llama4-nested": ("llama4", "llama4"),
    "mistral3": ("mistral3", "ministral3"),
    "qwen3_5-nested": ("qwen3_5", "qwen3_5"),
    "qwen3_5_moe-nested": ("qwen3_5_moe", "qwen3_5_moe"),
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "out_hidden_size": 32,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}

# Families whose blocks output several residual streams per token, of which engines make one state.
# Their attention chooses tokens, so packs and padding change which: one document per forward.
CONTRACTED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4": (
        "deepseek_v4",
        _ROUTED
        | _INDEXER
        | {
            **{"head_dim": 16, "qk_rope_head_dim": 8, "partial_rotary_factor": 0.5},
            **{"num_key_value_heads": 1, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2},
            **{"index_topk": 4, "sliding_window": WINDOW, "hc_mult": 4},
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        },
    ),
    "glm5_next-nested": (
        "glm5_next_text",
        _LATENT
        | _ROUTED
        | _INDEXER
        | {
            **{"qk_rope_head_dim": 0, "index_topk": 8, "index_kpool": 2, "hc_mult": 4},
            **{"linear_head_dim": 8, "linear_num_heads": 4},
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
}
# Families with such blocks for which no engine has a rule.
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "hy_v4": ("hy_v4", _LATENT | _ROUTED | _INDEXER | {"hc_mult": 4}),
}

# The normal test run fits every draft of these (latent attention, no positions, recurrent layers),
# and one draft, in turn, of the other families.
EVERY_DRAFT = {"deepseek_v2", "granitemoehybrid", "qwen3next"}
# The long one fits every draft of these too.
EVERY_DRAFT_LONG = (
    *("cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "glm4_moe", "granitemoe"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "kimi_linear", "lfm2", "lfm2_moe"),
    *("llama4", "minimax_m2", "mixtral", "olmo3", "qwen3_5", "qwen3_5_moe", "smollm3"),
)

# Targets whose attention has no rotary positions.
WITHOUT_ROPE = {"granitemoehybrid", "jamba", "kimi_linear", "nemotron_h"}


def current_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a tiny model of this family."""
    if name in NESTED:
        kind, part = NESTED[name]
        text = COMMON | CURRENT[part][1] | {"model_type": CURRENT[part][0]}
        return CONFIG_MAPPING[kind](text_config=text, vision_config=dict(_VISION))
    if name == "glm5_next-nested":
        text = COMMON | CONTRACTED[name][1] | {"model_type": CONTRACTED[name][0]}
        images = {"image_token_id": 94, "video_token_id": 95}
        return CONFIG_MAPPING["glm5_next"](text_config=text, vision_config=dict(_VISION), **images)
    kind, own = (CURRENT | STREAMS | CONTRACTED)[name]
    return CONFIG_MAPPING[kind](**COMMON | own)
