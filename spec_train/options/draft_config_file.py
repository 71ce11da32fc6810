"""`--draft-config FILE`: the options of a draft from a config.json, of this or another project.

In: a JSON object with keys of transformers, any subset; a published draft's config.json is one.
Out: values of options. Flags and a `--config` file replace them. Keys that describe the target are
compared with it when the draft is made, and an unknown key is an error
(`draft_config_checks`). No torch here: `--help` is instant.
"""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from spec_data.shards.errors import ConfigError, MissingError
from spec_data.shards.layer_ids import from_block_inputs
from spec_data.terminal.checks import checked_values
from spec_data.terminal.paths import check_value

NESTED = ("transformer_layer_config", "dflash_config", "eagle_config")
"""Tables of a draft's config.json whose keys count as if they were at the top."""
_MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_INPUTS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_OUTPUTS = ("target_layer_ids", "dspark_target_layer_ids")
_SAME = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("qk_norm", "norm_before_fc", "norm_before_residual", "fc_norm", "norm_output"),
    *("train_embeddings", "draft_vocab_size", "block_size", "markov_rank", "markov_head_type"),
    *("confidence_head_with_markov", "num_anchors", "sliding_window_non_causal"),
)
"""Keys whose option has the same name."""
OPTION_KEYS = frozenset(
    {
        *(*_SAME, *_MASKS, *_INPUTS, *_OUTPUTS, *NESTED, "hidden_activation", "mlp_bias"),
        *("num_hidden_layers", "draft_num_hidden_layers", "attention_bias", "sliding_window"),
        *("layer_types", "use_sliding_window", "embed_requires_grad", "sample_from_anchor"),
        *("enable_confidence_head", "layers", "use_swa", "swa_window_size", "is_causal", "causal"),
    }
)
"""Keys that set options."""


def read_draft_config(path: str) -> dict[str, Any]:
    """Return the keys of a file, those of its `NESTED` tables included; null values are left out.

    Raises:
        MissingError: no such file. ConfigError: it is not a JSON object.
    """
    check_value("--draft-config", path)
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingError(f"--draft-config {path}: no such file") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"--draft-config {path}: not a JSON file ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"--draft-config {path}: expected an object, found {type(raw).__name__}")
    flat = {name: value for name, value in raw.items() if name not in NESTED}
    for table in NESTED:
        inner = raw.get(table) if isinstance(raw.get(table), dict) else {}
        for name, value in (inner or {}).items():
            if table == "eagle_config" and name in _INPUTS:
                name = "target_layer_ids"  # nested ids are outputs of blocks, as SGLang reads them
            flat.setdefault(name, value)
    return {name: value for name, value in flat.items() if value is not None}


def with_draft_config(options: Any, draft: str, path: str) -> Any:
    """Return the options of a draft with those that a file sets, where they have defaults.

    Raises:
        As `options_of`.
    """
    default = {field.name: field.default for field in dataclasses.fields(options)}
    shape = options_of(path, draft, default)
    changes = {n: v for n, v in shape.items() if getattr(options, n) == default[n]}
    changes = checked_values(type(options), changes, f"--draft-config {path}: ")
    return dataclasses.replace(options, **changes)


def options_of(path: str, draft: str, names: Collection[str]) -> dict[str, Any]:
    """Return the options that a file sets, of those in `names`, the options of the draft.

    Raises:
        MissingError: no such file. ConfigError: it is not a JSON object, or a key has no meaning
            for this kind of draft, or a value of another type.
    """
    raw = read_draft_config(path)
    try:
        found = _options(raw, draft, names, path)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"--draft-config {path}: a value is not of the type that transformers has for its key "
            f"({error})"
        ) from None
    odd = sorted(name for name, value in found.items() if name not in names and value)
    if odd:
        raise ConfigError(
            f"--draft-config {path}: {', '.join(odd)}: {draft} drafts have no such option; fit "
            "the kind of draft that the file describes, or remove the key"
        )
    return {name: value for name, value in found.items() if name in names}


def _options(raw: dict[str, Any], draft: str, names: Collection[str], path: str) -> dict[str, Any]:
    """Return every option that the keys of a file set, also those that the draft does not have."""
    found = {name: raw[name] for name in _SAME if name in raw}
    found |= {"hidden_act": raw["hidden_activation"]} if "hidden_activation" in raw else {}
    for name in ("attention_bias", "mlp_bias"):
        if name in raw:
            found[name] = "true" if raw[name] else "false"
    if "embed_requires_grad" in raw:
        found.setdefault("train_embeddings", raw["embed_requires_grad"])
    found |= _windows(raw, path) | _layers(raw, draft) | _head_size(raw)
    causal = raw.get("is_causal", raw.get("causal"))
    if causal and "sliding_window_non_causal" in names and not _all_slide(found):
        raise ConfigError(
            f"--draft-config {path}: is_causal = true: slots of full layers see the whole block in "
            "every block draft here; remove the key, or make every layer slide"
        )
    if _has_qk_norm(raw):
        found.setdefault("qk_norm", True)
    for name in reversed(_MASKS):
        if name in raw:
            found["mask_token_id"] = raw[name]
    if "sample_from_anchor" in raw:
        found["layout"] = "anchor" if raw["sample_from_anchor"] else "mask"
    if raw.get("enable_confidence_head") is False:
        found["confidence_weight"] = 0.0
    if raw.get("markov_rank") == 0:  # no head, so no type of it
        found.pop("markov_head_type", None)
    return found


def _windows(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the window, the layer types and the causality; none unless a layer slides.

    Raises:
        ConfigError: a window is named, but Qwen's config class makes no layer slide.
    """
    types, window = raw.get("layer_types"), raw.get("sliding_window")
    if types:  # a copy of the target's config has one entry per layer of the target
        types = types[: raw.get("num_hidden_layers", len(types))]
    if raw.get("use_swa") and "sliding_attention" not in (types or ()):  # every layer slides
        types, window = None, raw.get("swa_window_size", window)
    elif raw.get("use_sliding_window") is False or (types and "sliding_attention" not in types):
        return {}
    elif window and raw.get("model_type") in ("qwen2", "qwen3"):
        names = {"use_sliding_window": raw.get("use_sliding_window"), "layer_types": types}
        if missing := [name for name, value in names.items() if not value]:
            raise ConfigError(
                f"--draft-config {path}: sliding_window = {window} without "
                f"{' and '.join(missing)}: no layer of a {raw['model_type']} config slides then; "
                "add what is missing, or remove sliding_window"
            )
    found: dict[str, Any] = {"sliding_window": window} if window else {}
    if types:
        found["layer_types"] = ",".join(types)
    if window and raw.get("is_causal", raw.get("causal")) is False:
        found["sliding_window_non_causal"] = True
    return found


def _all_slide(found: dict[str, Any]) -> bool:
    """Return whether every layer has a window, by the options of `_windows`."""
    return bool(found.get("sliding_window")) and "full" not in found.get("layer_types", "")


def _has_qk_norm(raw: dict[str, Any]) -> bool:
    """Return whether the class of an EAGLE-3 or P-EAGLE file norms queries and keys.

    No trainer but this one writes a key for it.
    """
    classes = {"Eagle3Qwen3ForCausalLM", "Qwen3Eagle3Model"}
    of_layers = "speculators_model_type" in raw and raw.get("model_type") == "qwen3"
    return of_layers or bool(classes & set(raw.get("architectures") or ()))


def _layers(raw: dict[str, Any], draft: str) -> dict[str, Any]:
    """Return the number of layers of the draft, and the captured layers that it reads."""
    count, found = raw.get("draft_num_hidden_layers", raw.get("num_hidden_layers")), {}
    if count is not None and "LlamaEagle3DraftModel" not in (raw.get("architectures") or ()):
        found["num_layers"] = count  # AutoModel's is the target's number
    inputs = next((raw[name] for name in _INPUTS if raw.get(name)), None)
    outputs = next((raw[name] for name in _OUTPUTS if raw.get(name)), None)
    ids = from_block_inputs(inputs) if inputs else outputs
    if isinstance(raw.get("layers"), str):
        found["layers"] = raw["layers"]
    elif ids:
        found["layers"] = ",".join(map(str, sorted(set(ids))))
    return found


def _head_size(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the head size that transformers derives for a file without one."""
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    return {"head_dim": hidden // heads} if heads and hidden and "head_dim" not in raw else {}
