"""Tiny random targets with an MTP block, as the checkpoints of each layout name it.

The block is the last decoder layer of a model with one layer more, so its names are what
transformers writes for the family.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.spec_data.runs import tokenizer

BLOCKS, HIDDEN = 2, 16
_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_ROUTED = {
    **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2},
    **{"topk_group": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 1},
    **{"routed_scaling_factor": 1.5, "norm_topk_prob": True},
}
_LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4},
    **{"linear_value_head_dim": 4, "head_dim": 8},
}
_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    **{"shared_expert_intermediate_size": 8, "norm_topk_prob": True},
}
_PLAIN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")

FAMILIES: dict[str, tuple[str, dict[str, Any], str, str, tuple[str, ...]]] = {
    "deepseek": (
        "deepseek_v3",
        _ROUTED
        | {"num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 5, "v_head_dim": 4}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6},
        *(f"model.layers.{BLOCKS}.", "", _PLAIN),
    ),
    "glm": (
        "glm4_moe",
        _ROUTED | {"head_dim": 8, "use_qk_norm": True, "attention_bias": True},
        *(f"model.layers.{BLOCKS}.", "", _PLAIN),
    ),
    "qwen3_next": ("qwen3_next", _LINEAR | _EXPERTS, "mtp.", "layers.0.", _QWEN),
    "qwen3_5": ("qwen3_5_text", _LINEAR, "mtp.", "layers.0.", _QWEN),
    "mimo": ("qwen2", {}, "model.mtp_layers.0.", "", _MIMO),
}
"""The model type, what differs from others, and the names: prefix, layer, four modules of MTP."""


def config_of(family: str, vocab: int, blocks: int = BLOCKS) -> Any:
    """The transformers configuration of a tiny target."""
    kind, changes, *_ = FAMILIES[family]
    table = {**_COMMON, **changes, "num_hidden_layers": blocks, "vocab_size": vocab}
    if family.startswith("qwen"):
        table["layer_types"] = ["linear_attention", "full_attention", "full_attention"][:blocks]
    config = AutoConfig.for_model(kind, **table)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config


def write_target(path: Path, family: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write a target with an MTP block and a tokenizer; return its MTP tensors."""
    tok = tokenizer("chatml")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, len(tok), BLOCKS + 1))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_(std=0.2)
    model.config.eos_token_id = tok.eos_token_id
    model.save_pretrained(path)
    config = config_of(family, len(tok))
    config.eos_token_id, config.dtype = tok.eos_token_id, "float32"
    config.save_pretrained(path)
    tok.save_pretrained(path)
    _, _, prefix, layer, names = FAMILIES[family]
    old, mtp = f"model.layers.{BLOCKS}.", {}
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.startswith(old)]:
        value, ours = tensors.pop(name), prefix + layer + name.removeprefix(old)
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        folder, _, kind = ours.rpartition(".")
        if not folder.endswith(".experts"):
            mtp[ours] = value
            continue
        for e, expert in enumerate(value):  # in checkpoints, each has tensors of its own
            for part, weight in zip(parts[kind], expert.chunk(len(parts[kind])), strict=True):
                mtp[f"{folder}.{e}.{part}.weight"] = weight.clone()
    shapes = (HIDDEN,), (HIDDEN,), (HIDDEN, 2 * HIDDEN), (HIDDEN,)
    for name, shape in zip(names, shapes, strict=True):
        mtp[f"{prefix}{name}.weight"] = torch.randn(shape) * 0.3 + (len(shape) == 1)
    copies = {}
    if names == _PLAIN:  # as DeepSeek's checkpoints repeat them
        copies[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        copies[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | mtp | copies, path / "model.safetensors", metadata={"format": "pt"})
    return mtp
