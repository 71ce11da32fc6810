"""Configuration of an EAGLE-1/2 draft: derived from the target's config.json, and its file.

What the engines read (vLLM's and SGLang's `llama_eagle.py`, SafeAILab's `cnets1.py`): `fc.weight`
[H, 2H] over [embedding ; state], the embedding first; `layers.N.*` of plain Llama layers of which
the first has **no** `input_layernorm`; no final norm; the target's own embedding and head.
`architectures` is vLLM's name; run with vLLM 0.32, drafts of one and of two layers are loaded as
they are and every round accepts what `spec_train.decoding.chains` accepts.

The bias of `fc` is where they differ. SafeAILab's loader makes one unless config.json says
`"bias": false`, vLLM has none and refuses a file with one, SGLang always has one and leaves it at
*random values* when the file has none. Drafts here have no bias and say so. For SGLang a file needs
`fc.bias` zeros and the architecture name `LlamaForCausalLMEagle`; as it is, SGLang refuses it.
"""

from dataclasses import dataclass
from typing import Any

from spec_data.config import from_dict
from spec_train.draft_options import EagleOptions
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.targets import (
    resolve_eagle1_draft_spec,
    target_architectures,
)
from spec_train.formats.flat import SECTION

ARCHITECTURE = "EagleLlamaForCausalLM"


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DraftConfig):
    """Everything that decides the draft's shapes and arithmetic."""

    num_hidden_layers: int

    @classmethod
    def from_target(
        cls,
        target_config: dict[str, Any],
        *,
        vocab_size: int,
        options: EagleOptions,
        dtype: str | None = None,
        origin: dict[str, Any] | None = None,
    ) -> "EagleConfig":
        """Derive a draft's configuration from the target's config.json.

        `dtype` is the target's element type if the config does not name it; `origin` is what else
        tells the target and its prompts from others.

        Raises:
            DraftError: a family that no draft is registered for, or a config without its sizes.
        """
        spec = resolve_eagle1_draft_spec(target_architectures(target_config))
        return cls(
            **cls.of_target(target_config, spec.shape(target_config), dtype, origin),
            num_hidden_layers=options.num_layers,
            vocab_size=vocab_size,
        )

    @property
    def draft_vocab_size(self) -> int:
        """The whole vocabulary: the head is the target's."""
        return self.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's states: the draft predicts them, so its own."""
        return self.hidden_size

    @property
    def layers(self) -> tuple[int, ...]:
        """No captured layer: the draft reads the final hidden states alone."""
        return ()

    def to_json(self, options: EagleOptions) -> dict[str, Any]:
        """Return config.json of the draft."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **self.shared_json(),
            "bias": False,  # of fc, to SafeAILab's loader
            "mlp_bias": False,
            SECTION: self.own_json("eagle", options),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> tuple["EagleConfig", EagleOptions]:
        """Read a config.json that `to_json` wrote.

        Raises:
            DraftError: it is not an EAGLE-1/2 draft of this project, or fields are missing.
        """
        found = cls.fields_of(raw, where, kind="an EAGLE-1/2", architectures=(ARCHITECTURE,))
        return cls(**found), from_dict(EagleOptions, raw[SECTION]["options"], where=where)
