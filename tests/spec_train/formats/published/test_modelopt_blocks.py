"""ModelOpt's DFlash and DSpark: z-lab's layout, with the heads of DSpark at the top level."""

from typing import Any

import pytest
import torch

from spec_data.shards.errors import DraftError
from tests.spec_train.formats.published import blocks, tiny
from tests.spec_train.formats.published.blocks import IDS, LAYERS, MASK, RANK, SIZE
from tests.spec_train.formats.published.tiny import H, L

CONFIG: dict[str, Any] = tiny.SIZES | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": SIZE,
    "num_hidden_layers": LAYERS,
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "num_target_layers": L,
    "layer_types": ["full_attention"] * LAYERS,
}
TABLE: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": IDS, "causal": False}

DENIED = {"attention_sink_bias": False}


def heads_at_the_top(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors under ModelOpt's names."""
    names = (("markov_head.", ""), ("confidence_head.proj.", "confidence_proj."))
    found = {}
    for name, value in tensors.items():
        for ours, theirs in names:
            name = name.replace(ours, theirs) if name.startswith(ours) else name
        found[name] = value
    return found


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("confidence", [True, False])
def test_dspark_drafts_as_defined(tmp_path, markov, confidence):
    facts = tiny.target()
    tensors = blocks.block_tensors(markov=markov, confidence=H + RANK if confidence else None)
    table = TABLE | {
        "projector_type": "dspark",
        "shift_label": True,
        "markov_rank": RANK,
        "markov_head_type": markov,
        "use_confidence_head": confidence,
    }
    folder = tiny.write(tmp_path, CONFIG | {"dflash_config": table}, heads_at_the_top(tensors))
    draft = blocks.drafts_as_defined(folder, tensors, facts, kind=markov)
    assert draft.name == "dspark" and draft.config.sample_from_anchor


def test_a_released_dspark_nests_its_heads(tmp_path):
    facts, tensors = tiny.target(), blocks.block_tensors(markov="vanilla")
    table = TABLE | {"projector_type": "dspark", "shift_label": True, "markov_rank": RANK}
    folder = tiny.write(tmp_path / "a", CONFIG | {"dflash_config": table}, tensors)
    blocks.drafts_as_defined(folder, tensors, facts, kind="vanilla")
    both = tensors | {"markov_w1.weight": tensors["markov_head.markov_w1.weight"]}
    folder = tiny.write(tmp_path / "b", CONFIG | {"dflash_config": table}, both)
    with pytest.raises(DraftError, match=r"markov_w1\.weight is there twice"):
        blocks.read_block(folder, facts)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_on_every_layer_beside_layer_types_without_one(tmp_path, causal):
    facts, tensors, window = tiny.target(), blocks.block_tensors(), 5
    table = TABLE | {"use_swa": True, "swa_window_size": window, "causal": causal}
    config = CONFIG | {"sliding_window": window, "dflash_config": table}
    how = {"windows": (window,) * LAYERS, "non_causal": not causal}
    folder = tiny.write(tmp_path, config, tensors)
    draft = blocks.drafts_as_defined(
        folder, tensors, facts, (9, 4), sample_from_anchor=False, **how
    )
    assert draft.name == "dflash" and not draft.config.sample_from_anchor


@pytest.mark.parametrize("heads", [False, True])
def test_sinks_of_released_nemotron_drafts(tmp_path, heads, caplog):
    """Causal sliding layers with a sink for each head, as DFlash and as DSpark."""
    facts, tensors = tiny.target(), blocks.block_tensors(markov="vanilla" if heads else None)
    for layer in range(LAYERS):
        name = f"layers.{layer}.self_attn.attention_sink_bias"
        tensors[name] = torch.linspace(-1, 2, CONFIG["num_attention_heads"]).bfloat16()
    table = TABLE | {"use_swa": True, "swa_window_size": 5, "causal": True}
    config = CONFIG | {"dflash_config": table | {"attention_sink_bias": True}}
    if heads:
        config |= {"architectures": ["Qwen3DSparkModel"], "dspark_bonus_anchor": True}
        config |= {"markov_rank": RANK, "markov_head_type": "vanilla"}
    how = {"windows": (5,) * LAYERS, "non_causal": False, "kind": "vanilla" if heads else "none"}
    folder = tiny.write(tmp_path / "a", config, tensors)
    draft = blocks.drafts_as_defined(
        folder, tensors, facts, (9, 4), sample_from_anchor=False, **how
    )
    assert "warning[dtypes]" in caplog.text  # the sinks are in bfloat16
    assert draft.config.attention_sink_bias and draft.name == ("dspark" if heads else "dflash")
    folder = tiny.write(tmp_path / "b", config | {"dflash_config": table | DENIED}, tensors)
    with pytest.raises(DraftError, match="attention_sink_bias = False, but the file has"):
        blocks.read_block(folder, facts)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"projector_type": "dspark", "shift_label": False, "markov_rank": RANK}, "unclear which"),
        ({"markov_rank": RANK}, "no sample_from_anchor"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, changes, message):
    tensors = blocks.block_tensors(markov="vanilla" if "markov_rank" in changes else None)
    folder = tiny.write(tmp_path, CONFIG | {"dflash_config": TABLE | changes}, tensors)
    with pytest.raises(DraftError, match=message):
        blocks.read_block(folder, tiny.target())


def test_quantised_weights_are_refused(tmp_path):
    config = CONFIG | {"dflash_config": TABLE, "quantization_config": {"quant_algo": "FP8"}}
    folder = tiny.write(tmp_path, config, blocks.block_tensors())
    with pytest.raises(DraftError, match="quantization_config"):
        blocks.read_block(folder, tiny.target())
