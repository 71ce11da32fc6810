"""Which targets a draft can be built for, and what the draft takes from the target's config.json.

`architectures` of the target's config.json selects the family; the first match wins. A family that
names its sizes as Llama does is one line in `_COMMON`. A family that does not needs a shape
function as well. No model class of any family is imported."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import build_target_layer_ids, capturable_layer_ids
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


__all__ = [
    "DSPARK",
    "EAGLE1",
    "EAGLE3",
    "DraftSpec",
    "build_target_layer_ids",
    "capturable_layer_ids",
    "resolve_dspark_draft_spec",
    "resolve_eagle1_draft_spec",
    "resolve_eagle3_draft_spec",
    "target_architectures",
]


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """How to build a draft for a family of targets."""

    family: str
    shape: Callable[[dict[str, Any]], TargetShape] = decoder_shape
    note: str = ""  # what the draft does not take over from its target


_LATENT = DraftSpec(
    family="DeepSeek-V3",
    shape=latent_shape,
    note="the draft attends densely, with heads of the size of the target's rotary part",
)


_GEMMA4 = DraftSpec(
    family="Gemma-4",
    shape=global_shape,
    note="heads and rotary settings are those of the full-attention layers",
)


_GPT_OSS = DraftSpec(
    family="gpt-oss",
    note="a dense MLP, no attention sinks and no biases; YaRN without truncation is the target's",
)


_COMMON: dict[str, DraftSpec] = {
    "LlamaForCausalLM": DraftSpec(family="Llama"),
    "MistralForCausalLM": DraftSpec(family="Mistral"),
    "Phi3ForCausalLM": DraftSpec(family="Phi-3"),
    "Qwen2ForCausalLM": DraftSpec(family="Qwen2"),
    "Qwen3ForCausalLM": DraftSpec(family="Qwen3"),
    "Qwen3MoeForCausalLM": DraftSpec(family="Qwen3-MoE"),
    "Gemma2ForCausalLM": DraftSpec(family="Gemma-2"),
    "Gemma3ForCausalLM": DraftSpec(family="Gemma-3 text"),
    "Gemma3ForConditionalGeneration": DraftSpec(family="Gemma-3, text only"),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "GptOssForCausalLM": _GPT_OSS,
    "DeepseekV3ForCausalLM": _LATENT,
    "Glm4ForCausalLM": DraftSpec(family="GLM-4"),
    "GraniteForCausalLM": DraftSpec(family="Granite"),
    "Olmo2ForCausalLM": DraftSpec(family="OLMo-2"),
    "CohereForCausalLM": DraftSpec(family="Cohere"),
    "GPT2LMHeadModel": DraftSpec(family="GPT-2", note="rotary positions instead of learnt ones"),
}


EAGLE1: dict[str, DraftSpec] = dict(_COMMON)


EAGLE3: dict[str, DraftSpec] = dict(_COMMON)  # P-EAGLE's too


DSPARK: dict[str, DraftSpec] = dict(_COMMON)  # DFlash's too


def resolve_eagle1_draft_spec(architectures: Sequence[str]) -> DraftSpec:
    """The first registered match for an EAGLE-1/2 draft.

    Raises:
        DraftError: no match; the message lists what is supported.
    """
    return _resolve(EAGLE1, architectures, "EAGLE-1/2")


def resolve_eagle3_draft_spec(architectures: Sequence[str]) -> DraftSpec:
    """The first registered match for an EAGLE-3 or P-EAGLE draft.

    Raises:
        DraftError: no match; the message lists what is supported.
    """
    return _resolve(EAGLE3, architectures, "EAGLE-3 or P-EAGLE")


def resolve_dspark_draft_spec(architectures: Sequence[str]) -> DraftSpec:
    """The first registered match for a DSpark or DFlash draft.

    Raises:
        DraftError: no match; the message lists what is supported.
    """
    return _resolve(DSPARK, architectures, "DSpark or DFlash")


def _resolve(
    registry: Mapping[str, DraftSpec], architectures: Sequence[str], draft: str
) -> DraftSpec:
    for name in architectures:
        if name in registry:
            return registry[name]
    raise DraftError(
        f"no {draft} draft is registered for a target of architectures {list(architectures)}; "
        f"supported: {', '.join(sorted(registry))}. Targets that take images or sound, encoder-"
        "decoders and recurrent models are not; a decoder that is written like Llama's is one line "
        "in spec_train/drafts/targets.py"
    )


def target_architectures(config: dict[str, Any]) -> list[str]:
    """The `architectures` of a target's config.json; empty where it names none."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []
