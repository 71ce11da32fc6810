"""export --target names each fact in which the target is not the one of the draft's training."""

import shutil

import pytest

import spec_train
from spec_data.shards.errors import ConfigError, MissingError, TargetError
from tests.factory import hub_snapshot
from tests.spec_train import fitted
from tests.spec_train.fitted import (
    edit,
    fine_tune,
    round_to_3_bits,
    split_otherwise,
    switch_yarn_on,
)

place, target = fitted.place, fitted.target


def found(place, name, draft="run") -> list[tuple[str, str]]:
    """The general findings: level and text."""
    result = spec_train.export(place / draft, target=name)
    return [(f.level, f.text) for f in result.findings["spec-train"]]


def warned(place, name, draft="run") -> list[str]:
    return [text for level, text in found(place, name, draft) if level == "warn"]


HASH = "weights_hash: the draft was fitted with sha256:"
ROPE = [
    "factor: ",
    "original_max_position_embeddings: ",
    "rope_type: the draft was fitted with 'def",
]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda target: None, []),
        (fine_tune, [HASH]),
        (round_to_3_bits, [HASH]),
        (
            lambda target: edit(target / "config.json", dtype="bfloat16"),
            ["dtype: the draft was fitted with 'float32'"],
        ),
        (switch_yarn_on, ROPE),
        (split_otherwise, ["tokenizer.pre_tokenizer: the draft was fitted with 'Sequence "]),
    ],
)
def test_another_target_is_a_warning_that_names_the_fact(place, target, change, said):
    change(target)
    lines = warned(place, target)
    assert said or {level for level, _ in found(place, target)} <= {"ok", "note"}
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))


def test_a_quantised_target_is_one_warning_and_still_exported(place, target, tmp_path):
    round_to_3_bits(target)
    edit(target / "config.json", quantization_config={"quant_method": "gptq", "bits": 3})
    (line,) = warned(place, target)
    assert line.startswith("quantization: the draft was fitted with none, ")
    assert '"bits": 3' in line
    out = str(tmp_path / "out")
    spec_train.export(draft=str(place / "run"), format="hf", out=out, target=str(target))


def test_a_hub_id_is_compared_with_the_local_cache_or_said_not_to_be(
    place, target, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = (
        "not compared with the draft's training: some/model is no directory here and not in the "
        "local Hub cache; download it first"
    )
    assert ("warn", said) in found(place, "some/model")
    origin = {"target_name": "some/model"}
    monkeypatch.setattr("spec_train.formats.preflight.Subject.origin", origin)
    assert ("note", said) in found(place, "some/model")  # it is trained elsewhere
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = hub_snapshot(tmp_path / "hub")
    switch_yarn_on(target)
    shutil.copytree(
        target, snapshot, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors")
    )
    findings = found(place, "some/model")
    assert any("rope_type: the draft was fitted with 'default'" in text for _, text in findings)
    notes = [text for level, text in findings if level == "note"]
    assert "no .safetensors weights" in notes[0] and "weights_hash" in notes[1]


@pytest.mark.parametrize("name", ["", "/nowhere", "./nowhere"])
def test_a_name_that_is_no_target_is_refused_in_words(place, name):
    with pytest.raises((MissingError, ConfigError), match="target"):
        found(place, name)


def test_a_target_whose_files_cannot_be_read_is_named_in_words(place, target):
    edit(target / "tokenizer.json", pre_tokenizer={"type": "OfANewerRelease"})
    notes = [text for level, text in found(place, target) if level == "note"]
    assert any("no usable tokenizer" in text for text in notes)
    (target / "config.json").write_text("[]")
    with pytest.raises(TargetError, match=r"config\.json: expected a JSON object, found"):
        found(place, target)
