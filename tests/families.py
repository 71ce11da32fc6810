"""Tiny random targets of real families, float32, vocabulary 96, six blocks, window 8 if sliding."""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCAB, LAYERS, WINDOW = 96, 6, 8
_COMMON = {
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
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_HALF = ["sliding_attention", "full_attention"] * (LAYERS // 2)

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
    config = (FAMILIES | LEAKY)[name]()
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
