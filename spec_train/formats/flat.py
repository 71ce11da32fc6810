"""The parts that the flat configs of all drafts share: shapes, switches, options, tensors."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_data.models.rope_settings import rope_parameters
from spec_data.shards.schema import LAYER_CONVENTION
from spec_data.terminal.config import to_dict
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.names import EMBEDDING, FORM, HEAD, TOKEN_KEYS, table_of
from spec_train.formats.target_facts import TargetFacts
from spec_train.options.draft_options import draft_options

log = logging.getLogger(__name__)

_NORMS = ("norm_before_fc", "norm_before_residual")
_OPTIONS = (
    *(*_NORMS, "hidden_act", "qk_norm", "train_embeddings", "draft_vocab_size", "block_size"),
    *("mask_token_id", "fc_norm", "norm_output", "markov_rank", "markov_head_type"),
    "sliding_window_non_causal",
)
"""Options of a draft that have the name of the field in its config."""
_COMPARED, _NEAR = 4096, 0.5
"""Rows of two embeddings that are compared, and the mean cosine from which one is the other's."""


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
        "rope_parameters": rope_parameters(_text_rope(raw) | {"max_position_embeddings": limit}),
        "dtype": _float_type(files.tensors),
        **{key: raw[key] for key in TOKEN_KEYS if raw.get(key) is not None},
    }


def sizes_of_weights(files: DraftFiles) -> dict[str, Any]:
    """Return the config with the sizes of the weights where it has none.

    The defaults of config classes differ: without `head_dim`, Qwen3's has 128, Llama's H / heads.
    """
    raw = dict(files.config)
    heads = raw.get("num_attention_heads")
    for name, tensor, parts in (
        ("head_dim", "layers.0.self_attn.q_proj.weight", heads if isinstance(heads, int) else 0),
        ("num_key_value_heads", "layers.0.self_attn.k_proj.weight", None),
        ("hidden_size", "norm.weight", 1),
        ("intermediate_size", "layers.0.mlp.gate_proj.weight", 1),
    ):
        parts = raw.get("head_dim") if parts is None else parts
        if raw.get(name) is None and tensor in files.tensors and parts:
            raw[name] = len(files.tensors[tensor]) // parts
    return raw


def _text_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config in which M-RoPE is the plain rope that it is for text.

    The three positions of a text token are equal. `mrope_section` stays, for engines and images.
    """
    result = dict(raw)
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) == "mrope":
            plain = {name: value for name, value in rope.items() if name != "type"}
            result[key] = plain | {"rope_type": "default"}
    return result


def _float_type(tensors: dict[str, Tensor]) -> str:
    """Return the name of the weights' dtype; the dtype of `fc.weight` if they are mixed."""
    floats = [value for value in tensors.values() if value.is_floating_point()]
    kinds = {str(value.dtype).removeprefix("torch.") for value in floats}
    chosen = str(tensors.get("fc.weight", floats[0]).dtype).removeprefix("torch.")
    if len(kinds) > 1:
        log.warning(
            "warning: the weights have several dtypes (%s); all are read as %s",
            *(", ".join(sorted(kinds)), chosen),
        )
    return chosen


def switches_of(files: DraftFiles) -> dict[str, Any]:
    """Return the switches of layers and norms that the file has; absent ones are left out.

    They have the names of a draft's configuration. Norms of queries and keys are known by their
    weights, because published configs have no key for them. `hidden_activation` is Gemma's name of
    `hidden_act`.
    """
    raw, nested = files.config, table_of(files.config, "eagle_config")
    said = {raw[name] for name in ("hidden_act", "hidden_activation") if raw.get(name) is not None}
    if len(said) > 1:
        raise files.bad_config(
            f"hidden_act = {raw['hidden_act']} and hidden_activation = {raw['hidden_activation']}: "
            "remove the one that the draft was not trained with"
        )
    both = nested | {name: value for name, value in raw.items() if value is not None}
    both |= {"hidden_act": next(iter(said))} if said else {}
    names = ("hidden_act", "attention_bias", "mlp_bias", *_NORMS)
    result = {name: both[name] for name in names if both.get(name) is not None}
    result["qk_norm"] = any(".q_norm." in name for name in files.tensors)
    options = table_of(raw, SECTION).get("options") or {}  # the speculators form may lack the key
    own = raw.get("train_embeddings", raw.get("embed_requires_grad"))
    own = options.get("train_embeddings") if own is None else own
    return result | ({"train_embeddings": True} if own else {})


def options_of(
    kind: str, config: dict[str, Any], layers: Sequence[int], **given: Any
) -> dict[str, Any]:
    """Return the options that lead to a draft of this config; unknown ones have their defaults.

    `given` are further options, None where unknown. Names that this kind of draft does not have are
    left out.
    """
    options = draft_options(kind)
    values = {name: config[name] for name in _OPTIONS if name in config} | given
    values |= {"layers": ",".join(map(str, layers)), "num_layers": config["num_hidden_layers"]}
    for name in ("attention_bias", "mlp_bias"):
        values[name] = "true" if config.get(name) else "false"
    if config.get("layer_types"):
        values["sliding_window"] = config["sliding_window"]
        values["layer_types"] = ",".join(config["layer_types"])
    names = {field.name for field in dataclasses.fields(options)}
    known = {n: value for n, value in values.items() if n in names and value is not None}
    return to_dict(options(**known))


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


def has_own_embedding(tensors: dict[str, Tensor], files: DraftFiles, target: TargetFacts) -> bool:
    """Return whether the embedding is the draft's own, and not the target's.

    Not all trainers that train it write a key for it, so the target's decides if it is given. A
    trained embedding stays near the target's. One that has nothing to do with it belongs to another
    target: it is not the draft's own here, and is refused where the two are joined.
    """
    raw, own = files.config, tensors.get(EMBEDDING)
    stated = bool(raw.get("train_embeddings", raw.get("embed_requires_grad")))
    if own is None or SECTION in raw:
        return stated and own is not None
    if target.embedding is None or own.shape != target.embedding.shape:
        return stated
    theirs = target.embedding.detach().to("cpu", own.dtype)
    if torch.equal(own, theirs):
        return False
    pairs = own[:_COMPARED].float(), theirs[:_COMPARED].float()
    return stated or float(torch.cosine_similarity(*pairs, dim=-1).mean()) > _NEAR


def own_tensors(
    tensors: dict[str, Tensor],
    files: DraftFiles,
    target: TargetFacts,
    dtype: str,
    *,
    target_head: bool = False,
    own_head: bool = False,
) -> dict[str, Tensor]:
    """Return tensors, under our names, with the target's weights that the file does not contain.

    Drafts that use the target's head (`target_head`) have no copy of it; `own_head`: a draft has a
    full head of its own, at the start the target's.
    """
    result = dict(tensors)
    head = result.pop(HEAD, None) if target_head else None
    if head is not None:
        _require_target_head(head, files, target)
    supply = {EMBEDDING: target.embedding} | ({HEAD: target.head} if own_head else {})
    for name, value in supply.items():
        if name in result:
            continue
        if value is None:
            raise files.bad_weights(
                f"has no {name}, because it shares the target's; run `spec-train export --draft "
                "... --target DIR --format hf --out NEW` and use NEW"
            )
        result[name] = value.detach().to("cpu", getattr(torch, dtype), copy=True)
    return result


def _require_target_head(head: Tensor, files: DraftFiles, target: TargetFacts) -> None:
    """Refuse an LM head in the file that is not the target's."""
    if target.head is None:
        log.warning(
            "warning: %s: lm_head is assumed to be a copy of the target's; pass --target to check",
            files.weights_path,
        )
    elif not torch.equal(head, target.head.detach().to("cpu", head.dtype)):
        raise files.bad_weights(
            "its lm_head is not the target's; drafts of this kind use the target's head, so this "
            "one cannot be represented"
        )
