"""DeepSpec's DSpark and DFlash: copies of the target's config, embedding and head.

Its class is `Qwen3DSparkModel` for both; a DFlash of its recipe is one without the two heads.
"""

from pathlib import Path
from typing import Any

import pytest

from spec_data.shards.errors import DraftError
from tests.spec_train.formats.published import blocks, tiny
from tests.spec_train.formats.published.blocks import IDS, LAYERS, MASK, RANK, SIZE, Reading
from tests.spec_train.formats.published.tiny import H, L

CONFIG: dict[str, Any] = tiny.SIZES | {
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
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "dtype": "float64",
}


def test_dspark_and_dflash_draft_as_defined(tmp_path: Path) -> None:
    for number, (markov, width) in enumerate(
        [("vanilla", H + RANK), ("vanilla", H), ("gated", H + RANK), ("rnn", None), (None, None)]
    ):
        facts = blocks.target()
        tensors = blocks.block_tensors(markov=markov, confidence=width)
        config = CONFIG | {
            "markov_rank": RANK if markov else 0,
            "enable_confidence_head": bool(width),
        }
        if width:
            config["confidence_head_with_markov"] = width > H
        if markov:
            config["markov_head_type"] = markov
        copies = {"embed_tokens.weight": facts.embedding, "lm_head.weight": facts.head}
        folder = tiny.write(tmp_path / str(number), config, tensors | copies)
        draft = blocks.read_block(folder, facts)
        assert draft.name == "dspark" and draft.config.layers == tuple(IDS)
        it = Reading(tensors, facts.embedding, facts.head, markov=markov)
        blocks.compare(draft, facts, it)
        if width:
            assert draft.config.confidence_head_with_markov == (width > H)
            tiny.assert_same(*blocks.confidences(draft, facts, it))


def test_a_head_that_is_not_the_targets_is_refused(tmp_path: Path) -> None:
    facts = blocks.target()
    tensors = blocks.block_tensors() | {"lm_head.weight": tiny.noise(tiny.V, H)}
    folder = tiny.write(tmp_path / "draft", CONFIG | {"markov_rank": 0}, tensors)
    with pytest.raises(DraftError, match="lm_head is not the target's"):
        blocks.read_block(folder, facts)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("Gemma4DSparkModel", "Gemma 4's layers"),
        ("DeepseekV4DSparkModel", "latent attention"),
        ("DFlash2DraftModel", "candidate selector"),
        ("DominoDraftModel", "recurrent head"),
    ],
)
def test_other_classes_are_refused_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    folder = tiny.write(
        tmp_path / "draft", CONFIG | {"architectures": [name]}, blocks.block_tensors()
    )
    with pytest.raises(DraftError, match=f"{name}.*{reason}"):
        blocks.read_block(folder, blocks.target())
