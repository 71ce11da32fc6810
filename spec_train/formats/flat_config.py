"""What the flat configs of all drafts share: sizes, rope, switches, options, order of states.

Published files omit different fields. An absent field gets the default of the class that reads it;
a field without a safe default must be present.
"""

import dataclasses
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spec_data.models.rope_settings import rope_parameters
from spec_data.shards.errors import DraftError
from spec_data.shards.schema import LAYER_CONVENTION
from spec_data.terminal.config import to_dict
from spec_data.terminal.given import decided
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.names import FORM, MASK_KEYS, NESTED, TOKEN_KEYS, table_of
from spec_train.formats.windows import windows_of
from spec_train.options.draft_options import SIZES
from spec_train.options.kinds import draft_options

log = logging.getLogger(__name__)

LAYER_NORMS = ("norm_before_fc", "norm_before_residual")
"""Switches of the norms of EAGLE-3's first layer."""
_STATE_COLUMNS = ("fc.weight", "input_norm.weight", "mask_hidden")
"""Tensors whose last dimension is the concatenated states."""
_ONE_NORM = re.compile(r"fc_norm\.(\d+)\.weight")


def needed(files: DraftFiles, name: str) -> Any:
    """Return the value of a key, without which a draft cannot be read."""
    if files.config.get(name) is None:
        raise files.bad_config(f"{name} is missing")
    return files.config[name]


def mask_token(raw: dict[str, Any]) -> int | None:
    """Return the id of the token that stands for unknown ones; None: no key names it."""
    return next((raw[key] for key in MASK_KEYS if raw.get(key) is not None), None)


def shape_of(files: DraftFiles) -> dict[str, Any]:
    """Return sizes, rope, dtype and token ids of a flat config, defaults as in LlamaConfig."""
    raw = files.config
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if not isinstance(raw.get(name), int)]
    if missing:
        raise files.bad_config(f"missing {', '.join(missing)}")
    heads = raw["num_attention_heads"]
    limit = raw.get("max_position_embeddings") or 2048
    return {
        **{name: raw[name] for name in needed},
        "target_hidden_size": raw.get("target_hidden_size") or raw["hidden_size"],
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": limit,
        "draft_vocab_size": raw.get("draft_vocab_size") or raw["vocab_size"],
        "rope_parameters": rope_parameters(text_rope(files) | {"max_position_embeddings": limit}),
        "dtype": _float_type(files.tensors),
        **{key: raw[key] for key in TOKEN_KEYS if raw.get(key) is not None},
    }


def with_sizes(files: DraftFiles) -> DraftFiles:
    """Return files whose config has the sizes of the weights where it had none.

    The defaults of config classes differ: without `head_dim`, Qwen3's has 128, Llama's H / heads.
    """
    raw = dict(files.config)
    tensors = {n.replace("midlayer.", "layers.0.", 1): t for n, t in files.tensors.items()}
    heads = raw.get("num_attention_heads")
    for name, tensor, parts in (
        ("head_dim", "layers.0.self_attn.q_proj.weight", heads if isinstance(heads, int) else 0),
        ("num_key_value_heads", "layers.0.self_attn.k_proj.weight", None),
        ("hidden_size", "norm.weight", 1),
        ("intermediate_size", "layers.0.mlp.gate_proj.weight", 1),
    ):
        parts = raw.get("head_dim") if parts is None else parts
        if raw.get(name) is None and tensor in tensors and parts:
            raw[name] = len(tensors[tensor]) // parts
    return replace(files, config=raw)


def text_rope(files: DraftFiles) -> dict[str, Any]:
    """Return a config with one rope, in which M-RoPE is the plain rope that it is for text.

    The three positions of a text token are equal. `mrope_section` stays, for engines and images,
    but not beside `rope_dim`: the number of channels that a draft was trained to rotate, which vLLM
    and SGLang read instead of the share that its config has from the target.
    """
    raw, result = files.config, dict(files.config)
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        if isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values()):
            kinds = sorted(set(windows_of(files).layer_types)) or ["full_attention"]
            ropes = [rope[kind] for kind in kinds if kind in rope]
            if any(other != ropes[0] for other in ropes):
                raise files.bad_config(
                    f"{key} differs between the draft's layers: {', '.join(kinds)}; drafts of "
                    "spec-train have one rope"
                )
            result[key] = rope = ropes[0] if ropes else rope
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) == "mrope":
            plain = {name: value for name, value in rope.items() if name != "type"}
            result[key] = rope = plain | {"rope_type": "default"}
        if isinstance(rope, dict) and rope.get("rope_dim"):
            size = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
            own = {n: v for n, v in rope.items() if n != "rope_dim" and not n.startswith("mrope")}
            result[key] = own | {"partial_rotary_factor": rope["rope_dim"] / size}
    return result


def _float_type(tensors: dict[str, Tensor]) -> str:
    """Return the name of the weights' dtype; the dtype of `fc.weight` if they are mixed."""
    floats = [value for value in tensors.values() if value.is_floating_point()]
    kinds = {str(value.dtype).removeprefix("torch.") for value in floats}
    chosen = str(tensors.get("fc.weight", floats[0]).dtype).removeprefix("torch.")
    if len(kinds) > 1:
        log.warning(
            "warning[dtypes]: the weights have several dtypes (%s); all are read as %s",
            *(", ".join(sorted(kinds)), chosen),
        )
    return chosen


def switches_of(files: DraftFiles) -> dict[str, Any]:
    """Return the switches of layers and norms that the file has; absent ones are left out.

    They have the names of a draft's configuration. Norms of queries and keys are known by their
    weights, because published configs have no key for them. `hidden_activation` is Gemma's name of
    `hidden_act`.
    """
    raw, nested = files.config, table_of(files.config, NESTED)
    said = {raw[name] for name in ("hidden_act", "hidden_activation") if raw.get(name) is not None}
    if len(said) > 1:
        raise files.bad_config(
            f"hidden_act = {raw['hidden_act']} and hidden_activation = {raw['hidden_activation']}: "
            "remove the one that the draft was not trained with"
        )
    both = nested | {name: value for name, value in raw.items() if value is not None}
    both |= {"hidden_act": next(iter(said))} if said else {}
    names = ("hidden_act", "attention_bias", "mlp_bias", *LAYER_NORMS)
    result = {name: both[name] for name in names if both.get(name) is not None}
    result["qk_norm"] = any(".q_norm." in name for name in files.tensors)
    options = table_of(raw, SECTION).get("options") or {}  # the speculators form may lack the key
    trained = raw.get("train_embeddings", raw.get("embed_requires_grad"))
    trained = options.get("train_embeddings") if trained is None else trained
    return result | ({"train_embeddings": True} if trained else {})


def refuse_set(files: DraftFiles, what: str, names: tuple[str, ...]) -> None:
    """Refuse a config with one of the switches `names`, which `what` does not have."""
    raw, nested = files.config, table_of(files.config, NESTED)
    values = {n: raw[n] if raw.get(n) is not None else nested.get(n) for n in names}
    if faults := [f"{n} = {value}" for n, value in values.items() if value not in (None, False)]:
        raise files.bad_config(
            f"{', '.join(faults)} cannot be represented: {what} of spec-train has "
            + ", ".join(f"{name} = False" for name in names)
        )


def options_of(
    kind: str, config: dict[str, Any], layers: Sequence[int], **given: Any
) -> dict[str, Any]:
    """Return the options that lead to a draft of this config; unknown ones have their defaults.

    Such are those with the name of a field of the config; sizes stay those of the target. `given`
    are further options, None where unknown. Names that this kind of draft does not have are left
    out.
    """
    options = draft_options(kind)
    names = {field.name for field in dataclasses.fields(options)}
    values = {name: config[name] for name in names - set(SIZES) if name in config} | given
    values |= {"layers": ",".join(map(str, layers)), "num_layers": config["num_hidden_layers"]}
    for name in ("attention_bias", "mlp_bias"):
        values[name] = "true" if config.get(name) else "false"
    if config.get("layer_types"):
        values["sliding_window"] = config["sliding_window"]
        values["layer_types"] = ",".join(config["layer_types"])
    chosen = {n: value for n, value in values.items() if n in names and value is not None}
    return to_dict(decided(options(), **chosen))


def section_of(
    files: DraftFiles, kind: str, layers: tuple[int, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the `spec_train` section of the file, or a new one with an unknown origin."""
    section = files.config.get(SECTION)
    if section is not None:
        return {name: value for name, value in section.items() if name != FORM}
    return {
        "draft": kind,
        "layers": list(layers),
        "layer_convention": LAYER_CONVENTION,
        "options": options,
        "origin": {},
    }


def sort_states(
    tensors: dict[str, Tensor], layers: Sequence[int], where: str, *, collected: bool = False
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Return the layer ids of a file in ascending order, and its tensors sorted with them.

    Our drafts concatenate states by ascending layer id. A draft with another order computes the
    same as one whose parts of `fc`, `fc_norm`, `input_norm` and `mask_hidden` are sorted with them.
    If the trainer has `collected` the states during one forward pass of its target, they are in
    ascending order, also if the ids are not. `where` is the path of config.json, for messages.
    """
    if len(set(layers)) != len(layers):
        raise DraftError(f"{where}: layers {list(layers)} repeat an id; each layer is read once")
    order = sorted(range(len(layers)), key=lambda i: layers[i])
    ascending = tuple(layers[i] for i in order)
    if ascending == tuple(layers) or collected:
        return ascending, tensors
    log.warning(
        "warning[layer-order]: %s: layers %s are not ascending. The parts of fc are taken to have "
        "the order of the file, as llama.cpp does, and were sorted; vLLM and SGLang would pass "
        "ascending states to the unsorted parts. An export is read alike by all engines",
        *(where, list(layers)),
        extra={"failure": "layer-order"},
    )
    result = dict(tensors)
    for name in _STATE_COLUMNS:
        if name not in tensors:
            continue
        if tensors[name].shape[-1] % len(order):
            raise DraftError(
                f"{where}: {name} has {tensors[name].shape[-1]} columns, which are not equal parts "
                f"for {len(order)} layers"
            )
        parts = tensors[name].chunk(len(order), dim=-1)
        result[name] = torch.cat([parts[i] for i in order], dim=-1).contiguous()
    norms = {int(m[1]): n for n in tensors if (m := _ONE_NORM.fullmatch(n))}
    for number, source in enumerate(order):
        if source in norms:
            result[f"fc_norm.{number}.weight"] = tensors[norms[source]]
    return ascending, result


def stated_vocabulary(raw: dict[str, Any], named: bool) -> dict[str, Any]:
    """Return the size of the draft vocabulary; 0: all tokens, also of a class without the key."""
    size, whole = raw.get("draft_vocab_size"), raw.get("vocab_size")
    if size is None:
        return {"draft_vocab_size": 0} if named else {}
    return {"draft_vocab_size": 0 if size == whole else size}
