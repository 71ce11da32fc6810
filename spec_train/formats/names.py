"""What names in the files of other programs mean here, by the tables of `names.toml`.

A key that changes the arithmetic of a draft must not be dropped without a word: those that are
known and neutral are read over, others are refused, and unknown ones are reported when the draft is
read and by the report of `export`. `auto_map` and files of code are never used.
"""

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.kind_files import every_kind

NAMES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_KEYS, _NAMED = NAMES["keys"], NAMES["named"]
READ, HARMLESS = (frozenset(_KEYS[name].split()) for name in ("read", "harmless"))

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
MASK_KEYS = tuple(_NAMED["mask_token"].split())
"""Names of the mask token, which replaces unknown tokens; vLLM reads the first one present."""
BLOCK_SIZE_KEYS, LAYER_ID_KEYS = (tuple(_NAMED[name].split()) for name in ("block_size", "layers"))
"""Names of the size of a block, and of the layers as outputs of decoder blocks."""
FORM = "form"
"""In the section: the form of these files if they are not our checkpoint."""
TYPE, LAYER = "speculators_model_type", "transformer_layer_config"
NESTED, BLOCK_TABLE = _NAMED["table"], _NAMED["block_table"]
"""The nested tables of published drafts; keys of the second have priority in engines."""
INPUT_KEY = _NAMED["layer_inputs"]
"""Layer ids: at the top level *inputs* of decoder blocks; nested, as SGLang reads it, outputs."""
BLOCK_INPUT_KEY = "aux_hidden_state_layer_ids"
"""Layer ids of block drafts in the speculators form, inputs of decoder blocks."""
_TABLES = (NESTED, LAYER, BLOCK_TABLE, "rope_parameters", "rope_scaling")
_LAYER = re.compile(r"layers\.(\d+)\.")


@functools.cache
def known_keys() -> frozenset[str]:
    """Return every key whose meaning is known; those of rope tables begin with "rope "."""
    kinds = every_kind().values()
    known = READ | HARMLESS | _neutral().keys() | _KEYS["scales"].keys()
    known |= {f"rope {name}" for name in _KEYS["rope"].split()}
    return known.union(*({*one.aliases, *one.harmless.split()} for one in kinds))


@functools.cache
def _neutral() -> dict[str, tuple[Any, ...]]:
    """Return the keys that change the arithmetic, and the values that change nothing."""
    neutral = {name: tuple(values) for name, values in _KEYS["neutral"].items()}
    for one in every_kind().values():
        neutral |= dict.fromkeys(one.keys, ()) | dict(one.neutral)
    return neutral


_SWITCHES = ("true", "false", "yes", "no", "on", "off")


def table_of(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a nested table of a config; empty if it is absent or null; else a TypeError."""
    value = raw.get(name)
    if not isinstance(value, dict | None):
        raise TypeError(f"{name} is {value!r}, no object")
    return value or {}


def said_causal(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config without an `is_causal` that says nothing of the draft.

    AutoModel writes false into every block draft of its class; in those of its JetSpec trainer, the
    table says that blocks are causal.
    """
    table = table_of(raw, BLOCK_TABLE)
    automodel = not set(_NAMED["not_causal"].split()).isdisjoint(raw.get("architectures") or ())
    causal = table.get("causal") or table.get("causal_head")
    if automodel and causal and raw.get("is_causal") is False:
        return {name: value for name, value in raw.items() if name != "is_causal"}
    return raw


# -- keys ------------------------------------------------------------------------------------------


def copied_from_target(files: DraftFiles) -> str | None:
    """Return the draft class of a trainer that copies its target's config; None for others."""
    names = files.config.get("architectures") or ()
    return next(
        (name for one in every_kind().values() for name in names if name in one.copies), None
    )


def refuse_arithmetic(files: DraftFiles, what: str, but: tuple[str, ...] = ()) -> None:
    """Refuse a config with a key that changes the arithmetic in a way that `what` does not have.

    `but` are keys that `what` reads.
    """
    raw, neutral, scales = files.config, _neutral(), _KEYS["scales"]
    size = raw.get("head_dim") or raw.get("hidden_size", 0) // raw.get("num_attention_heads", 1)
    faults = []
    for name, value, path in _leaves(raw):
        if isinstance(value, str) and value.strip().lower() in _SWITCHES:
            raise files.bad_config(
                f'{path} = "{value}" is a text, which every program reads as true; write true or '
                "false without quotes, as it was trained"
            )
        if name in scales and value not in (None, size ** scales[name]):
            faults.append(f"{path} = {value}")
        if name in neutral and name not in but and value not in (None, *neutral[name]):
            faults.append(f"{path} = {'...' if isinstance(value, dict) else value}")
    if faults:
        raise files.bad_config(
            f"{', '.join(faults)} cannot be represented: {what} of spec-train has no such "
            "arithmetic"
        )


def unread_keys(files: DraftFiles) -> list[str]:
    """Return the keys of a published config, sorted, of which it is unknown what they change.

    Null values are left out. Drafts of this project have other checks, and a config that is a copy
    of the target's may have any key: its draft class reads a few of them.
    """
    if SECTION in files.config or copied_from_target(files) is not None:
        return []
    leaves = _leaves(files.config)
    return sorted(
        path for name, value, path in leaves if value is not None and name not in known_keys()
    )


def unread_text(names: list[str]) -> str:
    """Return a sentence about keys that were not read."""
    return (
        f"keys of unknown meaning were not read: {', '.join(names)}. If one of them changes what "
        "the draft computes, it is read as another draft than the one that was trained"
    )


def _leaves(raw: dict[str, Any], path: str = "", rope: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, path) of the keys at the top and in the nested tables.

    `rope` goes before the names of a rope table, which may have a table for each type of layers.
    """
    for name, value in raw.items():
        if rope and isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.", rope)
        elif name in _TABLES:
            inner = "rope " if name.startswith("rope_") else ""
            yield from _leaves(table_of(raw, name), f"{path}{name}.", inner)
        else:
            yield rope + name, value, path + name


# -- tensors ---------------------------------------------------------------------------------------


def plain_names(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the tensors without the prefix `model.` that some tools add to the names.

    DraftError: one is there with the prefix and without; `where` is the path of the weights.
    """
    plain = {re.sub(r"^(model\.)+", "", name): value for name, value in tensors.items()}
    if len(plain) < len(tensors):
        twice = next(name for name in plain if f"model.{name}" in tensors)
        raise DraftError(f"{where}: {twice} is there twice, under two names: also as model.{twice}")
    return plain


def count_layers(names: Iterable[str]) -> int:
    """Return the number of decoder layers in a draft's tensors; `midlayer` is the first one."""
    plain = [name.replace("midlayer.", "layers.0.", 1) for name in names]
    return len({int(m[1]) for name in plain if (m := _LAYER.match(name))})


def refuse_quantised(files: DraftFiles) -> None:
    """Raise DraftError if the weights of a draft are quantised, or its config says that they are.

    A config that is a copy of the target's has the target's.
    """
    tables = (files.config.get(name) for name in ("quantization_config", "compression_config"))
    table = next((table for table in tables if isinstance(table, dict) and table), None)
    method = (table or {}).get("quant_method")
    advice = (
        "spec-train reads weights in bfloat16, float16 or float32: take the draft before it was "
        "quantised, or export it in bfloat16 with the program that quantised it"
    )
    for name in files.tensors:
        for pattern, by in NAMES["quantised"].items():
            if re.search(pattern, name):
                raise files.bad_weights(f"{name}: quantised weights ({method or by}); {advice}")
    if table is not None and copied_from_target(files) is None:
        raise files.bad_config(
            f"says that the weights are quantised ({method or 'quantization_config'}), and no "
            f"tensor is. {advice}. If they never were, remove the key"
        )


def renamed(files: DraftFiles, table: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors under our names, without rotary tables, which are computed from the config."""
    result: dict[str, Tensor] = {}
    for name, value in files.tensors.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        for pattern, ours in table.items():
            if match := re.match(pattern, name):
                name = match.expand(ours) + name[match.end() :]
                break
        if name in result:
            raise files.bad_weights(f"{name} is there twice, under two names")
        result[name] = value
    return result
