"""What the configurations of all drafts share: sizes, rotary settings, and their part of the file.

In: a target's config.json, or one that this project wrote. Out: a frozen dataclass, and the keys of
the draft's config.json that engines read. Keys that only this project needs are in the section
`spec_train`. Each kind of draft adds its own fields, its `architectures` and its keys.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

from spec_data.models.families import LayerSizes, TargetShape, text_table
from spec_data.models.rope_settings import RopeSettings
from spec_data.shards.errors import DraftError
from spec_data.shards.schema import LAYER_CONVENTION
from spec_data.terminal.config import to_dict
from spec_data.terminal.console import nearest
from spec_train.drafts.layers import LayerShape
from spec_train.drafts.targets import target_dtype, token_ids
from spec_train.formats.draft_seal import SECTION
from spec_train.options.shape_options import FULL, SLIDING, LayerOptions
from spec_train.options.vocabulary_options import PATHS

# -- shape checks ----------------------------------------------------------------------------------
# Which shapes a draft can have: the checks of a draft's configuration.
#
# In: the fields of a configuration. Out: a DraftError that names the field, or nothing.


def check_shape(config: Any) -> None:
    """Refuse a configuration (`BaseConfig`) whose fields contradict each other or mean nothing.

    Raises:
        DraftError: names the field, its value and what is possible.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise DraftError(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    if config.head_dim % 2:
        raise DraftError(f"head_dim = {config.head_dim}: rotary positions need an even size")
    _check_factors(config)
    _check_activation(config.hidden_act)
    _check_layer_types(config)


def _check_factors(config: Any) -> None:
    """Refuse a head size for which longrope has no factors: it has one per rotated pair."""
    rope = config.rope_parameters
    pairs = int(config.head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        count = len(rope.get(name) or ()) if rope["rope_type"] == "longrope" else 0
        if count not in (0, pairs):
            raise DraftError(
                f"head_dim = {config.head_dim}: the target's longrope has {count} numbers in "
                f"{name}, heads of this size need {pairs}; use the target's head size"
            )


def _check_activation(name: str) -> None:
    if name == "silu":  # nearly all drafts: transformers takes seconds to import
        return
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        near = nearest(str(name), list(ACT2FN))
        advice = f"; did you mean {near}?" if near else ""
        raise DraftError(
            f"hidden_act = {name!r}: transformers has no such activation{advice} Known: "
            f"{', '.join(sorted(ACT2FN))}"
        )
    if any(True for _ in ACT2FN[name].parameters()):
        raise DraftError(f"hidden_act = {name!r}: an activation with weights is not supported")


def _check_layer_types(config: Any) -> None:
    types, layers = config.layer_types, config.num_hidden_layers
    if types and len(types) != layers:
        raise DraftError(
            f"layer_types has {len(types)} entries, but the draft has {layers} decoder layers"
        )
    if odd := sorted(set(types) - {FULL, SLIDING}):
        raise DraftError(
            f"layer_types: {', '.join(map(str, odd))} unknown; a layer is {FULL} or {SLIDING}"
        )
    if types and (config.sliding_window or 0) < 1:
        raise DraftError(
            f"sliding_window = {config.sliding_window}: layer_types has {SLIDING}, which needs a "
            "window of at least 1"
        )


# -- config ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BaseConfig(LayerSizes):
    """Shapes and arithmetic of a draft."""

    not_keys: ClassVar[tuple[str, ...]] = ("token_ids", "origin", "positions")
    """Fields that are written under other names."""
    switches: ClassVar[tuple[str, ...]] = (
        *("hidden_act", "attention_bias", "mlp_bias", "qk_norm", "sliding_window", "layer_types"),
        "train_embeddings",
    )
    """Fields that older files lack and that are written only if they are not the default."""
    of_files: ClassVar[tuple[str, ...]] = ()
    """Fields that no option sets: a draft that was read keeps its own."""

    num_hidden_layers: int  # decoder layers of the draft
    max_position_embeddings: int
    vocab_size: int
    rope_parameters: dict[str, Any]
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # a token sees so many positions, its own one included
    layer_types: tuple[str, ...] = ()  # one per layer of the draft; (): all full_attention
    train_embeddings: bool = False  # whether the embedding is the draft's own
    dtype: str = "bfloat16"
    token_ids: dict[str, Any] = field(default_factory=dict)  # the target's bos, eos and pad ids
    origin: dict[str, Any] = field(default_factory=dict)  # see `spec_train.formats.origin`
    positions: dict[str, Any] = field(default_factory=dict)  # see `rope_settings.stored_json`

    def __post_init__(self) -> None:
        """Bring `layer_types` into one form; refuse a shape that no draft of this kind can have.

        Raises:
            DraftError: names the field.
        """
        sliding = set(self.layer_types) - {FULL}
        object.__setattr__(self, "layer_types", tuple(self.layer_types) if sliding else ())
        if not sliding:
            object.__setattr__(self, "sliding_window", None)
        check_shape(self)

    @staticmethod
    def of_target(
        target_config: dict[str, Any],
        shape: TargetShape,
        options: LayerOptions,
        layers: int,
        dtype: str | None,
        origin: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Return the fields above that come from the target and the options, but `vocab_size`.

        Args:
            target_config: the target's config.json.
            shape: the target's sizes.
            options: what the draft has otherwise than the target.
            layers: decoder layers of the draft.
            dtype: the target's dtype, used if `target_config` names none; None: bfloat16.
            origin: further facts that identify the target and its prompts.
        """
        sizes = shape.of_draft()
        own = options.layer_fields(text_table(target_config) | sizes, layers)
        if own["head_dim"] != shape.head_dim:  # the target's frequencies belong to its own heads
            kept = {k: v for k, v in shape.positions.items() if k == "factors"}
            sizes["positions"] = kept
        return {
            **sizes,
            **own,
            "dtype": target_dtype(target_config) or dtype or "bfloat16",
            "token_ids": token_ids(target_config),
            "origin": origin or {},
        }

    @property
    def rope(self) -> RopeSettings:
        """The fields that the rotary embedding needs."""
        return RopeSettings.of(self)

    @property
    def layer_shape(self) -> LayerShape:
        """The fields that a decoder layer needs."""
        return LayerShape(**{f.name: getattr(self, f.name) for f in dataclasses.fields(LayerShape)})

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every layer of the draft, in positions; None: it sees every position."""
        types = self.layer_types or (FULL,) * self.num_hidden_layers
        return tuple(None if kind == FULL else self.sliding_window for kind in types)

    def shape_json(self) -> dict[str, Any]:
        """Return the `switches` that are not the default of this kind of draft."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        plain = to_dict(self)  # lists for tuples, as a file has them
        names = [name for name in self.switches if getattr(self, name) != defaults[name]]
        out = {name: plain[name] for name in names}
        # transformers drops the window of a Qwen3 config without it
        return out | ({"use_sliding_window": True} if self.layer_types else {})

    def shared_json(self) -> dict[str, Any]:
        """Return the keys of config.json that every kind of draft writes."""
        rope = self.rope_parameters
        plain, left_out = to_dict(self), {*self.not_keys, *self.switches}
        out: dict[str, Any] = {k: v for k, v in plain.items() if k not in left_out}
        out |= self.token_ids
        out |= {
            "hidden_act": self.hidden_act,
            "attention_bias": self.attention_bias,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "rope_theta": rope["rope_theta"],
        }
        if "partial_rotary_factor" in rope:
            out["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if rope["rope_type"] != "default":
            out["rope_scaling"] = rope  # the key that engines on older transformers read
        return out

    def own_json(self, draft: str, options: Any) -> dict[str, Any]:
        """Return the section of config.json that only this project reads."""
        kept = {  # without null, which some engines do not read
            name: value
            for name, value in to_dict(options).items()
            if name not in PATHS and value is not None
        }
        own = {"draft": draft, "options": kept, "origin": self.origin}
        return own | ({"positions": self.positions} if self.positions else {})

    @classmethod
    def fields_of(
        cls,
        raw: dict[str, Any],
        where: str,
        *,
        kind: str,
        architectures: Collection[str],
        needed: Collection[str] = ("options",),
    ) -> dict[str, Any]:
        """Return the fields of a config.json that this project wrote.

        Args:
            raw: config.json.
            where: its path, for messages.
            kind: name of the draft with its article, for messages.
            architectures: names of which `architectures` must contain at least one.
            needed: required keys of the section of this project.

        Raises:
            DraftError: the file is not such a draft of this project, or fields are missing.
        """
        own = raw.get(SECTION)
        known = set(architectures) & set(raw.get("architectures") or ())
        if not known or not isinstance(own, dict):
            raise DraftError(
                f"{where}: not {kind} draft written by spec-train (architectures "
                f"{raw.get('architectures')}, {SECTION} {'present' if own else 'missing'})"
            )
        names = [f.name for f in dataclasses.fields(cls) if f.name not in cls.not_keys]
        missing = [name for name in names if name not in raw and name not in cls.switches]
        missing += [f"{SECTION}.{k}" for k in needed if k not in own]
        if missing:
            raise DraftError(f"{where}: lacks {', '.join(missing)}; it was edited or damaged")
        found = {name: raw[name] for name in names if name in raw}
        if "layers" in cls.not_keys:
            found["layers"] = tuple(own["layers"])
        tables = {name: own.get(name) or {} for name in ("origin", "positions")}
        return {**found, "token_ids": token_ids(raw), **tables}


@dataclass(frozen=True, kw_only=True)
class LayeredConfig(BaseConfig):
    """A draft that reads captured layers. Layer id: block output, counted from 0."""

    not_keys: ClassVar[tuple[str, ...]] = ("layers", "token_ids", "origin", "positions")

    target_hidden_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]

    def own_json(self, draft: str, options: Any) -> dict[str, Any]:
        """Return the section of config.json that only this project reads."""
        layers = {"layers": list(self.layers), "layer_convention": LAYER_CONVENTION}
        return {"draft": draft, **layers, **super().own_json(draft, options)}


@dataclass(frozen=True, kw_only=True)
class AuxConfig(LayeredConfig):
    """A draft of `aux_draft.AuxDraft`: with switches for norms of its inputs and of its output."""

    switches: ClassVar[tuple[str, ...]] = (
        *LayeredConfig.switches,
        *("norm_before_fc", "norm_before_residual"),
    )

    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False  # one RMSNorm over all captured layers
    norm_before_residual: bool = False  # the first layer adds to its normalised input
