"""What a draft takes from its target's config.json: sizes and rope settings.

In: a target's config.json as a dictionary. Out: a `TargetShape`. Configs with the keys of Llama or
GPT-2 need `decoder_shape` alone; other families have a function here. No model class is imported.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from spec_data.models.rope_settings import rope_parameters
from spec_data.shards.errors import DraftError

_EPS_KEYS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon")


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of a decoder layer, under the keys of Llama's config.json."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float


@dataclass(frozen=True, kw_only=True)
class TargetShape(LayerSizes):
    """The sizes of a target decoder that a draft needs."""

    max_position_embeddings: int
    num_hidden_layers: int
    rope_parameters: dict[str, Any]  # flat, as `rope_settings.rope_parameters` returns them
    positions: dict[str, Any] = field(default_factory=dict)  # see `rope_settings.stored_json`

    def of_draft(self) -> dict[str, Any]:
        """Return the fields that a draft's configuration copies: all but the number of blocks."""
        return {k: v for k, v in vars(self).items() if k != "num_hidden_layers"}


def decoder_shape(config: dict[str, Any]) -> TargetShape:
    """Return the shape of a decoder whose config.json uses the keys of Llama or of GPT-2.

    Raises:
        DraftError: a size is missing, or the query heads are not a multiple of the kv heads.
    """
    text = text_table(config)
    hidden = _size(text, "hidden_size", "n_embd", "d_model")
    heads = _size(text, "num_attention_heads", "n_head")
    kv_heads = text.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise DraftError(
            f"target config.json: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}; the file was edited or damaged"
        )
    limit = _size(text, "max_position_embeddings", "n_positions", "model_max_length")
    return TargetShape(
        hidden_size=hidden,
        intermediate_size=text.get("intermediate_size") or text.get("n_inner") or 4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=text.get("head_dim") or hidden // heads,
        rms_norm_eps=next((text[key] for key in _EPS_KEYS if text.get(key) is not None), 1e-6),
        max_position_embeddings=limit,
        num_hidden_layers=block_count(text) or _size(text, "num_hidden_layers", "n_layer"),
        rope_parameters=rope_parameters(text | {"max_position_embeddings": limit}),
    )


def block_count(config: dict[str, Any]) -> int | None:
    """Return the decoder blocks of a target's config.json; None if it does not tell.

    Some hybrid families list the kind of each block instead of a number.
    """
    text = text_table(config)
    kinds = text.get("layers_block_type") or text.get("layer_types")
    listed = len(kinds) if isinstance(kinds, list) else None
    numbers = (text.get(name) for name in ("num_hidden_layers", "n_layer"))
    return next((number for number in numbers if isinstance(number, int)), listed)


def latent_shape(config: dict[str, Any]) -> TargetShape:
    """Return the shape of a draft for a target with multi-head latent attention (DeepSeek-V3).

    The draft uses dense attention: latent compression saves cache in the target, and a draft of one
    layer does not need that. The draft's heads have the size of the target's rotary part, so its
    rotary frequencies, YaRN included, are those of the target. The target's extra softmax factor
    (`mscale_all_dim`) belongs to its latent heads; a trained draft learns its own scale.
    """
    size = _size(text_table(config), "qk_rope_head_dim")
    return replace(decoder_shape(config), head_dim=size)


def global_shape(config: dict[str, Any]) -> TargetShape:
    """Return the shape for a target whose full-attention layers have another head size (Gemma-4).

    The draft uses full attention with the rotary settings of those layers, which depend on that
    head size.
    """
    text = text_table(config)
    kinds = text.get("layer_types") or ()
    own = text.get("per_layer_config") or {}
    sizes = {
        int(own[key]["head_dim"])
        for key in own
        if "head_dim" in own[key] and kinds[int(key)] == "full_attention"
    }
    shape = decoder_shape(config)
    return replace(shape, head_dim=sizes.pop()) if len(sizes) == 1 else shape


def text_table(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a target's config.json (multimodal targets nest it)."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _size(config: dict[str, Any], *names: str) -> int:
    """Return the first of `names` that is an integer in `config`."""
    for name in names:
        if isinstance(config.get(name), int):
            return config[name]
    raise DraftError(
        f"the target's config.json has no {names[0]}; a draft needs it to take over the shape"
    )
