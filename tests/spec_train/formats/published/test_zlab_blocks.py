"""z-lab's published DFlash: `dflash_config`, no head, no embedding, and code that is never run."""

from pathlib import Path
from typing import Any

import pytest

from spec_data.shards.errors import DraftError
from spec_train.drafts.block.files import usual_layers
from tests.spec_train.formats.published import blocks, tiny
from tests.spec_train.formats.published.blocks import IDS, LAYERS, MASK, SIZE
from tests.spec_train.formats.published.tiny import L

FULL, SLIDING = "full_attention", "sliding_attention"
EMBEDDING = "mask_embedding.pt"
CONFIG: dict[str, Any] = tiny.PLAIN | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": SIZE,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": IDS},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "layer_types": [FULL] * LAYERS,
    "max_window_layers": LAYERS,
    "model_type": "qwen3",
    "num_hidden_layers": LAYERS,
    "num_target_layers": L,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": True,  # the target's
    "transformers_version": "4.57.3",
    "use_sliding_window": False,
}


def write(folder: Path, tensors: Any, **changes: Any) -> Path:
    """Write a checkpoint with a file of code that fails when it is run."""
    made = tiny.write(folder, CONFIG | changes, tensors)
    (made / "dflash.py").write_text("raise SystemExit('code of a checkpoint was run')\n")
    return made


def test_a_published_draft_drafts_as_defined(tmp_path):
    facts, tensors = tiny.target(), blocks.block_tensors()
    folder = write(tmp_path / "draft", tensors)
    draft = blocks.drafts_as_defined(folder, tensors, facts, sample_from_anchor=False)
    assert draft.name == "dflash" and not draft.config.sample_from_anchor
    assert draft.config.layers == tuple(IDS) and draft.depth == SIZE - 1


def test_a_mask_embedding_beside_the_weights_is_not_left_out_without_a_word(tmp_path):
    """vLLM, SGLang and llama.cpp put it in place of the mask token's row (MiMo's drafts)."""
    folder = write(tmp_path / "draft", blocks.block_tensors())
    (folder / EMBEDDING).touch()
    with pytest.raises(DraftError, match=f"{EMBEDDING}: the draft has an embedding of its own"):
        blocks.read_block(folder, tiny.target())


def test_rope_dim_replaces_the_share_of_a_head_that_the_target_rotates(tmp_path):
    """As in vLLM and SGLang: a config copied from Qwen3.5 says both."""
    rope = {"rope_type": "default", "rope_theta": CONFIG["rope_theta"], "rope_dim": tiny.D}
    rope |= {"partial_rotary_factor": 0.5, "mrope_section": [1, 0, 0], "mrope_interleaved": True}
    tensors = blocks.block_tensors()
    folder = write(tmp_path / "draft", tensors, rope_parameters=rope, partial_rotary_factor=0.5)
    draft = blocks.drafts_as_defined(folder, tensors, tiny.target(), sample_from_anchor=False)
    assert draft.config.rope_parameters["partial_rotary_factor"] == 1
    assert "mrope_section" not in draft.config.rope_parameters


@pytest.mark.parametrize("key", ["rope_is_neox_style", "use_gemma_norm"])
def test_keys_that_engines_read_are_refused_at_values_that_change_the_arithmetic(tmp_path, key):
    changed = key == "use_gemma_norm"
    folder = write(tmp_path / "draft", blocks.block_tensors(), **{key: changed})
    with pytest.raises(DraftError, match=f"{key} = {changed} cannot be represented"):
        blocks.read_block(folder, tiny.target())
    write(tmp_path / "draft", blocks.block_tensors(), **{key: not changed})
    blocks.read_block(folder, tiny.target())


@pytest.mark.parametrize("is_causal", [None, False])
@pytest.mark.parametrize("types", [(SLIDING, FULL), (SLIDING, SLIDING)])
def test_sliding_layers_are_causal_unless_the_file_says_otherwise(tmp_path, types, is_causal):
    tensors = blocks.block_tensors()
    changes = {"layer_types": list(types), "sliding_window": 5, "use_sliding_window": True}
    if is_causal is not None:
        changes["is_causal"] = is_causal
    windows = tuple(5 if kind == SLIDING else None for kind in types)
    how = {"sample_from_anchor": False, "windows": windows, "non_causal": is_causal is False}
    folder = write(tmp_path / "draft", tensors, **changes)
    blocks.drafts_as_defined(folder, tensors, tiny.target(), (9, 4), **how)


JETSPEC = {"dflash_config": CONFIG["dflash_config"] | {"causal_head": True}}


@pytest.mark.parametrize("changes", [{"is_causal": True}, {"causal": True}, JETSPEC], ids=str)
def test_full_layers_that_are_causal_inside_a_block_slide_over_the_whole_context(tmp_path, changes):
    tensors = blocks.block_tensors()
    how = {"sample_from_anchor": False, "windows": (10**6, 10**6), "non_causal": False}
    folder = write(tmp_path / "draft", tensors, **changes)
    blocks.drafts_as_defined(folder, tensors, tiny.target(), (9, 4), **how)
    config = blocks.read_block(folder, tiny.target()).config
    assert config.sliding_window == CONFIG["max_position_embeddings"]
    mixed = {"layer_types": [SLIDING, FULL], "sliding_window": 5, "use_sliding_window": True}
    folder = write(tmp_path / "mixed", tensors, **changes | mixed)
    with pytest.raises(DraftError, match=r"causal = true: full layers.*has other sliding layers"):
        blocks.read_block(folder, tiny.target())


def test_layers_in_any_order_and_a_file_without_them(tmp_path):
    facts, tensors = tiny.target(), blocks.block_tensors()
    ids = [8, 1, 4]
    table = {"mask_token_id": MASK, "target_layer_ids": ids}
    draft = blocks.read_block(write(tmp_path / "order", tensors, dflash_config=table), facts)
    assert draft.config.layers == (1, 4, 8)
    parts = tensors["fc.weight"].chunk(3, dim=1)
    tiny.assert_same(draft.fc.weight.detach(), blocks.torch.cat([parts[1], parts[2], parts[0]], 1))
    table = {"mask_token_id": MASK, "target_layer_ids": None}
    for more in ({}, {"target_layer_ids": []}):
        folder = write(tmp_path / "none", tensors, dflash_config=table, **more)
        with pytest.raises(
            DraftError, match=r"target_layer_ids is missing.* --layers .* \[1, 5, 9\]"
        ):
            blocks.read_block(folder, facts)
    assert usual_layers(36, 5) == [1, 9, 17, 25, 33]  # of Qwen3-8B-DFlash-b16
    assert usual_layers(36, 1) == [18]


@pytest.mark.parametrize(
    "table, message",
    [
        ({"attention_sink_bias": True}, "attention_sink_bias = True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"output_multiplier": 0.5}, "output_multiplier = 0.5"),
        ({"projector_type": "dflare"}, "projector_type = dflare"),
        ({"block_size": 9}, "block_size"),
        ({"surprise": 1}, "dflash_config has surprise"),
        ({"shift_label": True}, "unclear which slot drafts first"),
        ({"causal": "false"}, 'causal = "false" is a text'),
        ({"sample_from_anchor": "True"}, 'sample_from_anchor = "True" is a text'),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, table, message):
    table = {"mask_token_id": MASK, "target_layer_ids": IDS} | table
    folder = write(tmp_path / "draft", blocks.block_tensors(), dflash_config=table)
    with pytest.raises(DraftError, match=message):
        blocks.read_block(folder, tiny.target())


@pytest.mark.parametrize("anchor", [True, False])
def test_the_name_of_a_later_engine_for_the_slot_that_drafts_first_is_read(
    tmp_path, anchor, caplog
):
    """sglang#40144: not honoured, such a draft reads one slot off and accepts almost nothing."""
    table = {"mask_token_id": MASK, "target_layer_ids": IDS, "query_zero_predicts_next": anchor}
    folder = write(tmp_path / "a", blocks.block_tensors(), dflash_config=table)
    assert blocks.read_block(folder, tiny.target()).config.sample_from_anchor is anchor
    assert "not read" not in caplog.text
    table |= {"sample_from_anchor": not anchor}
    folder = write(tmp_path / "b", blocks.block_tensors(), dflash_config=table)
    with pytest.raises(DraftError, match="unclear which slot drafts first"):
        blocks.read_block(folder, tiny.target())


def test_keys_that_are_not_known_are_named_and_values_without_an_effect_are_read(tmp_path, caplog):
    table = {"mask_token_id": MASK, "target_layer_ids": IDS, "block_size": SIZE, "causal": False}
    table |= {"output_multiplier": 1.0, "final_logit_softcapping": None, "projector_type": "dflash"}
    table |= {"input_embedding_scale": 1.0, "attention_sink_bias": False}
    folder = write(tmp_path / "a", blocks.block_tensors(), dflash_config=table)
    assert blocks.read_block(folder, tiny.target()).config.block_size == SIZE
    assert "not read" not in caplog.text
    folder = write(tmp_path / "b", blocks.block_tensors(), new_trick=3)
    blocks.read_block(folder, tiny.target())
    assert "not read: new_trick." in caplog.text
