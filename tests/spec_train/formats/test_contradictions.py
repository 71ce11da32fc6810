"""Keys of a config.json that say the same thing must agree, in drafts of any program."""

from pathlib import Path
from typing import Any

import pytest

from spec_data.shards.errors import DraftError
from spec_train.cli import main
from spec_train.drafts import load_draft
from spec_train.formats.draft_files import read_files
from tests.draft_tools import edited, unseal
from tests.spec_train.drafts import any_draft
from tests.spec_train.formats import own_draft
from tests.spec_train.formats.tools import export, put, same_draft

dataset, head = any_draft.dataset, any_draft.head
own, target = own_draft.own, own_draft.target

IDS = "eagle_aux_hidden_state_layer_ids"
TWICE: list[tuple[dict[str, Any], str]] = [
    (
        {IDS: [2, 3, 4]},
        r"\[1, 2, 3\] by eagle_aux_hidden_state_layer_ids, \[0, 1, 2\] by eagle_config",
    ),
    ({f"eagle_config.{IDS}": [1, 2, 3]}, r"\[1, 2, 3\] by eagle_config"),
    ({"spec_train.layers": [0, 1, 3]}, r"\[0, 1, 3\] by spec_train.layers, \[0, 1, 2\] by eagle"),
    ({"rope_theta": 5e5}, "500000.0 by rope_theta, 10000.0 by rope_parameters.rope_theta"),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "default by rope_parameters, linear by",
    ),
    (
        {"rope_parameters.partial_rotary_factor": 0.5, "partial_rotary_factor": 0.25},
        "0.25 by partial_rotary_factor, 0.5 by rope_parameters.partial_rotary_factor",
    ),
    (
        {"eagle_config.norm_before_residual": True},
        "False by norm_before_residual, True by eagle_con",
    ),
    ({"torch_dtype": "bfloat16"}, "float32 by dtype, bfloat16 by torch"),
    ({"draft_vocab_size": 39}, "39 by draft_vocab_size, 40 by d2t"),
    ({"draft_vocab_size": ...}, "64 by draft_vocab_size, 40 by d2t"),
    ({"vocab_size": 65}, "65 by vocab_size, 64 by embed_tokens"),
    ({"layer_types": []}, "num_hidden_layers: 1 by num_hidden_layers, 0 by layer_types"),
    ({"attention_bias": True}, r"missing midlayer\.self_attn\.q_proj\.bias"),
    ({"head_dim": "8"}, "head_dim is '8', not a whole number"),
    ({IDS: "1,2"}, "a wrong type"),
]


def changed(folder: Path, keys: dict[str, Any]) -> Path:
    """Change keys of config.json, by dotted paths."""
    return edited(folder, lambda raw: [put(raw, key, value) for key, value in keys.items()])


@pytest.mark.parametrize(("keys", "message"), TWICE, ids=str)
def test_keys_that_exist_twice_must_agree_in_an_accepted_edit(own, keys, message):
    with pytest.raises(DraftError, match=message):
        load_draft(changed(own, keys), accept_edited=True)


FOREIGN = dict.fromkeys(("spec_train", "dtype", "torch_dtype", "rope_parameters"), ...)
"""Keys that other trainers do not publish."""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["chunked_attention"]}, "layer_types has chunked"),
        ({"eagle_config.norm_before_fc": False}, "norm_before_fc"),
        ({f"eagle_config.{IDS}": [1, 2, 3]}, "layers"),
        ({"rope_scaling": {"rope_type": "yarn", "rope_theta": 3.0}}, "theta"),
        ({"draft_vocab_size": 64}, "64 by draft_vocab_size, 40 by d2t"),
        ({"num_aux_hidden_states": 2}, "number of states: 3 .* 2"),
        ({"mask_token_id": 3, "ptd_token_id": 4}, "mask token: 3"),
        ({"hidden_size": "32"}, "hidden_size is .32., not a whole"),
    ],
)
def test_foreign_drafts_must_agree_too(own, keys, message):
    assert load_draft(changed(unseal(own), FOREIGN))
    with pytest.raises(DraftError, match=message):
        load_draft(changed(own, keys))


def test_a_published_draft_may_keep_keys_of_its_target(own, tmp_path, target):
    """The layer types of all its blocks, and in a nested config its dtype."""
    out = export(own, "speculators", tmp_path / "out", target)
    types = ["full_attention", *["sliding_attention"] * 5]
    assert load_draft(changed(unseal(own), FOREIGN | {"layer_types": types}))
    keys = {"spec_train": ..., "dtype": "float32", "transformer_layer_config.dtype": "bfloat16"}
    assert load_draft(changed(unseal(out), keys))
    with pytest.raises(DraftError, match="dtype: float32 by dtype, float16 by torch_dtype"):
        load_draft(changed(out, {"torch_dtype": "float16"}))


METHOD = "speculators_config.proposal_methods.0.speculative_tokens"


@pytest.mark.parametrize(
    ("form", "key", "value"),
    [
        ("vllm", IDS, [2, 3, 4]),
        ("vllm", "norm_before_residual", True),
        ("sglang", f"eagle_config.{IDS}", [-1, 0, 1]),
        ("sglang", "norm_before_residual", True),
        ("speculators", IDS, [2, 3, 4]),
        ("speculators", "norm_before_residual", True),
        ("speculators", "transformer_layer_config.rope_theta", 3.0),
        ("speculators", "transformer_layer_config.num_aux_hidden_states", 2),
        ("speculators", METHOD, 9),
        ("hf", IDS, [2, 3, 4]),
    ],
)
def test_an_edited_export_is_refused_with_and_without_its_seal(
    own, tmp_path, target, form, key, value, capsys
):
    """'ok, loads and computes what was trained' was the answer before."""
    out = export(own, form, tmp_path / "out", target)
    assert read_files(out).sealed and same_draft(own, out)
    check = ["export", "--draft", str(out), "--target", str(target)]
    assert main(check) == 0
    changed(out, {key: value})
    assert main(check) == 2
    assert "not as it was sealed" in capsys.readouterr().err
    unseal(out)
    assert main(check) == 2
    assert "has no seal" in capsys.readouterr().err
