"""NVIDIA AutoModel's P-EAGLE, DSpark and DFlash: copies of the target's config."""

from typing import Any

import pytest

from spec_data.shards.errors import DraftError
from tests.spec_train.formats.published import blocks, parallel, tiny
from tests.spec_train.formats.published.blocks import IDS, LAYERS, MASK, RANK, SIZE
from tests.spec_train.formats.published.tiny import VD, H, L

TARGET: dict[str, Any] = tiny.OF_TRANSFORMERS_5 | {
    "model_type": "qwen3",
    "num_hidden_layers": L,
    "layer_types": ["full_attention"] * L,
    "max_window_layers": L,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "transformers_version": "5.2.0",
}
DSPARK = TARGET | {
    "architectures": ["Qwen3DSparkModel"],
    "num_target_layers": L,
    "num_hidden_layers": LAYERS,
    "block_size": SIZE,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * LAYERS,
    "mask_token_id": MASK,
    "target_layer_ids": IDS,
    "num_anchors": 512,
}
DFLASH = TARGET | {
    "architectures": ["Qwen3DFlashDraftModel"],
    "num_target_layers": L,
    "num_hidden_layers": LAYERS,
    "block_size": SIZE,
    "layer_types": ["full_attention"] * LAYERS,
    "max_window_layers": LAYERS,
    "is_causal": False,
    "dflash_config": {
        "block_size": SIZE,
        "mask_token_id": MASK,
        "target_layer_ids": IDS,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "input_embedding_scale": 1.0,
    },
}
PEAGLE = TARGET | {
    "model_type": "llama",
    "architectures": ["LlamaEagle3DraftModel"],
    "attn_implementation": "eager",
    "draft_vocab_size": VD,
    "target_hidden_size": H,
    "tie_word_embeddings": False,
    "fc_norm": False,
    "norm_output": False,
    "parallel_drafting": True,
    "mask_token_id": MASK,
    "num_depths": parallel.DEPTHS,
    "down_sample_ratio": 0.7,
    "down_sample_ratio_min": 0.2,
    "num_hidden_layers": parallel.BLOCKS,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": IDS},
}


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_dspark_drafts_as_defined(tmp_path, markov):
    facts, width = tiny.target(), H + RANK
    tensors = blocks.block_tensors(markov=markov, confidence=width)
    config = DSPARK | {
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": RANK,
        "markov_head_type": markov,
    }
    copies = {"embed_tokens.weight": facts.embedding, "lm_head.weight": facts.head}
    folder = tiny.write(tmp_path, config, tensors | copies)
    blocks.drafts_as_defined(folder, tensors, facts, kind=markov)


def test_dflash_drafts_as_defined(tmp_path):
    facts, tensors = tiny.target(), blocks.block_tensors()
    folder = tiny.write(tmp_path, DFLASH, tensors)
    draft = blocks.drafts_as_defined(folder, tensors, facts, sample_from_anchor=False)
    assert draft.name == "dflash" and not draft.config.sample_from_anchor


@pytest.mark.parametrize("key", ["causal", "causal_head"])
def test_jetspec_of_automodel_is_causal_inside_a_block(tmp_path, key):
    """Its class writes `is_causal: false` of every draft; the table is of the trainer."""
    facts, tensors = tiny.target(), blocks.block_tensors()
    config = DFLASH | {"dflash_config": DFLASH["dflash_config"] | {key: True}}
    folder = tiny.write(tmp_path, config, tensors)
    how = {"sample_from_anchor": False, "windows": (10**6, 10**6), "non_causal": False}
    blocks.drafts_as_defined(folder, tensors, facts, (9, 4), **how)
    other = config | {"architectures": ["DFlashDraftModel"]}
    with pytest.raises(DraftError, match="contradicts itself"):
        blocks.read_block(tiny.write(tmp_path / "other", other, tensors), facts)


@pytest.mark.parametrize(
    ("flat", "fc_norm", "norm_output"), [(True, False, True), (False, True, True), (False,) * 3]
)
def test_peagle_drafts_as_defined(tmp_path, fc_norm, norm_output, flat):
    """With `norm_output` the norm is applied before the head instead of by it: once either way."""
    facts, ids = tiny.target(), tiny.some_ids()
    tensors = parallel.peagle_tensors(fc_norm=fc_norm)
    saved = {
        name if name in ("lm_head.weight", "mask_hidden") else f"model.{name}": value
        for name, value in (tensors | {"embed_tokens.weight": facts.embedding}).items()
    }
    if flat:
        saved["mask_hidden"] = saved["mask_hidden"].reshape(1, -1)
    config = PEAGLE | {"fc_norm": fc_norm, "norm_output": norm_output}
    draft = parallel.read_peagle(tiny.write(tmp_path, config, saved | tiny.maps(ids)), facts)
    assert draft.config.layers == tuple(IDS) and not draft.config.norm_output
    assert draft.options.depths == parallel.DEPTHS
    parallel.compare(draft, tensors, facts.embedding, ids)
