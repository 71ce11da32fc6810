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
from spec_data.shards.errors import ConfigError, DraftError, SpecDataError, an
from spec_data.terminal.given import decided, free
from spec_train.formats.contradictions import refuse_contradictions
from spec_train.formats.draft_files import DraftFiles, read_config_file
from spec_train.formats.draft_seal import without_seal
from spec_train.formats.flat_config import switches_of, text_rope
from spec_train.formats.kind_files import every_kind, files_of
from spec_train.formats.names import (
    BLOCK_INPUT_KEY,
    HARMLESS,
    LAYER,
    TYPE,
    copied_from_target,
    unread_keys,
    unread_text,
)
from spec_train.formats.read import kind_of_config, refuse_other_drafts
from spec_train.formats.speculators import flat_files
from spec_train.options.draft_options import VOCABULARY_CHOICES, BlockOptions, DraftOptions
from spec_train.options.kinds import DRAFT_OPTIONS

log = logging.getLogger(__name__)

ROPE = "rope"
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SAME = ("hidden_act", "train_embeddings")
_OF_TARGET = (
    *("vocab_size", "hidden_size", "target_hidden_size", "rms_norm_eps", "num_target_layers"),
)
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_RENAMED = {LAYER, BLOCK_INPUT_KEY, "draft_num_hidden_layers"}
"""Keys whose content is read under another name, as those in `aliases` of kinds."""
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
        found, files, _ = flat_files(files)
    else:
        found = kind_of_config(files, kind)
    if kind in DRAFT_OPTIONS and found != kind:
        raise files.bad_config(
            f"is of {an(found)} draft; fit that with `spec-train fit {found}`, or name the file "
            f"of {an(kind)} draft"
        )
    own = {field.name for field in fields(options)}
    if copied_from_target(files) is not None:
        written -= {"num_hidden_layers"}
    files = files_of(found).own_keys(files)
    values = files_of(found).stated(files, own, library)
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
    renamed = _RENAMED.union(
        *({*one.aliases, *one.harmless.split()} for one in every_kind().values())
    )
    unused = written - HARMLESS - renamed - set(unread) - set(raw) | (written & _UNUSED)
    return StatedShape(
        files.where, {n: v for n, v in values.items() if n in own}, facts, tuple(sorted(unused))
    )


def _sizes(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return sizes of a decoder layer, with those that transformers derives for absent keys."""
    found = {name: raw.get(name) for name in _SIZES}
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    block = issubclass(DRAFT_OPTIONS[kind], BlockOptions)
    llama = not block and raw.get("model_type") not in _QWEN
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
