"""Options for the shape of a draft: classes that the options of every draft inherit.

An option that is not given leaves the shape as it is without it: sizes are the target's, and the
other switches are off. `spec_train.drafts.config` makes the fields of a draft's configuration from
them, under the same names; the number of layers and the mask token are options of each draft.
`--draft-config FILE` sets the same options from a config.json (see `draft_config_file`). No torch
here: `--help` is instant.
"""

from dataclasses import dataclass
from typing import Any, Self

from spec_data.shards.errors import DraftError
from spec_data.terminal.config import option
from spec_train.options.initial_options import InitialOptions

SHAPE = "shape of the draft"
FULL, SLIDING = "full_attention", "sliding_attention"
"""The two values of `layer_types`."""
AUTO = "auto"
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def qk_norm_option(default: bool) -> Any:
    """Return the option for norms of queries and keys; the default depends on the draft."""
    return option(
        default,
        help="normalise queries and keys, each head by an RMSNorm (Qwen3's layer)",
        group=SHAPE,
    )


def _bias_option(of: str) -> Any:
    return option(
        AUTO,
        help=f"biases of {of}; auto: as the target's config says",
        group=SHAPE,
        choices=(AUTO, "true", "false"),
    )


@dataclass(frozen=True, kw_only=True)
class LayerOptions(InitialOptions):
    """The shape of a decoder layer, and the embedding."""

    intermediate_size: int = option(
        0, help="width inside the MLP. 0 = the target's", group=SHAPE, metavar="N"
    )
    num_attention_heads: int = option(
        0, help="query heads. 0 = the target's", group=SHAPE, metavar="N"
    )
    num_key_value_heads: int = option(
        0,
        help="key and value heads; they divide the query heads. 0 = the target's",
        group=SHAPE,
        metavar="N",
    )
    head_dim: int = option(
        0,
        help="size of a head. 0 = the target's. With another one, the rotary frequencies "
        "are those of this size, as engines compute them from the draft's own config",
        group=SHAPE,
        metavar="N",
    )
    hidden_act: str = option(
        "silu",
        help="activation of the MLP, by its name in transformers, such as silu or "
        "gelu_pytorch_tanh",
        group=SHAPE,
        metavar="NAME",
    )
    qk_norm: bool = qk_norm_option(False)
    attention_bias: str = _bias_option("the four attention projections")
    mlp_bias: str = _bias_option("the three projections of the MLP")
    sliding_window: int = option(
        0,
        help="a token sees the last N positions only, its own one included, in the layers of "
        "--layer-types. 0 = every earlier position",
        group=SHAPE,
        metavar="N",
    )
    layer_types: str = option(
        AUTO,
        help=f"one of {FULL} and {SLIDING} per layer of the draft, with commas; auto: every layer "
        "slides if --sliding-window is given",
        group=SHAPE,
        metavar="TYPES",
    )
    train_embeddings: bool = option(
        False,
        help="train an embedding of its own, which starts as the target's; SGLang replaces it by "
        "the target's",
        group=SHAPE,
    )

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        super().__post_init__()
        for name in (*_SIZES, "sliding_window"):
            if getattr(self, name) < 0:
                raise DraftError(f"{name} = {getattr(self, name)}: 0 or more")
        odd = sorted(set(self.types) - {FULL, SLIDING})
        if odd:
            raise DraftError(
                f"layer_types: {', '.join(odd)} unknown; choose from {FULL}, {SLIDING}"
            )
        if SLIDING in self.types and not self.sliding_window:
            raise DraftError(f"layer_types has {SLIDING}: --sliding-window N is needed as well")
        if self.types and SLIDING not in self.types and self.sliding_window:
            raise DraftError(
                f"sliding_window = {self.sliding_window}: no layer of layer_types is {SLIDING}"
            )

    @property
    def types(self) -> tuple[str, ...]:
        """The entries of `layer_types`; () for auto."""
        if self.layer_types == AUTO:
            return ()
        return tuple(part.strip() for part in self.layer_types.split(","))

    @property
    def biases_of_target(self) -> list[str]:
        """The options of biases that are auto, so that a new draft follows its target."""
        return [name for name in ("attention_bias", "mlp_bias") if getattr(self, name) == AUTO]

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a value for every size that is not given.

        `hidden` and `blocks` are the hidden size and the decoder blocks of the target.
        """
        return self

    def layer_fields(self, target: dict[str, Any], count: int) -> dict[str, Any]:
        """Return the fields of a draft's configuration that these options decide.

        Args:
            target: the target's sizes and its (text) config.json, as one table.
            count: decoder layers of the draft.

        Raises:
            DraftError: the number of layer types is not `count`.
        """
        types = self.types
        if self.sliding_window and not types:
            types = (SLIDING,) * count
        if types and len(types) != count:
            raise DraftError(f"layer_types has {len(types)} entries; the draft has {count} layers")
        fields = {name: getattr(self, name) for name in _SIZES}
        return {
            **{name: size or target[name] for name, size in fields.items()},
            "hidden_act": self.hidden_act,
            "qk_norm": self.qk_norm,
            "attention_bias": _switch(self.attention_bias, target.get("attention_bias")),
            "mlp_bias": _switch(self.mlp_bias, target.get("mlp_bias")),
            "sliding_window": self.sliding_window or None,
            "layer_types": types,
            "train_embeddings": self.train_embeddings,
        }


def _switch(value: str, target: Any) -> bool:
    return bool(target) if value == AUTO else value == "true"


@dataclass(frozen=True, kw_only=True)
class NormOptions(LayerOptions):
    """The norms of EAGLE-3's first layer."""

    norm_before_fc: bool = option(
        False, help="normalise all captured layers together, by one RMSNorm, before fc", group=SHAPE
    )
    norm_before_residual: bool = option(
        False,
        help="add the attention of the first layer to its normalised input instead of to the input",
        group=SHAPE,
    )

    def layer_fields(self, target: dict[str, Any], count: int) -> dict[str, Any]:
        """Return the fields of `LayerOptions.layer_fields` and the switches of the norms."""
        return super().layer_fields(target, count) | {
            "norm_before_fc": self.norm_before_fc,
            "norm_before_residual": self.norm_before_residual,
        }
