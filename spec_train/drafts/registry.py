"""Which targets a draft can be built for, by the `architectures` of their config.json.

A family that writes its sizes as Llama does is one line. One that does not gets a shape function
(see `shape`). No model class of any family is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_data.shards.errors import DraftError
from spec_data.shards.layers import build_target_layer_ids, capturable_layer_ids
from spec_train.drafts.shape import TargetShape, decoder_shape, global_shape, latent_shape

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
        "in spec_train/drafts/registry.py"
    )


def target_architectures(config: dict[str, Any]) -> list[str]:
    """The `architectures` of a target's config.json; empty where it names none."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []
