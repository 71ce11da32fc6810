"""The rope settings of a config, in the one form that this project uses, and their frequencies.

Frequencies come from transformers' initialisers, the code that the target itself runs, so every
rope type of transformers is supported.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.position_data import LONG, OF_DRAFTS, SHORT, RopeTable

_READ = (  # by transformers' initialisers
    *("rope_parameters", "head_dim", "hidden_size", "num_attention_heads"),
    "max_position_embeddings",
)
_LENGTH_AWARE = ("llama3", "yarn", "longrope")  # need original_max_position_embeddings


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope settings of a target's (text) config, in transformers 5's flat form.

    Reads `rope_parameters` (flat, or one dict per layer type, of which that of full_attention or,
    in DeepSeek-V4, of the uncompressed tokens is used),
    `rope_scaling`, and the top-level `rope_theta`, `partial_rotary_factor` and
    `original_max_position_embeddings` of older files. Values are copied unchanged, but for dynamic
    rope with `alpha` (HunYuan, in transformers, vLLM and SGLang): the default one of another theta.

    Raises:
        DraftError: the rope type is unknown, or no layer type is full_attention.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        own = next((rope[name] for name in OF_DRAFTS if isinstance(rope.get(name), dict)), None)
        if own is None:
            raise DraftError(
                f"config.json: rope_parameters has the layer types {sorted(rope)} without "
                "full_attention; a draft uses full attention, so there are no rope settings for it"
            )
        rope = dict(own)
    rope = {key: value for key, value in rope.items() if value is not None}
    kind = rope.pop("type", None)  # the older name; rope_type has priority
    rope.setdefault("rope_type", kind or "default")
    for name, older, default in (
        ("rope_theta", "rotary_emb_base", 1e4),
        ("partial_rotary_factor", "rotary_pct", None),
    ):
        values = (config.get(name), config.get(older), default)
        value = next((value for value in values if value is not None), None)
        if value is not None:
            rope.setdefault(name, value)
    if not isinstance(rope["rope_type"], str):
        raise DraftError(f"config.json: rope_type is {str(rope['rope_type'])[:60]}, not a name")
    if rope["rope_type"] == "dynamic" and rope.get("alpha"):
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = rope["rope_theta"] * rope["alpha"] ** (size / (size - 2))
        rope = {"rope_type": "default", "rope_theta": theta}
    if rope["rope_type"] in _LENGTH_AWARE:
        limit = config.get("original_max_position_embeddings")  # at the top level in Phi-3
        if limit is not None:
            rope["original_max_position_embeddings"] = limit
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    if rope["rope_type"] != "default" and rope["rope_type"] not in (types := _initialisers()):
        raise DraftError(
            f"config.json: rope type {rope['rope_type'][:60]!r} is unknown; known: "
            f"default, {', '.join(sorted(types))}"
        )
    return rope


def yarn_scales(rope: dict[str, Any]) -> dict[str, float]:
    """Return YaRN's factor on cos and sin, by how much of its settings is read.

    `trained`: all, as transformers and vLLM do; `without_attention_factor`, as SGLang does;
    `of_factor`: of `factor` alone, as llama.cpp does. Rounded to three digits after the point, for
    comparisons: files state a rounded `attention_factor`.
    """
    plain = 1 + 0.1 * math.log(max(rope["factor"], 1))
    up, down = rope.get("mscale"), rope.get("mscale_all_dim")
    ratio = (1 + up * (plain - 1)) / (1 + down * (plain - 1)) if up and down else plain
    scale = rope.get("attention_factor")
    scales = {"trained": ratio if scale is None else scale}
    scales |= {"without_attention_factor": ratio, "of_factor": plain}
    return {name: round(value, 3) for name, value in scales.items()}


def _initialisers() -> dict[str, Any]:
    """Return transformers' initialisers by rope type; "default" does without that import."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS


def _frequencies(shape: Any, length: int | None = None) -> tuple[Tensor, float]:
    """Return inverse frequencies, float32 [r/2], and the factor on cos and sin.

    `length` is the sequence length, for rope types that depend on it.
    """
    rope = shape.rope_parameters
    if rope["rope_type"] != "default":
        config = SimpleNamespace(**{name: getattr(shape, name) for name in _READ})
        config.standardize_rope_params = lambda: None  # they are already in the standard form
        initialise = _initialisers()[rope["rope_type"]]
        inv_freq, factor = initialise(config, torch.device("cpu"), seq_len=length)
        return inv_freq.float(), float(factor)
    size = int(shape.head_dim * rope.get("partial_rotary_factor", 1.0))
    steps = torch.arange(0, size, 2, dtype=torch.float)
    return 1.0 / (rope["rope_theta"] ** (steps / size)), 1.0


def config_table(shape: Any) -> RopeTable:
    """Return the rotary embedding of the rope settings of a `TargetShape` or a draft's config."""
    inv_freq, factor = _frequencies(shape)
    if shape.rope_parameters["rope_type"] != "longrope":
        return RopeTable(inv_freq=inv_freq, factor=factor)
    limit = int(shape.rope_parameters["original_max_position_embeddings"])
    long_inv_freq, _ = _frequencies(shape, limit + 1)
    return RopeTable(inv_freq=inv_freq, factor=factor, long_inv_freq=long_inv_freq, limit=limit)


def rotary_table(shape: Any) -> RopeTable:
    """Return the rotary embedding of a draft: what `positions` of the shape has, else its settings.

    With `factors`, every document has the short or the long frequencies, and there is no limit.
    """
    stored = dict(shape.positions)
    factors = stored.pop("factors", None)
    for name in {"inv_freq", "long_inv_freq"} & stored.keys():
        stored[name] = torch.tensor(stored[name], dtype=torch.float32)
    table = RopeTable(**stored) if "inv_freq" in stored else config_table(shape)
    if factors not in (SHORT, LONG) or table.long_inv_freq is None:
        return table
    inv_freq = table.long_inv_freq if factors == LONG else table.inv_freq
    return RopeTable(inv_freq=inv_freq, factor=table.factor)


def stored_json(table: RopeTable, expressed: bool) -> dict[str, Any]:
    """Return what a draft stores of a table beside its rope settings, by the names of its fields.

    `expressed`: the settings have the same frequencies, so only the choice of longrope's is stored.
    A float32 is exact as a JSON number.
    """
    frequencies = () if expressed else ("inv_freq", "factor", "long_inv_freq", "limit")
    values = {name: getattr(table, name) for name in ("factors", *frequencies)}
    return {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in values.items()
        if value is not None
    }
