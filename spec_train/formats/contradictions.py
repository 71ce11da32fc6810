"""Keys of a config.json that say the same thing must agree: engines read different ones of them.

For example, layer ids stand in up to four places, because engines disagree on their meaning. If two
places differ, one engine drafts from other states than another, and none reports it. The table of
`_statements` lists such keys for every form; values are compared after conversion to one meaning.
"""

import re
from collections.abc import Iterator
from typing import Any

from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import from_block_inputs
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION, same_value, some_of
from spec_train.formats.flat import INPUT_KEY, MASK_KEYS
from spec_train.formats.write import LAYER, TYPE
from spec_train.options.shape_options import AUTO, FULL, SLIDING

Statement = tuple[str, str, Any]
"""(what is said, the key that says it, the value in one meaning)."""

_LAYERS = "layers (outputs of decoder blocks)"
_THETA, _PARTIAL = ("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")
_SHAPE = (*("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),)
_SWITCHES = {"hidden_act": "silu", "norm_before_fc": False, "norm_before_residual": False}
"""Options that decide the key of the same name, with the value of releases without them."""
_OPTIONS = {
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
    "markov_rank": "markov_rank",
    "markov_head_type": "markov_head_type",
    "block_size": "block_size",
    "num_layers": "num_hidden_layers",
    "draft_layers": "num_hidden_layers",
    "num_draft_layers": "num_hidden_layers",
    **{name: name for name in _SHAPE},
}
"""Options of a draft that decide the config key on the right."""


def refuse_contradictions(files: DraftFiles) -> None:
    """Refuse a draft, of any program and in any form, whose keys contradict each other.

    Raises:
        DraftError: names the keys and their values.
    """
    if found := contradictions(files):
        raise DraftError(
            f"{files.config_path}: contradicts itself, so engines would read different drafts: "
            f"{some_of(found)}. Correct the wrong one, or copy or export the draft again"
        )


def contradictions(files: DraftFiles) -> list[str]:
    """Return the things that keys of the config, or its tensors, say differently."""
    said: dict[str, list[tuple[str, Any]]] = {}
    try:
        for what, key, value in (*_statements(files.config), *_of_tensors(files)):
            if value is not None:
                said.setdefault(what, []).append((key, value))
    except (TypeError, ValueError, AttributeError) as error:
        return [f"a field has a wrong type ({error})"]
    return [
        f"{what}: " + ", ".join(f"{value} by {key}" for key, value in values)
        for what, values in said.items()
        if not all(same_value(values[0][1], value) for _, value in values)
    ]


def _statements(raw: dict[str, Any]) -> Iterator[Statement]:
    layer, eagle = _table(raw, LAYER), _table(raw, "eagle_config")
    dflash, own = _table(raw, "dflash_config"), _table(raw, SECTION)
    options = _table(own, "options")
    yield from _layer_statements(raw, layer, eagle, dflash, own, options)
    for table, prefix in ((raw, ""), (layer, f"{LAYER}.")):
        yield from _rope_statements(table, prefix)
    places = (
        (raw, ""),
        (layer, f"{LAYER}."),
        (eagle, "eagle_config."),
        (dflash, "dflash_config."),
    )
    for table, prefix in places:
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            yield name, prefix + name, table.get(name)
        for name in ("draft_vocab_size", "vocab_size", "hidden_size", "target_hidden_size"):
            yield name, prefix + name, table.get(name)
        for name in MASK_KEYS:
            yield "mask token", prefix + name, table.get(name)
        for name in ("block_size", "dspark_block_size"):
            yield "block_size", prefix + name, table.get(name)
        for name in ("causal", "is_causal"):
            yield "causal", prefix + name, table.get(name)
        for name in ("dtype", "torch_dtype"):
            value = table.get(name)  # a nested config may keep its target's dtype: no contradiction
            yield f"{prefix}dtype", prefix + name, value and str(value).removeprefix("torch.")
        yield "num_hidden_layers", prefix + "num_hidden_layers", table.get("num_hidden_layers")
        if table.get("layer_types") is not None:
            # engines read the first ones; configs made from the target's may keep all of them
            blocks, kinds = table.get("num_hidden_layers"), len(table["layer_types"])
            known = isinstance(blocks, int) and blocks < kinds
            yield "num_hidden_layers", f"{prefix}layer_types", blocks if known else kinds
    for name in (*_SHAPE, "hidden_act"):
        yield name, name, raw.get(name)
    if raw.get(TYPE) == "eagle3" and raw.get("norm_before_residual") is None:
        yield "norm_before_residual", "its absence (vLLM serves true)", True
    if "sliding_window" in options:
        yield from _window_statements(raw | layer, options)
    for name, formerly in _SWITCHES.items() if options else ():
        yield name, f"{SECTION}.options.{name}", options.get(name, formerly)
    for name, key in _OPTIONS.items():
        zero_is_auto = name in _SHAPE and options.get(name) == 0
        yield key, f"{SECTION}.options.{name}", None if zero_is_auto else options.get(name)
    if options.get("mask_token_id", -1) != -1:
        yield "mask token", f"{SECTION}.options.mask_token_id", options["mask_token_id"]
    if "layout" in options:
        yield "sample_from_anchor", "sample_from_anchor", raw.get("sample_from_anchor")
        anchor = options["layout"] == "anchor"
        yield "sample_from_anchor", f"{SECTION}.options.layout", anchor


def _window_statements(raw: dict[str, Any], options: dict[str, Any]) -> Iterator[Statement]:
    """Yield the layers that slide and their window, by the keys of engines and by the options."""
    count = raw.get("num_hidden_layers") or 1
    found = [kind == SLIDING for kind in (raw.get("layer_types") or [FULL] * count)[:count]]
    window = options["sliding_window"]
    kinds = options.get("layer_types", AUTO)
    kinds = [SLIDING if window else FULL] * count if kinds == AUTO else kinds.split(",")
    own = [kind.strip() == SLIDING for kind in kinds]
    yield from (
        ("sliding layers", "layer_types", found),
        ("sliding layers", f"{SECTION}.options.layer_types", own),
        ("sliding_window", "sliding_window", raw.get("sliding_window") if any(found) else 0),
        ("sliding_window", f"{SECTION}.options.sliding_window", window),
    )


def _layer_statements(
    raw: dict[str, Any],
    layer: dict[str, Any],
    eagle: dict[str, Any],
    dflash: dict[str, Any],
    own: dict[str, Any],
    options: dict[str, Any],
) -> Iterator[Statement]:
    """Yield the places of the layer ids, as outputs of decoder blocks, and of their number."""
    places = [
        (INPUT_KEY, _outputs(raw.get(INPUT_KEY))),
        (f"{LAYER}.{INPUT_KEY}", _outputs(layer.get(INPUT_KEY))),
        (f"eagle_config.{INPUT_KEY}", eagle.get(INPUT_KEY)),
        ("aux_hidden_state_layer_ids", _outputs(raw.get("aux_hidden_state_layer_ids"))),
        ("target_layer_ids", raw.get("target_layer_ids")),
        ("dspark_target_layer_ids", raw.get("dspark_target_layer_ids")),
        ("dflash_config.target_layer_ids", dflash.get("target_layer_ids")),
        (f"{SECTION}.layers", own.get("layers")),
        (f"{SECTION}.options.layers", _typed_ids(options.get("layers"))),
    ]
    for key, value in places:
        yield _LAYERS, key, list(value) if value else None
    known = [(key, value) for key, value in places if value]
    for key, value in known[:1]:
        yield "number of states", key, len(value)
    for table, prefix in ((raw, ""), (layer, f"{LAYER}.")):
        name = "num_aux_hidden_states"
        yield "number of states", prefix + name, table.get(name)


def _outputs(blocks: Any) -> list[int] | None:
    return from_block_inputs(blocks) if blocks else None


def _typed_ids(text: Any) -> list[int] | None:
    """Return the ids of an option such as "2,0"; None for "auto"."""
    if not isinstance(text, str) or not re.fullmatch(r"-?\d+(,-?\d+)*", text):
        return None
    return sorted({int(part) for part in text.split(",")})


def _rope_statements(table: dict[str, Any], prefix: str) -> Iterator[Statement]:
    """Yield the rope settings of a config: at its top level and in up to two tables."""
    for names in (_THETA, _PARTIAL):
        for name in names:
            yield names[0], prefix + name, table.get(name)
    length = "original_max_position_embeddings"
    yield length, prefix + length, table.get(length)
    for place in ("rope_parameters", "rope_scaling"):
        rope = _table(table, place)
        if any(isinstance(value, dict) for value in rope.values()):  # one table per layer type
            rope = _table(rope, "full_attention")
        if not rope:
            continue
        kind = rope.get("rope_type") or rope.get("type") or "default"
        yield "rope_type", f"{prefix}{place}", kind
        for name, value in rope.items():
            if name not in ("rope_type", "type"):
                plain = name in (*_THETA, *_PARTIAL, length)
                yield name if plain else f"rope {name}", f"{prefix}{place}.{name}", value


def _of_tensors(files: DraftFiles) -> Iterator[Statement]:
    """Yield what the shapes of tensors say about sizes that the config has too."""
    raw = _table(files.config, LAYER) | files.config
    vocab = raw.get("vocab_size")
    size = raw.get("draft_vocab_size") or vocab
    tensors = {name.removeprefix("model."): value for name, value in files.tensors.items()}
    for name, what, stated in (
        ("embed_tokens.weight", "vocab_size", vocab),
        ("t2d", "vocab_size", vocab),
        ("d2t", "draft_vocab_size", size),
        ("lm_head.weight", "draft_vocab_size", size),
    ):
        if name in tensors and stated is not None:
            yield f"{what} (tensors)", what, stated
            yield f"{what} (tensors)", name, len(tensors[name])


def _table(raw: dict[str, Any], name: str) -> dict[str, Any]:
    found = raw.get(name)
    return found if isinstance(found, dict) else {}
