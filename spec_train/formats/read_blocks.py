"""DSpark and DFlash: read the checkpoints of engines and of other trainers as ours.

Two things have no key in most files, because the program that wrote them has only one form. Which
slot drafts first follows from the kind of draft: DSpark drafts from the anchor's slot, DFlash from
the slot after it. Whether slots see later slots of their block follows from the layer, as in vLLM,
SGLang, SpecForge and z-lab's code: sliding layers are causal, full ones are not.
"""

import logging
from typing import Any

import torch

from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import from_block_inputs, published_dflash_layers
from spec_data.terminal.config import to_dict
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.flat import (
    BLOCK_INPUT_KEY,
    MASK_KEYS,
    drop_target_head,
    has_own_embedding,
    refuse_set,
    section_of,
    shape_of,
    shape_options,
    sizes_of_weights,
    switches_of,
    with_target_weights,
)
from spec_train.formats.layer_order import sort_states
from spec_train.formats.names import CLASSES, block_keys, block_tensors, refuse_arithmetic
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.vocabulary_maps import own_vocabulary
from spec_train.formats.windows import SLIDING, Windows, slides_non_causal, windows_of
from spec_train.formats.write import DFLASH, DSPARK, EMBEDDING, HEAD
from spec_train.options.draft_options import DFlashOptions, DSparkOptions

log = logging.getLogger(__name__)

WHAT = "a DSpark or DFlash draft"
ANCHOR = "sample_from_anchor"
NON_CAUSAL = "sliding_window_non_causal"
_OF_SPECULATORS: dict[str, dict[str, Any]] = {
    "dflash": {ANCHOR: False, "block_size": 8},
    "dspark": {
        ANCHOR: True,
        "block_size": 8,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
"""Values of keys that a file of the speculators library lacks, in the library (0.9)."""


def from_speculators(
    kind: str, flat: DraftFiles, depth: int | None, target: TargetFacts
) -> DraftFiles:
    """Convert unwrapped files of the speculators form to our checkpoint.

    Raises:
        DraftError: as `from_flat`, or it is unclear which slot drafts first.
    """
    raw = dict(flat.config)
    dflash = bool(set(raw.get("architectures") or ()) & set(CLASSES["dflash"]))
    defaults = _OF_SPECULATORS["dflash" if dflash else "dspark"]
    if ANCHOR not in raw and not dflash:
        _check_silent_anchor(flat, raw, depth)
    if BLOCK_INPUT_KEY not in raw:
        raise DraftError(f"{flat.config_path}: {BLOCK_INPUT_KEY} is missing; add it")
    if NON_CAUSAL not in raw and windows_of(flat).layer_types:
        raise DraftError(
            f"{flat.config_path}: has sliding layers and no {NON_CAUSAL}; the speculators library "
            "reads it as false, vLLM as true. Add the value that it was trained with"
        )
    raw = defaults | raw
    if not dflash and not raw[ANCHOR] and raw["markov_rank"] and raw["markov_head_type"] == "rnn":
        raise DraftError(
            f"{flat.config_path}: markov_head_type = rnn with {ANCHOR} = false: the speculators "
            "library advances the head's state over the anchor's slot before the first draft, "
            "while drafts here and SGLang start at the first draft, so other tokens would be "
            f"drafted than in training. Train it with {ANCHOR} = true, or another Markov head"
        )
    raw["target_layer_ids"] = from_block_inputs(raw.pop(BLOCK_INPUT_KEY))
    raw["architectures"] = [DFLASH if dflash else DSPARK]
    files = DraftFiles(raw, flat.tensors, flat.where)
    return from_flat(kind, files, depth, target, collected=True)


def _check_silent_anchor(flat: DraftFiles, raw: dict[str, Any], depth: int | None) -> None:
    """Refuse a DSpark without `sample_from_anchor` if its tokens per round are those of "mask"."""
    size = raw.get("block_size")
    if size is not None and depth == size - 1:
        raise DraftError(
            f"{flat.config_path}: has no {ANCHOR}, and {depth} tokens per round with blocks of "
            f"{size}: the speculators library reads it as {ANCHOR} = true, vLLM as false. Add the "
            "value that it was trained with"
        )
    log.warning(
        "warning: %s: has no %s; read as true, as the speculators library does. vLLM reads it as "
        "false: serve an export of this draft",
        *(flat.config_path, ANCHOR),
    )


def from_flat(
    kind: str,
    files: DraftFiles,
    depth: int | None,
    target: TargetFacts,
    *,
    collected: bool = False,
) -> DraftFiles:
    """Convert a flat checkpoint of any trainer to ours; arguments as for `read_eagle.from_flat`.

    Raises:
        DraftError: it computes something that our DSpark and DFlash do not, or weights are missing.
    """
    stated = (files.config.get(SECTION) or {}).get("draft")
    dflash = bool(set(files.config.get("architectures") or ()) & set(CLASSES["dflash"]))
    files = block_keys(files)
    files = DraftFiles(files.config, block_tensors(files), files.where)
    refuse_arithmetic(files, WHAT)
    norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    refuse_set(files, WHAT, **dict.fromkeys(norms, False))
    blocks = needed(files, "num_hidden_layers")
    files = _with_layer_ids(files, dflash)
    raw = sizes_of_weights(files)
    files = DraftFiles(raw, files.tensors, files.where)
    windows = windows_of(files, blocks)
    heads = bool(raw.get("markov_rank") or raw.get("enable_confidence_head"))
    anchor = _anchor(files, dflash, heads)
    layers, tensors = sort_states(
        files.tensors, raw["target_layer_ids"], files.config_path, collected=collected
    )
    config = shape_of(files) | switches_of(files)
    config["train_embeddings"] = bool(config.get("train_embeddings")) or has_own_embedding(
        tensors, files, target
    )
    config |= {
        "architectures": [DFLASH if dflash and not anchor and not heads else DSPARK],
        "model_type": "qwen3",
        "num_hidden_layers": blocks,
        "num_target_layers": raw.get("num_target_layers") or target.num_layers,
        "block_size": needed(files, "block_size"),
        "mask_token_id": next((raw[k] for k in MASK_KEYS if raw.get(k) is not None), None),
        ANCHOR: anchor,
        **windows.keys(),
        "markov_rank": raw.get("markov_rank") or 0,
        "markov_head_type": raw.get("markov_head_type") or "vanilla",
        "enable_confidence_head": bool(raw.get("enable_confidence_head", False)),
    }
    config["confidence_head_with_markov"] = _with_markov(files, config)
    config |= _causality(files, windows)
    for name in ("num_target_layers", "mask_token_id"):
        needed(DraftFiles(config, {}, files.where), name)
    kind = stated or ("dflash" if dflash and not heads else "dspark")
    options = _options(kind, config, layers, raw.get("num_anchors"))
    config[SECTION] = section_of(files, kind, layers, options)
    named = DraftFiles(config, tensors, files.where)
    return DraftFiles(config, _own_tensors(named, target), files.where)


def _causality(files: DraftFiles, windows: Windows) -> dict[str, bool]:
    """Return whether slots see later slots of their block in sliding layers, if there are any.

    Raises:
        DraftError: layers are sliding without a window, which programs read in different ways.
    """
    raw = files.config
    types = set((raw.get("layer_types") or ())[: raw["num_hidden_layers"]])
    if SLIDING in types and not windows.layer_types:
        raise DraftError(
            f"{files.config_path}: layer_types has {SLIDING}, but use_sliding_window = "
            f"{raw.get('use_sliding_window')} and sliding_window = {raw.get('sliding_window')} set "
            "no window; programs read such layers in different ways. Correct the wrong key"
        )
    non_causal = slides_non_causal(files, windows)
    return {NON_CAUSAL: True} if windows.layer_types and non_causal else {}


def needed(files: DraftFiles, name: str) -> Any:
    """Return a key of the config.

    Raises:
        DraftError: it is missing or null.
    """
    if files.config.get(name) is None:
        raise DraftError(f"{files.config_path}: {name} is missing")
    return files.config[name]


def _with_layer_ids(files: DraftFiles, dflash: bool) -> DraftFiles:
    """Return files with `target_layer_ids`; DFlash drafts without them have those of its code."""
    raw = files.config
    if raw.get("target_layer_ids"):
        return files
    if not dflash or raw.get("num_target_layers") is None:
        raise DraftError(f"{files.config_path}: target_layer_ids is missing")
    count = raw["num_hidden_layers"]
    if "fc.weight" in files.tensors and isinstance(raw.get("hidden_size"), int):
        count = files.tensors["fc.weight"].shape[1] // raw["hidden_size"]
    layers = published_dflash_layers(raw["num_target_layers"], count)
    return DraftFiles(raw | {"target_layer_ids": layers}, files.tensors, files.where)


def _anchor(files: DraftFiles, dflash: bool, heads: bool) -> bool:
    """Return whether the anchor's slot makes the first draft.

    Raises:
        DraftError: keys of the config disagree, or none says it for a draft of a mixed kind.
    """
    raw = files.config
    stated = {ANCHOR: raw.get(ANCHOR)}
    if raw.get("dspark_bonus_anchor") is not None:  # older vLLM
        stated["dspark_bonus_anchor"] = not raw["dspark_bonus_anchor"]
    if raw.get("projector_type") == "dspark":  # ModelOpt, SpecForge
        stated["projector_type"] = True
    if raw.get("shift_label") is not None:
        stated["shift_label"] = bool(raw["shift_label"])
    found = {name: value for name, value in stated.items() if value is not None}
    if len(set(found.values())) > 1 or (dflash and not heads and raw.get("shift_label")):
        raise DraftError(
            f"{files.config_path}: it is unclear which slot drafts first: "
            + ", ".join(f"{name} = {raw[name]}" for name in found)
            + f". Set {ANCHOR} to the value that it was trained with, and remove the others"
        )
    if found:
        return bool(next(iter(found.values())))
    if dflash and heads:
        raise DraftError(
            f"{files.config_path}: a DFlash draft with a Markov or confidence head, and no "
            f"{ANCHOR}: add the value that it was trained with (true if the anchor's slot drafts "
            "the token after the anchor)"
        )
    return not dflash


def _with_markov(files: DraftFiles, config: dict[str, Any]) -> bool:
    """Return whether the confidence head also reads the Markov embedding.

    Readers have different defaults for the key, so the weight must have the width that it says.

    Raises:
        DraftError: there is no such embedding, or the key and the weight differ.
    """
    if not config["enable_confidence_head"]:
        return False
    rank, key = config["markov_rank"], "confidence_head_with_markov"
    wanted = files.config.get(key)
    weight = files.tensors.get("confidence_head.proj.weight")
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


def _options(
    kind: str, config: dict[str, Any], layers: tuple[int, ...], anchors: int | None
) -> dict[str, Any]:
    """Return the options of a new draft of this shape; unknown ones have their defaults."""
    common: dict[str, Any] = {
        "layers": ",".join(map(str, layers)),
        "draft_vocab_size": config["draft_vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "block_size": config["block_size"],
        "layout": "anchor" if config[ANCHOR] else "mask",
        "mask_token_id": config["mask_token_id"],
        "num_anchors": anchors or DSparkOptions.num_anchors,
        **shape_options(config, DSparkOptions),
        NON_CAUSAL: config.get(NON_CAUSAL, False),
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


def _own_tensors(files: DraftFiles, target: TargetFacts) -> dict[str, torch.Tensor]:
    """Return the tensors of our checkpoint: always the embedding, the head only if reduced."""
    config = files.config
    sizes = config["vocab_size"], config["draft_vocab_size"]
    tensors = own_vocabulary(files.tensors, *sizes, files.weights_path)
    full = sizes[0] == sizes[1]
    if full:
        tensors = drop_target_head(tensors, files, target)
    if not full and not {HEAD, "d2t"} <= tensors.keys():
        raise DraftError(
            f"{files.weights_path}: a reduced draft vocabulary needs lm_head.weight and d2t"
        )
    return with_target_weights(tensors, files, target, config["dtype"], (EMBEDDING,))
