"""The registry of targets that a draft can be built for, and the shape that the draft takes over.

`architectures` of a target's config.json selects the family; the first registered name wins. Every
kind of draft supports the same families. A shape function takes sizes and rope settings from a
config.json; a family needs one of its own if its config has not the keys of Llama or GPT-2.

`generate` reads inverse frequencies and the final norm from the live modules and proves them
(`shards.position_data`). So a family needs no code to have the right rope. Where config.json says
otherwise, the data decide, and the difference is logged. Engines compute a draft's rope from its
config.json. So settings that have the same frequencies are searched first. Where none have, the
draft stores the frequencies, and an export for engines is refused.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spec_data.models.config_values import wrong_value
from spec_data.models.rope_settings import config_table, rope_parameters, stored_json
from spec_data.shards.errors import DraftError
from spec_data.shards.position_data import ROPE, Positions, RopeTable

log = logging.getLogger(__name__)

_DIGITS = 7  # of a theta that is searched
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
    if wrong := wrong_value(text):
        raise DraftError(f"target config.json: {wrong}; the file was edited or damaged")
    hidden = _size(text, "hidden_size", "n_embd", "d_model")
    heads = _size(text, "num_attention_heads", "n_head")
    kv_heads = text.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise DraftError(
            f"target config.json: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}; the file was edited or damaged"
        )
    limit = _size(text, "max_position_embeddings", "n_positions", "model_max_length")
    layers = (text.get("per_layer_config") or {}).items()
    sizes = {int(key): layer.get("head_dim") for key, layer in layers}
    kinds = enumerate(text.get("layer_types") or ())
    # of the full-attention layers, where all have one of their own (Gemma-4)
    full = {sizes.get(i) for i, kind in kinds if kind == "full_attention"}
    head_dim = full.pop() if len(full) == 1 else None
    return TargetShape(
        hidden_size=hidden,
        intermediate_size=text.get("intermediate_size") or text.get("n_inner") or 4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or text.get("head_dim") or hidden // heads,
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


def compressed_shape(config: dict[str, Any]) -> TargetShape:
    """Return the shape of a draft for DeepSeek-V4, as `latent_shape` does.

    The rope of config.json turns a share of the target's wide heads, and all of the draft's.
    """
    shape = latent_shape(config)
    rope = {k: v for k, v in shape.rope_parameters.items() if k != "partial_rotary_factor"}
    return replace(shape, rope_parameters=rope)


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


# -- registry --------------------------------------------------------------------------------------

_AS_LLAMA = """
    AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM BambaForCausalLM BitNetForCausalLM
    Cohere2ForCausalLM Cohere2MoeForCausalLM CohereForCausalLM CwmForCausalLM Dots1ForCausalLM
    Ernie4_5_MoeForCausalLM Ernie4_5ForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM
    FalconForCausalLM FalconH1ForCausalLM FlexOlmoForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
    Gemma3ForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration GemmaForCausalLM
    Glm4ForCausalLM Glm4MoeForCausalLM Glm5NextForConditionalGeneration GlmForCausalLM
    GPT2LMHeadModel GPTNeoXForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM GraniteMoeSWAForCausalLM
    GraniteSWAForCausalLM HeliumForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM
    HyperCLOVAXForCausalLM HYV3ForCausalLM InternLM3ForCausalLM Jais2ForCausalLM JambaForCausalLM
    KimiLinearForCausalLM LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM
    Llama4ForCausalLM Llama4ForConditionalGeneration LlamaForCausalLM MellumForCausalLM
    MiMoV2FlashForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM
    Ministral3ForCausalLM MinistralForCausalLM Mistral3ForConditionalGeneration MistralForCausalLM
    MixtralForCausalLM NanoChatForCausalLM NemotronForCausalLM NemotronHForCausalLM Olmo2ForCausalLM
    Olmo3ForCausalLM OlmoeForCausalLM OlmoForCausalLM OlmoHybridForCausalLM Phi3ForCausalLM
    PhiForCausalLM PhimoeForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3_5ForCausalLM
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
    Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
    SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM VaultGemmaForCausalLM
"""
_LATENT = """
    AXK1ForCausalLM AXK2ForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
    DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM YoutuForCausalLM
"""
TARGETS: dict[str, Callable[[dict[str, Any]], TargetShape]] = {
    **dict.fromkeys(_AS_LLAMA.split(), decoder_shape),
    **dict.fromkeys(_LATENT.split(), latent_shape),
    "DeepseekV4ForCausalLM": compressed_shape,
}
"""From config.json to the draft's shape, by an entry of `architectures`."""

_RECURRENT = "captured one document per row, for its recurrent blocks; the draft has attention only"
_NO_ROPE = "captured one document per row; the draft has rotary positions, which it has not"
_ROWS = """
    BambaForCausalLM FalconH1ForCausalLM GraniteMoeHybridForCausalLM Lfm2ForCausalLM
    Lfm2MoeForCausalLM Lfm3ForCausalLM MiniMaxForCausalLM OlmoHybridForCausalLM
    Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
    Qwen3_5MoeForConditionalGeneration Qwen3NextForCausalLM
"""
NOTES = {
    **dict.fromkeys(_ROWS.split(), _RECURRENT),
    **dict.fromkeys(
        ["JambaForCausalLM", "KimiLinearForCausalLM", "NemotronHForCausalLM"], _NO_ROPE
    ),
    **dict.fromkeys(_LATENT.split(), "the draft has dense attention instead of latent attention"),
    "DeepseekV4ForCausalLM": "the draft reads the mean of the residual streams, and has dense "
    "attention",
    **dict.fromkeys(
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        "the draft has heads and rotary settings of the full-attention layers",
    ),
    "Glm5NextForConditionalGeneration": "the draft reads the mean of the residual streams; "
    + _NO_ROPE,
    "GPT2LMHeadModel": "the draft has rotary positions instead of learned ones",
    "GptOssForCausalLM": "the draft has a dense MLP, no attention sinks, and the target's YaRN",
}
"""How a draft differs from its target, in more than sizes; docs/targets.md has more."""


def registered(architectures: Sequence[str]) -> str | None:
    """Return the first of a target's architectures that is registered, None without one."""
    return next((name for name in architectures if name in TARGETS), None)


def target_architectures(config: dict[str, Any]) -> list[str]:
    """Return `architectures` of a target's config.json; empty if the key is missing."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def config_shape(config: dict[str, Any], *, with_rope: bool = True) -> TargetShape:
    """Return the shape that config.json describes; of an unknown family, with Llama's keys.

    Raises:
        DraftError: a size is missing, or the rope is unknown.
    """
    shape_of = TARGETS.get(registered(target_architectures(config)) or "", decoder_shape)
    return shape_of(config if with_rope else _without_rope(config))


def _without_rope(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    tables = {"text_config": _without_rope(nested)} if isinstance(nested, dict) else {}
    rope = ("rope_parameters", "rope_scaling")
    return {key: value for key, value in config.items() if key not in rope} | tables


# -- what was proven -------------------------------------------------------------------------------


def fitted_shape(config: dict[str, Any], positions: Positions | None) -> TargetShape:
    """Return the shape of a draft; `positions` are those of its dataset, None if not recorded.

    Raises:
        DraftError: config.json lacks a size, or has a rope that is unknown and not proven.
    """
    positions = positions or Positions()
    table = positions.of_draft if positions.proven else None
    try:
        shape = config_shape(config)
    except DraftError as error:
        if table is None:
            raise
        shape = config_shape(config, with_rope=False)  # raises again if a size is missing
        log.warning("warning[rope]: the rope of config.json is not used: %s", error)
    eps = positions.norm.get("eps")
    if eps is not None and not math.isclose(eps, shape.rms_norm_eps, rel_tol=1e-6):
        log.warning(
            "warning[rope]: config.json leads to eps %g of the norms, the target's final norm has "
            "%g, which is used",
            *(shape.rms_norm_eps, eps),
        )
        shape = replace(shape, rms_norm_eps=eps)
    if table is not None:
        return _with_table(shape, table)
    if positions.kind == ROPE:
        log.warning(
            "warning[rope]: the target's rotary frequencies are not proven (%s): those of its "
            "config.json are used",
            positions.reason or "no table for full attention",
        )
    return shape


def _with_table(shape: TargetShape, table: RopeTable) -> TargetShape:
    """Return the shape with the rotary embedding of a proven table."""
    shape = replace(shape, head_dim=max(table.size, shape.head_dim))
    stated = shape.rope_parameters
    for parameters in (stated, *_candidates(shape, table)):
        fitted = replace(shape, rope_parameters=parameters)
        try:
            expressed = config_table(fitted).equals(table)
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            continue
        if expressed:
            if parameters is not stated:
                log.warning(
                    "warning[rope]: the rope of the target's config.json, %s, is not what its "
                    "rotary module computes. The module decides; the draft's config.json has %s",
                    *(stated, parameters),
                )
            return replace(fitted, positions=stored_json(table, expressed=True))
    log.warning(
        "warning[rope]: the rope of the target's config.json, %s, is not what its rotary module "
        "computes, and no rope settings are. The draft stores the module's frequencies; engines "
        "cannot serve it",
        stated,
    )
    return replace(shape, positions=stored_json(table, expressed=False))


def _candidates(shape: TargetShape, table: RopeTable) -> Iterator[dict[str, Any]]:
    """Yield rope settings that may have the frequencies of a table."""
    share = table.size / shape.head_dim
    while int(shape.head_dim * share) < table.size:  # readers round down
        share = math.nextafter(share, 2)
    partial = {"partial_rotary_factor": share} if share < 1 else {}
    plain = {k: v for k, v in shape.rope_parameters.items() if k != "partial_rotary_factor"}
    yield plain | partial
    count = len(table.inv_freq)
    if count < 2 or not bool((table.inv_freq > 0).all()):
        return
    first, last = float(table.inv_freq[0]), float(table.inv_freq[-1])
    exact = (first / last) ** (count / (count - 1))
    for digits in range(1, _DIGITS + 1):
        theta = {"rope_theta": float(f"{exact:.{digits}g}")}
        yield {"rope_type": "default"} | theta | partial
        yield {"rope_type": "linear"} | theta | {"factor": float(f"{1 / first:.6g}")} | partial
