"""Weights in one file, in several with an index, and in pytorch_model.bin, which runs no code."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spec_data.shards.errors import DraftError, MissingError
from spec_train.drafts import load_draft
from spec_train.training.run_directory import resolve_draft_dir
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.published.test_vocabulary_maps import CONFIG


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return tiny.eagle3_tensors() | tiny.maps(tiny.some_ids())


def same(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    assert resolve_draft_dir(folder) == folder
    found = load_draft(folder, tiny.target()).state_dict()
    for name in ("fc.weight", "lm_head.weight", "midlayer.mlp.up_proj.weight"):
        assert torch.equal(found[name], tensors[name])


def test_a_bin_file_is_read_without_running_code(tmp_path, tensors):
    same(tiny.write(tmp_path / "draft", CONFIG, tensors, "pytorch_model.bin"), tensors)


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_several_files_with_an_index_are_read(tmp_path, tensors, kind):
    folder = tiny.write(tmp_path / "draft", CONFIG, {})
    (folder / "model.safetensors").unlink()
    stem, suffix = kind.rsplit(".", 1)
    names, parts = list(tensors), {}
    for i in range(2):
        file = f"{stem}-0000{i + 1}-of-00002.{suffix}"
        some = {name: tensors[name] for name in names[i::2]}
        if suffix == "bin":
            torch.save(some, folder / file)
        else:
            save_file(some, folder / file)
        parts |= dict.fromkeys(some, file)
    index = folder / f"{kind}.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    same(folder, tensors)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../other.safetensors"}}))
    with pytest.raises(DraftError, match=r"index\.json: not an index of weights"):
        load_draft(folder)
    index.write_text(json.dumps({"weight_map": {"fc.weight": f"absent.{suffix}"}}))
    with pytest.raises(MissingError, match="absent"):
        load_draft(folder)


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


def test_a_bin_file_with_code_is_refused_and_the_code_does_not_run(tmp_path, tensors, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tiny.write(tmp_path / "draft", CONFIG, {}, "pytorch_model.bin")
    torch.save(tensors | {"extra": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(DraftError, match=r"pytorch_model\.bin: damaged, or it holds more than"):
        load_draft(folder)
    assert not (tmp_path / "was-run").exists()


def test_a_damaged_bin_file_is_named(tmp_path, tensors):
    folder = tiny.write(tmp_path / "draft", CONFIG, tensors, "pytorch_model.bin")
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DraftError, match=r"pytorch_model\.bin: damaged"):
        load_draft(folder)
    torch.save([1, 2], path)
    with pytest.raises(DraftError, match="expected tensors by name"):
        load_draft(folder)


def test_safetensors_have_priority(tmp_path, tensors):
    folder = tiny.write(tmp_path / "draft", CONFIG, tensors)
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    same(folder, tensors)


WRAPPERS = ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.model."]
WRAPPERS += ["draft_model.", "model.draft_model.", "base_model.model.", "_fsdp_wrapped_module."]
WRAPPERS += ["net.", "state_dict.", "_forward_module.model."]


@pytest.mark.parametrize("prefix", WRAPPERS)
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_a_draft_inside_other_modules_is_read(tmp_path, tensors, prefix, kind, caplog):
    """As DDP, FSDP, torch.compile, Lightning, peft and trainers' own wrappers save it."""
    caplog.set_level("INFO")
    same(
        tiny.write(tmp_path / "d", CONFIG, {prefix + n: t for n, t in tensors.items()}, kind),
        tensors,
    )
    assert f"saved from a wrapped model: {prefix}" in caplog.text or prefix == "model.model."


def test_parts_of_a_draft_inside_other_modules_are_read(tmp_path, tensors):
    inner = {
        n.replace("midlayer.", "midlayer._checkpoint_wrapped_module."): tensors[n] for n in tensors
    }
    same(tiny.write(tmp_path / "d", CONFIG, inner), tensors)
    some = {f"module.{n}" if "midlayer" in n else n: t for n, t in tensors.items()}
    same(tiny.write(tmp_path / "e", CONFIG, some), tensors)
    twice = tensors | {"module.fc.weight": tensors["fc.weight"]}
    with pytest.raises(DraftError, match="two of which have one name inside"):
        load_draft(tiny.write(tmp_path / "f", CONFIG, twice))
    adapter = {f"base_model.model.{n}": t for n, t in tensors.items()}
    name = "base_model.model.midlayer.mlp.up_proj.lora_A.weight"
    with pytest.raises(DraftError, match="LoRA adapters; merge them"):
        load_draft(tiny.write(tmp_path / "g", CONFIG, adapter | {name: torch.ones(2, 16)}))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pard_token": 5, "spd_type": "pard"}, "pard_token: the draft has the form of PARD"),
        ({}, "has no fc.weight, .* It is a whole language model"),
    ],
)
def test_a_whole_language_model_is_no_draft(tmp_path, tensors, keys, said):
    layer = {f"model.{n}": t for n, t in tiny.layer_tensors("layers.0.").items()}
    whole = layer | {"model.embed_tokens.weight": tiny.noise(tiny.V, tiny.H)}
    config = CONFIG | {"architectures": ["LlamaForCausalLM"]} | keys
    with pytest.raises(DraftError, match=said):
        load_draft(tiny.write(tmp_path / "d", config, whole), tiny.target())


def test_weights_in_another_form_are_named(tmp_path, tensors):
    folder = tiny.write(tmp_path / "d", CONFIG, tensors)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(MissingError, match=r"but consolidated\.safetensors, in a form"):
        resolve_draft_dir(folder)
