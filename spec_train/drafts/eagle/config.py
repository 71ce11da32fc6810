"""Configuration of an EAGLE-1/2 draft: derived from the target's config.json, and its file.

In: the target's config.json, or the draft's own. Out: `EagleConfig`, and the draft's config.json.

The engines (vLLM's and SGLang's `llama_eagle.py`, SafeAILab's `cnets1.py`) read `fc.weight` [H, 2H]
over [embedding ; state], the embedding first; `layers.N.*` of plain Llama layers, of which the
first has **no** `input_layernorm`; no final norm; and the target's own embedding and head.
`architectures` is vLLM's name. vLLM 0.32 loads drafts of one and of two layers unchanged, and every
round accepts the tokens that `spec_train.decoding.chains` accepts (measured).

The engines differ in the bias of `fc`. SafeAILab's loader makes one unless config.json has
`"bias": false`. vLLM has none and refuses a file with one. SGLang always has one and leaves it at
*random values* if the file has none. Drafts that are fitted here have no bias and write
`"bias": false`. For SGLang the file needs an `fc.bias` of zeros and the architecture name
`LlamaForCausalLMEagle`; it refuses the file as written here.

Drafts of other trainers may have the bias, a norm before the first layer's attention, and a norm of
the prediction (AutoModel has both norms, under ModelOpt's names of the keys). Such a draft is read
and can be fitted further; no option makes a new one.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from spec_data.config import from_dict
from spec_data.shards.position_data import Positions
from spec_train.drafts.config import BaseConfig
from spec_train.drafts.targets import resolve_eagle1_draft_spec, target_shape
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.eagle import OWN as ARCHITECTURE
from spec_train.options.draft_options import EagleOptions


@dataclass(frozen=True, kw_only=True)
class EagleConfig(BaseConfig):
    """Shapes and arithmetic of the draft."""

    of_files: ClassVar[tuple[str, ...]] = (
        *("bias", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
    )
    switches: ClassVar[tuple[str, ...]] = (*BaseConfig.switches, *of_files)

    bias: bool = False  # of fc
    use_input_layernorm_in_first_layer: bool = False
    use_last_layernorm: bool = False  # of the prediction

    @classmethod
    def from_target(
        cls,
        target_config: dict[str, Any],
        *,
        vocab_size: int,
        options: EagleOptions,
        dtype: str | None = None,
        origin: dict[str, Any] | None = None,
        positions: Positions | None = None,
    ) -> "EagleConfig":
        """Derive a draft's configuration from the target's config.json.

        `dtype` and `origin` are those of `BaseConfig.of_target`, `positions` those of the dataset.

        Raises:
            DraftError: no draft is registered for the target's family, or a size is missing.
        """
        shape = target_shape(resolve_eagle1_draft_spec, target_config, positions)
        return cls(
            **cls.of_target(target_config, shape, options, options.num_layers, dtype, origin),
            num_hidden_layers=options.num_layers,
            vocab_size=vocab_size,
        )

    @property
    def draft_vocab_size(self) -> int:
        """The full vocabulary: the head is the target's."""
        return self.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's states, which the draft predicts: its own width."""
        return self.hidden_size

    @property
    def layers(self) -> tuple[int, ...]:
        """No captured layer: the draft reads only the final hidden states."""
        return ()

    def to_json(self, options: EagleOptions) -> dict[str, Any]:
        """Return config.json of the draft."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **self.shared_json(),
            "bias": self.bias,  # SafeAILab's loader makes one if there is no such key
            "mlp_bias": self.mlp_bias,
            **self.shape_json(),
            SECTION: self.own_json("eagle", options),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> tuple["EagleConfig", EagleOptions]:
        """Read a config.json that `to_json` wrote.

        Raises:
            DraftError: the file is not an EAGLE-1/2 draft of this project, or fields are missing.
        """
        found = cls.fields_of(raw, where, kind="an EAGLE-1/2", architectures=(ARCHITECTURE,))
        return cls(**found), from_dict(EagleOptions, raw[SECTION]["options"], where=where)
