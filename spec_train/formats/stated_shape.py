"""The shape that a config.json states, for a new draft: `fit --shape-of FILE`.

The file is that of a published draft, of this or another project. It is read as `read` reads it,
but there are no weights beside it, so what only weights tell is not known. Keys that describe the
target are compared with it. What neither sets an option nor describes the target is named.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from spec_data.models.families import TargetShape
from spec_data.models.rope_settings import rope_parameters
from spec_data.shards.errors import ConfigError, DraftError, SpecDataError
from spec_data.terminal.given import decided, free
from spec_train.formats.contradictions import refuse_contradictions
from spec_train.formats.draft_files import DraftFiles, read_config_file
from spec_train.formats.draft_seal import SECTION, without_seal
from spec_train.formats.names import (
    BLOCK_INPUT_KEY,
    BLOCK_KINDS,
    HARMLESS,
    LAYER,
    MASK_KEYS,
    NAMES,
    STAGE_KEYS,
    TYPE,
    block_keys,
    copied_from_target,
    keys_of_copy,
    kind_of_config,
    refuse_arithmetic,
    refuse_other_drafts,
    unread_keys,
    unread_text,
)
from spec_train.formats.read import (
    SINKS,
    WHAT,
    anchor_first,
    has_dflash_class,
    normed_by_class,
    of_speculators,
    refuse_parts_of_files,
    stated_layers,
    stated_norms,
    switches_of,
    text_rope,
    with_stage_sizes,
)
from spec_train.formats.windows import Windows, causal_windows, slides_non_causal, windows_of
from spec_train.options.draft_options import DRAFT_OPTIONS, VOCABULARY_CHOICES, DraftOptions

log = logging.getLogger(__name__)

ROPE = "rope"
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SAME = ("hidden_act", "train_embeddings")
_OF_TARGET = (
    *("vocab_size", "hidden_size", "target_hidden_size", "rms_norm_eps", "num_target_layers"),
)
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_RENAMED = {LAYER, BLOCK_INPUT_KEY, "draft_num_hidden_layers", *NAMES["keys"]["blocks"]}
"""Keys whose content is read under another name."""
_UNUSED = {"max_position_embeddings", "tie_word_embeddings", "speculators_config"}
"""Keys that other commands read: a new draft has the target's context and head, and what is drafted
per round in serving is no shape."""
_QWEN, _QWEN_HEAD = ("qwen2", "qwen3"), 128  # transformers' default of `head_dim` in Qwen3


@dataclass(frozen=True)
class _ConfigFile(DraftFiles):
    """A config.json without weights; `where` is its own path."""

    @property
    def config_path(self) -> str:
        return self.where


@dataclass(frozen=True)
class StatedShape:
    """What a config.json says of a draft."""

    path: str
    options: Mapping[str, Any]
    """Values of options of the draft."""
    of_target: Mapping[str, Any]
    """Keys that describe the target."""
    unused: tuple[str, ...]
    """Keys that decide nothing in training."""

    def fill(self, options: DraftOptions) -> tuple[DraftOptions, dict[str, Any]]:
        """Return the options with this shape where nobody gave another, and what was filled.

        Raises:
            DraftError: a value that this kind of draft cannot have.
        """
        names = free(options, self.options)
        if any(getattr(options, name, None) is not None for name in VOCABULARY_CHOICES):
            names.pop("draft_vocab_size", None)
        if options.given & {"position_weights"}:
            names.pop("step_decay", None)
        try:
            return decided(options, **names), names
        except DraftError as error:
            raise DraftError(f"{self.path}: {error}") from None

    def check_target(self, target: TargetShape, vocab_size: int) -> None:
        """Refuse a file that describes another target than this one.

        Raises:
            ConfigError: names the key and both values.
        """
        known = {
            "vocab_size": vocab_size,
            "hidden_size": target.hidden_size,
            "target_hidden_size": target.hidden_size,
            "rms_norm_eps": target.rms_norm_eps,
            "num_target_layers": target.num_hidden_layers,
            ROPE: target.rope_parameters,
        }
        for name, stated in self.of_target.items():
            own = known[name]
            if name == ROPE:
                limits = {"max_position_embeddings": target.max_position_embeddings}
                stated = rope_parameters(stated | limits)
            if own != stated:
                raise ConfigError(
                    f"{self.path}: {name} = {stated} contradicts the target of the dataset, which "
                    f"has {own}; name the file of a draft for this target, or remove the key"
                )


def stated_shape(path: str, kind: str, options: DraftOptions) -> StatedShape:
    """Read what a config.json states of the shape of a draft of a kind with these options.

    Raises:
        MissingError: no such file. ConfigError: a value has another type than its key wants.
        DraftError: it is no JSON object, of another kind of draft or of none, contradicts itself,
            or has arithmetic that drafts of this project have not.
    """
    config, _ = without_seal(read_config_file(Path(path)))
    try:
        return _stated(_ConfigFile(config, {}, path), kind, options)
    except SpecDataError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise ConfigError(
            f"{path}: a value is not of the type that transformers has for its key ({error})"
        ) from None


def _stated(files: DraftFiles, kind: str, options: DraftOptions) -> StatedShape:
    refuse_other_drafts(files)
    refuse_contradictions(files)
    if unread := unread_keys(files):
        log.warning("warning[unread-keys]: %s: %s", files.config_path, unread_text(unread))
    written = {name for name, value in files.config.items() if value not in (None, False)}
    layers = files.config.get("draft_num_hidden_layers")
    library = TYPE in files.config
    if library:
        found, files, _ = of_speculators(files)
    else:
        found = kind_of_config(files, kind)
    if kind in DRAFT_OPTIONS and found != kind:
        raise files.bad_config(
            f"is of a {found} draft; fit that with `spec-train fit {found}`, or name the file of a "
            f"{kind} draft"
        )
    own = {field.name for field in fields(options)}
    if found in BLOCK_KINDS:
        files = block_keys(files)
        values = _of_blocks(files, found, own)
    else:
        if (writer := copied_from_target(files)) is not None:
            files = keys_of_copy(files, writer)
            written -= {"num_hidden_layers"}
        values = _of_chains(files, found, own, library)
        values |= {} if layers is None else {"num_layers": layers}
    raw = files.config
    values |= _sizes(raw, found) | _biases(files)
    values = {name: value for name, value in values.items() if value is not None}
    strange = (n for n, v in values.items() if n not in own and v != getattr(options, n, v or None))
    if odd := sorted(strange):
        raise files.bad_config(f"{', '.join(odd)}: {kind} drafts have no such option")
    facts = {name: raw[name] for name in _OF_TARGET if raw.get(name) is not None}
    if any(raw.get(name) is not None for name in _ROPE):
        facts[ROPE] = text_rope(files)
    unused = written - HARMLESS - _RENAMED - set(unread) - set(raw) | (written & _UNUSED)
    return StatedShape(
        files.where, {n: v for n, v in values.items() if n in own}, facts, tuple(sorted(unused))
    )


def _sizes(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return sizes of a decoder layer, with those that transformers derives for absent keys."""
    found = {name: raw.get(name) for name in _SIZES}
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    llama = kind not in BLOCK_KINDS and raw.get("model_type") not in _QWEN
    if heads and found["head_dim"] is None and hidden:
        found["head_dim"] = _QWEN_HEAD if raw.get("model_type") == "qwen3" else hidden // heads
    if heads and found["num_key_value_heads"] is None and llama:
        found["num_key_value_heads"] = heads
    return found


def _biases(files: DraftFiles) -> dict[str, Any]:
    """Return activation, biases and the embedding, by the names of options."""
    switches = switches_of(files)
    found: dict[str, Any] = {n: switches[n] for n in _SAME if n in switches}
    for name in ("attention_bias", "mlp_bias"):
        if name in switches:
            found[name] = "true" if switches[name] else "false"
    return found


def _of_chains(files: DraftFiles, kind: str, own: set[str], library: bool) -> dict[str, Any]:
    """Return the options, of those in `own`, of a draft without blocks that a flat file states."""
    raw, final = files.config, "layers" not in own
    refuse_arithmetic(files, WHAT[kind])
    if final:
        refuse_parts_of_files(files)
    count = raw.get("num_hidden_layers")
    windows = windows_of(files, count or 1)
    found = {"num_layers": count, "step_decay": raw.get("step_loss_decay")}
    found |= _windows(windows)
    named = library or "architectures" in raw
    found["qk_norm"] = raw.get("qk_norm", normed_by_class(raw, library) if named else None)
    if final:
        return found
    found |= stated_norms(files, named) | stated_layers(files) | _vocabulary(raw, named)
    if "depths" in own:  # nothing is fed back
        return found | {
            "mask_token_id": _mask_token(raw),
            "depths": raw.get("num_depths"),
            "norm_output": None,
        }
    return found | {"ttt_steps": raw.get("ttt_length")}


def _mask_token(raw: dict[str, Any]) -> Any:
    return next((raw[key] for key in MASK_KEYS if raw.get(key) is not None), None)


def _vocabulary(raw: dict[str, Any], named: bool) -> dict[str, Any]:
    """Return the size of the draft vocabulary; 0: all tokens, also of a class without the key."""
    size, whole = raw.get("draft_vocab_size"), raw.get("vocab_size")
    if size is None:
        return {"draft_vocab_size": 0} if named else {}
    return {"draft_vocab_size": 0 if size == whole else size}


def _windows(windows: Windows) -> dict[str, Any]:
    if not windows.layer_types:
        return {}
    types = ",".join(windows.layer_types)
    return {"sliding_window": windows.sliding_window, "layer_types": types}


def _of_blocks(files: DraftFiles, kind: str, own: set[str]) -> dict[str, Any]:
    """Return the options, of those in `own`, of a block draft that a file with our keys states."""
    stage = kind if kind in STAGE_KEYS else None
    of_stage = ("projector_type", *STAGE_KEYS[stage]) if stage else ()
    refuse_arithmetic(files, WHAT[kind], but=(SINKS, *of_stage))
    raw = files.config
    named = "architectures" in raw or SECTION in raw
    if named and stage is not None:
        raw = with_stage_sizes(files, stage).config
    count = raw.get("num_hidden_layers")
    windows = windows_of(files, count)
    if count is not None:
        windows = causal_windows(files, windows, count)
    confident = bool(raw.get("enable_confidence_head"))
    ids = raw.get("target_layer_ids")
    found = {
        "num_layers": count,
        "block_size": raw.get("block_size"),
        "mask_token_id": _mask_token(raw),
        "num_anchors": raw.get("num_anchors"),
        "qk_norm": raw.get("qk_norm"),
        SINKS: raw.get(SINKS),
        "layers": ",".join(map(str, sorted(set(ids)))) if ids else None,
        **_windows(windows),
        **{name: raw.get(name) for name in STAGE_KEYS.get(stage or "", ())},
    }
    if windows.layer_types:
        found["sliding_window_non_causal"] = slides_non_causal(files, windows)
    heads = bool(raw.get("markov_rank")) or confident
    if named or raw.get("sample_from_anchor") is not None:
        first = stage is not None or has_dflash_class(raw)
        anchor = anchor_first(files, first, heads or (stage is not None and "layout" in own))
        found["layout"] = "anchor" if anchor else "mask"
    if stage is None:
        found |= _vocabulary(raw, named)
    if "markov_rank" in own and (named or raw.get("markov_rank") is not None):
        found["markov_rank"] = raw.get("markov_rank") or 0
    if heads:
        found["markov_head_type"] = raw.get("markov_head_type")
    if confident:
        found["confidence_head_with_markov"] = raw.get("confidence_head_with_markov")
    said = raw.get("enable_confidence_head")
    if "markov_rank" in own and not confident and (named or said is not None):
        found["confidence_weight"] = 0.0
    return found
