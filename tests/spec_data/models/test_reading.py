"""Configs and tokenizers that transformers cannot read are errors in words."""

import json

import pytest

from spec_data.models.identify import config_hash, identify_files
from spec_data.models.loading import load_model
from spec_data.models.reading import end_token_ids, load_config
from spec_data.models.tokenizer import load_tokenizer
from spec_data.shards.errors import TargetError
from spec_train.formats.target_facts import read_target
from tests.spec_data.runs import save_target
from tests.spec_train.fitted import edit

NEWER = {"pre_tokenizer": {"type": "OfANewerRelease"}}


@pytest.fixture
def target(tmp_path):
    save_target(tmp_path / "target")
    return tmp_path / "target"


def test_a_tokenizer_of_a_newer_release_is_an_error_in_words(target):
    """The tokenizers library raises a plain Exception for it."""
    edit(target / "tokenizer.json", **NEWER)
    with pytest.raises(TargetError, match=r"no usable tokenizer \(data did not match any"):
        load_tokenizer(target)
    facts, problems = identify_files(target)
    assert "weights_hash" in facts and "config_hash" in facts
    assert len(problems) == 1 and "no usable tokenizer" in problems[0]


@pytest.mark.parametrize("text", ["[1]", "[" * 5000 + "]" * 5000])
def test_a_config_that_is_no_object_is_an_error_in_words(target, text):
    file = target / "config.json"
    whole = file.read_text()
    (target / "generation_config.json").write_text(text)
    said = r"config\.json: (expected a JSON object|not valid JSON)"
    with pytest.raises(TargetError, match=f"generation_{said}"):
        end_token_ids(target)
    file.write_text(text)
    for read in (load_config, config_hash, read_target):
        with pytest.raises(TargetError, match=said):
            read(target)
    file.write_text(whole)
    load_config(target)


def test_an_encoder_decoder_model_is_refused_before_its_weights_are_read(target):
    config = {"model_type": "t5", "vocab_size": 96, "d_model": 8, "num_layers": 1, "num_heads": 1}
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="it is an encoder-decoder model; drafts need"):
        load_model(str(target), device="cpu")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen3ForSequenceClassification", "scores or classifies texts, as reward models do"),
        ("LlamaForTokenClassification", "classifies tokens"),
        ("BertForMaskedLM", "fills masks"),
        ("Qwen3Model", "has no LM head: it makes embeddings"),
        ("CLIPModel", "has no LM head"),
        ("ViTForImageClassification", "classifies images"),
    ],
)
def test_a_class_that_is_no_language_model_is_named(target, name, said):
    edit(target / "config.json", architectures=[name])
    with pytest.raises(TargetError, match=f"its class {name} {said}.*needs a causal language"):
        load_config(target)
    edit(target / "config.json", architectures=[name], auto_map={})
    edit(target / "config.json", architectures=["ChatGLMModel"], auto_map={"AutoModel": "x.Y"})
    load_config(target)
