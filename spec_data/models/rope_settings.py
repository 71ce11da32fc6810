"""The rope settings of a config, in the one form that this project uses, and their frequencies.

Frequencies come from transformers' initialisers, the code that the target itself runs, so every
rope type of transformers is supported.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.position_data import LONG, SHORT, RopeTable

_LENGTH_AWARE = ("llama3", "yarn", "longrope")  # need original_max_position_embeddings


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope settings of a target's (text) config, in transformers 5's flat form.

    Reads `rope_parameters` (flat, or one dict per layer type, of which full_attention is used),
    `rope_scaling`, and the top-level `rope_theta`, `partial_rotary_factor` and
    `original_max_position_embeddings` of older files. Values are copied unchanged.

    Raises:
        DraftError: the rope type is unknown, or no layer type is full_attention.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        if not isinstance(rope.get("full_attention"), dict):
            raise DraftError(
                f"rope_parameters has the layer types {sorted(rope)} without full_attention; a "
                "draft uses full attention, so there are no rope settings for it"
            )
        rope = dict(rope["full_attention"])
    rope = {key: value for key, value in rope.items() if value is not None}
    kind = rope.pop("type", None)  # the older name; rope_type has priority
    rope.setdefault("rope_type", kind or "default")
    theta = _first(config, "rope_theta", "rotary_emb_base")
    rope.setdefault("rope_theta", 1e4 if theta is None else theta)
    partial = _first(config, "partial_rotary_factor", "rotary_pct")
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if rope["rope_type"] in _LENGTH_AWARE:
        limit = config.get("original_max_position_embeddings")  # at the top level in Phi-3
        if limit is not None:
            rope["original_max_position_embeddings"] = limit
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    if rope["rope_type"] != "default" and rope["rope_type"] not in (types := _initialisers()):
        raise DraftError(
            f"rope type {rope['rope_type']!r} of the target is unknown; known: "
            f"default, {', '.join(sorted(types))}"
        )
    return rope


def _initialisers() -> dict[str, Any]:
    """Return transformers' initialisers by rope type; "default" does without that import."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS


def _first(config: dict[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


@dataclass
class RopeSettings:
    """The fields of a config that transformers' rope initialisers read.

    `stored` is what the settings cannot express, see `stored_json`.
    """

    rope_parameters: dict[str, Any]
    head_dim: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    stored: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, shape: Any) -> "RopeSettings":
        """Return the rope settings of a `TargetShape`, or of a draft's configuration."""
        names = [f.name for f in fields(cls) if f.name != "stored"]
        return cls(**{name: getattr(shape, name) for name in names}, stored=shape.positions)

    def standardize_rope_params(self) -> None:
        """Do nothing: `rope_parameters` is already in the standard form. transformers calls it."""


def _frequencies(settings: RopeSettings, length: int | None = None) -> tuple[Tensor, float]:
    """Return inverse frequencies, float32 [r/2], and the factor on cos and sin.

    `length` is the sequence length, for rope types that depend on it.
    """
    kind = settings.rope_parameters["rope_type"]
    if kind != "default":
        initialise = _initialisers()[kind]
        inv_freq, factor = initialise(settings, torch.device("cpu"), seq_len=length)
        return inv_freq.float(), float(factor)
    size = int(settings.head_dim * settings.rope_parameters.get("partial_rotary_factor", 1.0))
    steps = torch.arange(0, size, 2, dtype=torch.float)
    return 1.0 / (settings.rope_parameters["rope_theta"] ** (steps / size)), 1.0


def config_table(settings: RopeSettings) -> RopeTable:
    """Return the rotary embedding that the rope settings describe."""
    inv_freq, factor = _frequencies(settings)
    if settings.rope_parameters["rope_type"] != "longrope":
        return RopeTable(inv_freq=inv_freq, factor=factor)
    limit = int(settings.rope_parameters["original_max_position_embeddings"])
    long_inv_freq, _ = _frequencies(settings, limit + 1)
    return RopeTable(inv_freq=inv_freq, factor=factor, long_inv_freq=long_inv_freq, limit=limit)


def rotary_table(settings: RopeSettings) -> RopeTable:
    """Return the rotary embedding of a draft: of `stored` as far as it has it, else the settings'.

    With `factors`, every document has the short or the long frequencies, and there is no limit.
    """
    stored = settings.stored
    if "inv_freq" not in stored:
        table = config_table(settings)
    else:
        long = stored.get("long_inv_freq")
        table = RopeTable(
            inv_freq=torch.tensor(stored["inv_freq"], dtype=torch.float32),
            factor=float(stored["factor"]),
            long_inv_freq=None if long is None else torch.tensor(long, dtype=torch.float32),
            limit=stored.get("limit"),
        )
    if stored.get("factors") not in (SHORT, LONG) or table.long_inv_freq is None:
        return table
    chosen = table.long_inv_freq if stored["factors"] == LONG else table.inv_freq
    return RopeTable(inv_freq=chosen, factor=table.factor)


def stored_json(table: RopeTable, expressed: bool) -> dict[str, Any]:
    """Return what a draft stores of a table beside its rope settings.

    `expressed`: the settings have the same frequencies, so only the choice of longrope's is stored.
    A float32 is exact as a JSON number.
    """
    stored: dict[str, Any] = {} if table.factors is None else {"factors": table.factors}
    if expressed:
        return stored
    stored |= {"inv_freq": table.inv_freq.tolist(), "factor": table.factor}
    if table.long_inv_freq is not None:
        stored |= {"long_inv_freq": table.long_inv_freq.tolist(), "limit": table.limit}
    return stored
