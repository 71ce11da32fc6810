"""DSpark and DFlash: convert our checkpoints to and from the forms of engines and trainers.

Engines share the target's embedding and head with a draft over the full vocabulary, so the forms
for engines contain neither; llama.cpp would tie the head to an embedding without a head. Layer ids
are outputs of decoder blocks in all flat forms, and inputs in the speculators form. The slot that
drafts first (`sample_from_anchor`) is always written, because the defaults of readers differ.
"""

from typing import Any

import torch

from spec_data.config import to_dict
from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import as_block_inputs, from_block_inputs
from spec_train.draft_options import DFlashOptions, DSparkOptions
from spec_train.formats import speculators
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.flat import (
    MASK_KEYS,
    drop_target_head,
    plain_names,
    refuse_set,
    refuse_sliding,
    section_of,
    shape_of,
    shape_options,
    switches_of,
    with_target_weights,
)
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.vocabulary_maps import own_vocabulary

DSPARK, DFLASH = "Qwen3DSparkModel", "DFlashDraftModel"
ARCHITECTURES = (DSPARK, "DSparkDraftModel", "DSparkSpeculator")
DFLASH_ARCHITECTURES = (DFLASH, "DFlashSpeculator")
INPUT_KEY = "aux_hidden_state_layer_ids"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def to_flat(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for vLLM, SGLang and llama.cpp: our checkpoint without the target's embedding."""
    tensors = {name: value for name, value in own.tensors.items() if name != _EMBEDDING}
    return DraftFiles(own.config, tensors, own.where)


def to_speculators(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for the speculators library, which vLLM reads too."""
    raw = own.config
    published = DFLASH in raw["architectures"]
    fields: dict[str, Any] = {
        INPUT_KEY: as_block_inputs(raw[SECTION]["layers"]),
        "block_size": raw["block_size"],
        "mask_token_id": raw["mask_token_id"],
        "sample_from_anchor": raw["sample_from_anchor"],
        "sliding_window_non_causal": True,
        "target_hidden_size": raw["target_hidden_size"],
        "num_target_layers": raw["num_target_layers"],
    }
    if not published:
        fields |= {
            "markov_rank": raw["markov_rank"],
            "markov_head_type": raw["markov_head_type"],
            "enable_confidence_head": raw["enable_confidence_head"],
            "confidence_head_with_markov": raw["confidence_head_with_markov"],
        }
    config = speculators.wrap(
        raw,
        "dflash" if published else "dspark",
        "DFlashSpeculator" if published else "DSparkSpeculator",
        raw["block_size"] - (0 if raw["sample_from_anchor"] else 1),
        target,
        **fields,
    )
    return DraftFiles(config, to_flat(own, target).tensors, own.where)


def to_deepspec(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for DeepSpec's trainer, whose class holds copies of the target's embedding and head.

    Raises:
        DraftError: the vocabulary is reduced, the layout is "mask", or no target is given.
    """
    raw = own.config
    if raw["draft_vocab_size"] != raw["vocab_size"]:
        raise DraftError(
            f"{own.where}: DeepSpec supports only the full vocabulary, this draft has a reduced one"
        )
    if not raw["sample_from_anchor"]:
        raise DraftError(
            f"{own.where}: DeepSpec drafts from the anchor's slot (layout anchor), this draft does "
            "not (layout mask)"
        )
    if target.head is None:
        raise DraftError(
            f"{own.where}: DeepSpec's checkpoints hold a copy of the target's LM head; pass "
            "--target with the target's directory"
        )
    head = target.head.detach().to("cpu", own.tensors["fc.weight"].dtype, copy=True)
    return DraftFiles(raw | {"architectures": [DSPARK]}, own.tensors | {_HEAD: head}, own.where)


def from_speculators(flat: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """Convert unwrapped files of the speculators form to our checkpoint."""
    raw = dict(flat.config)
    if "sample_from_anchor" not in raw:
        raise DraftError(
            f"{flat.config_path}: has no sample_from_anchor; vLLM then assumes false and the "
            "speculators library, for DSpark, true. Add the value that it was trained with"
        )
    if INPUT_KEY not in raw:
        raise DraftError(f"{flat.config_path}: {INPUT_KEY} is missing; add it")
    raw["target_layer_ids"] = from_block_inputs(raw.pop(INPUT_KEY))
    dflash = set(raw.get("architectures") or ()) & set(DFLASH_ARCHITECTURES)
    raw["architectures"] = [DFLASH if dflash else DSPARK]
    return from_flat(DraftFiles(raw, flat.tensors, flat.where), depth, target)


def from_flat(files: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """Convert a flat checkpoint of any tool to ours.

    Raises:
        DraftError: it computes something that our DSpark and DFlash do not, or weights are missing.
    """
    raw = {**files.config, **(files.config.get("dflash_config") or {})}
    dflash = bool(set(raw.get("architectures") or ()) & set(DFLASH_ARCHITECTURES))
    what = "a DSpark or DFlash draft"
    refuse_set(files, what, tie_word_embeddings=False)
    refuse_set(files, what, is_causal=False, norm_before_residual=False)
    refuse_sliding(files, what)
    if raw.get("causal"):
        raise DraftError(f"{files.config_path}: causal = true is not supported in draft blocks")
    blocks = _needed(files, raw, "num_hidden_layers")
    layers = tuple(raw.get("target_layer_ids") or raw.get("dspark_target_layer_ids") or ())
    if not layers or list(layers) != sorted(set(layers)):
        raise DraftError(
            f"{files.config_path}: target_layer_ids {list(layers)} must be ascending and unique"
        )
    shape = shape_of(files)
    config = shape | switches_of(files)
    config |= {
        "architectures": [DFLASH if dflash and not raw.get("sample_from_anchor") else DSPARK],
        "model_type": "qwen3",
        "num_hidden_layers": blocks,
        "num_target_layers": raw.get("num_target_layers") or target.num_layers,
        "block_size": raw.get("block_size") or raw.get("dspark_block_size"),
        "mask_token_id": next((raw[k] for k in MASK_KEYS if raw.get(k) is not None), None),
        "sample_from_anchor": raw.get("sample_from_anchor", not dflash),
        "markov_rank": raw.get("markov_rank", 0),
        "markov_head_type": raw.get("markov_head_type", "vanilla"),
        "enable_confidence_head": bool(raw.get("enable_confidence_head", False)),
    }
    config["confidence_head_with_markov"] = _with_markov(files, config, raw)
    for name in ("num_target_layers", "block_size", "mask_token_id"):
        _needed(files, config, name)
    kind = (raw.get(SECTION) or {}).get("draft") or ("dflash" if dflash else "dspark")
    options = _options(kind, config, layers, raw.get("num_anchors"))
    config[SECTION] = section_of(files, kind, layers, options)
    return DraftFiles(config, _own_tensors(files, config, target), files.where)


def _with_markov(files: DraftFiles, config: dict[str, Any], raw: dict[str, Any]) -> bool:
    """Return whether the confidence head also reads the Markov embedding.

    Readers have different defaults for the key, so the weight must have the width that it says.

    Raises:
        DraftError: there is no such embedding, or the key and the weight differ.
    """
    if not config["enable_confidence_head"]:
        return False
    rank, key = config["markov_rank"], "confidence_head_with_markov"
    wanted = raw.get(key)
    weight = plain_names(files.tensors).get("confidence_head.proj.weight")
    if wanted is None and weight is not None:
        wanted = weight.shape[-1] > config["hidden_size"]
    if wanted and not rank:
        raise DraftError(f"{files.config_path}: {key} = true, but markov_rank is 0")
    width = config["hidden_size"] + (rank if wanted else 0)
    if weight is not None and weight.shape[-1] != width:
        raise DraftError(
            f"{files.config_path}: {key} = {bool(wanted)} needs a confidence head of width "
            f"{width}; the one in the file has width {weight.shape[-1]}"
        )
    return bool(wanted)


def _needed(files: DraftFiles, raw: dict[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise DraftError(f"{files.config_path}: {name} is missing")
    return raw[name]


def _options(
    kind: str, config: dict[str, Any], layers: tuple[int, ...], anchors: int | None
) -> dict[str, Any]:
    """Return the options of a new draft of this shape; unknown ones have their defaults."""
    common: dict[str, Any] = {
        "layers": ",".join(map(str, layers)),
        "draft_vocab_size": config["draft_vocab_size"],
        "num_draft_layers": config["num_hidden_layers"],
        "block_size": config["block_size"],
        "layout": "anchor" if config["sample_from_anchor"] else "mask",
        "mask_token_id": config["mask_token_id"],
        "num_anchors": anchors or DSparkOptions.num_anchors,
        **shape_options(config),
    }
    if kind == "dflash":
        return to_dict(DFlashOptions(**common))
    return to_dict(
        DSparkOptions(
            **common,
            markov_rank=config["markov_rank"],
            markov_head_type=config["markov_head_type"],
            confidence_weight=1.0 if config["enable_confidence_head"] else 0.0,
            confidence_head_with_markov=config["confidence_head_with_markov"]
            or not config["enable_confidence_head"],
        )
    )


def _own_tensors(
    files: DraftFiles, config: dict[str, Any], target: TargetFacts
) -> dict[str, torch.Tensor]:
    """Return the tensors of our checkpoint: always the embedding, the head only if reduced."""
    tensors = plain_names(files.tensors)
    sizes = config["vocab_size"], config["draft_vocab_size"]
    tensors = own_vocabulary(tensors, *sizes, files.weights_path)
    full = config["draft_vocab_size"] == config["vocab_size"]
    if full:
        tensors = drop_target_head(tensors, files, target)
    if not full and not {_HEAD, "d2t"} <= tensors.keys():
        raise DraftError(
            f"{files.weights_path}: a reduced draft vocabulary needs lm_head.weight and d2t"
        )
    return with_target_weights(tensors, files, target, config["dtype"], (_EMBEDDING,))
