"""Files, configuration and options of block drafts, and the mask token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from spec_data.shards.errors import DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import load_draft
from spec_train.drafts.dspark.model import DSparkConfig
from spec_train.drafts.mask_token import choose_mask_token, usual_mask_tokens
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DFlashOptions, DSparkOptions, PeagleOptions
from tests.factory import tiny_llama
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.dspark.cases import build
from tests.tolerance import close

dataset, head = any_draft.dataset, any_draft.head

LAYER = [
    *("input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *("self_attn.q_norm", "self_attn.k_norm"),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
]
BACKBONE = [
    *("embed_tokens", "fc", "hidden_norm", "norm"),
    *(f"layers.{i}.{x}" for i in range(2) for x in LAYER),
]
VANILLA = ["markov_head.markov_w1", "markov_head.markov_w2"]


@pytest.mark.parametrize(
    ("name", "changes", "more"),
    [
        ("dspark", {}, [*(f"{x}.weight" for x in VANILLA)]),
        ("dspark", {"markov_head_type": "gated"}, ["markov_head.gate_proj.bias"]),
        ("dspark", {"markov_head_type": "rnn"}, ["markov_head.joint_proj.bias"]),
        ("dflash", {}, None),
    ],
    ids=str,
)
def test_tensors_have_the_names_and_shapes_that_engines_read(
    dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path, name: str, changes, more
) -> None:
    build(dataset, head, name, **changes).save_pretrained(tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {f"{x}.weight" for x in BACKBONE}
    if more is not None:
        expected |= {f"{x}.weight" for x in VANILLA} | set(more)
        expected |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
        expected |= {x.replace(".bias", ".weight") for x in more}
        assert tensors["markov_head.markov_w1.weight"].shape == (64, 8)
        assert tensors["markov_head.markov_w2.weight"].shape == (64, 8)
        assert tensors["confidence_head.proj.weight"].shape == (1, 32 + 8)
        assert tensors["confidence_head.proj.bias"].shape == (1,)
    assert set(tensors) == expected  # no lm_head and no maps: the vocabulary is the target's
    assert tensors["fc.weight"].shape == (32, 96)
    if "markov_head.gate_proj.weight" in tensors:
        assert tensors["markov_head.gate_proj.weight"].shape == (8, 32 + 8)
    if "markov_head.joint_proj.weight" in tensors:
        assert tensors["markov_head.joint_proj.weight"].shape == (24, 16 + 32)
    assert torch.equal(tensors["embed_tokens.weight"], head.embed_weight.bfloat16())
    build(dataset, head, name, **changes).save_pretrained(tmp_path)  # the target's own dtype
    again = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(again, head.embed_weight)


def test_a_draft_vocabulary_brings_its_own_rows_of_the_head_and_maps(dataset, head, tmp_path):
    draft = build(dataset, head, "dspark", draft_vocab_size=40)
    draft.save_pretrained(tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    ids = torch.arange(40) + tensors["d2t"]  # offsets, not ids
    assert torch.equal(ids, tensors["t2d"].nonzero().squeeze(1))
    assert torch.equal(tensors["lm_head.weight"], head.head_weight[ids].bfloat16())
    assert tensors["markov_head.markov_w2.weight"].shape == (40, 8)
    assert tensors["markov_head.markov_w1.weight"].shape == (64, 8)
    trained = {id(p) for p in draft.trainable_parameters()}
    frozen = {n for n, p in draft.named_parameters() if id(p) not in trained}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}


def test_the_config_is_the_one_that_engines_read(dataset, head, tmp_path):
    build(dataset, head, "dspark", layers="0,2").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "mask_token_id": 3,
        "target_layer_ids": [0, 2],  # block outputs, as in every engine
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "num_anchors": 512,
        "layer_types": ["full_attention"] * 2,
        "draft_vocab_size": 64,
        "vocab_size": 64,
        "hidden_size": 32,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "has_embed_tokens": False,
        "dtype": "float32",
    }
    assert {key: raw[key] for key in expected} == expected
    assert raw["spec_train"]["draft"] == "dspark" and raw["spec_train"]["layers"] == [0, 2]
    assert "output of decoder block k" in raw["spec_train"]["layer_convention"]
    build(dataset, head, "dspark", draft_vocab_size=40, layout="mask").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "has_embed_tokens" not in raw and raw["sample_from_anchor"] is False
    # an engine that reads it as a Qwen3 gets the same frequencies and shapes
    theirs = Qwen3Config.from_dict(json.loads((tmp_path / "config.json").read_text()))
    ours = load_draft(tmp_path)
    positions = torch.arange(40)[None]
    wanted = Qwen3RotaryEmbedding(theirs)(torch.zeros(1), positions)
    for a, b in zip(ours.rotary(positions), wanted, strict=True):
        close(a, b, terms=4)  # cosines and sines of equal angles


def test_published_defaults() -> None:
    spark, flash = DSparkOptions().sized(2560, 36), DFlashOptions().sized(4096, 28)
    assert (spark.block_size, spark.num_layers, spark.num_anchors) == (7, 5, 512)
    assert (spark.ce_weight, spark.l1_weight, spark.confidence_weight) == (0.1, 0.9, 1.0)
    assert (spark.markov_rank, spark.markov_head_type, spark.loss_decay_gamma) == (
        256, "vanilla", 4.0,
    )  # fmt: skip
    assert (flash.ce_weight, flash.l1_weight, flash.confidence_weight) == (1.0, 0.0, 0.0)
    assert (flash.block_size, flash.layout, flash.markov_rank) == (16, "mask", 0)
    assert flash.num_layers == 5
    parallel = PeagleOptions().sized(2560, 36)
    assert (parallel.depths, parallel.num_layers) == (8, 4)
    assert (parallel.cod_ratio, parallel.cod_floor) == (0.7, 0.2)


def test_a_draft_of_a_small_target_has_the_published_share_of_its_depth_and_width() -> None:
    small = DSparkOptions().sized(576, 30)  # SmolLM2-135M
    assert (small.num_layers, small.markov_rank) == (4, 56)
    assert DSparkOptions().sized(64, 2).num_layers == 1
    assert DFlashOptions().sized(576, 30).num_layers == 4
    assert PeagleOptions().sized(576, 30).num_layers == 3
    given = DSparkOptions(num_layers=2, markov_rank=0)
    assert given.sized(576, 30) == given
    types = ",".join(["full_attention"] * 3)
    assert DSparkOptions(layer_types=types).sized(576, 30).num_layers == 3


def test_the_last_block_of_the_target_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    raw = tiny_llama().config.to_dict()
    arguments: dict[str, Any] = dict(vocab_size=64, draft_vocab_size=64, options=DSparkOptions())
    with caplog.at_level("WARNING"):
        DSparkConfig.from_target(raw, layers=(1, 3), mask_token_id=0, **arguments)
    assert "layer 3 is the target's last block" in caplog.text
    with pytest.raises(DraftError, match="mask_token_id = 64"):
        DSparkConfig.from_target(raw, layers=(1,), mask_token_id=64, **arguments)
    with pytest.raises(DraftError, match="num_hidden_layers"):
        DSparkConfig.from_target(
            {k: v for k, v in raw.items() if k != "num_hidden_layers"},
            layers=(1,),
            mask_token_id=0,
            **arguments,
        )


# --- the mask token ------------------------------------------------------------------------------


def write_tokenizer(folder: Path, words: dict[str, int], added: dict[str, int]) -> None:
    raw = {
        "model": {"type": "BPE", "vocab": words},
        "added_tokens": [{"id": i, "content": text} for text, i in added.items()],
    }
    (folder / "tokenizer.json").write_text(json.dumps(raw))


def test_the_mask_token_is_unused_then_reserved_then_padding_then_unseen(tmp_path: Path) -> None:
    embedding = torch.ones(8, 4)
    counts = torch.tensor([5, 5, 0, 5, 5, 0, 0, 5])
    words = {f"w{i}": i for i in range(4)}
    ends = {"eos_token_id": [5], "pad_token_id": 2}
    write_tokenizer(tmp_path, words, {"<|im_end|>": 4, "<end>": 5})
    assert choose_mask_token(tmp_path, ends, embedding, counts) == 6  # 6 and 7 have no text
    embedding[6] = 0  # with a zero embedding, the slots could not be told apart
    assert choose_mask_token(tmp_path, ends, embedding, counts) == 2
    write_tokenizer(tmp_path, words, {"<|a|>": 4, "<b>": 5, "<|reserved_0|>": 6, "<c>": 7})
    assert choose_mask_token(tmp_path, ends, torch.ones(8, 4), counts) == 6
    (tmp_path / "tokenizer.json").unlink()
    assert choose_mask_token(tmp_path, ends, torch.ones(8, 4), counts) == 2
    assert choose_mask_token(tmp_path, {"eos_token_id": 5}, torch.ones(8, 4), counts) == 6
    counts[3] = 2
    assert choose_mask_token(tmp_path, {}, torch.ones(8, 4), counts + 5 * (counts == 0)) == 3
    with pytest.raises(DraftError, match="every embedding"):
        choose_mask_token(tmp_path, {}, torch.zeros(8, 4), counts)


def test_an_ordinary_word_is_no_reserved_token(tmp_path: Path) -> None:
    """A vocabulary of words has "mask", "unused" and "reserved" among them."""
    words = {"a": 0, "Ġmask": 1, "unused": 2, "b": 3, "z": 5}
    write_tokenizer(tmp_path, words, {"<repo_name>": 4})
    counts = torch.tensor([5, 0, 0, 5, 0, 0])
    assert choose_mask_token(tmp_path, {}, torch.ones(6, 4), counts) == 4
    usual = usual_mask_tokens(tmp_path, {}, torch.ones(6, 4), counts)
    assert "a reserved token" not in usual.values()
    write_tokenizer(tmp_path, words, {"<mask>": 4})
    assert "a reserved token" in usual_mask_tokens(tmp_path, {"pad_token_id": 1}, torch.ones(6, 4),
                                                   counts + 1).values()  # fmt: skip


def test_the_usual_mask_tokens_are_those_of_other_trainers_too(tmp_path: Path) -> None:
    special = {"<pad>": 3, "[MASK]": 4, "<|reserved_0|>": 5, "<|reserved_1|>": 6}
    write_tokenizer(tmp_path, {f"w{i}": i for i in range(3)}, special)
    named = {"mask_token": "[MASK]", "pad_token": {"content": "<pad>"}, "unk_token": "<unknown>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    counts = torch.tensor([5, 5, 5, 5, 5, 5, 5, 5, 0, 5])
    found = usual_mask_tokens(tmp_path, {"eos_token_id": [2, 99]}, torch.ones(10, 4), counts)
    assert found == {
        8: "the choice of spec-train",
        7: "the first id that the tokenizer leaves unused",
        4: "the mask token",
        3: "the pad token",
        2: "the eos token",
        6: "a reserved token",  # the first one that is named so is [MASK]
        0: "the first id of the vocabulary",
        9: "the last id of the vocabulary",
    }
    assert list(found)[:3] == [8, 7, 4], "the likeliest first"
    (tmp_path / "tokenizer.json").unlink()
    zero = usual_mask_tokens(tmp_path, {"bos_token_id": 1}, torch.zeros(3, 4), None)
    assert set(zero) == {0, 1, 2}, "a target whose embedding is zero is another check's finding"


def test_a_mask_token_of_no_use_is_refused(dataset: HiddenStatesDataset) -> None:
    head = TargetHead.from_dataset(dataset.path)
    with pytest.raises(DraftError, match="vocabulary has 64 tokens"):
        build(dataset, head, "dspark", mask_token_id=64)
    head.embed_weight[7] = 0
    with pytest.raises(DraftError, match="its embedding is zero"):
        build(dataset, head, "dspark", mask_token_id=7)
    assert build(dataset, head, "dspark", mask_token_id=9).config.mask_token_id == 9
