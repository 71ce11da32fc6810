"""Options and configuration of an EAGLE-3 draft: derived from the target's config.json.

The configuration file is the one every engine reads: `architectures`, both keys for the layer ids
(engines disagree on what an id means), no null fields. What only this project needs is under
`spec_train`.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from spec_data.config import from_dict, to_dict
from spec_data.shards.errors import DraftError
from spec_data.shards.schema import LAYER_CONVENTION
from spec_train.draft_options import Eagle3Options
from spec_train.drafts.layers import RopeSettings
from spec_train.drafts.targets import (
    resolve_eagle3_draft_spec,
    target_architectures,
    target_dtype,
    token_ids,
    warn_of_last_layer,
)

ARCHITECTURE = "LlamaForCausalLMEagle3"
_OWN = ("layers", "token_ids", "origin")  # not keys of config.json under these names


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Everything that decides the draft's shapes and arithmetic. Layer id: block output, from 0."""

    draft: ClassVar[str] = "eagle3"
    architecture: ClassVar[str] = ARCHITECTURE
    options_class: ClassVar[type] = Eagle3Options

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]
    rope_parameters: dict[str, Any]
    dtype: str = "bfloat16"
    fc_norm: bool = False
    norm_output: bool = False
    token_ids: dict[str, Any] = field(default_factory=dict)  # bos/eos/pad as the target has them
    origin: dict[str, Any] = field(default_factory=dict)  # see `spec_train.origin`

    @classmethod
    def from_target(
        cls,
        target_config: dict[str, Any],
        *,
        layers: tuple[int, ...],
        vocab_size: int,
        draft_vocab_size: int,
        options: Any,
        dtype: str | None = None,
        origin: dict[str, Any] | None = None,
        **own: Any,
    ) -> Self:
        """Derive a draft's configuration from the target's config.json.

        `dtype` is the target's element type if the config does not name it; `origin` is what else
        tells the target and its prompts from others; `own` are fields that a subclass adds.

        Raises:
            DraftError: a family that no draft is registered for, or a config without its sizes.
        """
        architectures = target_architectures(target_config)
        shape = resolve_eagle3_draft_spec(architectures).shape(target_config)
        warn_of_last_layer(layers, shape.num_hidden_layers)
        return cls(
            **shape.of_draft(),
            target_hidden_size=shape.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            layers=layers,
            dtype=target_dtype(target_config) or dtype or "bfloat16",
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
            token_ids=token_ids(target_config),
            origin=origin or {},
            **own,
        )

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

    def to_json(self, options: Any) -> dict[str, Any]:
        """config.json of the draft."""
        rope = self.rope_parameters
        out: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": "llama",
            "num_hidden_layers": 1,
        }
        plain = dataclasses.asdict(self)
        out |= {k: v for k, v in plain.items() if k not in _OWN}
        out |= self.token_ids
        out |= {
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "torch_dtype": self.dtype,
            "rope_theta": rope["rope_theta"],
        }
        if "partial_rotary_factor" in rope:
            out["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if rope["rope_type"] != "default":
            out["rope_scaling"] = rope  # the name that engines on older transformers read
        # vLLM and llama.cpp take an id as the *input* of that block, SGLang (nested) as its output.
        out["eagle_aux_hidden_state_layer_ids"] = [k + 1 for k in self.layers]
        out["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
        }
        out["spec_train"] = {
            "draft": self.draft,
            "layers": list(self.layers),
            "layer_convention": LAYER_CONVENTION,
            "options": to_dict(options),
            "origin": self.origin,
        }
        return out

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> tuple[Self, Any]:
        """Read a config.json that `to_json` wrote.

        Raises:
            DraftError: it is not such a draft of this project, or fields are missing.
        """
        own = raw.get("spec_train")
        if cls.architecture not in raw.get("architectures", ()) or not isinstance(own, dict):
            raise DraftError(
                f"{where}: no {cls.draft} draft written by spec-train (architectures "
                f"{raw.get('architectures')}, spec_train {'present' if own else 'missing'})"
            )
        names = [f.name for f in dataclasses.fields(cls) if f.name not in _OWN]
        missing = [name for name in names if name not in raw]
        missing += [f"spec_train.{k}" for k in ("layers", "options") if k not in own]
        if missing:
            raise DraftError(f"{where}: lacks {', '.join(missing)}; it was edited or damaged")
        config = cls(
            **{name: raw[name] for name in names},
            layers=tuple(own["layers"]),
            token_ids=token_ids(raw),
            origin=own.get("origin") or {},
        )
        return config, from_dict(cls.options_class, own["options"], where=where)
