"""Windows of a config's keys: transformers' own config classes decide what is right."""

import logging
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from spec_data.shards.errors import DraftError
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.windows import Windows, slides_non_causal, windows_of

FULL, SLIDING = "full_attention", "sliding_attention"


def files(**config: Any) -> DraftFiles:
    return DraftFiles({"model_type": "qwen3", "num_hidden_layers": 3} | config, {}, "draft")


CASES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 7},
    {"use_sliding_window": False, "sliding_window": 7},
    {"use_sliding_window": True, "sliding_window": 7},
    {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    {"use_sliding_window": True, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING]},
    {"use_sliding_window": True, "sliding_window": 7, "layer_types": [FULL] * 3},
    {"sliding_window": 7, "layer_types": [SLIDING] * 3},
]


@pytest.mark.parametrize("config", CASES)
@pytest.mark.parametrize("kind, made", [("qwen3", Qwen3Config), ("qwen2", Qwen2Config)])
def test_qwen_windows_are_those_of_its_config_class(kind, made, config):
    """A layer of transformers slides if its type and `config.sliding_window` both say so."""
    wanted = made(num_hidden_layers=3, **config)
    found = windows_of(files(model_type=kind, **config))
    layers = [
        wanted.sliding_window if of_layer == SLIDING else None for of_layer in wanted.layer_types
    ]
    types = found.layer_types or (FULL,) * 3
    assert [found.sliding_window if kind == SLIDING else None for kind in types] == layers
    assert (found == Windows()) == (set(layers) == {None})


@pytest.mark.parametrize(
    "config, wanted",
    [
        ({"sliding_window": 7}, Windows()),
        ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, Windows()),
        ({"layer_types": [SLIDING] * 3}, Windows()),
        (
            {"layer_types": [SLIDING, FULL, FULL], "sliding_window": 7},
            Windows(7, (SLIDING, FULL, FULL)),
        ),
    ],
)
def test_llama_windows_are_those_that_vllm_and_speculators_read(config, wanted):
    """They read two attributes of a config class that keeps unknown keys and adds none."""
    assert windows_of(files(model_type="llama", **config)) == wanted
    made = LlamaConfig(num_hidden_layers=3, **config)
    types = getattr(made, "layer_types", None) or ()
    assert (SLIDING in types and getattr(made, "sliding_window", None) is not None) == bool(
        wanted.layer_types
    )


def test_modelopt_slides_every_layer_without_layer_types():
    """vLLM's rule: use_swa forces a window on every layer of an all-full config."""
    swa = {"use_swa": True, "swa_window_size": 64}
    for types in ({}, {"layer_types": [FULL] * 3}):
        raw = files(dflash_config=swa | {"causal": False}, **types)
        assert windows_of(raw) == Windows(64, (SLIDING,) * 3)
        assert slides_non_causal(raw, windows_of(raw))
    with pytest.raises(DraftError, match="use_swa = true needs swa_window_size"):
        windows_of(files(dflash_config={"use_swa": True}))


@pytest.mark.parametrize(
    "config, message",
    [
        ({"layer_types": [SLIDING]}, "expected an entry for each of the draft's 3 layers"),
        ({"layer_types": ["chunked_attention", FULL, FULL]}, "has chunked_attention"),
        ({"layer_types": [SLIDING] * 3, "sliding_window": 0}, "sliding_window = 0"),
        ({"layer_types": [SLIDING] * 3, "sliding_window": "7"}, "sliding_window = 7: expected"),
    ],
)
def test_values_that_no_reader_accepts_are_refused(config, message):
    with pytest.raises(DraftError, match=message):
        windows_of(files(use_sliding_window=True, **config))


def test_a_copy_of_the_targets_layer_types_is_named(caplog):
    raw = files(model_type="llama", layer_types=[SLIDING, FULL] * 8, sliding_window=128)
    with caplog.at_level(logging.WARNING):
        assert windows_of(raw, 1) == Windows(128, (SLIDING,))
    assert "warning[assumed]" in caplog.text and "may be a copy of the target's" in caplog.text


@pytest.mark.parametrize(
    "config, non_causal",
    [
        ({}, False),
        ({"is_causal": False}, True),
        ({"is_causal": True}, False),
        ({"is_causal": True, "sliding_window_non_causal": True}, False),
        ({"dflash_config": {"causal": False}}, True),
        ({"is_causal": False, "dflash_config": {"causal": True}}, True),
        ({"sliding_window_non_causal": True}, True),
    ],
)
def test_causality_inside_a_block_has_vllms_order_of_keys(config, non_causal):
    assert slides_non_causal(files(**config), Windows(8, (SLIDING,) * 3)) == non_causal
