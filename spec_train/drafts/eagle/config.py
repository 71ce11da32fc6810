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

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from spec_data.config import from_dict, to_dict
from spec_data.shards.errors import DraftError
from spec_train.draft_options import EagleOptions
from spec_train.drafts.layers import LayerShape, RopeSettings
from spec_train.drafts.targets import (
    resolve_eagle1_draft_spec,
    target_architectures,
    target_dtype,
    token_ids,
)

ARCHITECTURE = "EagleLlamaForCausalLM"
_OWN = ("origin", "token_ids")  # not keys of config.json under these names


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Everything that decides the draft's shapes and arithmetic."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    vocab_size: int
    rope_parameters: dict[str, Any]
    dtype: str = "bfloat16"
    token_ids: dict[str, Any] = field(default_factory=dict)  # bos/eos/pad as the target has them
    origin: dict[str, Any] = field(default_factory=dict)  # see `spec_train.origin`

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
            **spec.shape(target_config).of_draft(),
            num_hidden_layers=options.num_layers,
            vocab_size=vocab_size,
            dtype=target_dtype(target_config) or dtype or "bfloat16",
            token_ids=token_ids(target_config),
            origin=origin or {},
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

    @property
    def rope(self) -> RopeSettings:
        """The part that the rotary embedding reads."""
        return RopeSettings(
            rope_parameters=self.rope_parameters,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=self.max_position_embeddings,
        )

    @property
    def layer_shape(self) -> LayerShape:
        """The part that a decoder layer reads."""
        return LayerShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
        )

    def to_json(self, options: EagleOptions) -> dict[str, Any]:
        """config.json of the draft."""
        rope = self.rope_parameters
        out: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "llama"}
        out |= {k: v for k, v in dataclasses.asdict(self).items() if k not in _OWN}
        out |= self.token_ids
        out |= {
            "hidden_act": "silu",
            "bias": False,  # of fc, to SafeAILab's loader
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "rope_theta": rope["rope_theta"],
        }
        if "partial_rotary_factor" in rope:
            out["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if rope["rope_type"] != "default":
            out["rope_scaling"] = rope  # the name that engines on older transformers read
        out["spec_train"] = {"draft": "eagle", "options": to_dict(options), "origin": self.origin}
        return out

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> tuple["EagleConfig", EagleOptions]:
        """Read a config.json that `to_json` wrote.

        Raises:
            DraftError: it is not an EAGLE-1/2 draft of this project, or fields are missing.
        """
        own = raw.get("spec_train")
        if ARCHITECTURE not in raw.get("architectures", ()) or not isinstance(own, dict):
            raise DraftError(
                f"{where}: not an EAGLE-1/2 draft written by spec-train (architectures "
                f"{raw.get('architectures')}, spec_train {'present' if own else 'missing'})"
            )
        names = [f.name for f in dataclasses.fields(cls) if f.name not in _OWN]
        missing = [name for name in names if name not in raw]
        missing += ["spec_train.options"] if "options" not in own else []
        if missing:
            raise DraftError(f"{where}: lacks {', '.join(missing)}; it was edited or damaged")
        config = cls(
            **{name: raw[name] for name in names},
            token_ids=token_ids(raw),
            origin=own.get("origin") or {},
        )
        return config, from_dict(EagleOptions, own["options"], where=where)
