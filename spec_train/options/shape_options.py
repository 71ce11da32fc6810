"""Options for the shape of a draft: classes that the options of every draft inherit.

An option that is not given leaves the shape as it is without it: sizes are the target's, and the
other switches are off. `spec_train.drafts.config` makes the fields of a draft's configuration from
them, under the same names; the number of layers and the mask token are options of each draft.
No torch here: `--help` is instant.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from cyclopts import Parameter

from spec_data.shards.errors import DraftError
from spec_data.terminal.types import NO_FLAG, more

SHAPE = more("shape of the draft")
FULL, SLIDING = "full_attention", "sliding_attention"
"""The two values of `layer_types`."""
AUTO = "auto"
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The shape of a decoder layer, and the embedding."""

    intermediate_size: Annotated[int, NO_FLAG] = 0
    """Width inside the MLP. 0 = the target's."""
    num_attention_heads: Annotated[int, NO_FLAG] = 0
    """Query heads. 0 = the target's."""
    num_key_value_heads: Annotated[int, NO_FLAG] = 0
    """Key and value heads; they divide the query heads. 0 = the target's."""
    head_dim: Annotated[int, NO_FLAG] = 0
    """Size of a head. 0 = the target's. With another one, the rotary frequencies are those of this
    size, as engines compute them from the draft's own config."""
    hidden_act: Annotated[str, NO_FLAG] = "silu"
    """Activation of the MLP, by its name in transformers, such as silu or gelu_pytorch_tanh."""
    qk_norm: Annotated[bool, NO_FLAG] = False
    """Normalise queries and keys, each head by an RMSNorm (Qwen3's layer)."""
    attention_bias: Annotated[Literal["auto", "true", "false"], NO_FLAG] = "auto"
    """Biases of the four attention projections; auto: as the target's config says."""
    mlp_bias: Annotated[Literal["auto", "true", "false"], NO_FLAG] = "auto"
    """Biases of the three projections of the MLP; auto: as the target's config says."""
    sliding_window: Annotated[int, SHAPE, Parameter(metavar="N")] = 0
    """A token sees the last N positions only, its own one included, in the layers of layer_types.
    0 = every earlier position."""
    layer_types: Annotated[str, NO_FLAG] = "auto"
    """One of full_attention and sliding_attention per layer of the draft, with commas; auto: every
    layer slides if --sliding-window is given."""
    train_embeddings: Annotated[bool, SHAPE] = False
    """Train an embedding of its own, which starts as the target's; SGLang replaces it by the
    target's."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
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

    norm_before_fc: Annotated[bool, NO_FLAG] = False
    """Normalise all captured layers together, by one RMSNorm, before fc."""
    norm_before_residual: Annotated[bool, NO_FLAG] = False
    """Add the attention of the first layer to its normalised input instead of to the input."""

    def layer_fields(self, target: dict[str, Any], count: int) -> dict[str, Any]:
        """Return the fields of `LayerOptions.layer_fields` and the switches of the norms."""
        return super().layer_fields(target, count) | {
            "norm_before_fc": self.norm_before_fc,
            "norm_before_residual": self.norm_before_residual,
        }
