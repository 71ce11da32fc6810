"""Absurd numbers in the config.json of a draft are errors with the file, the key and the value."""

import json
import math
import random

import pytest

from spec_data.shards.errors import DraftError
from spec_train.formats.draft_files import read_config

ABSURD = [0, -1, 2**31, 10**30, 1e30, 0.5, math.nan, math.inf, "8", True, -math.inf]


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("key", ["num_attention_heads", "hidden_size", "head_dim", "vocab_size"])
def test_sizes_that_no_model_has_are_refused(tmp_path, key, value):
    """Zero heads once ended in a ZeroDivisionError."""
    for config in ({key: value}, {"transformer_layer_config": {key: value}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(DraftError, match=rf"config\.json: \S*{key} is .*, not a whole number"):
            read_config(tmp_path)


@pytest.mark.parametrize("value", [0, -1e-6, math.nan, math.inf, "1e-6"])
def test_rates_that_no_model_has_are_refused(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps({"rms_norm_eps": value}))
    with pytest.raises(DraftError, match=r"rms_norm_eps is .*, not a number above 0"):
        read_config(tmp_path)


def test_what_models_have_is_read(tmp_path):
    config = {"hidden_size": 64, "head_dim": None, "num_key_value_heads": [4, 2], "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == config


def test_deep_tables_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' * 500 + '{"head_dim": 0}' + "}" * 500)
    with pytest.raises(DraftError, match="head_dim is 0"):
        read_config(tmp_path)


def test_random_bytes_of_a_config_end_in_words(tmp_path):
    """A seeded fuzzer: bytes of a config are changed, cut and repeated."""
    rng, whole = random.Random(0), json.dumps({"hidden_size": 64, "a": {"vocab_size": 9}}).encode()
    refused = 0
    for _ in range(2000):
        text = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
            text = text * rng.choice([1, 1, 1, 2]) or bytearray(b" ")
        (tmp_path / "config.json").write_bytes(text)
        try:
            read_config(tmp_path)
        except DraftError as error:
            assert "config.json" in str(error)
            refused += 1
    assert refused > 1000
