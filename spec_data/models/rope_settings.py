"""The rope settings of a config, in the one form that this project uses, and their frequencies.

Frequencies come from transformers' initialisers, the code that the target itself runs, so every
rope type of transformers is supported.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spec_data.shards.errors import DraftError

_LENGTH_AWARE = ("llama3", "yarn", "longrope")  # need original_max_position_embeddings


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope settings of a target's (text) config, in transformers 5's flat form.

    Reads `rope_parameters` (flat, or one dict per layer type, of which full_attention is used),
    `rope_scaling`, and the top-level `rope_theta`, `partial_rotary_factor` and
    `original_max_position_embeddings` of older files. Values are copied unchanged.

    Raises:
        DraftError: the rope type is unknown, or no layer type is full_attention.
    """
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in found.values()):
        if not isinstance(found.get("full_attention"), dict):
            raise DraftError(
                f"rope_parameters has the layer types {sorted(found)} without full_attention; a "
                "draft uses full attention, so there are no rope settings for it"
            )
        found = dict(found["full_attention"])
    found = {key: value for key, value in found.items() if value is not None}
    kind = found.pop("type", None)  # the older name; rope_type has priority
    found.setdefault("rope_type", kind or "default")
    found.setdefault("rope_theta", _first(config, "rope_theta", "rotary_emb_base", default=1e4))
    partial = _first(config, "partial_rotary_factor", "rotary_pct", default=None)
    if partial is not None:
        found.setdefault("partial_rotary_factor", partial)
    if found["rope_type"] in _LENGTH_AWARE:
        limit = config.get("original_max_position_embeddings")  # at the top level in Phi-3
        if limit is not None:
            found["original_max_position_embeddings"] = limit
        found.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    if found["rope_type"] not in ("default", *ROPE_INIT_FUNCTIONS):
        raise DraftError(
            f"rope type {found['rope_type']!r} of the target is unknown; known: "
            f"default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
        )
    return found


@dataclass
class RopeSettings:
    """The fields of a config that transformers' rope initialisers read."""

    rope_parameters: dict[str, Any]
    head_dim: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int

    def standardize_rope_params(self) -> None:
        """Do nothing: `rope_parameters` is already in the standard form. transformers calls it."""


def rope_frequencies(settings: RopeSettings, length: int | None = None) -> tuple[Tensor, float]:
    """Return inverse frequencies, float32 [r/2], and the factor on cos and sin.

    `length` is the sequence length, for rope types that depend on it.
    """
    kind = settings.rope_parameters["rope_type"]
    if kind != "default":
        initialise = ROPE_INIT_FUNCTIONS[kind]
        inv_freq, factor = initialise(settings, torch.device("cpu"), seq_len=length)
        return inv_freq.float(), float(factor)
    size = int(settings.head_dim * settings.rope_parameters.get("partial_rotary_factor", 1.0))
    steps = torch.arange(0, size, 2, dtype=torch.float)
    return 1.0 / (settings.rope_parameters["rope_theta"] ** (steps / size)), 1.0


def _first(config: dict[str, Any], *names: str, default: Any) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)
