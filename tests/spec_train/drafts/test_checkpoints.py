"""The files of every kind: the names, shapes and keys that engines read; published defaults."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from spec_data.shards.errors import ConfigError, DraftError
from spec_train.drafts import load_draft
from spec_train.drafts.block.config import DSparkConfig
from spec_train.drafts.dflash.options import DFlashOptions
from spec_train.drafts.dspark.options import DSparkOptions
from spec_train.drafts.peagle.options import PeagleOptions
from tests.draft_tools import read_json, reseal, write_json
from tests.factory import tiny_llama
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft
from tests.tolerance import close

dataset, head = any_draft.dataset, any_draft.head

LAYER = [
    "post_attention_layernorm",
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
]
HEADS = ["self_attn.q_norm", "self_attn.k_norm"]
BLOCK = ["fc", "hidden_norm", "norm", "layers.0.input_layernorm", "layers.1.input_layernorm"]
BLOCK += [f"layers.{i}.{x}" for i in range(2) for x in HEADS]
MARKOV = ["markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"]
CONVOLVED = ("attention", "mlp")
MARKOV_SHAPES = {
    "markov_head.markov_w1.weight": (64, 4),
    "markov_head.markov_w2.weight": (64, 4),
    "confidence_head.proj.weight": (1, 32 + 4),
    "confidence_head.proj.bias": (1,),
}
GRU_SHAPES = {
    "prefix_gru.weight_ih_l0": (18, 32),
    "prefix_gru.weight_hh_l0": (18, 6),
    "embed_proj.0.weight": (4, 32 + 6),
    "embed_proj.2.weight": (64, 4),
}
REFINER_SHAPES = {
    **{f"xpress_head.{name}.weight": (64, 16) for name in ("w1", "w2")},
    **{f"xpress_head.{name}.weight": (16, 32) for name in ("down_h", "down_g")},
    **{f"xpress_head.mlp.{name}_proj.weight": (6, 16) for name in ("gate", "up")},
    "xpress_head.mlp.down_proj.weight": (16, 6),
    "xpress_head.in_proj.weight": (16, 48),
    "xpress_head.mix.L": (16, 3, 3),
}
SELECTOR_SHAPES = {  # two taps, two groups of channels
    "candidate_selector.predecessor_codebook": (64, 4),
    "candidate_selector.successor_codebook": (64, 4),
    "candidate_selector.hidden_projection.weight": (4, 32),
    **{f"layers.{i}.{x}_conv.base_kernel": (2, 2, 32) for i in range(2) for x in CONVOLVED},
    **{
        f"layers.{i}.{x}_conv.kernel_projection.weight": (2 * 2 * 2, 32)
        for i in range(2)
        for x in CONVOLVED
    },
}
FILES: list[tuple[str, dict[str, Any], list[str], dict[str, tuple[int, ...]]]] = [
    # vLLM's llama_eagle.py fails on any other name; its first layer has no norm parameter
    ("eagle", {}, ["fc"], {"fc.weight": (32, 64), "layers.0.self_attn.k_proj.weight": (16, 32)}),
    ("eagle", {"num_layers": 2}, ["fc", "layers.1.input_layernorm"], {}),
    (
        "peagle",
        {},
        [
            *("fc", "norm", "lm_head", "layers.0.hidden_norm", "layers.0.input_layernorm"),
            *("input_norm", "layers.1.input_layernorm"),
        ],
        {
            "mask_hidden": (1, 1, 96),
            "d2t": (40,),
            "t2d": (64,),
            "fc.weight": (32, 96),
            "layers.0.self_attn.k_proj.weight": (16, 64),
            "layers.1.self_attn.k_proj.weight": (16, 32),
        },
    ),
    ("dspark", {}, [*BLOCK, *MARKOV], MARKOV_SHAPES | {"fc.weight": (32, 96)}),
    (
        "dspark",
        {"markov_head_type": "gated", "confidence_weight": 0.0},
        [*BLOCK, *MARKOV[:2], "markov_head.gate_proj"],
        {"markov_head.gate_proj.weight": (4, 32 + 4), "markov_head.gate_proj.bias": (4,)},
    ),
    (
        "dspark",
        {"markov_head_type": "rnn", "confidence_weight": 0.0},
        [*BLOCK, *MARKOV[:2], "markov_head.joint_proj"],
        {"markov_head.joint_proj.weight": (12, 8 + 32), "markov_head.joint_proj.bias": (12,)},
    ),
    # the head is the target's; a draft vocabulary has rows of it, and maps
    ("dflash", {}, BLOCK, {}),
    ("dflash", {"draft_vocab_size": 40}, [*BLOCK, "lm_head"], {"d2t": (40,), "t2d": (64,)}),
    ("dflash2", {"selector_rank": 4}, BLOCK, SELECTOR_SHAPES),
    ("domino", {"gru_hidden_dim": 6}, BLOCK, GRU_SHAPES),
    ("xpress", {"xpress_mlp_hidden": 6}, BLOCK, REFINER_SHAPES),
]


@pytest.mark.parametrize(("kind", "options", "names", "shapes"), FILES, ids=str)
def test_tensors_have_the_names_and_shapes_that_engines_read(
    dataset, head, tmp_path: Path, kind, options, names, shapes
) -> None:
    draft = build_draft(kind, dataset, head, **options)
    draft.save_pretrained(tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    layers = [f"layers.{i}.{x}" for i in range(draft.config.num_hidden_layers) for x in LAYER]
    assert set(tensors) == {f"{x}.weight" for x in ["embed_tokens", *names, *layers]} | set(shapes)
    assert {name: tuple(tensors[name].shape) for name in shapes} == shapes
    assert torch.equal(tensors["embed_tokens.weight"], head.embed_weight.bfloat16())
    if kind == "dflash" and "lm_head" in names:  # frozen, as the embedding
        trained = {id(p) for p in draft.trainable_parameters()}
        frozen = {n for n, p in draft.named_parameters() if id(p) not in trained}
        assert frozen == {"embed_tokens.weight", "lm_head.weight"}


SHARED = {"hidden_size": 32, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 512}
SHARED |= {"attention_bias": False, "tie_word_embeddings": False, "dtype": "float32"}
CONFIGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "eagle",
        {},
        {
            "architectures": ["EagleLlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "rope_theta": 10000.0,
            "bias": False,
        },
    ),
    (
        "peagle",
        {"layers": "0,2", "mask_token_id": 7},
        {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 2,
            "mask_token_id": 7,
            "ptd_token_id": 7,
            "draft_vocab_size": 40,
            "eagle_aux_hidden_state_layer_ids": [1, 3],
            "norm_before_residual": False,
            "norm_output": False,
        },
    ),
    (
        "dspark",
        {"layers": "0,2"},
        {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "block_size": 3,
            "mask_token_id": 5,
            "target_layer_ids": [0, 2],  # block outputs, as in every engine
            "num_hidden_layers": 2,
            "num_target_layers": 4,
            "markov_rank": 4,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": True,
            "num_anchors": 512,
            "layer_types": ["full_attention"] * 2,
            "draft_vocab_size": 64,
            "has_embed_tokens": False,
        },
    ),
]


@pytest.mark.parametrize(("kind", "options", "expected"), CONFIGS, ids=str)
def test_the_config_is_the_one_that_engines_read(
    dataset, head, tmp_path, kind, options, expected
) -> None:
    build_draft(kind, dataset, head, **options).save_pretrained(tmp_path)
    raw, section = read_json(tmp_path), read_json(tmp_path)["spec_train"]
    expected = SHARED | expected
    assert {key: raw[key] for key in expected} == expected
    assert section["draft"] == kind and "null" not in json.dumps(raw)
    if "layers" in options:
        assert section["layers"] == [0, 2]
        assert "output of decoder block k" in section["layer_convention"]
    if kind == "dspark":  # an engine that reads it as a Qwen3 gets the same frequencies
        theirs, positions = Qwen3Config.from_dict(raw), torch.arange(40)[None]
        wanted = Qwen3RotaryEmbedding(theirs)(torch.zeros(1), positions)
        for a, b in zip(load_draft(tmp_path).rotary(positions), wanted, strict=True):
            close(a, b, terms=4)  # cosines and sines of equal angles
    if kind == "peagle":
        del raw["mask_token_id"]
        write_json(tmp_path, raw)
        reseal(tmp_path)
        with pytest.raises(DraftError, match="lacks mask_token_id"):
            load_draft(tmp_path)


def test_published_defaults() -> None:
    spark, flash = DSparkOptions().sized(2560, 36), DFlashOptions().sized(4096, 28)
    assert (spark.block_size, spark.num_layers, spark.num_anchors) == (7, 5, 512)
    assert (spark.ce_weight, spark.l1_weight, spark.confidence_weight) == (0.1, 0.9, 1.0)
    assert (spark.markov_rank, spark.markov_head_type) == (256, "vanilla")
    assert (flash.ce_weight, flash.l1_weight, flash.confidence_weight) == (1.0, 0.0, 0.0)
    assert (flash.block_size, flash.layout, flash.num_layers) == (16, "mask", 5)
    parallel = PeagleOptions().sized(2560, 36)
    assert (parallel.depths, parallel.num_layers) == (8, 4)
    assert (parallel.cod_ratio, parallel.cod_floor) == (0.7, 0.2)


def test_a_draft_of_a_small_target_has_the_published_share_of_its_depth_and_width() -> None:
    small = DSparkOptions().sized(576, 30)  # SmolLM2-135M
    assert (small.num_layers, small.markov_rank) == (4, 56)
    assert DSparkOptions().sized(64, 2).num_layers == 1
    assert PeagleOptions().sized(576, 30).num_layers == 3
    given = DSparkOptions(num_layers=2, markov_rank=0)
    assert given.sized(576, 30) == given
    types = ",".join(["full_attention"] * 3)
    assert DSparkOptions(layer_types=types).sized(576, 30).num_layers == 3


def test_the_last_block_of_the_target_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    raw, options = tiny_llama().config.to_dict(), DSparkOptions()
    arguments: dict[str, Any] = dict(vocab_size=64, draft_vocab_size=64, options=options)
    DSparkConfig.from_target(raw, layers=(1, 3), mask_token_id=0, **arguments)
    assert "warning[last-layer]: layer 3 is the target's last block" in caplog.text
    del raw["num_hidden_layers"]
    with pytest.raises(DraftError, match="num_hidden_layers"):
        DSparkConfig.from_target(raw, layers=(1,), mask_token_id=0, **arguments)


def test_a_draft_in_memory_is_pushed_as_it_is_saved(dataset, head, monkeypatch, tmp_path):
    draft, told = build_draft("eagle3", dataset, head), {}

    def create(self, repo_id, **given):
        told["created"] = repo_id, given
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload(self, *, repo_id, folder_path, **given):
        told["files"] = {p.name: p.read_bytes() for p in Path(folder_path).iterdir()}
        told["commit"] = repo_id, given
        return SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert draft.push_to_hub("mine", private=True, create_pr=True) == "https://hub/commit"
    assert told["created"] == ("mine", {"private": True, "exist_ok": True})
    repo, given = told["commit"]
    assert repo == "me/mine" and given["create_pr"] and given["commit_message"] == "Upload draft"
    draft.save_pretrained(tmp_path)
    assert told["files"] == {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="not the name of a repository"):
        draft.push_to_hub("a/b/c")
