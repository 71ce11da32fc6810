"""What the cases of all drafts share: a small target, its sizes, tensors, gradients, layouts."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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


def reference_sizes(
    target: dict[str, Any], changes: Iterable[tuple[str, Any]], heads: int, kv_heads: int
) -> dict[str, Any]:
    """Return the sizes of a reference: the target's, changed by the options of a shape.

    Frequencies come from the target's rotary code.
    """
    shape = dict(changes)
    fields = target | {k: v for k, v in shape.items() if k == "head_dim"}
    return {
        "heads": shape.get("num_attention_heads", heads),
        "kv_heads": shape.get("num_key_value_heads", kv_heads),
        "head_dim": shape.get("head_dim", 6),
        "act": shape.get("hidden_act", "silu"),
        "rms_norm_eps": 1e-5,
        "rope_inv_freq": LlamaRotaryEmbedding(LlamaConfig(**fields)).inv_freq,
    }


def gradients(draft: Any) -> dict[str, Tensor]:
    """Return the gradient of every trained parameter, and forget them."""
    found = {}
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            found[name] = parameter.grad
            parameter.grad = None
    return found


def each_in_one_layout(cases: Iterable[str], layouts: Iterable[str]) -> list[tuple[str, str]]:
    """Return every case with one of the layouts in turn, and the first one with all of them."""
    names, forms = list(cases), list(layouts)
    pairs = [(name, forms[i % len(forms)]) for i, name in enumerate(names)]
    return pairs + [(names[0], form) for form in forms[1:]]
