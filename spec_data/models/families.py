"""The registry of targets that a draft can be built for: one line per family.

`architectures` of a target's config.json selects the family; the first registered name wins. Every
kind of draft supports the same families. A family whose config uses Llama's keys is one line. A
family that does not also needs a shape function in `shapes.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spec_data.models.shapes import TargetShape, decoder_shape, global_shape, latent_shape


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
