"""Numbers of a config.json that no model has, before a library makes lists and tensors of them.

Zero heads end in a division by zero, `num_hidden_layers` of a million million in a list of as many
names of layers, and a text is added to a number somewhere in a model. Here they are an error with
the file, the key, the value, and what is expected.
"""

import math
from collections.abc import Mapping
from typing import Any

_SIDE, _HEADS, _BLOCKS = 1 << 20, 1 << 16, 1 << 14
_MOST = dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), _SIDE
)
_MOST |= dict.fromkeys(
    ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"), 1 << 24
)
_MOST |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"), _HEADS)
_MOST |= dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim"), _SIDE)
_MOST |= dict.fromkeys(("num_hidden_layers", "n_layer"), _BLOCKS)
_MOST |= dict.fromkeys(("vocab_size", "draft_vocab_size", "target_vocab_size"), 1 << 26)
_MOST |= dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window"), 2**31 - 1)
_MOST |= dict.fromkeys(("original_max_position_embeddings",), 2**31 - 1)
_MOST |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16)
_MOST |= dict.fromkeys(("num_experts_per_tok", "n_shared_experts"), 1 << 16)
_FROM_ZERO = {
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    *("n_shared_experts", "q_lora_rank", "kv_lora_rank", "sliding_window", "v_head_dim"),
    *("num_hidden_layers", "n_layer"),  # a kind of draft may have none
}
_RATES = {
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    *("rope_theta", "partial_rotary_factor", "rotary_pct", "rope_local_base_freq"),
}
_ROTATED = {"head_dim", "qk_rope_head_dim"}
_SWITCHES = {"sliding_window"}  # some configs have false


def wrong_value(config: Mapping[str, Any], others: tuple[str, ...] = ()) -> str | None:
    """Return the first value of a config, or of a part of it, that no model has; None: none.

    Parts whose names have one of `others` in them are left out.
    """
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(type(n) is str for n in names)):
        return f"architectures is {_short(names)}, not a list of names"
    waiting = [("", config)]
    while waiting:
        inside, table = waiting.pop()
        parts = ((k, part) for k, part in table.items() if isinstance(part, dict))
        waiting += [
            (f"{inside}{k}.", part) for k, part in parts if not any(name in k for name in others)
        ]
        for name in sorted(table.keys() & (_MOST.keys() | _RATES)):
            value = table[name]
            if value is None or isinstance(value, (list, dict)):
                continue
            if value is False and name in _SWITCHES:
                continue
            if value == 0 and name in _ROTATED and table.get("qk_nope_head_dim"):
                continue  # GLM-5-Next's heads have no part that is rotated
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name in _RATES:
                fits, wanted = number and 0 < value < math.inf, "a number above 0"
            else:
                least, most = int(name not in _FROM_ZERO), _MOST[name]
                fits = number and least <= value <= most and value == int(value)
                wanted = f"a whole number from {least} to {most:,}"
            if not fits:
                return f"{inside}{name} is {_short(value)}, not {wanted}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
