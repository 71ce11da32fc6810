"""DFlash, DSpark and P-EAGLE of the speculators library (0.9), with the fields that it writes."""

from typing import Any

import pytest

from spec_data.shards.errors import DraftError
from tests.spec_train.formats.published import blocks, parallel, tiny
from tests.spec_train.formats.published.blocks import IDS, LAYERS, MASK, RANK, SIZE
from tests.spec_train.formats.published.tiny import VD, H, V

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_config(kind: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """Return `transformer_layer_config`: what the config class of the layer writes."""
    return tiny.OF_TRANSFORMERS_5 | {
        "model_type": kind,
        "num_hidden_layers": LAYERS,
        "layer_types": [FULL] * LAYERS,
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "transformers_version": "5.2.0",
        **changes,
    }


def config(kind: str, tokens: int, layer: dict[str, Any], **own: Any) -> dict[str, Any]:
    """Return config.json of a draft of that kind with `tokens` per round."""
    return {
        "architectures": [own.pop("name")],
        "auto_map": {"": "config.SpeculatorModelConfig"},
        "dtype": "float32",
        "draft_vocab_size": V,
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": tiny.speculators_config(kind, tokens, "Qwen3ForCausalLM"),
        **own,
    }


def block_config(kind: str, layer: dict[str, Any] | None = None, **own: Any) -> dict[str, Any]:
    """Return config.json of a DFlash or DSpark."""
    anchor = own.setdefault("sample_from_anchor", kind == "dspark")
    fields: dict[str, Any] = {
        "name": "DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel",
        "aux_hidden_state_layer_ids": [k + 1 for k in IDS],
        "block_size": SIZE,
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
    }
    if kind == "dspark":
        fields |= {
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    tokens = SIZE if anchor else SIZE - 1
    return config(kind, tokens, layer or layer_config(), **fields | own)


def heads_of(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `block_tensors` and of `reference_config` for a kind of draft."""
    if kind == "dflash":
        return {}, {"sample_from_anchor": False}
    return {"markov": "vanilla", "confidence": H + RANK}, {"kind": "vanilla"}


@pytest.mark.parametrize("layer", ["qwen3", "llama"])
def test_dflash_drafts_as_defined(tmp_path, layer):
    """Its layers are Qwen3's in both cases, with norms of queries and keys."""
    facts, tensors = tiny.target(), blocks.block_tensors()
    folder = tiny.write(tmp_path, block_config("dflash", layer_config(layer)), tensors)
    draft = blocks.drafts_as_defined(folder, tensors, facts, sample_from_anchor=False)
    assert draft.name == "dflash" and draft.config.layers == tuple(IDS)


@pytest.mark.parametrize("anchor", [True, False])
@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_dspark_drafts_as_defined(tmp_path, markov, with_markov, anchor):
    facts, width = tiny.target(), H + (RANK if with_markov else 0)
    tensors = blocks.block_tensors(markov=markov, confidence=width)
    raw = block_config(
        "dspark",
        markov_head_type=markov,
        confidence_head_with_markov=with_markov,
        sample_from_anchor=anchor,
    )
    folder = tiny.write(tmp_path, raw, tensors)
    if markov == "rnn" and not anchor:  # its state has seen the anchor's slot before slot 1
        with pytest.raises(DraftError, match="advances the head's state over the anchor's slot"):
            blocks.read_block(folder, facts)
        return
    draft = blocks.drafts_as_defined(folder, tensors, facts, sample_from_anchor=anchor, kind=markov)
    assert draft.name == "dspark" and draft.config.sample_from_anchor == anchor


@pytest.mark.parametrize("order", ["ascending", "random"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_reduced_vocabulary_has_rows_of_its_own(tmp_path, kind, order):
    facts, ids = tiny.target(), tiny.some_ids(order)
    heads, how = heads_of(kind)
    tensors, head = blocks.block_tensors(rows=VD, **heads), facts.head[ids]
    saved = tensors | {"lm_head.weight": head} | tiny.maps(ids)
    rows = ids.argsort()  # of the file, for each of our rows
    state = dict(tensors)
    if kind == "dspark":
        name = "markov_head.markov_w2.weight"
        state[name] = tensors[name][rows]
    draft = blocks.read_block(
        tiny.write(tmp_path, block_config(kind, draft_vocab_size=VD), saved), facts
    )
    config = blocks.reference_config(facts, state, head_rows=head[rows], **how)
    blocks.compare(draft, facts, state, config, ids=ids[rows].tolist())


def test_rows_that_are_not_the_targets_are_kept(tmp_path, caplog):
    facts, ids = tiny.target(), tiny.some_ids()
    tensors, head = blocks.block_tensors(rows=VD), tiny.noise(VD, H)
    saved = tensors | {"lm_head.weight": head} | tiny.maps(ids)
    folder = tiny.write(tmp_path, block_config("dflash", draft_vocab_size=VD), saved)
    blocks.drafts_as_defined(
        folder, tensors, facts, ids=ids.tolist(), head_rows=head, sample_from_anchor=False
    )
    assert "lm_head is not made of the target's rows" in caplog.text


@pytest.mark.parametrize("non_causal", [True, False])
@pytest.mark.parametrize("types", [(SLIDING, SLIDING), (SLIDING, FULL)])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_windows_are_those_of_its_training_defaults(tmp_path, kind, types, non_causal):
    """By default every layer slides, and is causal inside a block."""
    facts, window = tiny.target(), 5
    heads, how = heads_of(kind)
    tensors = blocks.block_tensors(**heads)
    layer = layer_config(layer_types=list(types), sliding_window=window, use_sliding_window=True)
    raw = block_config(kind, layer, sliding_window_non_causal=non_causal)
    folder = tiny.write(tmp_path / "a", raw, tensors)
    windows = tuple(window if type_ == SLIDING else None for type_ in types)
    how |= {"windows": windows, "non_causal": non_causal}
    for lengths in ((9, 4), (2,)):  # with two, all positions are in the window
        blocks.drafts_as_defined(folder, tensors, facts, lengths, **how)
    del raw["sliding_window_non_causal"]
    with pytest.raises(DraftError, match="has sliding layers and no sliding_window_non_causal"):
        blocks.read_block(tiny.write(tmp_path / "b", raw, tensors), facts)


@pytest.mark.parametrize("missing", ["markov_rank", "block_size", "confidence_head_with_markov"])
def test_a_missing_field_has_the_librarys_default(tmp_path, missing):
    defaults = {"markov_rank": 256, "block_size": 8, "confidence_head_with_markov": True}
    tensors = blocks.block_tensors(markov="vanilla", confidence=H + RANK)
    raw = block_config("dspark")
    del raw[missing]
    if missing == "markov_rank":
        with pytest.raises(DraftError, match="needs a confidence head of width 272"):
            blocks.read_block(tiny.write(tmp_path, raw, tensors), tiny.target())
        return
    draft = blocks.read_block(tiny.write(tmp_path, raw, tensors), tiny.target())
    assert getattr(draft.config, missing) == defaults[missing]


def test_without_its_key_a_dspark_drafts_from_the_anchor_or_is_refused(tmp_path, caplog):
    tensors = blocks.block_tensors(markov="vanilla", confidence=H + RANK)
    raw = block_config("dspark")
    del raw["sample_from_anchor"]
    draft = blocks.read_block(tiny.write(tmp_path / "a", raw, tensors), tiny.target())
    assert draft.config.sample_from_anchor and "vLLM reads it as false" in caplog.text
    assert "warning[assumed]" in caplog.text
    raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = SIZE - 1
    with pytest.raises(DraftError, match="Add the value that it was trained with"):
        blocks.read_block(tiny.write(tmp_path / "b", raw, tensors), tiny.target())


def peagle_config(kind: str = "qwen3", **own: Any) -> dict[str, Any]:
    """Return config.json of a P-EAGLE; keys of the layer config are in `own["layer"]`."""
    count = parallel.BLOCKS
    layer = {"num_hidden_layers": count, "layer_types": [FULL] * count} | own.pop("layer", {})
    fields: dict[str, Any] = {
        "name": "PEagleDraftModel",
        "draft_vocab_size": VD,
        "eagle_aux_hidden_state_layer_ids": [k + 1 for k in IDS],
        "mask_token_id": MASK,
        "norm_before_residual": True,  # the default of its command line
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": True,
    }
    return config("peagle", parallel.DEPTHS, layer_config(kind, **layer), **fields | own)


SLIDES = {"layer_types": [SLIDING] * 2, "sliding_window": 5, "use_sliding_window": True}
PEAGLES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3", {}, {}),
    ("llama", {"norm_before_residual": False}, {}),
    ("qwen3", {"norm_before_fc": True}, {}),
    ("llama", {"fc_norm": True}, {}),
    ("qwen3", {"norm_output": True}, {}),  # nothing is fed back: no effect
    ("qwen3", {}, SLIDES),  # the default of its command line
    ("llama", {}, SLIDES),
    ("llama", {}, {"attention_bias": True, "mlp_bias": True}),
]


@pytest.mark.parametrize(("kind", "own", "layer"), PEAGLES, ids=str)
def test_peagle_drafts_as_defined(tmp_path, kind, own, layer):
    facts, ids = tiny.target(), tiny.some_ids("random")
    norms = {name: own.get(name, False) for name in ("norm_before_fc", "fc_norm")}
    tensors = parallel.peagle_tensors(
        qk_norm=kind == "qwen3", bias="attention_bias" in layer, **norms
    )
    saved = tensors | {"embed_tokens.weight": facts.embedding} | tiny.maps(ids)
    folder = tiny.write(tmp_path, peagle_config(kind, layer=layer, **own), saved)
    draft = parallel.read_peagle(folder, facts)
    assert draft.config.layers == tuple(IDS) and draft.options.depths == parallel.DEPTHS
    assert not draft.config.norm_output
    rows = ids.argsort()
    state = tensors | {"lm_head.weight": tensors["lm_head.weight"][rows]}
    parallel.compare(
        draft,
        state,
        facts.embedding,
        ids[rows],
        norm_before_residual=own.get("norm_before_residual", True),
        window=layer.get("sliding_window"),
    )


@pytest.mark.parametrize("key", [True, False, None])
@pytest.mark.parametrize("known", [True, False])
def test_the_embedding_of_a_peagle_is_its_own(tmp_path, known, key):
    """Its trainer trains it by default. A given target decides, else the key does."""
    facts, ids = tiny.target(), tiny.some_ids()
    tensors, own = parallel.peagle_tensors(), facts.embedding + tiny.noise(V, H) / 5
    raw = peagle_config("llama")
    if key is None:
        del raw["embed_requires_grad"]
    else:
        raw["embed_requires_grad"] = key
    saved = tensors | {"embed_tokens.weight": own} | tiny.maps(ids)
    folder = tiny.write(tmp_path, raw, saved)
    draft = parallel.read_peagle(folder, facts if known else None)
    assert draft.config.train_embeddings == (known or key is not False)
    if draft.config.train_embeddings:
        draft.share(blocks.head_of(facts))  # as evaluation does
        parallel.compare(draft, tensors, own, ids, norm_before_residual=True)


def test_layer_ids_in_another_order_leave_the_parts_of_fc(tmp_path):
    """Its states are collected in the order of the target's blocks, not in that of the ids."""
    facts, tensors = tiny.target(), blocks.block_tensors()
    raw = block_config("dflash", aux_hidden_state_layer_ids=[9, 2, 5])
    folder = tiny.write(tmp_path / "block", raw, tensors)
    draft = blocks.drafts_as_defined(folder, tensors, facts, sample_from_anchor=False)
    assert draft.config.layers == tuple(IDS)
