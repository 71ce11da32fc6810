"""TorchSpec's DFlash and DSpark: names of tensors and of a key of its own."""

from typing import Any

import pytest

from spec_data.shards.errors import DraftError
from tests.spec_train.formats.published import blocks, tiny
from tests.spec_train.formats.published.blocks import IDS, LAYERS, MASK, RANK, SIZE
from tests.spec_train.formats.published.tiny import D, H, L

CONFIG: dict[str, Any] = {k: v for k, v in tiny.SIZES.items() if k != "hidden_act"} | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "dflash",
    "num_hidden_layers": LAYERS,
    "num_target_layers": len(IDS),  # here: of the captured layers
    "target_hidden_size": H,
    "target_num_hidden_layers": L,
    "target_layer_ids": IDS,
    "mask_token_id": MASK,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "_torchspec_version": "0.3.0",
}


def own_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors under TorchSpec's names."""
    names = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
    found = {}
    for name, value in tensors.items():
        start = next((ours for ours in names if name.startswith(ours)), "")
        found[names.get(start, "") + name[len(start) :]] = value
    return found


@pytest.mark.parametrize("native", [True, False])
def test_dflash_drafts_as_defined(tmp_path, native):
    facts, tensors = tiny.target(), blocks.block_tensors()
    saved = own_names(tensors) if native else tensors
    config = CONFIG | {"block_size": SIZE}
    folder = tiny.write(tmp_path, config, saved | {"embed_tokens.weight": facts.embedding})
    draft = blocks.drafts_as_defined(folder, tensors, facts, sample_from_anchor=False)
    assert draft.name == "dflash" and draft.config.num_target_layers == L
    assert draft.config.layers == tuple(IDS)
    tiny.write(folder, config | {"target_layer_ids": None}, saved)
    with pytest.raises(DraftError, match="target_layer_ids is missing"):
        blocks.read_block(folder, facts)


@pytest.mark.parametrize("with_markov", [True, False])
def test_dspark_drafts_as_defined(tmp_path, with_markov):
    facts = tiny.target()
    tensors = blocks.block_tensors(markov="vanilla", confidence=H + (RANK if with_markov else 0))
    config = CONFIG | {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3_dspark",
        "block_size": SIZE,
        "markov_rank": RANK,
        "markov_head_type": "classical",
        "enable_confidence_head": True,
        "confidence_head_with_markov": with_markov,
    }
    folder = tiny.write(tmp_path, config, own_names(tensors))
    draft = blocks.drafts_as_defined(folder, tensors, facts, kind="vanilla")
    assert draft.name == "dspark" and draft.config.sample_from_anchor


def test_head_sizes_are_those_of_the_weights(tmp_path):
    """Its files may have no head_dim: transformers' Qwen3 would take 128, Llama H / heads."""
    config = {k: v for k, v in CONFIG.items() if k not in ("head_dim", "num_key_value_heads")}
    folder = tiny.write(tmp_path, config | {"block_size": SIZE}, blocks.block_tensors())
    draft = blocks.read_block(folder, tiny.target())
    assert draft.config.head_dim == D and draft.config.num_key_value_heads == tiny.GROUPS


def test_what_its_files_do_not_say_is_asked_for(tmp_path):
    """The size of a block is an option of its training; a head says not which slot drafts."""
    folder = tiny.write(tmp_path / "a", CONFIG, blocks.block_tensors())
    with pytest.raises(DraftError, match="block_size is missing"):
        blocks.read_block(folder, tiny.target())
    config = CONFIG | {"block_size": SIZE, "markov_rank": RANK, "markov_head_type": "vanilla"}
    folder = tiny.write(tmp_path / "b", config, blocks.block_tensors(markov="vanilla"))
    with pytest.raises(DraftError, match="and no sample_from_anchor"):
        blocks.read_block(folder, tiny.target())
