"""`--config` of a published draft's config.json: what is used, what refused, and what named."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from spec_data.shards.errors import ConfigError, DraftError, MissingError
from spec_data.terminal.given import decided
from spec_train.cli import main
from spec_train.drafts import load_draft
from spec_train.drafts.dspark.options import DSparkOptions
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.formats.stated_shape import stated_shape
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from tests import factory
from tests.spec_train import flat

TARGET = {"vocab_size": 64, "hidden_size": 32, "rms_norm_eps": 1e-6}
SIZES = {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
COMMON = {"initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}
EAGLE3: dict[str, Any] = {  # as the trainers of SGLang and vLLM write it
    **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "bos_token_id": 1},
    **{"num_hidden_layers": 1, "draft_vocab_size": 40, "hidden_act": "gelu", "mlp_bias": False},
    **{"max_position_embeddings": 2048, "tie_word_embeddings": False, "rope_theta": 10000.0},
    **(TARGET | SIZES | COMMON),
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 0]},
}
DFLASH: dict[str, Any] = {  # as speculators writes it
    **{"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash"},
    **{"speculators_version": "0.9.0", "draft_vocab_size": 64, "block_size": 4},
    **{"aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 5, "target_hidden_size": None},
    "transformer_layer_config": {
        **{"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 16, "hidden_act": "silu"},
        **{"max_position_embeddings": 512, "attention_bias": False, "rope_theta": 10000.0},
        **(TARGET | SIZES | COMMON),
    },
    "speculators_config": {"algorithm": "dflash", "proposal_methods": [{"speculative_tokens": 3}]},
}
ZLAB = {
    **{"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2},
    **{"dflash_config": {"mask_token_id": 9, "target_layer_ids": [2, 1]}, "block_size": 8},
}
MAKES = {"steps": 0, "seq_len": 48, "device": "cpu"}


def written(tmp_path: Path, raw: Any, name: str = "config.json") -> str:
    (tmp_path / name).write_text(json.dumps(raw))
    return str(tmp_path / name)


def filled(tmp_path: Path, kind: str, raw: Any, **given: Any) -> Any:
    """The options of a draft with the shape of a file."""
    options = DRAFT_OPTIONS[kind](**given)
    return stated_shape(written(tmp_path, raw), kind, options).fill(options)[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return factory.tiny_dataset(tmp_path_factory.mktemp("shape") / "data", n_docs=8)


def test_an_eagle3_of_sglang_is_the_shape_where_nothing_was_typed(
    data, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--data", str(data), "--device", "cpu", "--steps", "0", "--seq-len", "48"]
    words += ["--preset", "smoke", "--draft-vocab-size", "48"]
    assert (
        main(["fit", "eagle3", *words, "--out", "run", "--config", written(tmp_path, EAGLE3)]) == 0
    )
    draft = load_draft(tmp_path / "run" / "last")
    config = draft.config
    assert (config.intermediate_size, config.num_attention_heads, config.head_dim) == (24, 2, 16)
    assert config.num_key_value_heads == 1 and config.hidden_act == "gelu"
    assert config.layers == (0, 2) and config.draft_vocab_size == 48  # typed: 48, the file's: 40
    assert not config.norm_before_fc  # its class has no such norm
    said = " ".join(capsys.readouterr().err.split())
    assert "shape " in said and "--intermediate-size 24 --num-attention-heads 2" in said
    assert "--draft-vocab-size 40" not in said and "not used: max_position_embeddings" in said
    (tmp_path / "config.json").unlink()  # fit.json has all of it
    assert main(["fit", "eagle3", "--config", "run/fit.json", "--out", "again"]) == 0
    assert load_draft("again/last").config.shape_json() == config.shape_json()


def test_a_dflash_of_speculators_is_the_shape_also_beside_a_table_of_options(
    data, tmp_path, capsys
) -> None:
    shape, out = written(tmp_path, DFLASH, "dflash.json"), str(tmp_path / "run")
    table = MAKES | {"data": str(data), "out": out, "shape_of": shape, "num-layers": 1}
    assert main(["fit", "dflash", "--config", written(tmp_path, table, "fit.json")]) == 0
    config = load_draft(tmp_path / "run" / "last").config
    assert (config.block_size, config.mask_token_id, config.layers) == (4, 5, (0, 2))
    assert config.num_hidden_layers == 1 and config.intermediate_size == 24
    said = " ".join(capsys.readouterr().err.split())
    assert "--block-size 4" in said and "not used: speculators_config" in said


@pytest.mark.parametrize(
    ("kind", "raw", "wanted"),
    [
        ("eagle3", {"draft_num_hidden_layers": 2, "num_hidden_layers": 36}, {"num_layers": 2}),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [4, 2, 6]}, {"layers": "1,3,5"}),
        ("eagle3", EAGLE3, {"layers": "0,2", "head_dim": 16, "norm_before_fc": False}),
        ("eagle3", EAGLE3 | {"fc_norm": True}, {"fc_norm": True, "norm_before_fc": False}),
        ("eagle3", EAGLE3 | {"draft_vocab_size": 64}, {"draft_vocab_size": 0}),
        ("eagle3", EAGLE3 | {"architectures": ["LlamaForCausalLM"]}, {"draft_vocab_size": 40}),
        ("eagle", {"architectures": ["LlamaForCausalLM"], "hidden_act": "gelu"}, {"num_layers": 1}),
        ("eagle3", EAGLE3 | {"ttt_length": 5, "step_loss_decay": 0.5}, {"ttt_steps": 5}),
        ("eagle3", EAGLE3 | {"architectures": ["Eagle3Qwen3ForCausalLM"]}, {"qk_norm": True}),
        ("eagle3", {"intermediate_size": 80}, {"intermediate_size": 80, "norm_before_fc": None}),
        ("peagle", EAGLE3 | {"ptd_token_id": 7, "num_depths": 4}, {"mask_token_id": 7}),
        ("dspark", {"markov_rank": 8, "enable_confidence_head": False, "block_size": 5},
         {"markov_rank": 8, "confidence_weight": 0.0, "block_size": 5, "layout": "anchor"}),
        ("dflash", ZLAB, {"layers": "1,2", "mask_token_id": 9, "layout": "mask", "num_layers": 2}),
        ("dspark", DFLASH | {"architectures": ["DSparkDraftModel"], "sample_from_anchor": True},
         {"markov_rank": 256, "confidence_weight": 1.0, "layout": "anchor"}),
        ("dspark", ZLAB | {"architectures": ["Qwen3DSparkModel"]},
         {"markov_rank": 0, "confidence_weight": 0.0}),
        ("dflash", ZLAB | {"use_swa": True, "swa_window_size": 32},
         {"sliding_window": 32, "sliding_window_non_causal": True}),
        ("xpress", ZLAB | {"architectures": ["Qwen3XPressModel"]}, {"xpress_rank": 256}),
    ],
)  # fmt: skip
def test_what_a_file_states_becomes_its_options(tmp_path, kind, raw, wanted) -> None:
    options = filled(tmp_path, kind, raw)
    assert {name: getattr(options, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("kind", "raw", "words"),
    [
        ("dspark", EAGLE3, "of an eagle3 draft; fit that with `spec-train fit eagle3`"),
        ("eagle3", ZLAB, "of a dflash draft"),
        ("eagle3", EAGLE3 | {"architectures": ["Qwen3ForCausalLM"]}, "is a target, and no draft"),
        ("eagle3", {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}, "is a target"),
        ("eagle", {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}, "is a target"),
        ("eagle3", EAGLE3 | {"architectures": ["Unheard"]}, "are not a known draft"),
        ("eagle3", EAGLE3 | {"final_logit_softcapping": 30.0}, "cannot be represented"),
        ("eagle3", {"target_layer_ids": 5, "architectures": ["LlamaForCausalLMEagle3"]}, "type"),
        ("eagle3", {"num_hidden_layers": "x"}, "num_hidden_layers"),
        ("eagle3", {"intermediate_size": True}, "intermediate_size"),
        ("eagle", {"bias": True}, "bias: no option makes a new draft with it"),
        ("eagle3", EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [1, 4]}, "contradicts itself"),
        ("dflash", ZLAB | {"num_attention_heads": 2, "hidden_size": [4]}, "not of the type"),
        ("eagle3", [1], "expected a JSON object"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, kind, raw, words) -> None:
    with pytest.raises((ConfigError, DraftError), match=words) as caught:
        filled(tmp_path, kind, raw)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", 65), ("hidden_size", 64), ("rms_norm_eps", 0.5), ("rope_theta", 123.0)],
)
def test_a_file_for_another_target_is_refused(data, tmp_path, key, value) -> None:
    shape = written(tmp_path, EAGLE3 | {key: value, "head_dim": 16})
    name = "rope" if key == "rope_theta" else key
    with pytest.raises(ConfigError, match=f"{name} = .* contradicts the target of the dataset"):
        flat.fit("eagle3", data, tmp_path / "run", shape_of=shape, **MAKES)


def test_two_shapes_and_a_missing_file_are_refused_and_unknown_keys_named(tmp_path, caplog) -> None:
    with pytest.raises(ConfigError, match="both bring a shape"):
        Training(data="d", out="o", shape_of="a.json", init_from="b")
    with pytest.raises(MissingError, match="no such file"):
        stated_shape(str(tmp_path / "no.json"), "eagle3", Eagle3Options())
    with caplog.at_level(logging.WARNING):
        filled(tmp_path, "eagle3", EAGLE3 | {"intermediate_sizes": 80})
    assert "warning[unread-keys]" in caplog.text and "intermediate_sizes" in caplog.text


def test_another_choice_of_the_vocabulary_stays(tmp_path) -> None:
    options = filled(tmp_path, "eagle3", EAGLE3, draft_vocab_coverage=0.9)
    assert options.draft_vocab_size == Eagle3Options().draft_vocab_size
    typed = filled(tmp_path, "eagle3", EAGLE3, num_layers=1, norm_before_fc=True)
    assert typed.norm_before_fc and typed.given == {"num_layers", "norm_before_fc"}
    preset = decided(DSparkOptions(), block_size=3)  # as a preset fills, which the file replaces
    path = written(tmp_path, ZLAB | {"architectures": ["Qwen3DSparkModel"]})
    assert stated_shape(path, "dspark", preset).fill(preset)[0].block_size == 8
