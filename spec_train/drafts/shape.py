"""What a draft takes over from its target's config.json: sizes, rotary settings, dtype, token ids.

One function per way of writing these down; `registry` says which family uses which.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

from spec_data.shards.errors import DraftError
from spec_train.drafts.layers import rope_parameters

log = logging.getLogger(__name__)

_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_EPS_KEYS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """A decoder as drafts see it."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    num_hidden_layers: int
    rope_parameters: dict[str, Any]  # flat, as `layers.rope_parameters` gives them

    def of_draft(self) -> dict[str, Any]:
        """What a draft's configuration takes over: all but the number of blocks."""
        return {k: v for k, v in vars(self).items() if k != "num_hidden_layers"}


def decoder_shape(config: dict[str, Any]) -> TargetShape:
    """The shape of a decoder whose config.json names sizes as Llama's does, or GPT-2's.

    Raises:
        DraftError: a size is missing, or heads do not divide.
    """
    text = text_config(config)
    hidden = _size(text, "hidden_size", "n_embd", "d_model")
    heads = _size(text, "num_attention_heads", "n_head")
    kv_heads = text.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise DraftError(f"target config: {heads} heads are no multiple of {kv_heads} kv heads")
    limit = _size(text, "max_position_embeddings", "n_positions")
    return TargetShape(
        hidden_size=hidden,
        intermediate_size=text.get("intermediate_size") or text.get("n_inner") or 4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=text.get("head_dim") or hidden // heads,
        rms_norm_eps=next((text[key] for key in _EPS_KEYS if key in text), 1e-6),
        max_position_embeddings=limit,
        num_hidden_layers=_size(text, "num_hidden_layers", "n_layer"),
        rope_parameters=rope_parameters(text | {"max_position_embeddings": limit}),
    )


def latent_shape(config: dict[str, Any]) -> TargetShape:
    """The shape of a draft for a target with multi-head latent attention (DeepSeek-V3).

    The draft attends densely: latent compression saves the target's cache, which a draft of one
    layer does not need. Its heads have the size of the target's rotary part, so that its
    frequencies, YaRN included, are the target's own; the target's extra factor on the softmax
    (`mscale_all_dim`) belongs to its latent heads, and a trained draft learns its own scale.
    """
    size = _size(text_config(config), "qk_rope_head_dim")
    return replace(decoder_shape(config), head_dim=size)


def global_shape(config: dict[str, Any]) -> TargetShape:
    """The shape for a target whose full-attention layers have heads of their own size (Gemma-4).

    A draft attends fully, with the rotary settings of those layers, which depend on that size.
    """
    text = text_config(config)
    kinds = text.get("layer_types") or ()
    own = text.get("per_layer_config") or {}
    sizes = {
        int(own[key]["head_dim"])
        for key in own
        if "head_dim" in own[key] and kinds[int(key)] == "full_attention"
    }
    shape = decoder_shape(config)
    return replace(shape, head_dim=sizes.pop()) if len(sizes) == 1 else shape


def warn_of_last_layer(layers: tuple[int, ...], blocks: int) -> None:
    """Say that engines disagree about the last block's output, where a draft reads it."""
    if layers and layers[-1] >= blocks - 1:
        log.warning(
            "layer %d is the target's last block: engines disagree on what its output is "
            "(before or after the final norm); drafts for serving should not use it",
            layers[-1],
        )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a target's config (multimodal targets nest it)."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def target_dtype(config: dict[str, Any]) -> str | None:
    """Name of the target's element type; None where the config does not say."""
    for table in (config, text_config(config)):
        for key in ("dtype", "torch_dtype"):
            if isinstance(table.get(key), str):
                return str(table[key]).removeprefix("torch.")
    return None


def special_ids(config: dict[str, Any]) -> list[int]:
    """Ids of the special tokens that a target's config names; a draft can always propose them."""
    values = token_ids(config).values()
    return [i for value in values for i in (value if isinstance(value, list) else [value])]


def token_ids(config: dict[str, Any]) -> dict[str, Any]:
    """The bos, eos and pad ids that a config names."""
    tables = (text_config(config), config)
    found = {key: table[key] for table in tables for key in _TOKEN_KEYS if key in table}
    return {key: value for key, value in found.items() if value is not None}


def _size(config: dict[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return config[name]
    raise DraftError(f"the target's config.json has no {names[0]}; cannot shape a draft for it")
