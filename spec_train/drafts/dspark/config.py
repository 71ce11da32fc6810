"""Configuration of a DSpark or DFlash draft: derived from the target's config.json.

The file is the flat one that DeepSpec writes and engines read (`Qwen3DSparkModel`); a DFlash draft
in the layout that its paper publishes is a `DFlashDraftModel`. Which slots draft is always said:
engines differ in what they take for granted. `target_layer_ids` are outputs of blocks in all of
them. What only this project needs is under `spec_train`.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from spec_data.config import from_dict, to_dict
from spec_data.shards.errors import DraftError
from spec_data.shards.schema import LAYER_CONVENTION
from spec_train.draft_options import BlockOptions, DFlashOptions, DSparkOptions
from spec_train.drafts.layers import LayerShape, RopeSettings
from spec_train.drafts.targets import (
    resolve_dspark_draft_spec,
    target_architectures,
    target_dtype,
    token_ids,
    warn_of_last_layer,
)

DSPARK, DFLASH = "Qwen3DSparkModel", "DFlashDraftModel"
OPTIONS: dict[str, type[BlockOptions]] = {"dspark": DSparkOptions, "dflash": DFlashOptions}
_OWN = ("layers", "token_ids", "origin")  # not keys of config.json under these names


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """Everything that decides the draft's shapes and arithmetic. Layer id: block output, from 0."""

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
    num_hidden_layers: int
    num_target_layers: int
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    dtype: str = "bfloat16"
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
        mask_token_id: int,
        options: Any,
        dtype: str | None = None,
        origin: dict[str, Any] | None = None,
    ) -> "DSparkConfig":
        """Derive a draft's configuration from the target's config.json and `BlockOptions`.

        Raises:
            DraftError: a family that no draft is registered for, a config without its sizes, or a
                number that does not fit.
        """
        spec = resolve_dspark_draft_spec(target_architectures(target_config))
        shape = spec.shape(target_config)
        warn_of_last_layer(layers, shape.num_hidden_layers)
        if not 0 <= mask_token_id < vocab_size:
            raise DraftError(
                f"mask_token_id = {mask_token_id}: the target's vocabulary has {vocab_size} tokens"
            )
        return cls(
            **shape.of_draft(),
            target_hidden_size=shape.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            layers=layers,
            dtype=target_dtype(target_config) or dtype or "bfloat16",
            token_ids=token_ids(target_config),
            origin=origin or {},
            num_hidden_layers=options.num_draft_layers,
            num_target_layers=shape.num_hidden_layers,
            block_size=options.block_size,
            mask_token_id=mask_token_id,
            sample_from_anchor=options.layout == "anchor",
            markov_rank=options.markov_rank,
            markov_head_type=options.markov_head_type,
            enable_confidence_head=options.confidence_weight > 0,
        )

    @property
    def first(self) -> int:
        """The slot of a block that makes its first draft."""
        return 0 if self.sample_from_anchor else 1

    @property
    def depth(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - self.first

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
        """The part that a decoder layer reads: Qwen3's, norms of queries and keys, no biases."""
        return LayerShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            qk_norm=True,
        )

    def to_json(self, options: BlockOptions, draft: str) -> dict[str, Any]:
        """config.json of the draft called `draft`."""
        published = draft == "dflash" and not self.sample_from_anchor
        rope = self.rope_parameters
        plain = dataclasses.asdict(self)
        out: dict[str, Any] = {
            "architectures": [DFLASH if published else DSPARK],
            "model_type": "qwen3",
            **{k: v for k, v in plain.items() if k not in _OWN},
            **self.token_ids,
            "target_layer_ids": list(self.layers),
            "confidence_head_with_markov": self.enable_confidence_head and self.markov_rank > 0,
            "num_anchors": options.num_anchors,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "rope_theta": rope["rope_theta"],
        }
        if self.draft_vocab_size == self.vocab_size:
            # The head is the target's, so its embedding must be too: llama.cpp ties the head to an
            # embedding that it finds alone.
            out["has_embed_tokens"] = False
        if published:
            out["dflash_config"] = {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.layers),
                "block_size": self.block_size,
            }
        if "partial_rotary_factor" in rope:
            out["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if rope["rope_type"] != "default":
            out["rope_scaling"] = rope  # the name that engines on older transformers read
        out["spec_train"] = {
            "draft": draft,
            "layers": list(self.layers),
            "layer_convention": LAYER_CONVENTION,
            "options": to_dict(options),
            "origin": self.origin,
        }
        return out

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> tuple["DSparkConfig", str, Any]:
        """Read a config.json that `to_json` wrote: the config, the draft's name, its options.

        Raises:
            DraftError: it is not a block draft of this project, or fields are missing.
        """
        own = raw.get("spec_train")
        known = {DSPARK, DFLASH} & set(raw.get("architectures") or ())
        if not known or not isinstance(own, dict):
            raise DraftError(
                f"{where}: not a DSpark or DFlash draft written by spec-train (architectures "
                f"{raw.get('architectures')}, spec_train {'present' if own else 'missing'})"
            )
        names = [f.name for f in dataclasses.fields(cls) if f.name not in _OWN]
        missing = [name for name in names if name not in raw]
        missing += [f"spec_train.{k}" for k in ("draft", "layers", "options") if k not in own]
        if missing:
            raise DraftError(f"{where}: lacks {', '.join(missing)}; it was edited or damaged")
        if own["draft"] not in OPTIONS:
            raise DraftError(f"{where}: spec_train.draft is {own['draft']!r}, not {list(OPTIONS)}")
        config = cls(
            **{name: raw[name] for name in names},
            layers=tuple(own["layers"]),
            token_ids=token_ids(raw),
            origin=own.get("origin") or {},
        )
        return config, own["draft"], from_dict(OPTIONS[own["draft"]], own["options"], where=where)
