"""What the cases of all drafts share: a small target's config, and the tensors of a checkpoint."""

from typing import Any

import torch
from torch import Tensor

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 100.0}


def small_target(
    hidden: int, heads: int, kv_heads: int, rope: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return config.json of a Llama target of 8 blocks with heads of size 6."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 20,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 8,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": rope or DEFAULT_ROPE,
    }


def windows_of(types: str, window: int, layers: int) -> tuple[int | None, ...]:
    """Return the window of every layer from the options `layer_types` and `sliding_window`."""
    if types == "auto":
        return (window or None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types.split(","))


def reference_state(draft: Any) -> dict[str, Tensor]:
    """Return the checkpoint's tensors as float64 leaves of a graph of their own."""
    return {
        name: value.clone().requires_grad_(value.is_floating_point())
        for name, value in draft.checkpoint_tensors(torch.float64).items()
    }
