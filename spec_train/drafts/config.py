"""The configurations of all drafts: sizes and arithmetic, from a target's config.json or a draft's.

A configuration is a frozen dataclass. It is written as a config.json that engines read, where keys
that only this project needs are in the section `spec_train`. Each kind of draft adds its fields,
its `architectures` and its keys.
"""

import dataclasses
import logging
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import msgspec

from spec_data.models.families import (
    TARGETS,
    LayerSizes,
    TargetShape,
    fitted_shape,
    registered,
    target_architectures,
    text_table,
)
from spec_data.shards.errors import DraftError
from spec_data.shards.position_data import Positions
from spec_data.shards.schema import LAYER_CONVENTION
from spec_data.terminal.config import to_dict
from spec_train.drafts.layers import activation
from spec_train.drafts.mask_token import require_in_vocabulary
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.names import TOKEN_KEYS
from spec_train.options.draft_options import FULL, PATHS, SLIDING

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DraftConfig(LayerSizes):
    """Shapes and arithmetic of a draft."""

    draft: ClassVar[str]  # the kind of draft, a key of `DRAFTS`
    architectures: ClassVar[tuple[str, ...]] = ("SpecTrainDraft",)
    """Names in config.json that this kind may have."""
    reads_layers: ClassVar[bool] = True  # or else the final hidden states, with the full head
    not_keys: ClassVar[tuple[str, ...]] = ("layers", "token_ids", "origin", "positions")
    """Fields that are not keys of config.json, or are written under other names."""
    switches: ClassVar[tuple[str, ...]] = (
        *("hidden_act", "attention_bias", "mlp_bias", "qk_norm", "sliding_window", "layer_types"),
        "train_embeddings",
    )
    """Fields that are written only if they are not the default."""
    of_files: ClassVar[tuple[str, ...]] = ()
    """Fields that no option sets: a draft that was read keeps its own."""

    num_hidden_layers: int  # decoder layers of the draft
    max_position_embeddings: int
    vocab_size: int  # of the target
    rope_parameters: dict[str, Any]
    hidden_act: str = "silu"  # a name of transformers' ACT2FN
    attention_bias: bool = False  # of the four attention projections
    mlp_bias: bool = False  # of the three projections of the MLP
    qk_norm: bool = False  # Qwen3: an RMSNorm over each head's queries and keys
    sliding_window: int | None = None  # a token sees so many positions, its own one included
    layer_types: tuple[str, ...] = ()  # one per layer of the draft; (): all full_attention
    train_embeddings: bool = False  # whether the embedding is the draft's own
    dtype: str = "bfloat16"  # of the target; the draft is saved in it
    token_ids: dict[str, Any] = field(default_factory=dict)  # the target's bos, eos and pad ids
    origin: dict[str, Any] = field(default_factory=dict)  # see `spec_train.formats.origin`
    positions: dict[str, Any] = field(default_factory=dict)  # see `rope_settings.stored_json`
    target_hidden_size: int  # width of the target's states
    draft_vocab_size: int  # number of tokens that the draft can propose
    layers: tuple[int, ...] = ()  # block outputs that it reads, counted from 0, ascending

    def __post_init__(self) -> None:
        """Bring `layer_types` into one form; refuse a shape that no draft of this kind can have."""
        check_types(self)
        sliding = set(self.layer_types) - {FULL}
        object.__setattr__(self, "layer_types", tuple(self.layer_types) if sliding else ())
        if not sliding:
            object.__setattr__(self, "sliding_window", None)
        check_shape(self)

    @classmethod
    def from_target(
        cls,
        target_config: dict[str, Any],
        *,
        options: Any,
        vocab_size: int,
        draft_vocab_size: int | None = None,
        layers: tuple[int, ...] = (),
        dtype: str | None = None,
        origin: dict[str, Any] | None = None,
        positions: Positions | None = None,
        **fields: Any,
    ) -> Self:
        """Derive a draft's configuration from the target's config.json and the draft's options.

        Args:
            target_config: the target's config.json.
            options: of the draft; what it has otherwise than the target.
            vocab_size, draft_vocab_size, layers, origin: as the fields; None: all tokens, no facts.
            dtype: the target's dtype, used if `target_config` names none; None: bfloat16.
            positions: what the dataset records of the target's positions.
            **fields: fields that only this kind of draft has, if no option sets them.

        Raises:
            DraftError: no draft is registered for the target's family, a size is missing, or the
                shape is impossible.
        """
        shape = target_shape(cls.draft, target_config, positions)
        if layers and layers[-1] >= shape.num_hidden_layers - 1:
            log.warning(
                "warning[last-layer]: layer %d is the target's last block: engines disagree on "
                "whether its output is taken before or after the final norm; do not use it in "
                "drafts for serving",
                layers[-1],
            )
        options = options.sized(shape.hidden_size, shape.num_hidden_layers)
        sizes = shape.of_draft()
        layers_of_draft = getattr(options, "num_layers", 1)
        layer = options.layer_fields(text_table(target_config) | sizes, layers_of_draft)
        if layer["head_dim"] != shape.head_dim:  # the target's frequencies belong to its own heads
            sizes["positions"] = {k: v for k, v in shape.positions.items() if k == "factors"}
        return cls(
            **(sizes | layer),
            num_hidden_layers=layers_of_draft,
            vocab_size=vocab_size,
            dtype=target_dtype(target_config) or dtype or "bfloat16",
            token_ids=token_ids(target_config),
            origin=origin or {},
            target_hidden_size=shape.hidden_size,
            draft_vocab_size=vocab_size if draft_vocab_size is None else draft_vocab_size,
            layers=layers,
            **cls.from_options(options, shape),
            **fields,
        )

    @classmethod
    def from_options(cls, options: Any, shape: TargetShape) -> dict[str, Any]:
        """Return the fields of this kind of draft that its options and the target decide.

        These are the options of the same name, unless a subclass says otherwise.
        """
        own = {f.name for f in dataclasses.fields(cls)} - {
            f.name for f in dataclasses.fields(DraftConfig)
        }
        return {name: value for name, value in options.values().items() if name in own}

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

    def own_json(self, options: Any) -> dict[str, Any]:
        """Return the section of config.json that only this project reads."""
        section: dict[str, Any] = {"draft": self.draft}
        if self.reads_layers:
            section |= {"layers": list(self.layers), "layer_convention": LAYER_CONVENTION}
        settings = to_dict(options).items()  # without null, which some engines do not read
        section["options"] = {k: v for k, v in settings if k not in PATHS and v is not None}
        section["origin"] = self.origin
        return section | ({"positions": self.positions} if self.positions else {})

    def to_json(self, options: Any) -> dict[str, Any]:
        """Return config.json of the draft."""
        return {
            "architectures": [self.architectures[0]],
            "model_type": self.draft,
            **self.shared_json(),
            **self.shape_json(),
            SECTION: self.own_json(options),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> Self:
        """Read a config.json that `to_json` wrote; `where` is its path, for messages.

        Raises:
            DraftError: the file is not such a draft of this project, or fields are missing.
        """
        section = raw.get(SECTION)
        classes = set(cls.architectures) & set(raw.get("architectures") or ())
        if not classes or not isinstance(section, dict):
            raise DraftError(
                f"{where}: no {cls.draft} draft written by spec-train (architectures "
                f"{raw.get('architectures')}, {SECTION} {'present' if section else 'missing'})"
            )
        names = [f.name for f in dataclasses.fields(cls) if f.name not in cls.not_keys]
        missing = [name for name in names if name not in raw and name not in cls.switches]
        needed = ("draft", "options", *(("layers",) if cls.reads_layers else ()))
        missing += [f"{SECTION}.{k}" for k in needed if k not in section]
        if missing:
            raise DraftError(f"{where}: lacks {', '.join(missing)}; it was edited or damaged")
        if section["draft"] != cls.draft:
            raise DraftError(f"{where}: a draft of kind {section['draft']}, not {cls.draft}")
        fields: dict[str, Any] = {name: raw[name] for name in names if name in raw}
        if cls.reads_layers:
            fields["layers"] = tuple(section["layers"])
        else:
            fields["target_hidden_size"] = raw["hidden_size"]
            fields["draft_vocab_size"] = raw["vocab_size"]
        fields |= {name: section.get(name) or {} for name in ("origin", "positions")}
        return cls(**fields, token_ids=token_ids(raw))


def check_types(config: Any) -> None:
    """Raise DraftError if a field of a `DraftConfig` has not the type of its annotation."""
    hints = typing.get_type_hints(type(config))
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        try:
            msgspec.convert(value, hints[one.name])
        except msgspec.ValidationError as error:
            text = str(error).replace("`", "").partition(" - at ")[0]
            raise DraftError(f"{one.name} = {value!r}: {text[0].lower()}{text[1:]}") from None


def check_shape(config: Any) -> None:
    """Raise DraftError if fields of a `DraftConfig` contradict each other or mean nothing."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise DraftError(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    if config.head_dim % 2:
        raise DraftError(f"head_dim = {config.head_dim}: rotary positions need an even size")
    for name in ("rms_norm_eps", "max_position_embeddings"):
        if getattr(config, name) <= 0:
            raise DraftError(f"{name} = {getattr(config, name)}: expected a number above 0")
    if hasattr(config, "mask_token_id"):
        require_in_vocabulary(config.mask_token_id, config.vocab_size)
    rope = config.rope_parameters
    share = rope.get("partial_rotary_factor", 1.0)
    if rope["rope_theta"] <= 0 or not 0 < share <= 1:
        raise DraftError(
            f"rope_theta = {rope['rope_theta']}, partial_rotary_factor = {share}: theta is above "
            "0, and the factor at most 1"
        )
    pairs = int(config.head_dim * share) // 2
    for name in ("short_factor", "long_factor"):  # one per rotated pair
        count = len(rope.get(name) or ()) if rope["rope_type"] == "longrope" else 0
        if count not in (0, pairs):
            raise DraftError(
                f"head_dim = {config.head_dim}: the target's longrope has {count} numbers in "
                f"{name}, heads of this size need {pairs}; use the target's head size"
            )
    activation(config.hidden_act)
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


# -- the target ------------------------------------------------------------------------------------


def target_shape(
    draft: str, target_config: dict[str, Any], positions: Positions | None
) -> TargetShape:
    """Return the shape that a draft of the kind `draft` takes from its target.

    The registry of families is `TARGETS` in `spec_data/models/families.py`. A family that it does
    not know is derived from its config.json, if the dataset has proven `positions` of it.

    Raises:
        DraftError: neither is the case, or config.json lacks a size.
    """
    names = target_architectures(target_config)
    if registered(names) is None:
        problem = (
            f"no {draft} draft is registered for a target of architectures {names}; "
            f"supported: {', '.join(sorted(TARGETS))}. Targets that take images or audio, encoder-"
            "decoders and recurrent models are not supported. To add a decoder whose config.json "
            "has Llama's keys, add its name to _AS_LLAMA in spec_data/models/families.py"
        )
        if positions is None:
            raise DraftError(problem)
        if not positions.proven:
            raise DraftError(
                f"{problem}. The dataset does not replace that line: the target's positions are "
                f"not proven ({positions.reason})"
            )
        log.info("%s is not registered: sizes come from config.json as Llama's do", names)
    return fitted_shape(target_config, positions)


def target_dtype(config: dict[str, Any]) -> str | None:
    """Return the name of the target's dtype, or None if the config does not name one."""
    for table in (config, text_table(config)):
        for key in ("dtype", "torch_dtype"):
            if isinstance(table.get(key), str):
                return str(table[key]).removeprefix("torch.")
    return None


def special_ids(config: dict[str, Any]) -> list[int]:
    """Return the special token ids of a target's config; every draft vocabulary has them."""
    values = token_ids(config).values()
    return [i for value in values for i in (value if isinstance(value, list) else [value])]


def token_ids(config: dict[str, Any]) -> dict[str, Any]:
    """Return the bos, eos and pad ids of a config; the top level overrides `text_config`."""
    tables = (text_table(config), config)
    ids = {key: table[key] for table in tables for key in TOKEN_KEYS if key in table}
    return {key: value for key, value in ids.items() if value is not None}
