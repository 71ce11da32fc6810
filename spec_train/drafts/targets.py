"""Which targets a draft can be built for, and what the draft takes from the target's config.json.

In: a target's config.json as a dictionary. Out: a `DraftSpec`, and from it a `TargetShape`.

`architectures` of the config selects the family; the first registered name wins. Every kind of
draft supports the same families, so there is one registry, `TARGETS`. A family whose config uses
Llama's keys is one line there. A family that does not also needs a shape function. No model class
of any family is imported.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spec_data.shards.errors import DraftError
from spec_train.drafts.layers import LayerSizes
from spec_train.formats.flat import TOKEN_KEYS
from spec_train.formats.rope import rope_parameters
from spec_train.formats.target_facts import text_config

log = logging.getLogger(__name__)

_EPS_KEYS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")


@dataclass(frozen=True, kw_only=True)
class TargetShape(LayerSizes):
    """The sizes of a target decoder that a draft needs."""

    max_position_embeddings: int
    num_hidden_layers: int
    rope_parameters: dict[str, Any]  # flat, as `formats.rope.rope_parameters` returns them

    def of_draft(self) -> dict[str, Any]:
        """Return the fields that a draft's configuration copies: all but the number of blocks."""
        return {k: v for k, v in vars(self).items() if k != "num_hidden_layers"}


def decoder_shape(config: dict[str, Any]) -> TargetShape:
    """Return the shape of a decoder whose config.json uses the keys of Llama or of GPT-2.

    Raises:
        DraftError: a size is missing, or the query heads are not a multiple of the kv heads.
    """
    text = text_config(config)
    hidden = _size(text, "hidden_size", "n_embd", "d_model")
    heads = _size(text, "num_attention_heads", "n_head")
    kv_heads = text.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise DraftError(
            f"target config.json: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}; the file was edited or damaged"
        )
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
    """Return the shape of a draft for a target with multi-head latent attention (DeepSeek-V3).

    The draft uses dense attention: latent compression saves cache in the target, and a draft of one
    layer does not need that. The draft's heads have the size of the target's rotary part, so its
    rotary frequencies, YaRN included, are those of the target. The target's extra softmax factor
    (`mscale_all_dim`) belongs to its latent heads; a trained draft learns its own scale.
    """
    size = _size(text_config(config), "qk_rope_head_dim")
    return replace(decoder_shape(config), head_dim=size)


def global_shape(config: dict[str, Any]) -> TargetShape:
    """Return the shape for a target whose full-attention layers have another head size (Gemma-4).

    The draft uses full attention with the rotary settings of those layers, which depend on that
    head size.
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


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """How to build a draft for a family of targets."""

    family: str
    shape: Callable[[dict[str, Any]], TargetShape] = decoder_shape
    note: str = ""  # how the draft differs from its target


_LATENT = DraftSpec(
    family="DeepSeek-V3",
    shape=latent_shape,
    note="the draft uses dense attention, with heads of the size of the target's rotary part",
)
_GEMMA4 = DraftSpec(
    family="Gemma-4",
    shape=global_shape,
    note="heads and rotary settings are those of the full-attention layers",
)
_GPT_OSS = DraftSpec(
    family="gpt-oss",
    note="a dense MLP, no attention sinks and no biases; YaRN without truncation as in the target",
)

TARGETS: dict[str, DraftSpec] = {
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
    "GPT2LMHeadModel": DraftSpec(family="GPT-2", note="rotary positions instead of learned ones"),
}
"""Supported targets, by an entry of `architectures` in config.json."""


def resolve_eagle1_draft_spec(architectures: Sequence[str]) -> DraftSpec:
    """Return the first registered match for an EAGLE-1/2 draft.

    Raises:
        DraftError: no match; the message lists what is supported.
    """
    return _resolve(architectures, "EAGLE-1/2")


def resolve_eagle3_draft_spec(architectures: Sequence[str]) -> DraftSpec:
    """Return the first registered match for an EAGLE-3 or P-EAGLE draft.

    Raises:
        DraftError: no match; the message lists what is supported.
    """
    return _resolve(architectures, "EAGLE-3 or P-EAGLE")


def resolve_dspark_draft_spec(architectures: Sequence[str]) -> DraftSpec:
    """Return the first registered match for a DSpark or DFlash draft.

    Raises:
        DraftError: no match; the message lists what is supported.
    """
    return _resolve(architectures, "DSpark or DFlash")


def _resolve(architectures: Sequence[str], draft: str) -> DraftSpec:
    """Return the first registered match; `draft` names the kind of draft in the message."""
    for name in architectures:
        if name in TARGETS:
            return TARGETS[name]
    raise DraftError(
        f"no {draft} draft is registered for a target of architectures {list(architectures)}; "
        f"supported: {', '.join(sorted(TARGETS))}. Targets that take images or audio, encoder-"
        "decoders and recurrent models are not supported. To add a decoder whose config.json has "
        "Llama's keys, add one line to TARGETS in spec_train/drafts/targets.py"
    )


def target_architectures(config: dict[str, Any]) -> list[str]:
    """Return `architectures` of a target's config.json; empty if the key is missing."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def target_dtype(config: dict[str, Any]) -> str | None:
    """Return the name of the target's dtype, or None if the config does not name one."""
    for table in (config, text_config(config)):
        for key in ("dtype", "torch_dtype"):
            if isinstance(table.get(key), str):
                return str(table[key]).removeprefix("torch.")
    return None


def special_ids(config: dict[str, Any]) -> list[int]:
    """Return the special token ids that a target's config names.

    They are part of every draft vocabulary.
    """
    values = token_ids(config).values()
    return [i for value in values for i in (value if isinstance(value, list) else [value])]


def token_ids(config: dict[str, Any]) -> dict[str, Any]:
    """Return the bos, eos and pad ids of a config; the top level overrides `text_config`."""
    tables = (text_config(config), config)
    found = {key: table[key] for table in tables for key in TOKEN_KEYS if key in table}
    return {key: value for key, value in found.items() if value is not None}


def warn_of_last_layer(layers: tuple[int, ...], blocks: int) -> None:
    """Log a warning if a draft reads the output of the target's last block (`blocks` - 1)."""
    if layers and layers[-1] >= blocks - 1:
        log.warning(
            "layer %d is the target's last block: engines disagree on whether its output is taken "
            "before or after the final norm; do not use it in drafts for serving",
            layers[-1],
        )


def _size(config: dict[str, Any], *names: str) -> int:
    """Return the first of `names` that is an integer in `config`."""
    for name in names:
        if isinstance(config.get(name), int):
            return config[name]
    raise DraftError(
        f"the target's config.json has no {names[0]}; a draft needs it to take over the shape"
    )
