"""The registry of targets that a draft can be built for: one line per family.

`architectures` of a target's config.json selects the family; the first registered name wins. Every
kind of draft supports the same families. A shape function takes sizes and rope settings from a
config.json; a family needs one of its own if its config has not the keys of Llama or GPT-2. No
model class is imported.
"""

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """How to build a draft for a family of targets.

    Attributes:
        family: its name in messages.
        shape: from config.json to the draft's shape.
        note: how the draft differs from its target.
    """

    family: str
    shape: Callable[[dict[str, Any]], TargetShape] = decoder_shape
    note: str = ""


def _latent(family: str) -> DraftSpec:
    """A family with multi-head latent attention."""
    note = "the draft uses dense attention, with heads of the size of the target's rotary part"
    return DraftSpec(family=family, shape=latent_shape, note=note)


def _recurrent(family: str, note: str = "the draft has attention only") -> DraftSpec:
    """A family with recurrent or convolutional blocks: captured one document per row."""
    return DraftSpec(family=family, note=note)


_NO_ROPE = "rotary positions, although the target's attention has none"
_GEMMA4 = DraftSpec(
    family="Gemma-4",
    shape=global_shape,
    note="heads and rotary settings are those of the full-attention layers",
)
_GPT_OSS = DraftSpec(
    family="gpt-oss",
    note="a dense MLP, no attention sinks; YaRN without truncation as in the target",
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
    "DeepseekV3ForCausalLM": _latent("DeepSeek-V3, Kimi-K2"),
    "Glm4ForCausalLM": DraftSpec(family="GLM-4"),
    "GraniteForCausalLM": DraftSpec(family="Granite"),
    "Olmo2ForCausalLM": DraftSpec(family="OLMo-2"),
    "CohereForCausalLM": DraftSpec(family="Cohere"),
    "GPT2LMHeadModel": DraftSpec(family="GPT-2", note="rotary positions instead of learned ones"),
    "AfmoeForCausalLM": DraftSpec(family="AFMoE"),
    "ApertusForCausalLM": DraftSpec(family="Apertus"),
    "ArceeForCausalLM": DraftSpec(family="Arcee"),
    "AXK1ForCausalLM": _latent("A.X-K1"),
    "AXK2ForCausalLM": _latent("A.X-K2"),
    "BambaForCausalLM": _recurrent("Bamba"),
    "BitNetForCausalLM": DraftSpec(family="BitNet"),
    "Cohere2ForCausalLM": DraftSpec(family="Cohere-2"),
    "Cohere2MoeForCausalLM": DraftSpec(family="Cohere-2 MoE"),
    "CwmForCausalLM": DraftSpec(family="CWM"),
    "DeepseekV2ForCausalLM": _latent("DeepSeek-V2"),
    "DeepseekV32ForCausalLM": _latent("DeepSeek-V3.2"),
    "Dots1ForCausalLM": DraftSpec(family="dots.llm1"),
    "Ernie4_5ForCausalLM": DraftSpec(family="Ernie-4.5"),
    "Ernie4_5_MoeForCausalLM": DraftSpec(family="Ernie-4.5 MoE"),
    "Exaone4ForCausalLM": DraftSpec(family="EXAONE-4"),
    "ExaoneMoeForCausalLM": DraftSpec(family="EXAONE MoE"),
    "FalconForCausalLM": DraftSpec(family="Falcon"),
    "FalconH1ForCausalLM": _recurrent("Falcon-H1"),
    "FlexOlmoForCausalLM": DraftSpec(family="FlexOLMo"),
    "GemmaForCausalLM": DraftSpec(family="Gemma"),
    "GlmForCausalLM": DraftSpec(family="GLM-4 (9B)"),
    "Glm4MoeForCausalLM": DraftSpec(family="GLM-4.5, GLM-4.6"),
    "Glm4MoeLiteForCausalLM": _latent("GLM-4.7-Flash"),
    "GlmMoeDsaForCausalLM": _latent("GLM-5"),
    "GPTNeoXForCausalLM": DraftSpec(family="GPT-NeoX"),
    "GraniteMoeForCausalLM": DraftSpec(family="Granite MoE"),
    "GraniteMoeHybridForCausalLM": _recurrent("Granite-4"),
    "GraniteMoeSharedForCausalLM": DraftSpec(family="Granite MoE, shared experts"),
    "GraniteMoeSWAForCausalLM": DraftSpec(family="Granite MoE, sliding windows"),
    "GraniteSWAForCausalLM": DraftSpec(family="Granite, sliding windows"),
    "HeliumForCausalLM": DraftSpec(family="Helium"),
    "HunYuanDenseV1ForCausalLM": DraftSpec(family="Hunyuan dense"),
    "HunYuanMoEV1ForCausalLM": DraftSpec(family="Hunyuan MoE"),
    "HYV3ForCausalLM": DraftSpec(family="Hunyuan 3"),
    "HyperCLOVAXForCausalLM": DraftSpec(family="HyperCLOVA X"),
    "InternLM3ForCausalLM": DraftSpec(family="InternLM3"),
    "Jais2ForCausalLM": DraftSpec(family="Jais-2"),
    "JambaForCausalLM": _recurrent("Jamba", _NO_ROPE),
    "KimiLinearForCausalLM": _recurrent("Kimi-Linear", _NO_ROPE),
    "LagunaForCausalLM": DraftSpec(family="Laguna"),
    "Lfm2ForCausalLM": _recurrent("LFM2"),
    "Lfm2MoeForCausalLM": _recurrent("LFM2 MoE"),
    "Lfm3ForCausalLM": _recurrent("LFM3"),
    "Llama4ForCausalLM": DraftSpec(family="Llama-4 text"),
    "Llama4ForConditionalGeneration": DraftSpec(family="Llama-4, text only"),
    "MellumForCausalLM": DraftSpec(family="Mellum"),
    "MiMoV2FlashForCausalLM": DraftSpec(family="MiMo-V2-Flash"),
    "MiniMaxForCausalLM": _recurrent("MiniMax-01"),
    "MiniMaxM2ForCausalLM": DraftSpec(family="MiniMax-M2"),
    "MiniMaxM3VLForCausalLM": DraftSpec(family="MiniMax-M3 text"),
    "MinistralForCausalLM": DraftSpec(family="Ministral"),
    "Ministral3ForCausalLM": DraftSpec(family="Ministral-3"),
    "Mistral3ForConditionalGeneration": DraftSpec(family="Mistral-3, text only"),
    "MixtralForCausalLM": DraftSpec(family="Mixtral"),
    "NanoChatForCausalLM": DraftSpec(family="nanochat"),
    "NemotronForCausalLM": DraftSpec(family="Nemotron, Minitron"),
    "NemotronHForCausalLM": _recurrent("Nemotron-H", _NO_ROPE),
    "OlmoForCausalLM": DraftSpec(family="OLMo"),
    "Olmo3ForCausalLM": DraftSpec(family="OLMo-3"),
    "OlmoHybridForCausalLM": _recurrent("OLMo hybrid"),
    "OlmoeForCausalLM": DraftSpec(family="OLMoE"),
    "PhiForCausalLM": DraftSpec(family="Phi-2"),
    "PhimoeForCausalLM": DraftSpec(family="Phi-3.5 MoE"),
    "Qwen2MoeForCausalLM": DraftSpec(family="Qwen2-MoE"),
    "Qwen3_5ForCausalLM": _recurrent("Qwen3.5 text"),
    "Qwen3_5ForConditionalGeneration": _recurrent("Qwen3.5, text only"),
    "Qwen3_5MoeForCausalLM": _recurrent("Qwen3.5-MoE text"),
    "Qwen3_5MoeForConditionalGeneration": _recurrent("Qwen3.5-MoE, text only"),
    "Qwen3NextForCausalLM": _recurrent("Qwen3-Next"),
    "SeedOssForCausalLM": DraftSpec(family="Seed-OSS"),
    "SmolLM3ForCausalLM": DraftSpec(family="SmolLM3"),
    "SolarOpenForCausalLM": DraftSpec(family="Solar Open"),
    "StableLmForCausalLM": DraftSpec(family="StableLM"),
    "Starcoder2ForCausalLM": DraftSpec(family="StarCoder2"),
    "VaultGemmaForCausalLM": DraftSpec(family="VaultGemma"),
    "YoutuForCausalLM": _latent("Youtu"),
}
"""Supported targets, by an entry of `architectures` in config.json."""


def find_spec(architectures: Sequence[str]) -> DraftSpec | None:
    """Return the first registered match, None if there is none."""
    return next((TARGETS[name] for name in architectures if name in TARGETS), None)


def derived_spec(architectures: Sequence[str]) -> DraftSpec:
    """Return the specification of a family that is not registered: its config has Llama's keys."""
    name = ", ".join(architectures) or "a target without a name"
    return DraftSpec(
        family=name,
        note=f"{name}: sizes come from config.json as Llama's do, rope and norm from the dataset",
    )
