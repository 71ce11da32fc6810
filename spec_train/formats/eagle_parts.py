"""The tensors of published EAGLE drafts under one set of names, with what they say about the shape.

In: the tensors of a file, as any trainer names them. Out: the same tensors under our names, and the
fields of the shape that only tensors tell: which projections have biases, which norms exist.
Nothing here changes the result of a forward pass.
"""

import re
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.flat import plain_names
from spec_train.formats.known_keys import count_layers
from spec_train.formats.target_facts import TargetFacts

_NAMES = (
    (r"aux_norm_low\.", "fc_norm.0."),  # SGLang's aliases
    (r"aux_norm_mid\.", "fc_norm.1."),
    (r"aux_norm_high\.", "fc_norm.2."),
    (r"fc_norm_perslice\.", "fc_norm."),  # forks of DeepSpec
    (r"fc_norm\.weight$", "input_norm.weight"),  # the same: one norm over all states
)
"""(start of a name in some trainer's file, ours)."""
_UNREADABLE: tuple[tuple[str, str], ...] = (
    (r"\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj|q_b_proj)\.", "multi-head latent attention (MLA)"),
    (
        r"\.(experts|shared_experts?|block_sparse_moe)\.|mlp\.(router|gate)\.",
        "a mixture of experts",
    ),
    (r"\.lora_[AB]\.", "LoRA adapters; merge them into the weights"),
    (r"parallel_draft_heads|medusa", "parallel (Medusa) heads"),
    (
        r"\.(weight_scale\w*|input_scale|weight_packed|weight_zero_point|qweight|scales|qzeros)$",
        "quantised weights; export them in bfloat16",
    ),
    (r"self_attn\.sinks$", "attention sinks"),
    (r"self_attn\.(g_proj|gate_proj)\.", "a gate on the attention's output"),
    (r"(embed|embedding|hidden_states|lm_head)_layernorm\.", "the extra norms of HASS"),
    (r"additional_fc", "a second input projection"),
)
"""(pattern of tensor names, what it means)."""
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_NORM_KEYS = {
    "fc_norm": ("fc_norm", "use_aux_norm", "fc_norm_perslice"),
    "norm_before_fc": ("norm_before_fc",),
}
"""(field, the keys that name it; the second ones are aliases of SGLang and of a fork)."""
_COMPARED, _NEAR = 4096, 0.5
"""Rows of two embeddings that are compared, and the mean cosine from which one is the other's."""
_LAYER = r"(?:midlayer|layers\.\d+)"


def eagle_tensors(files: DraftFiles, what: str) -> dict[str, Tensor]:
    """Return the tensors under our names, without the prefix `model.` and rotary tables.

    Raises:
        DraftError: there is a part that `what` does not have, or two tensors have one name.
    """
    found: dict[str, Tensor] = {}
    for name, value in plain_names(files.tensors).items():
        for pattern, words in _UNREADABLE:
            if re.search(pattern, name):
                raise DraftError(
                    f"{files.weights_path}: {name}: {words} cannot be represented: {what} of "
                    "spec-train has none"
                )
        if name.endswith("rotary_emb.inv_freq"):
            continue  # computed from the config
        for pattern, ours in _NAMES:
            name = re.sub(rf"^{pattern}", ours, name)
        if name in found:
            raise DraftError(f"{files.weights_path}: {name} is there twice, under two names")
        found[name] = value
    return found


def with_whole_biases(
    tensors: dict[str, Tensor], files: DraftFiles
) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """Return tensors in which all projections of a kind have a bias or none has, and which do.

    A missing bias among others is zero: SafeAILab's drafts for Qwen2 have biases of queries, keys
    and values only.

    Returns:
        The tensors, and the fields `attention_bias` and `mlp_bias`.

    Raises:
        DraftError: the config says that there are biases, and there is none.
    """
    found, fields = dict(tensors), {}
    for field, block, parts in (
        ("attention_bias", "self_attn", _ATTENTION),
        ("mlp_bias", "mlp", _MLP),
    ):
        pattern = re.compile(rf"({_LAYER}\.{block}\.(?:{'|'.join(parts)}))\.weight")
        names = [m[1] for name in tensors if (m := pattern.fullmatch(name))]
        fields[field] = any(f"{name}.bias" in tensors for name in names)
        if files.config.get(field) and not fields[field]:
            raise DraftError(
                f"{files.config_path}: {field} = true, but {files.weights_path} has no such bias; "
                "copy the draft again, or set it to false if it was trained without"
            )
        for name in names if fields[field] else ():
            weight = tensors[f"{name}.weight"]
            found.setdefault(f"{name}.bias", weight.new_zeros(weight.shape[0]))
    return found, fields


def has_norms(tensors: dict[str, Tensor], files: DraftFiles) -> dict[str, bool]:
    """Return the fields `fc_norm`, `norm_before_fc` and `qk_norm`, as the tensors say.

    Raises:
        DraftError: a key of the config says otherwise, or only some layers norm queries and keys.
    """
    raw = files.config
    nested = raw.get("eagle_config") or {}
    each = any(name.startswith("fc_norm.") for name in tensors)
    found = {"fc_norm": each, "norm_before_fc": "input_norm.weight" in tensors}
    for field, keys in _NORM_KEYS.items():
        values = [table[key] for table in (raw, nested) for key in keys if key in table]
        stated = any(values)
        one_norm = stated and found["norm_before_fc"]  # `fc_norm` in forks of DeepSpec
        if any(value is not None for value in values) and stated != found[field] and not one_norm:
            raise DraftError(
                f"{files.config_path}: {field} = {str(stated).lower()}, but the norms in "
                f"{files.weights_path} say otherwise; copy the draft again, or correct the key"
            )
    normed, layers = (
        [name for name in tensors if re.fullmatch(rf"{_LAYER}\.self_attn\.{part}\.weight", name)]
        for part in ("q_norm", "q_proj")
    )
    if normed and len(normed) != len(layers):
        raise DraftError(
            f"{files.weights_path}: {len(normed)} of {len(layers)} layers norm queries and keys; "
            "all layers of our drafts do, or none does"
        )
    return found | {"qk_norm": bool(normed)}


def layers_of(tensors: dict[str, Tensor], files: DraftFiles) -> int:
    """Return the number of decoder layers in the tensors.

    Raises:
        DraftError: the config has another number.
    """
    count, stated = count_layers(tensors), files.config.get("num_hidden_layers")
    if stated not in (None, count):
        raise DraftError(
            f"{files.config_path}: num_hidden_layers = {stated}, but {files.weights_path} has "
            f"{count} layers; copy the draft again, or correct the key"
        )
    return count


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


def tied_head(tensors: dict[str, Tensor], files: DraftFiles, full: bool) -> dict[str, Tensor]:
    """Return tensors with an LM head where the config ties it to the embedding in the file.

    A head of its own in the file decides: SpecForge's configs say `tie_word_embeddings = true` of
    drafts that have one.

    Raises:
        DraftError: the head is tied, but has another size than the embedding.
    """
    head, embedding = "lm_head.weight", "embed_tokens.weight"
    if head in tensors or not files.config.get("tie_word_embeddings") or embedding not in tensors:
        return tensors
    if not full:
        raise DraftError(
            f"{files.config_path}: tie_word_embeddings = true with a reduced draft vocabulary, and "
            f"{files.weights_path} has no lm_head; copy the draft again"
        )
    return tensors | {head: tensors[embedding].clone()}


def no_bias(bias: Tensor | None) -> bool:
    """Return whether a bias changes nothing."""
    return bias is None or not bool(torch.any(bias))


def flag(files: DraftFiles, *names: str) -> bool:
    """Return a switch that several keys name, at the top level or in `eagle_config`.

    Raises:
        DraftError: two keys differ.
    """
    tables: tuple[dict[str, Any], ...] = (files.config, files.config.get("eagle_config") or {})
    said = {
        name: bool(table[name]) for table in tables for name in names if table.get(name) is not None
    }
    if len(set(said.values())) > 1:
        text = ", ".join(f"{name} = {str(value).lower()}" for name, value in said.items())
        raise DraftError(f"{files.config_path}: {text} contradict each other; correct one")
    return any(said.values())
