"""DeepSpec's DSpark and DFlash: copies of the target's config, embedding and head.

Its class is `Qwen3DSparkModel` for both; a DFlash of its recipe is one without the two heads.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_data.shards.errors import DraftError
from tests.spec_train.formats.published import blocks, tiny
from tests.spec_train.formats.published.blocks import IDS, LAYERS, MASK, RANK, SIZE
from tests.spec_train.formats.published.tiny import H, L

CONFIG: dict[str, Any] = tiny.PLAIN | {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "num_hidden_layers": LAYERS,
    "num_target_layers": L,
    "block_size": SIZE,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * LAYERS,
    "mask_token_id": MASK,
    "target_layer_ids": IDS,
    "num_anchors": 512,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 36,
    "dtype": "float64",
}


def test_dspark_and_dflash_draft_as_defined(tmp_path):
    for number, (markov, width) in enumerate(
        [("vanilla", H + RANK), ("vanilla", H), ("gated", H + RANK), ("rnn", None), (None, None)]
    ):
        facts = tiny.target()
        tensors = blocks.block_tensors(markov=markov, confidence=width)
        config = CONFIG | {"markov_rank": RANK if markov else 0}
        config |= {"enable_confidence_head": bool(width), "markov_head_type": markov or "vanilla"}
        if width:
            config["confidence_head_with_markov"] = width > H
        copies = {"embed_tokens.weight": facts.embedding, "lm_head.weight": facts.head}
        folder = tiny.write(tmp_path / str(number), config, tensors | copies)
        draft = blocks.drafts_as_defined(folder, tensors, facts, kind=markov or "none")
        assert draft.name == "dspark" and draft.config.layers == tuple(IDS)
        if width:
            assert draft.config.confidence_head_with_markov == (width > H)


def test_a_head_that_is_not_the_targets_is_refused(tmp_path):
    facts = tiny.target()
    tensors = blocks.block_tensors() | {"lm_head.weight": tiny.noise(tiny.V, H)}
    folder = tiny.write(tmp_path / "draft", CONFIG | {"markov_rank": 0}, tensors)
    with pytest.raises(DraftError, match="lm_head is not the target's"):
        blocks.read_block(folder, facts)


def test_a_head_that_no_target_was_given_for_is_assumed_to_be_its_own(tmp_path, caplog):
    facts = tiny.target()
    tensors = blocks.block_tensors() | {"lm_head.weight": facts.head}
    folder = tiny.write(tmp_path / "draft", CONFIG | {"markov_rank": 0}, tensors)
    blocks.read_block(folder, facts)
    assert "lm_head" not in caplog.text
    blocks.read_block(folder, replace(facts, head=None))
    assert "warning[assumed]" in caplog.text
    assert "lm_head is assumed to be a copy of the target's" in caplog.text


@pytest.mark.parametrize(
    "name, reason",
    [
        ("Gemma4DSparkModel", "Gemma 4's layers"),
        ("Qwen3NextMTP", "MTP"),
    ],
)
def test_other_classes_are_refused_with_the_reason(tmp_path, name, reason):
    folder = tiny.write(
        tmp_path / "draft", CONFIG | {"architectures": [name]}, blocks.block_tensors()
    )
    with pytest.raises(DraftError, match=f"{name}.*{reason}"):
        blocks.read_block(folder, tiny.target())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"dflash_config": {"lilicorr_hidden_size": 8}},
            r"dflash_config\.lilicorr_hidden_size.*Li",
        ),
        ({"xpress_rank": 4}, "xpress_rank.*XPress"),
        ({"speculators_model_type": "xpress"}, "speculators_model_type = xpress.*XPress"),
    ],
)
def test_parts_of_other_drafts_are_named_and_never_advised_away(tmp_path, changes, named):
    """Without its key, a LiLiCorr is a DFlash that drafts other tokens than were trained."""
    folder = tiny.write(tmp_path / "draft", CONFIG | changes, blocks.block_tensors())
    with pytest.raises(DraftError, match=named) as caught:
        blocks.read_block(folder, tiny.target())
    assert not re.search("remove|delete|leave .* out|correct", str(caught.value), re.IGNORECASE)


def test_weights_and_adapters_of_other_drafts_are_named(tmp_path):
    tensors = blocks.block_tensors() | {"lilicorr.slot_embedding": torch.zeros(2)}
    with pytest.raises(DraftError, match=r"lilicorr\.slot_embedding.*LiLiCorr"):
        blocks.read_block(tiny.write(tmp_path / "weights", CONFIG, tensors), tiny.target())
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(DraftError, match="UNO"):
        blocks.read_block(tmp_path / "adapter", tiny.target())
