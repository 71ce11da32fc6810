"""`--draft-config FILE`: which options a config.json sets, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from spec_data.shards.errors import ConfigError, DraftError, MissingError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.cli import main
from spec_train.commands.fit import shaped
from spec_train.drafts import DRAFTS, load_draft
from spec_train.losses.head import TargetHead
from spec_train.options.draft_config_file import with_draft_config
from spec_train.options.draft_options import Eagle3Options
from spec_train.training.setup import check_keys, check_target, fit
from tests.factory import tiny_dataset
from tests.spec_train import flat
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft

dataset, head = any_draft.dataset, any_draft.head
RUN = {"data": "d", "out": "o"}


def resolved(tmp_path: Path, draft: str, raw: Any, **given: Any) -> tuple[Any, Any]:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(raw))
    training, options = flat.split(draft, **RUN | {"draft_config": str(path)} | given)
    return training, shaped(training, draft, options)


PUBLISHED = {  # a draft of EAGLE-3 as its authors published them
    **{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "hidden_act": "silu"},
    **{"hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 80},
    **{"max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "num_hidden_layers": 1, "rms_norm_eps": 1e-05},
    **{"tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True},
    **{"transformers_version": "4.28.1", "vocab_size": 128, "draft_vocab_size": 64},
}
LLAMA = {"architectures": ["LlamaEagle3DraftModel"]}
INNER = {"model_type": "qwen3"}
SPECULATORS = {"speculators_model_type": "eagle3", "transformer_layer_config": INNER}


def test_a_published_config_sets_the_shape(tmp_path: Path) -> None:
    config, options = resolved(tmp_path, "eagle3", PUBLISHED)
    assert (options.intermediate_size, options.num_attention_heads) == (80, 2)
    assert options.num_key_value_heads == 1 and options.num_layers == 1
    assert options.head_dim == 16  # hidden_size / heads, as transformers reads it
    assert options.draft_vocab_size == 64 and options.initializer_range == 0.0
    check_keys(config)


@pytest.mark.parametrize(
    ("draft", "raw", "wanted"),
    [
        ("eagle", {"num_hidden_layers": 3, "mlp_bias": True}, {"mlp_bias": "true"}),
        ("eagle3", {"attention_bias": False}, {"attention_bias": "false"}),
        ("eagle3", {"draft_num_hidden_layers": 1, "num_hidden_layers": 36}, {"num_layers": 1}),
        ("eagle3", LLAMA | {"num_hidden_layers": 36}, {"num_layers": 1}),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [4, 2, 6]}, {"layers": "1,3,5"}),
        (
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}},
            {"layers": "1,3,5"},
        ),
        ("eagle3", {"embed_requires_grad": True}, {"train_embeddings": True}),
        (
            "peagle",
            {"transformer_layer_config": {"num_hidden_layers": 2}, "ptd_token_id": 7},
            {"num_layers": 2, "mask_token_id": 7},
        ),
        (
            "dspark",
            {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
            {"num_layers": 2, "layer_types": "sliding_attention,sliding_attention"},
        ),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 2], "block_size": 8}},
            {"mask_token_id": 9, "layers": "1,2", "block_size": 8},
        ),
        ("dspark", {"sample_from_anchor": False, "qk_norm": False}, {"layout": "mask"}),
        ("eagle3", {"sliding_window": 9, "use_sliding_window": False}, {"sliding_window": 0}),
        ("eagle3", {"hidden_activation": "gelu", "head_dim": None}, {"hidden_act": "gelu"}),
        ("eagle3", {"architectures": ["Eagle3Qwen3ForCausalLM"]}, {"qk_norm": True}),
        ("eagle3", SPECULATORS, {"qk_norm": True}),
        (
            "dflash",
            {"dflash_config": {"use_swa": True, "swa_window_size": 32, "causal": False}},
            {"sliding_window": 32, "layer_types": "auto", "sliding_window_non_causal": True},
        ),
        (
            "dspark",
            {
                **{"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 16},
                **{"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "causal": False},
            },
            {"sliding_window": 16, "sliding_window_non_causal": True},
        ),
        (
            "dspark",
            {"num_hidden_layers": 1, "layer_types": ["full_attention", "sliding_attention"]},
            {"sliding_window": 0, "layer_types": "auto"},
        ),
    ],
)
def test_every_key_becomes_its_option(
    tmp_path: Path, draft: str, raw: dict[str, Any], wanted: dict[str, Any]
) -> None:
    if "sliding_attention" in raw.get("layer_types", ()):
        raw = raw | {"sliding_window": 16}
    config, options = resolved(tmp_path, draft, raw)
    assert {name: getattr(options, name) for name in wanted} == wanted
    check_keys(config)


@pytest.mark.parametrize("table", ["is_causal", "dflash_config"])
def test_causal_full_layers_of_a_block_are_refused(tmp_path: Path, table: str) -> None:
    raw = {table: True if table == "is_causal" else {"causal": True}}
    with pytest.raises(ConfigError, match="slots of full layers see the whole block"):
        resolved(tmp_path, "dflash", raw)
    resolved(tmp_path, "eagle3", raw)
    assert resolved(tmp_path, "dflash", raw | {"sliding_window": 32})[1].sliding_window == 32


def test_options_replace_its_keys_and_it_replaces_presets(tmp_path: Path) -> None:
    raw = {"intermediate_size": 80, "draft_vocab_size": 64, "head_dim": 8}
    _, options = resolved(tmp_path, "eagle3", raw, preset="smoke", intermediate_size=20)
    assert (options.intermediate_size, options.head_dim) == (20, 8)
    assert options.draft_vocab_size == 64 and options.ttt_steps == 2  # smoke: 2048 and 2


QWEN = {"model_type": "qwen3", "sliding_window": 16, "num_hidden_layers": 1}
USES, TYPES = {"use_sliding_window": True}, {"layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("draft", "raw", "message"),
    [
        ("eagle3", {"block_size": 7}, "block_size: eagle3 drafts have no such option"),
        ("eagle", {"norm_before_fc": True}, "norm_before_fc: eagle drafts have no such option"),
        ("eagle3", [1], "expected an object, found list"),
        ("eagle3", {"intermediate_size": "80"}, "intermediate-size"),
        ("dspark", QWEN, "16 without use_sliding_window and layer_types: no layer"),
        ("dspark", QWEN | USES, "16 without layer_types: no layer"),
        ("dspark", QWEN | TYPES, "16 without use_sliding_window: no layer"),
        ("eagle3", QWEN, "no layer of a qwen3 config slides"),
        ("eagle3", {"num_hidden_layers": "x"}, "--draft-config .*: --num-layers 'x': expected int"),
        ("eagle3", {"hidden_size": 32, "num_attention_heads": [4]}, "not of the type"),
        ("eagle3", {"layer_types": 5}, "not of the type"),
        ("eagle3", {"target_layer_ids": 5}, "not of the type"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": ["1"]}, "not of the type"),
    ],
)
def test_what_the_draft_cannot_have_is_refused(
    tmp_path: Path, draft: str, raw: Any, message: str
) -> None:
    with pytest.raises((ConfigError, DraftError), match=message):
        resolved(tmp_path, draft, raw)


def test_an_unknown_key_names_the_nearest_one(tmp_path: Path) -> None:
    config, _ = resolved(tmp_path, "eagle3", {"intermediate_sizes": 80})
    with pytest.raises(ConfigError, match="unknown key intermediate_sizes; did you mean interm"):
        check_keys(config)


def test_keys_without_effect_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, _ = resolved(tmp_path, "eagle3", PUBLISHED)
    with caplog.at_level("INFO"):
        check_keys(config)
    for name in ("architectures", "transformers_version", "max_position_embeddings"):
        assert name in caplog.text
    assert "intermediate_size" not in caplog.text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"--draft-config .*no such file"):
        with_draft_config(Eagle3Options(), "eagle3", str(tmp_path / "no.json"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 999),
        ("hidden_size", 64),
        ("rms_norm_eps", 0.5),
        ("rope_theta", 123.0),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_a_key_that_contradicts_the_target_is_refused(
    dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path, key: str, value: Any
) -> None:
    draft = build_draft("eagle3", dataset, head)
    own = draft.config.to_json(draft.options)
    same = {name: own[name] for name in ("vocab_size", "hidden_size", "rms_norm_eps", "rope_theta")}
    config, _ = resolved(tmp_path, "eagle3", same)
    check_target(config, draft)
    config, _ = resolved(tmp_path, "eagle3", same | {key: value})
    name = "rope" if key.startswith("rope") else key
    with pytest.raises(ConfigError, match=f"{name} = .* contradicts the target"):
        check_target(config, draft)
    config, _ = resolved(tmp_path, "eagle3", same | {"rope_scaling": "linear"})
    with pytest.raises(ConfigError, match=r"shape.json: its rope settings cannot be read"):
        check_target(config, draft)


@pytest.mark.parametrize("name", DRAFTS)
def test_our_own_config_makes_the_same_shape_again(
    dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path, name: str
) -> None:
    first = build_draft(name, dataset, head, intermediate_size=20, head_dim=16, mlp_bias="true")
    config, options = resolved(tmp_path, name, first.config.to_json(first.options))
    check_keys(config)
    check_target(config, first)
    again = build_draft(name, dataset, head, **dataclasses.asdict(options))
    assert again.config == first.config


def test_fit_json_repeats_the_run_without_the_file(tmp_path: Path) -> None:
    shape = {"intermediate_size": 24, "num_attention_heads": 2, "head_dim": 16, "qk_norm": True}
    data = tiny_dataset(tmp_path / "data", n_docs=12)
    given = {"data": str(data), "steps": 0, "seq_len": 48, "device": "cpu"}
    given["out"] = str(tmp_path / "first")
    fit("eagle3", *resolved(tmp_path, "eagle3", shape, **given))
    (tmp_path / "shape.json").unlink()
    file = str(tmp_path / "first" / "fit.json")
    assert main(["fit", "eagle3", "--config", file, "--out", str(tmp_path / "again")]) == 0
    first, second = (load_draft(tmp_path / name / "last") for name in ("first", "again"))
    assert first.config.intermediate_size == 24 and first.config == second.config
