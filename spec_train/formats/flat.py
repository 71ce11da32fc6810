"""The parts that the flat configs of all drafts share: shapes, rope, token ids, layer ids.

Published files omit different fields. An absent field gets the default of the class that reads it
(transformers' LlamaConfig for sizes and rope). A field without a safe default must be present.
"""

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor

from spec_data.models.rope_settings import rope_parameters
from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import eagle3_layers, from_block_inputs
from spec_data.shards.schema import LAYER_CONVENTION
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.names import plain_names
from spec_train.formats.target_facts import TargetFacts

log = logging.getLogger(__name__)

TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Names of the mask token, which replaces unknown tokens; vLLM reads the first one present."""
FORM = "form"
"""In the section: the form of these files if they are not our checkpoint."""
_NORMS = ("norm_before_fc", "norm_before_residual")
INPUT_KEY = "eagle_aux_hidden_state_layer_ids"
"""Layer ids: at the top level *inputs* of decoder blocks; nested, as SGLang reads it, outputs."""
BLOCK_INPUT_KEY = "aux_hidden_state_layer_ids"
"""Layer ids of block drafts in the speculators form, inputs of decoder blocks."""
_COMPARED, _NEAR = 4096, 0.5
"""Rows of two embeddings that are compared, and the mean cosine from which one is the other's."""


def shape_of(files: DraftFiles) -> dict[str, Any]:
    """Return sizes, rope, dtype and token ids of a flat config, with every default filled in.

    Raises:
        DraftError: a size is missing.
    """
    raw = files.config
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if not isinstance(raw.get(name), int)]
    if missing:
        raise DraftError(f"{files.config_path}: missing {', '.join(missing)}")
    heads = raw["num_attention_heads"]
    limit = raw.get("max_position_embeddings") or 2048
    found = {name: raw[name] for name in needed}
    found |= {
        "target_hidden_size": raw.get("target_hidden_size") or raw["hidden_size"],
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": limit,
        "draft_vocab_size": raw.get("draft_vocab_size") or raw["vocab_size"],
        "rope_parameters": rope_parameters(_text_rope(raw) | {"max_position_embeddings": limit}),
        "dtype": float_type(files.tensors),
    }
    tokens = {key: raw[key] for key in TOKEN_KEYS if raw.get(key) is not None}
    return found | tokens


def sizes_of_weights(files: DraftFiles) -> dict[str, Any]:
    """Return the config with the sizes of the weights where it has none.

    The defaults of config classes differ: without `head_dim`, Qwen3's has 128, Llama's H / heads.
    """
    raw, tensors = dict(files.config), plain_names(files.tensors)
    layer, heads = "layers.0.", raw.get("num_attention_heads")
    query = tensors.get(f"{layer}self_attn.q_proj.weight")
    if raw.get("head_dim") is None and query is not None and isinstance(heads, int) and heads:
        raw["head_dim"] = len(query) // heads
    key = tensors.get(f"{layer}self_attn.k_proj.weight")
    if raw.get("num_key_value_heads") is None and key is not None and raw.get("head_dim"):
        raw["num_key_value_heads"] = len(key) // raw["head_dim"]
    for name, tensor in (
        ("hidden_size", tensors.get("norm.weight")),
        ("intermediate_size", tensors.get(f"{layer}mlp.gate_proj.weight")),
    ):
        if raw.get(name) is None and tensor is not None:
            raw[name] = len(tensor)
    return raw


def _text_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config in which M-RoPE is the plain rope that it is for text.

    The three positions of a text token are equal. `mrope_section` stays, for engines and images.
    """
    found = dict(raw)
    for place in ("rope_parameters", "rope_scaling"):
        rope = raw.get(place)
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) == "mrope":
            found[place] = {k: v for k, v in rope.items() if k != "type"} | {"rope_type": "default"}
    return found


def switches_of(files: DraftFiles) -> dict[str, Any]:
    """Return the switches of layers and norms that the file has; absent ones are left out.

    They have the names of a draft's configuration. Norms of queries and keys are known by their
    weights, because published configs have no key for them. `hidden_activation` is Gemma's name of
    `hidden_act`.

    Raises:
        DraftError: the two keys of the activation differ.
    """
    raw, nested = files.config, files.config.get("eagle_config") or {}
    said = {raw[name] for name in ("hidden_act", "hidden_activation") if raw.get(name) is not None}
    if len(said) > 1:
        raise DraftError(
            f"{files.config_path}: hidden_act = {raw['hidden_act']} and hidden_activation = "
            f"{raw['hidden_activation']}: remove the one that the draft was not trained with"
        )
    raw = raw | {"hidden_act": next(iter(said), None)}
    found: dict[str, Any] = {}
    for name in ("hidden_act", "attention_bias", "mlp_bias", *_NORMS):
        value = raw[name] if raw.get(name) is not None else nested.get(name)
        if value is not None:
            found[name] = value
    found["qk_norm"] = any(".q_norm." in name for name in files.tensors)
    options = (raw.get(SECTION) or {}).get("options") or {}  # the speculators form may lack the key
    own = raw.get("train_embeddings", raw.get("embed_requires_grad"))
    own = options.get("train_embeddings") if own is None else own
    return found | ({"train_embeddings": True} if own else {})


def shape_options(config: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the values of the options of `shape_options` that lead to these switches.

    `kind` is the class of the draft's options; a switch that it does not have is left out.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    names = ("hidden_act", "qk_norm", "train_embeddings", *_NORMS)
    found = {name: config[name] for name in names if name in config and name in known}
    for name in ("attention_bias", "mlp_bias"):
        found[name] = "true" if config.get(name) else "false"
    if config.get("layer_types"):
        found["sliding_window"] = config["sliding_window"]
        found["layer_types"] = ",".join(config["layer_types"])
    return found


def float_type(tensors: dict[str, Tensor]) -> str:
    """Return the name of the weights' dtype; the dtype of `fc.weight` if they are mixed."""
    kinds = {str(value.dtype).removeprefix("torch.") for value in _floats(tensors)}
    chosen = tensors["fc.weight"] if "fc.weight" in tensors else next(_floats(tensors))
    if len(kinds) > 1:
        log.warning(
            "warning: the weights have several dtypes (%s); all are read as %s",
            ", ".join(sorted(kinds)),
            str(chosen.dtype).removeprefix("torch."),
        )
    return str(chosen.dtype).removeprefix("torch.")


def _floats(tensors: dict[str, Tensor]) -> Any:
    return (value for value in tensors.values() if value.is_floating_point())


def aux_layers(files: DraftFiles, target: TargetFacts) -> tuple[int, ...]:
    """Return the layer ids (outputs of decoder blocks) of an EAGLE-3 style config.

    The top-level key holds inputs of blocks, as vLLM and llama.cpp read it. The nested key, which
    SGLang reads, holds outputs; `contradictions` has compared the two. DeepSpec's key holds
    outputs. Without a key all engines use the inputs of blocks 2, L//2 and L-3 of a target with L
    blocks.

    The ids have the order of the file; `layer_order.sort_states` sorts them.

    Raises:
        DraftError: both keys are absent and L is unknown.
    """
    raw = files.config
    nested = (raw.get("eagle_config") or {}).get(INPUT_KEY)
    if raw.get(INPUT_KEY):
        layers = tuple(from_block_inputs(raw[INPUT_KEY]))
    elif nested:
        layers = tuple(nested)
    elif raw.get("target_layer_ids"):
        layers = tuple(raw["target_layer_ids"])
    elif blocks := raw.get("num_target_layers") or target.num_layers:
        layers = eagle3_layers(blocks)
    else:
        raise DraftError(
            f"{files.config_path}: contains no layer ids; engines then derive them from the "
            "target's number of decoder blocks. Pass the target with --target DIR"
        )
    return layers


def section_of(
    files: DraftFiles, kind: str, layers: tuple[int, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the `spec_train` section of the file, or a new one with an unknown origin.

    The layers of the file's section are those of the keys that engines read (see `agreement`).
    """
    own = files.config.get(SECTION)
    if own is None:
        return {
            "draft": kind,
            "layers": list(layers),
            "layer_convention": LAYER_CONVENTION,
            "options": options,
            "origin": {},
        }
    return {name: value for name, value in own.items() if name != FORM}


def refuse_set(files: DraftFiles, what: str, **wanted: Any) -> None:
    """Refuse a config with a field that `what` does not support; absent or null is accepted.

    Raises:
        DraftError: lists every such field and the supported values.
    """
    raw = files.config
    nested = raw.get("eagle_config") or {}
    faults = []
    for name, value in wanted.items():
        found = raw[name] if raw.get(name) is not None else nested.get(name)
        if found is not None and found != value:
            faults.append(f"{name} = {found}")
    if faults:
        raise DraftError(
            f"{files.config_path}: {', '.join(faults)} cannot be represented: {what} of spec-train "
            "has " + ", ".join(f"{name} = {value}" for name, value in wanted.items())
        )


def has_own_embedding(tensors: dict[str, Tensor], files: DraftFiles, target: TargetFacts) -> bool:
    """Return whether the embedding is the draft's own, and not the target's.

    Not all trainers that train it write a key for it, so the target's decides if it is given. A
    trained embedding stays near the target's. One that has nothing to do with it belongs to another
    target: it is not the draft's own here, and is refused where the two are joined.
    """
    raw, own = files.config, tensors.get("embed_tokens.weight")
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


def no_bias(bias: Tensor | None) -> bool:
    """Return whether a bias changes nothing."""
    return bias is None or not bool(torch.any(bias))


def with_target_weights(
    tensors: dict[str, Tensor],
    files: DraftFiles,
    target: TargetFacts,
    dtype: str,
    names: tuple[str, ...],
) -> dict[str, Tensor]:
    """Add the target's weights `names` (embedding, LM head) that the file does not contain.

    Raises:
        DraftError: a weight is missing and the target is not given.
    """
    found = dict(tensors)
    supply = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.head}
    for name in names:
        value = supply[name]
        if name in found:
            continue
        if value is None:
            raise DraftError(
                f"{files.weights_path}: has no {name}, because it shares the target's; run "
                "`spec-train export --draft ... --target DIR --format hf --out NEW` and use NEW"
            )
        found[name] = value.detach().to("cpu", getattr(torch, dtype), copy=True)
    return found


def drop_target_head(
    tensors: dict[str, Tensor], files: DraftFiles, target: TargetFacts
) -> dict[str, Tensor]:
    """Return tensors without the full LM head: drafts of this kind use the target's head.

    Raises:
        DraftError: the head in the file is not the target's.
    """
    found = dict(tensors)
    head = found.pop("lm_head.weight", None)
    if head is None:
        return found
    if target.head is None:
        log.warning(
            "warning: %s: lm_head is assumed to be a copy of the target's; pass --target to check",
            files.weights_path,
        )
    elif not torch.equal(head, target.head.detach().to("cpu", head.dtype)):
        raise DraftError(
            f"{files.weights_path}: its lm_head is not the target's; drafts of this kind use the "
            "target's head, so this one cannot be represented"
        )
    return found
