"""Keys of a config.json that say the same thing must agree, in drafts of any program."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import spec_train
from spec_data.shards.errors import DraftError
from spec_train.cli import main
from spec_train.drafts import load_draft
from spec_train.formats.draft_files import read_files
from tests.draft_tools import Change, edited, set_ids, unseal
from tests.spec_train.drafts.eagle3 import tools as eagle3_tools
from tests.spec_train.formats import own_draft
from tests.spec_train.formats.tools import export, same_draft

dataset, head = eagle3_tools.dataset, eagle3_tools.head
own, target = own_draft.own, own_draft.target

TWICE: dict[str, tuple[Change, str]] = {
    "ids of vLLM": (
        lambda raw: set_ids(raw, 1),
        r"\[1, 2, 3\] by eagle_aux_hidden_state_layer_ids, \[0, 1, 2\] by eagle_config",
    ),
    "ids of SGLang": (
        lambda raw: set_ids(raw["eagle_config"], 1),
        r"\[1, 2, 3\] by eagle_config",
    ),
    "our ids": (
        lambda raw: raw["spec_train"].update(layers=[0, 1, 3]),
        "engines would read another draft",
    ),
    "theta": (
        lambda raw: raw.update(rope_theta=5e5),
        "500000.0 by rope_theta, 10000.0 by rope_parameters.rope_theta",
    ),
    "rope scaling": (
        lambda raw: raw.update(rope_scaling={"rope_type": "linear", "factor": 4.0}),
        "rope_type: default by rope_parameters, linear by rope_scaling",
    ),
    "partial rotary": (
        lambda raw: (
            raw["rope_parameters"].update(partial_rotary_factor=0.5),
            raw.update(partial_rotary_factor=0.25),
        ),
        "0.25 by partial_rotary_factor, 0.5 by rope_parameters.partial_rotary_factor",
    ),
    "a norm": (
        lambda raw: raw["eagle_config"].update(norm_before_residual=True),
        "False by norm_before_residual, True by eagle_config.norm_before_residual",
    ),
    "dtype": (
        lambda raw: raw.update(torch_dtype="bfloat16"),
        "float32 by dtype, bfloat16 by torch",
    ),
    "vocabulary": (
        lambda raw: raw.update(draft_vocab_size=39),
        "39 by draft_vocab_size, 40 by d2t",
    ),
    "full vocabulary": (
        lambda raw: raw.pop("draft_vocab_size"),
        "64 by draft_vocab_size, 40 by d2t",
    ),
    "target vocabulary": (
        lambda raw: raw.update(vocab_size=65),
        "65 by vocab_size, 64 by embed_tokens",
    ),
    "layers": (
        lambda raw: raw.update(layer_types=[]),
        "num_hidden_layers: 1 by num_hidden_layers, 0 by layer_types",
    ),
    "attention_bias": (
        lambda raw: raw.update(attention_bias=True),
        r"missing midlayer\.self_attn\.q_proj\.bias",
    ),
    "tied": (
        lambda raw: raw.update(tie_word_embeddings=True),
        "tie_word_embeddings: would be written as false, found true",
    ),
    "a wrong type": (lambda raw: raw.update(head_dim="8"), "a wrong type"),
    "ids of a wrong type": (
        lambda raw: raw.update(eagle_aux_hidden_state_layer_ids="1,2"),
        "a wrong type",
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_keys_that_exist_twice_must_agree_in_an_accepted_edit(own: Path, name: str) -> None:
    change, message = TWICE[name]
    with pytest.raises(DraftError, match=message):
        load_draft(edited(own, change), accept_edited=True)


def test_an_accepted_edit_must_not_contradict_itself(own: Path) -> None:
    edited(own, lambda raw: raw.update(rope_theta=5e5))
    with pytest.raises(DraftError, match="contradicts itself"):
        load_draft(own, accept_edited=True)
    edited(own, lambda raw: raw["rope_parameters"].update(rope_theta=5e5))
    assert load_draft(own, accept_edited=True).config.rope_parameters["rope_theta"] == 5e5


def test_a_missing_or_unknown_key_is_named_by_check(own: Path) -> None:
    edited(own, lambda raw: (raw.pop("eagle_config"), raw.update(rope_factor=2)))
    found = spec_train.export(own, accept_edited=True).of("spec-train")
    (text,) = [f.text for f in found if "keys that engines read" in f.text]
    assert "eagle_config" in text and "rope_factor: added, 2" in text


FOREIGN_DROPS = ("spec_train", "dtype", "torch_dtype", "rope_parameters")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(layer_types=["chunked_attention"]), "layer_types has chunked"),
        (lambda raw: raw["eagle_config"].update(norm_before_fc=True), "norm_before_fc"),
        (lambda raw: set_ids(raw["eagle_config"], 1), "layers"),
        (lambda raw: raw.update(rope_scaling={"rope_type": "yarn", "rope_theta": 3.0}), "theta"),
        (lambda raw: raw.update(draft_vocab_size=64), "64 by draft_vocab_size, 40 by d2t"),
        (lambda raw: raw.update(num_aux_hidden_states=2), "number of states: 3 .* 2"),
        (lambda raw: raw.update(mask_token_id=3, ptd_token_id=4), "mask token: 3"),
        (lambda raw: raw.update(hidden_size="32"), "missing hidden_size"),
    ],
)
def test_foreign_drafts_must_agree_too(own: Path, change: Change, message: str) -> None:
    """As other trainers publish them: without a section of ours."""

    def strip(raw: dict[str, Any]) -> None:
        for name in FOREIGN_DROPS:
            raw.pop(name)

    edited(unseal(own), strip)
    assert load_draft(own)
    with pytest.raises(DraftError, match=message):
        load_draft(edited(own, change))


def test_a_published_draft_may_keep_the_layer_types_of_all_blocks_of_its_target(own: Path) -> None:
    def publish(raw: dict[str, Any]) -> None:
        for name in FOREIGN_DROPS:
            raw.pop(name)
        raw["layer_types"] = ["full_attention", *["sliding_attention"] * 5]

    assert load_draft(edited(unseal(own), publish))


def test_a_published_speculators_draft_may_have_another_dtype_than_its_layer(
    own: Path, tmp_path: Path, target: Path
) -> None:
    """A nested config that was copied from the target keeps the target's dtype."""

    def publish(raw: dict[str, Any]) -> None:
        raw.pop("spec_train")
        raw["dtype"] = "float32"
        raw["transformer_layer_config"] |= {"dtype": "bfloat16"}

    edited(unseal(export(own, "speculators", tmp_path / "out", target)), publish)
    assert load_draft(tmp_path / "out")
    publish_wrong = edited(tmp_path / "out", lambda raw: raw.update(torch_dtype="float16"))
    with pytest.raises(DraftError, match="dtype: float32 by dtype, float16 by torch_dtype"):
        load_draft(publish_wrong)


def test_the_maps_of_the_vocabulary_must_name_the_same_tokens(own: Path) -> None:
    edited(unseal(own), lambda raw: raw.pop("spec_train"))
    weights = own / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(weights).items()}
    t2d = tensors["t2d"]
    t2d[t2d.nonzero()[0]] = False
    t2d[(~t2d).nonzero()[-1]] = True
    save_file(tensors, weights)
    with pytest.raises(DraftError, match="tokens of the draft vocabulary"):
        load_draft(own)


EXPORT_EDITS: list[tuple[str, Change]] = [
    ("vllm", lambda raw: set_ids(raw, 1)),
    ("vllm", lambda raw: raw.update(norm_before_residual=True)),
    ("sglang", lambda raw: set_ids(raw["eagle_config"], -1)),
    ("sglang", lambda raw: raw.update(norm_before_residual=True)),
    ("speculators", lambda raw: set_ids(raw, 1)),
    ("speculators", lambda raw: raw.update(norm_before_residual=True)),
    ("speculators", lambda raw: raw["transformer_layer_config"].update(rope_theta=3.0)),
    ("speculators", lambda raw: raw["transformer_layer_config"].update(num_aux_hidden_states=2)),
    (
        "speculators",
        lambda raw: raw["speculators_config"]["proposal_methods"][0].update(speculative_tokens=9),
    ),
    ("hf", lambda raw: set_ids(raw, 1)),
]


@pytest.mark.parametrize(("form", "change"), EXPORT_EDITS)
def test_an_edited_export_is_refused_with_and_without_its_seal(
    own: Path, tmp_path: Path, target: Path, form: str, change: Change, capsys: Any
) -> None:
    """'ok, loads and computes what was trained' was the answer before."""
    out = export(own, form, tmp_path / "out", target)
    assert read_files(out).sealed and same_draft(own, out)
    check = ["export", "--draft", str(out), "--target", str(target)]
    assert main(check) == 0
    edited(out, change)
    assert main(check) == 2
    assert "not as it was sealed" in capsys.readouterr().err
    unseal(out)
    assert main(check) == 2
    assert "has no seal" in capsys.readouterr().err
