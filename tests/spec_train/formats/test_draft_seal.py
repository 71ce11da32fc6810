"""A draft directory says what it was when it was written; anything else is refused by name."""

import json
import os
import random
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_train
from spec_data.shards.errors import DraftError, MissingError, SpecDataError
from spec_train.cli import main
from spec_train.drafts import load_draft
from spec_train.formats.draft_files import read_files, write_files
from spec_train.formats.draft_seal import MARK, SEAL
from tests.draft_tools import edited, read_json
from tests.spec_data.shards.integrity_tools import flip
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft
from tests.spec_train.formats import own_draft
from tests.spec_train.formats.tools import export, put, same_draft

dataset, head = any_draft.dataset, any_draft.head
own, target = own_draft.own, own_draft.target

EDITS: list[tuple[str, Any, str]] = [
    ("rope_theta", 5e5, "rope_theta: sealed 10000.0, found 500000.0"),
    ("rope_parameters.rope_theta", 5e5, "rope_parameters.rope_theta: sealed 10000.0, found 5000"),
    ("norm_output", True, "norm_output: sealed false, found true"),
    ("fc_norm", 0, "fc_norm: sealed false, found 0"),
    ("norm_before_residual", True, "norm_before_residual: sealed false, found true"),
    (
        "eagle_aux_hidden_state_layer_ids",
        [2, 3, 4],
        r"layer_ids: sealed \[1, 2, 3\], found \[2, 3, 4\]",
    ),
    ("spec_train.layers", [0, 1, 3], r"layers: sealed \[0, 1, 2\], found \[0, 1, 3\]"),
    ("spec_train.options.ttt_steps", 4, "spec_train.options.ttt_steps: sealed 3, found 4"),
    ("eagle_config", ..., "eagle_config: sealed .*, now missing"),
    ("quantization_config", {"bits": 4}, r'quantization_config: added, \{"bits": 4\}'),
    (f"spec_train.{SEAL}", ..., r"config\.json has no seal, but the draft was written with one"),
    ("spec_train", ..., r"config\.json has no seal"),
    (
        f"spec_train.{SEAL}.config",
        lambda c: c.replace("10000.0", "5.0"),
        "the seal itself is damaged",
    ),
    (f"spec_train.{SEAL}", True, "the seal itself is damaged"),
]


@pytest.mark.parametrize(("key", "value", "message"), EDITS, ids=range(len(EDITS)))
def test_an_edited_config_is_refused_by_field(own, key, value, message):
    with pytest.raises(DraftError, match=message):
        load_draft(edited(own, lambda raw: put(raw, key, value)))


def test_one_bit_of_the_weights_is_refused_and_its_tensor_named(own):
    """In every tensor, and in the header."""
    weights = own / "model.safetensors"
    whole = weights.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    rng = random.Random(0)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        flip(weights, 8 + length + rng.randrange(start, end), rng.randrange(8))
        with pytest.raises(DraftError, match=f"tensor {name} has other values"):
            load_draft(own)
        weights.write_bytes(whole)
    for position in rng.sample(range(8 + length), 60):
        flip(weights, position, rng.randrange(8))
        try:
            load_draft(own)
        except SpecDataError:
            pass
        else:  # in the metadata, which nothing reads while config.json has a seal
            start = whole.index(b"__metadata__")
            assert start <= position < whole.index(b"}", start), position
        weights.write_bytes(whole)
    assert load_draft(own)


def test_every_command_refuses_it(dataset, own, tmp_path, capsys):
    flip(own / "model.safetensors", -5, 3)
    data, out = str(dataset.path), str(tmp_path / "out")
    commands = [
        ["eval", "--draft", str(own), "--data", data],
        ["export", "--draft", str(own), "--format", "vllm", "--out", out],
        ["export", "--draft", str(own)],
        ["fit", "eagle3", "--data", data, "--out", out, "--init-from", str(own), "--seq-len", "64"],
    ]
    for command in commands:
        assert main(command) == 2, command
        error = capsys.readouterr().err
        assert "not as it was sealed" in error and "--accept-edited" in error, command
        assert "Traceback" not in error
    with pytest.raises(DraftError, match="not as it was sealed"):
        spec_train.evaluate(own, data=data)


def test_an_edit_on_purpose_is_accepted_with_a_flag_and_sealed_by_an_export(
    dataset, own, tmp_path, caplog
):
    edited(own, lambda raw: raw.update(max_position_embeddings=128))
    flags = ["--draft", str(own), "--accept-edited"]
    assert main(["eval", *flags, "--data", str(dataset.path), "--limit", "2"]) == 0
    assert "warning[edited]" in caplog.text
    assert "accepted as edited (max_position_embeddings: sealed 512, found 128" in caplog.text
    assert main(["export", *flags, "--format", "hf", "--out", str(tmp_path / "new")]) == 0
    caplog.clear()
    assert load_draft(tmp_path / "new").config.max_position_embeddings == 128
    assert caplog.text == ""
    assert spec_train.load_draft(own, accept_edited=True).config.max_position_embeddings == 128
    out = str(tmp_path / "run")
    small = ["--steps", "0", "--seq-len", "64", "--ttt-steps", "2", "--draft-vocab-size", "40"]
    start = ["fit", "eagle3", "--data", str(dataset.path), "--out", out, "--init-from", str(own)]
    assert main([*start, *small]) == 2
    assert main([*start, *small, "--accept-edited"]) == 0


def test_what_decides_nothing_is_no_damage(own):
    """Other indentation and order of keys, and 10000 for 10000.0."""
    raw = read_json(own)
    swapped = {name: raw[name] for name in reversed(raw)} | {"rope_theta": 10000}
    (own / "config.json").write_text(json.dumps(swapped))
    assert read_files(own).sealed
    weights = own / "model.safetensors"
    save_file(load_file(weights), weights)  # the same tensors without metadata
    assert read_files(own).sealed


def test_swapped_missing_and_added_tensors_and_files_of_two_drafts(dataset, head, own, tmp_path):
    weights = own / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(weights).items()}
    a, b = "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"
    save_file(tensors | {a: tensors[b], b: tensors[a]}, weights)
    with pytest.raises(DraftError, match=rf"{a} has other values.*{b} has other values"):
        load_draft(own)
    save_file(tensors | {"more": torch.zeros(1)}, weights)
    with pytest.raises(DraftError, match="tensor more was added"):
        load_draft(own)
    del tensors[a]
    save_file(tensors, weights)
    with pytest.raises(DraftError, match=f"tensor {a} is missing"):
        load_draft(own)
    other = build_draft("eagle3", dataset, head)
    with torch.no_grad():
        other.fc.weight.add_(1)
    other.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", weights)
    with pytest.raises(DraftError, match=r"tensor fc\.weight has other values"):
        load_draft(own)


def test_a_key_twice_in_one_object_is_refused(own):
    file = own / "config.json"
    file.write_text('{"rope_theta": 5e5,' + file.read_text()[1:])
    with pytest.raises(DraftError, match="twice in one object: rope_theta"):
        load_draft(own)


def test_equal_drafts_have_equal_bytes(own, tmp_path):
    """safetensors writes metadata in random order."""
    files = read_files(own)
    wanted = (own / "model.safetensors").read_bytes()
    for _ in range(8):
        write_files(files, tmp_path / "again")
        assert (tmp_path / "again" / "model.safetensors").read_bytes() == wanted
    header = wanted[8 : 8 + int.from_bytes(wanted[:8], "little")]
    assert json.loads(header)["__metadata__"] == {"format": "pt", **MARK}


def test_another_form_of_the_header_is_left_as_it_is(own, tmp_path, monkeypatch):
    """A future safetensors may write spaces in it; saving a draft must not fail then."""
    headers = []

    def save_spaced(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata)
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        header = raw[8:end].rstrip().replace(b'":', b'": ')
        header += b" " * (-len(header) % 8)
        headers.append(header)
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])

    files = read_files(own)
    monkeypatch.setattr("spec_train.formats.draft_files.save_file", save_spaced)
    write_files(files, tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").read_bytes()[8:].startswith(headers[0])
    assert read_files(tmp_path / "new").sealed
    assert same_draft(own, tmp_path / "new")


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_mode_of_the_umask(own, tmp_path, umask):
    """A container's user could not read exports with mode 0600."""
    before = os.umask(umask)
    try:
        load_draft(own).save_pretrained(tmp_path / "saved")
        folders = [tmp_path / "saved", export(own, "vllm", tmp_path / "out")]
    finally:
        os.umask(before)
    files = [file for folder in folders for file in folder.iterdir()]
    assert len(files) == 5  # the export has a README.md
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask, file


def test_a_run_whose_best_draft_lacks_a_file_does_not_use_another(own, tmp_path):
    for name in ("best", "last"):
        shutil.copytree(own, tmp_path / "run" / name)
    assert spec_train.load_draft(tmp_path / "run")
    (tmp_path / "run" / "best" / "config.json").unlink()
    with pytest.raises(MissingError, match=r"best: config\.json or model\.safetensors is missing"):
        spec_train.load_draft(tmp_path / "run")
