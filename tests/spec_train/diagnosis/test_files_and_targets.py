"""What the files of a draft, a target and a dataset decide: each planted failure by its name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_train
from spec_data.shards.errors import ConfigError, MissingError
from spec_train.cli import main
from spec_train.commands.doctor import doctor
from spec_train.diagnosis.checks import FINDING, OK, UNDECIDED
from spec_train.diagnosis.examination import _target_checks
from spec_train.formats.target_facts import TargetFacts
from tests import factory
from tests.draft_tools import edited, read_json, set_ids, unseal
from tests.spec_data.shards.integrity_tools import flip
from tests.spec_train import fitted
from tests.spec_train.diagnosis.test_conventions import changed, examine, found, planted
from tests.spec_train.diagnosis.trained import VOCAB
from tests.spec_train.formats.tools import export

place, target_of_place = fitted.place, fitted.target


def copied(draft: Path, folder: Path) -> Path:
    shutil.copytree(draft, folder / "copy")
    return folder / "copy"


# --- residual streams ---


@pytest.mark.parametrize(
    ("origin", "state", "text"),
    [
        ({"streams": "mean of 4"}, OK, "as in the training"),
        (
            {"streams": "first of 4"},
            FINDING,
            "fitted with 'first of 4', the target has 'mean of 4'",
        ),
        ({"weights_hash": "0"}, UNDECIDED, "does not record its contraction of the streams"),
        ({}, UNDECIDED, "mean of 4 here"),
    ],
)
def test_another_contraction_of_the_streams_is_named(origin, state, text):
    served = TargetFacts(identity={"streams": "mean of 4", "weights_hash": "0"})
    check = next(c for c in _target_checks(origin, None, served, "") if c.name == "streams")
    assert check.state == state and text in check.text
    plain = TargetFacts(identity={"weights_hash": "0"})
    checks = {c.name for c in _target_checks({"weights_hash": "0"}, None, plain, "")}
    assert "target" in checks and "streams" not in checks, "of a target with one stream"


# --- the draft's files ---


def test_files_alone_name_what_is_missing(sound_dir):
    diagnosis = doctor(sound_dir("eagle3"), device="cpu")
    assert not diagnosis.findings
    states = {check.name: check.state for check in diagnosis.checks}
    assert states["seal"] == states["files"] == states["weights"] == OK
    for name, given in (("conventions", "--data"), ("embedding", "--data")):
        assert states[name] == UNDECIDED and given in diagnosis.named(name).text


def test_files_without_the_embedding_still_have_a_seal(
    sound_dir, data, target_dir, tmp_path, capsys
):
    """What shares the target's weights is not read without them, and is no finding by that."""
    draft = export(sound_dir("dspark"), "vllm", tmp_path / "vllm", target_dir)
    whole = examine(draft, documents=0)
    assert not whole.findings and "seal" not in {check.name for check in whole.checks}
    assert all("cannot be read" in whole.named(name).text for name in ("target", "conventions"))
    assert not whole.next_command  # `export` would refuse it
    bare = Path(shutil.copytree(target_dir, tmp_path / "bare"))
    next(bare.glob("*.safetensors")).unlink()
    lacking = examine(draft, target=bare, documents=0).named("files")
    assert "or --target with its weights" in lacking.text
    assert "bare has no readable weights here" in "".join(lacking.evidence)
    factory.tiny_llama(VOCAB, hidden=48).save_pretrained(tmp_path / "wide")
    wide = examine(draft, documents=0, target=tmp_path / "wide")
    assert found(wide) == {"target"}, str(wide)
    assert "wide has shape [40, 48], expected [40, 32]" in wide.named("target").text
    assert whole.exit_code == 1, "a gate must not pass it"
    measured = spec_train.evaluate(draft, data=data, limit=2)
    assert measured.next_command[-2:] == ["--target", "MODEL"], "without it, it cannot be read"
    tensors = load_file(draft / "model.safetensors")
    name = next(name for name in tensors if "markov_w1" in name)
    save_file(tensors | {name: tensors[name] + 1}, draft / "model.safetensors")
    edited_one = examine(draft, documents=0)
    assert found(edited_one) == {"seal"} and name in edited_one.named("seal").text
    assert not edited_one.next_command
    assert "warning" not in capsys.readouterr().err


def test_a_damaged_draft_is_tried_all_the_same(sound_dir, data, tmp_path):
    draft = copied(sound_dir("eagle3"), tmp_path)
    tensors = load_file(draft / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].roll(tensors["fc.weight"].shape[1] // 2, 1)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    diagnosis = examine(draft, data=data)
    assert found(diagnosis) == {"seal", "layer-order"}, str(diagnosis)
    assert "fc.weight" in diagnosis.named("seal").text
    assert not diagnosis.named("ambiguous-keys").evidence


def test_keys_that_contradict_each_other(sound_dir, data, tmp_path):
    draft = unseal(copied(sound_dir("eagle3"), tmp_path))
    diagnosis = examine(edited(draft, lambda raw: set_ids(raw, 1)), data=data)
    assert found(diagnosis) == {"files", "seal"}, "its seal was taken away"
    assert "layers" in diagnosis.named("files").text
    assert diagnosis.kind is None


def published(draft: Path, folder: Path) -> Path:
    """The same draft as another trainer would write it: without our section and seal."""
    copy_of = copied(draft, folder)
    raw = read_json(copy_of)
    raw.pop("spec_train")
    raw.pop("eagle_config", None)
    (copy_of / "config.json").write_text(json.dumps(raw))
    tensors = load_file(copy_of / "model.safetensors")
    save_file(tensors, copy_of / "model.safetensors", metadata={"format": "pt"})
    return copy_of


def test_a_target_that_is_not_here_is_an_error_and_no_missing_option(sound_dir):
    with pytest.raises(MissingError, match=r"--target no/such: .*not in the local Hub cache"):
        examine(sound_dir("eagle3"), target="no/such")


def test_prompts_that_nothing_is_tried_on_are_refused(sound_dir, target_dir, prompts):
    with pytest.raises(ConfigError, match="--corpus would change nothing with --documents 0"):
        examine(sound_dir("eagle3"), target=target_dir, corpus=prompts, documents=0)


def test_a_published_draft_is_sound(sound_dir, data, tmp_path):
    diagnosis = examine(published(sound_dir("eagle3"), tmp_path), data=data)
    assert not diagnosis.findings, str(diagnosis)
    assert diagnosis.named("target").state == UNDECIDED
    assert diagnosis.named("target").text.startswith("give --target: ")  # --data is given


NORMS = ("q_norm.weight", "k_norm.weight")


@pytest.mark.long
def test_norms_of_queries_and_keys_that_the_file_lost(sound_dir, data, tmp_path):
    draft = published(sound_dir("dflash"), tmp_path)
    tensors = load_file(draft / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(NORMS)}
    assert len(tensors) - len(kept) == 4, "two of each layer"
    save_file(kept, draft / "model.safetensors", metadata={"format": "pt"})
    diagnosis = examine(draft, data=data)
    assert found(diagnosis) == {"carried-norm"}, str(diagnosis)
    assert "qk_norm = true" in diagnosis.named("carried-norm").text


def test_a_published_draft_that_counts_layers_otherwise(sound_dir, data, tmp_path):
    """Its ids are outputs of blocks, but the key counts inputs: every layer is one too early."""
    draft = published(sound_dir("eagle3"), tmp_path)
    edited(draft, lambda raw: set_ids(raw, -1))
    diagnosis = examine(draft, data=data)
    assert found(diagnosis) == {"layer-ids"}, str(diagnosis)
    assert "layers 1, 3" in diagnosis.named("layer-ids").text


@pytest.mark.parametrize("form", ["vllm", "sglang", "speculators"])
def test_a_convention_is_found_in_every_form(sound, data, target_dir, tmp_path, form):
    draft = planted(sound("eagle3"), tmp_path, changed(layers=(2, 4)))
    diagnosis = examine(export(draft, form, tmp_path / form, target_dir), data=data)
    assert "layer-ids" in found(diagnosis), str(diagnosis)
    assert "layers 1, 3" in diagnosis.named("layer-ids").text


def ids_for_offsets(tensors):
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def never_filled(tensors):
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    del tensors["t2d"]


@pytest.mark.parametrize("change", [ids_for_offsets, never_filled])
def test_a_vocabulary_map_that_is_wrong(sound_dir, data, tmp_path, change):
    draft = published(sound_dir("eagle3"), tmp_path)
    tensors = load_file(draft / "model.safetensors")
    change(tensors)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    assert "vocabulary-map" in found(examine(draft, data=data))


def test_layers_in_an_order_that_engines_do_not_keep(sound_dir, data, tmp_path):
    def turn(raw):
        key = "eagle_aux_hidden_state_layer_ids"
        raw[key] = raw[key][::-1]

    diagnosis = examine(edited(published(sound_dir("eagle3"), tmp_path), turn), data=data)
    check = diagnosis.named("layer-order")
    assert check.state == FINDING and "not ascending" in check.text


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', not a number above 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None: expected float, got null"),
        (
            {"max_position_embeddings": "512"},
            "max_position_embeddings is '512', not a whole",
        ),
        (
            {"max_position_embeddings": -1},
            "max_position_embeddings is -1, not a whole",
        ),
        ({"mask_token_id": VOCAB, "ptd_token_id": VOCAB}, f"mask_token_id = {VOCAB}: the target's"),
        ({"mask_token_id": -1, "ptd_token_id": -1}, "mask_token_id = -1: the target's vocabulary"),
        (
            {"partial_rotary_factor": 1.5, "rope_parameters": {"partial_rotary_factor": 1.5}},
            "partial_rotary_factor = 1.5: ",
        ),
        ({"hidden_act": "swish7"}, "hidden_act = 'swish7'"),
    ],
)
def test_a_key_of_another_type_or_out_of_range_is_said(sound_dir, data, tmp_path, wrong, text):
    draft = edited(published(sound_dir("peagle"), tmp_path), lambda raw: raw.update(wrong))
    check = examine(draft, data=data).named("files")
    assert check.state == FINDING and check.text.startswith(f"{draft / 'config.json'}: ")
    assert text in check.text


def test_what_the_files_leave_open_is_said(sound_dir, tmp_path):
    draft = edited(
        published(sound_dir("eagle3"), tmp_path), lambda raw: raw.update(norm_output=True)
    )
    check = doctor(draft, device="cpu").named("ambiguous-keys")
    assert check.state == OK and check.text == "read with assumptions"
    assert any("norm_output = true is read as engines serve it" in line for line in check.evidence)


def test_a_length_that_is_that_of_the_training(sound, data, tmp_path):
    draft = planted(
        sound("eagle3"), tmp_path, lambda d: d.update_config(max_position_embeddings=64)
    )
    diagnosis = examine(draft, data=data)
    assert found(diagnosis) == {"max-positions"}
    assert "512" in diagnosis.named("max-positions").text


def test_weights_that_are_not_finite(sound, tmp_path):
    def broken(draft):
        draft.fc.weight[0, 0] = float("nan")

    diagnosis = doctor(planted(sound("eagle3"), tmp_path, broken), device="cpu")
    assert found(diagnosis) == {"weights"}
    assert "fc.weight" in diagnosis.named("weights").text


# --- the target ---


def test_the_same_target_has_no_finding(place):
    diagnosis = doctor(place / "run", target=place / "target", documents=0, device="cpu")
    assert not diagnosis.findings, str(diagnosis)
    assert diagnosis.named("chat-template").state == OK


def test_a_target_without_its_weights_decides_nothing_about_the_embedding(place, target_of_place):
    (target_of_place / "model.safetensors").rename(target_of_place / "pytorch_model.bin")
    diagnosis = doctor(place / "run", target=target_of_place, documents=0, device="cpu")
    assert diagnosis.named("embedding").state == UNDECIDED


def quantised(target: Path) -> None:
    fitted.edit(target / "config.json", quantization_config={"quant_method": "awq", "bits": 4})


def other_template(target: Path) -> None:
    file = target / "chat_template.jinja"
    file.write_text(file.read_text() + "{# another #}")


@pytest.mark.parametrize(
    "change, name",
    [
        (fitted.fine_tune, "target"),
        (fitted.switch_yarn_on, "target"),
        (quantised, "quantised"),
        (other_template, "chat-template"),
        (fitted.split_otherwise, "tokenizer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_another_target_is_named_by_the_fact(place, target_of_place, change, name):
    change(target_of_place)
    diagnosis = doctor(place / "run", target=target_of_place, documents=0, device="cpu")
    assert found(diagnosis) == {name}, str(diagnosis)


def test_a_capture_in_float32_of_a_target_in_bf16_is_no_failure(place, target_of_place):
    """Serving rounds the states; the check says so."""
    fitted.edit(target_of_place / "config.json", dtype="bfloat16")
    diagnosis = doctor(place / "run", target=target_of_place, documents=0, device="cpu")
    check = diagnosis.named("quantised")
    assert check.state == OK and "rounded when served" in check.text, str(diagnosis)
    assert any("bfloat16" in line and "coarsely" in line for line in check.evidence)


def test_another_target_for_a_draft_of_another_trainer(place, target_of_place, tmp_path):
    """The draft records nothing, so the target of the dataset is compared."""
    draft = published(place / "run" / "best", tmp_path)
    fitted.fine_tune(target_of_place)
    alone = doctor(draft, target=target_of_place, documents=0, device="cpu")
    assert alone.named("target").state == UNDECIDED and "--data" in alone.named("target").text
    options = {"target": target_of_place, "device": "cpu"}
    diagnosis = doctor(draft, data=place / "data", **options)
    assert "target" in found(diagnosis), str(diagnosis)
    assert "the dataset was captured with" in diagnosis.named("target").text


def test_a_draft_for_another_size_of_target(sound_dir, place):
    diagnosis = doctor(sound_dir("eagle3"), data=place / "data", device="cpu")
    assert "target" in found(diagnosis)
    assert "vocabulary" in diagnosis.named("target").text


# --- the dataset ---


def test_answers_that_are_not_the_targets(place):
    """The target is random, so the answers of the corpus are not its own."""
    diagnosis = doctor(place / "run", data=place / "data", device="cpu")
    assert "on-policy" in found(diagnosis), str(diagnosis)


def test_a_damaged_dataset(sound_dir, data, tmp_path):
    shutil.copytree(data, tmp_path / "damaged")
    shard = next((tmp_path / "damaged" / "shards").iterdir())
    flip(shard, shard.stat().st_size // 2)
    diagnosis = examine(sound_dir("eagle3"), data=tmp_path / "damaged")
    assert "data" in found(diagnosis)
    check = diagnosis.named("data")
    assert any(shard.name in line for line in (check.text, *check.evidence))


# --- the command ---


def test_the_command_prints_findings_first_and_exits_with_1(sound, data, tmp_path, capsys):
    draft = planted(sound("eagle3"), tmp_path, lambda d: d.update_config(norm_output=True))
    report = tmp_path / "report.json"
    arguments = ["doctor", "--draft", str(draft), "--data", str(data), "--device", "cpu"]
    assert main([*arguments, "--documents", "16", "--json", str(report)]) == 1
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[1].startswith("FINDING        carried-norm: ")
    assert any(line.lstrip().startswith("evidence: acceptance length") for line in lines)
    assert any(line.lstrip().startswith("fix: ") for line in lines)
    assert "next:" not in printed.err, "the finding says what to do; it is not to be exported"
    raw = json.loads(report.read_text())
    assert raw["findings"] == ["carried-norm"] and raw["tried"]
