"""SpecForge's DSpark, DFlash and P-EAGLE: z-lab's layout with DSpark's heads in `dflash_config`."""

from typing import Any

import pytest
import torch

from tests.spec_train.formats.published import blocks, parallel, tiny
from tests.spec_train.formats.published.blocks import IDS, MASK, RANK
from tests.spec_train.formats.published.test_zlab_blocks import CONFIG
from tests.spec_train.formats.published.tiny import H, V

TABLE: dict[str, Any] = {
    "mask_token_id": MASK,
    "target_layer_ids": IDS,
    "projector_type": "dspark",
    "attention_mode": "gqa",
    "markov_rank": RANK,
    "confidence_head_alpha": 1.0,
}
PEAGLE: dict[str, Any] = tiny.SIZES | {
    "architectures": ["PEagleDraftModel"],
    "model_type": "llama",
    "num_hidden_layers": parallel.BLOCKS,
    "draft_vocab_size": V,
    "target_hidden_size": H,
    "norm_before_residual": False,
    "mask_token_id": MASK,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": IDS},
}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_dspark_drafts_as_defined(tmp_path, markov, with_markov, nested):
    """Every slot drafts the token after its own, so the anchor's slot drafts first."""
    facts, width = tiny.target(), H + (RANK if with_markov else 0)
    tensors = blocks.block_tensors(markov=markov, confidence=width)
    table = TABLE | {"markov_head_type": markov, "confidence_head_with_markov": with_markov}
    config = CONFIG | {"architectures": ["DSparkDraftModel"], "dflash_config": table}
    saved = {
        f"logit_head.{name}" if nested and "_head." in name else name: value
        for name, value in tensors.items()
    }
    folder = tiny.write(tmp_path, config, saved)
    draft = blocks.drafts_as_defined(folder, tensors, facts, kind=markov)
    assert draft.name == "dspark" and draft.config.sample_from_anchor


def test_peagle_drafts_as_defined(tmp_path):
    """It writes maps of a full vocabulary too: all zero and all true."""
    facts, tensors = tiny.target(), parallel.peagle_tensors(rows=V)
    maps = {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.ones(V, dtype=torch.bool)}
    saved = tensors | {"embed_tokens.weight": facts.embedding} | maps
    draft = parallel.read_peagle(tiny.write(tmp_path, PEAGLE, saved), facts)
    assert draft.config.layers == tuple(IDS)
    parallel.compare(draft, tensors, facts.embedding, torch.arange(V))
