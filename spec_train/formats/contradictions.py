"""Keys of a config.json that say the same thing must agree: engines read different ones of them.

For example, layer ids stand in up to four places, because engines disagree on their meaning. If two
places differ, one engine drafts from other states than another, and none reports it. Values are
compared after conversion to one meaning.
"""

from collections.abc import Iterator
from typing import Any

from spec_data.shards.layer_ids import from_block_inputs
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION, same_value, some_of
from spec_train.formats.kind_files import every_kind
from spec_train.formats.names import (
    BLOCK_INPUT_KEY,
    BLOCK_SIZE_KEYS,
    BLOCK_TABLE,
    INPUT_KEY,
    LAYER,
    LAYER_ID_KEYS,
    MASK_KEYS,
    NESTED,
    TYPE,
    said_causal,
    table_of,
)

Statement = tuple[str, str, Any]
"""(what is said, the key that says it, the value in one meaning)."""

_THETA, _PARTIAL = ("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")
_ROPE_LENGTH = "original_max_position_embeddings"
_ALIASES = {
    **{name: "mask token" for name in MASK_KEYS},
    **dict.fromkeys(BLOCK_SIZE_KEYS, "block_size"),
    **dict.fromkeys(("causal", "causal_head", "is_causal"), "causal"),
    **dict.fromkeys(_THETA, "rope_theta"),
    **dict.fromkeys(_PARTIAL, "partial_rotary_factor"),
    **{
        name: name
        for name in (
            *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
            *("draft_vocab_size", "vocab_size", "hidden_size", "target_hidden_size"),
            *("num_hidden_layers", _ROPE_LENGTH),
        )
    },
}
"""key -> what it says, at the top level of a config and in each of its tables."""
_TENSORS = {
    "embed_tokens.weight": "vocab_size",
    "t2d": "vocab_size",
    "d2t": "draft_vocab_size",
    "lm_head.weight": "draft_vocab_size",
}
"""tensor -> the key that says its length."""


def refuse_contradictions(files: DraftFiles) -> None:
    """Refuse a draft, of any program and in any form, whose keys contradict each other.

    Raises:
        DraftError: names the keys and their values.
    """
    said: dict[str, list[tuple[str, Any]]] = {}
    try:
        statements = _statements(said_causal(files.config))
        for what, key, value in (*statements, *_of_tensors(files)):
            if value is not None:
                said.setdefault(what, []).append((key, value))
        faults = [
            f"{what}: " + ", ".join(f"{value} by {key}" for key, value in values)
            for what, values in said.items()
            if not all(same_value(values[0][1], value) for _, value in values)
        ]
    except (TypeError, ValueError, AttributeError) as error:
        faults = [f"a field has a wrong type ({error})"]
    if faults:
        raise files.bad_config(
            f"contradicts itself, so engines would read different drafts: {some_of(faults)}. "
            "Correct the wrong one, or copy or export the draft again"
        )


def _statements(raw: dict[str, Any]) -> Iterator[Statement]:
    names = ("", LAYER, NESTED, BLOCK_TABLE)
    tables = {f"{name}." if name else "": table_of(raw, name) if name else raw for name in names}
    yield from _layer_statements(tables)
    for prefix, table in tables.items():
        for name, what in _ALIASES.items():
            yield what, prefix + name, table.get(name)
        for name in ("dtype", "torch_dtype"):
            value = table.get(name)  # a nested config may keep its target's dtype: no contradiction
            yield f"{prefix}dtype", prefix + name, value and str(value).removeprefix("torch.")
        if table.get("layer_types") is not None:
            # engines read the first ones; configs made from the target's may keep all of them
            blocks, kinds = table.get("num_hidden_layers"), len(table["layer_types"])
            fewer = isinstance(blocks, int) and blocks < kinds
            yield "num_hidden_layers", f"{prefix}layer_types", blocks if fewer else kinds
        yield from _rope_statements(table, prefix)
    kind = every_kind().get(str(raw.get(TYPE)))
    for name, value in (kind.served_absent if kind else {}).items():
        if raw.get(name) is None:
            yield name, f"its absence (vLLM serves {str(value).lower()})", value


def _layer_statements(tables: dict[str, dict[str, Any]]) -> Iterator[Statement]:
    """Yield the places of the layer ids, as outputs of decoder blocks, and of their number."""
    raw, count = tables[""], None
    section = table_of(raw, SECTION)
    yield "layers (outputs of decoder blocks)", f"{SECTION}.layers", section.get("layers") or None
    for key, inputs in (
        (INPUT_KEY, True),
        (f"{LAYER}.{INPUT_KEY}", True),
        (f"{NESTED}.{INPUT_KEY}", False),
        (BLOCK_INPUT_KEY, True),
        *((name, False) for name in LAYER_ID_KEYS),
        (f"{BLOCK_TABLE}.target_layer_ids", False),
    ):
        table, _, name = key.rpartition(".")
        ids = tables[f"{table}." if table else ""].get(name)
        if ids:
            count = count or len(ids)
            outputs = from_block_inputs(ids) if inputs else list(ids)
            yield "layers (outputs of decoder blocks)", key, outputs
    name = "num_aux_hidden_states"
    yield "number of states", "the layer ids", count
    yield "number of states", name, raw.get(name)
    yield "number of states", f"{LAYER}.{name}", tables[f"{LAYER}."].get(name)


def _rope_statements(table: dict[str, Any], prefix: str) -> Iterator[Statement]:
    """Yield the rope settings of the up to two tables of a config."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = table_of(table, key)
        if any(isinstance(value, dict) for value in rope.values()):  # one table per layer type
            rope = table_of(rope, "full_attention")
        if not rope:
            continue
        kind = rope.get("rope_type") or rope.get("type") or "default"
        yield "rope_type", f"{prefix}{key}", kind
        for name, value in rope.items():
            if name not in ("rope_type", "type"):
                plain = name in (*_THETA, *_PARTIAL, _ROPE_LENGTH)
                yield name if plain else f"rope {name}", f"{prefix}{key}.{name}", value


def _of_tensors(files: DraftFiles) -> Iterator[Statement]:
    """Yield what the lengths of tensors say about sizes that the config has too."""
    raw = table_of(files.config, LAYER) | files.config
    sizes = {"vocab_size": raw.get("vocab_size")}
    sizes["draft_vocab_size"] = raw.get("draft_vocab_size") or sizes["vocab_size"]
    tensors = {name.removeprefix("model."): value for name, value in files.tensors.items()}
    for name, what in _TENSORS.items():
        if name in tensors and sizes[what] is not None:
            yield f"{what} (tensors)", what, sizes[what]
            yield f"{what} (tensors)", name, len(tensors[name])
