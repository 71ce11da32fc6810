"""Which shapes a draft can have: the checks of a draft's configuration.

In: the fields of a configuration. Out: a DraftError that names the field, or nothing.
"""

from typing import Any

from spec_data.console import nearest
from spec_data.shards.errors import DraftError
from spec_train.options.shape_options import FULL, SLIDING


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
