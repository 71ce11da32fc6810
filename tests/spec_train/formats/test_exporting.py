"""The export command: what it refuses, what it reports, what it writes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_train
from spec_data.shards.errors import ConfigError, DraftError, MissingError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.cli import main
from spec_train.drafts import load_draft
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.evaluation import exporting as export_module
from spec_train.losses.head import TargetHead
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.draft_tools import reseal
from tests.factory import tiny_llama
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft
from tests.spec_train.formats import own_draft
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.tools import export, same_draft

dataset, head = any_draft.dataset, any_draft.head
own, target = own_draft.own, own_draft.target


def findings(folder: Path, **options: Any) -> dict[str, list[tuple[str, str]]]:
    """Level and text of every finding, by engine."""
    found = spec_train.export(draft=str(folder), **options).findings
    return {engine: [(f.level, f.text) for f in some] for engine, some in found.items()}


def edit(folder: Path, **changes: Any) -> Path:
    """Change fields of a config.json, among them those of its own section, and seal it again."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["spec_train"] |= changes.pop("spec_train", {})
    path.write_text(json.dumps(raw | changes))
    return reseal(folder)


def test_a_plain_draft_is_fine_everywhere_but_in_deepspec(own, target):
    found = findings(own, target=str(target))
    for engine in ("vllm", "sglang", "llama.cpp", "speculators"):
        assert found[engine] == [("ok", "loads and computes what was trained")]
    (level, text), *_ = found["vllm-cpu"]
    assert level == "refuse" and text.startswith("head_dim 8;")
    assert found["deepspec"][0][0] == "refuse"


def test_the_targets_last_layer_is_refused(dataset, head, tmp_path, target):
    """Layer 3 is the last of 4; the dataset cannot train such a draft, so its config is edited."""
    draft = build_draft("eagle3", dataset, head)
    draft.update_config(layers=(0, 1, 3))
    draft.save_pretrained(tmp_path / "own")
    found = findings(tmp_path / "own", target=str(target))
    for engine, expected in (("vllm", "refuse"), ("llama.cpp", "refuse"), ("sglang", "warn")):
        assert any(level == expected and "last layer" in text for level, text in found[engine])
    with pytest.raises(DraftError, match=r"exported as vllm.*\n.*vLLM 0\.33\.0: the target's last"):
        export(tmp_path / "own", "vllm", tmp_path / "out", target)
    draft.update_config(layers=(0, 1, 4))
    draft.save_pretrained(tmp_path / "beyond")
    found = findings(tmp_path / "beyond", target=str(target))
    assert any("a target with 4 decoder blocks" in text for _, text in found["spec-train"])
    unknown = findings(edit(tmp_path / "beyond", spec_train={"origin": None}))["spec-train"]
    assert any(level == "warn" and "pass --target" in text for level, text in unknown)


def change_tensor(own: Path, name: str, change: Any) -> None:
    """Replace a tensor by a function of it, and seal the draft again."""
    tensors = load_file(own / "model.safetensors")
    save_file(tensors | {name: change(tensors[name])}, own / "model.safetensors")
    reseal(own)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.index_fill(0, torch.tensor(3), 1e-6),
        lambda value: value.bfloat16().float(),
    ],
    ids=["a row", "rounded"],
)
def test_the_embedding_must_be_the_targets_bit_for_bit(own, target, change):
    change_tensor(own, "embed_tokens.weight", change)
    with pytest.raises(DraftError, match="embed_tokens is not the target's"):
        export(own, "vllm", own.parent / "out", target)


@pytest.mark.parametrize(
    ("own", "targets", "said"),
    [
        (torch.bfloat16, torch.float32, "rounded as torch.bfloat16 instead of torch.float32"),
        (torch.float32, torch.bfloat16, "stored as torch.float32 instead of torch.bfloat16"),
    ],
)
def test_another_type_of_the_embedding_is_said(dataset, tmp_path, target, own, targets, said):
    head = TargetHead.from_dataset(dataset.path)
    other = shutil.copytree(target, tmp_path / "target")
    file = other / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "embed_tokens" in name)
    draft = build_draft("eagle3", dataset, head)
    if targets == torch.bfloat16:  # a draft of such a target has values that it can hold
        rounded = tensors[name].to(targets)
        save_file(tensors | {name: rounded}, file)
        with torch.no_grad():
            draft.embed_tokens.weight.copy_(rounded.float())
    draft.save_pretrained(tmp_path / "draft", own)
    found = findings(tmp_path / "draft", target=str(other))["spec-train"]
    assert any(level == "warn" and said in text for level, text in found), found


def test_weights_that_are_not_finite_are_refused(own):
    change_tensor(own, "norm.weight", lambda value: value * torch.nan)
    with pytest.raises(DraftError, match=r"not finite: norm\.weight"):
        export(own, "hf", own.parent / "out")


def test_a_shorter_length_than_the_targets_is_said(own, target):
    edit(own, max_position_embeddings=128)
    found = findings(own, target=str(target))["spec-train"]
    assert any(
        level == "warn" and "128 is less than the target's 512" in text for level, text in found
    )


def test_nothing_is_overwritten_and_nothing_half_written_stays(own, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (own / "optimizer.safetensors").write_bytes(b"state")
    assert same_draft(export(own, "vllm", out), own)  # an empty directory is as good as none
    assert {p.name for p in out.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    with pytest.raises(ConfigError, match="exists already"):
        export(own, "vllm", out)
    monkeypatch.setattr(export_module, "_same", lambda a, b: False)
    with pytest.raises(Exception, match="reads back as another draft"):
        export(own, "vllm", tmp_path / "second")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "own"]


def test_a_place_that_no_directory_can_take_is_refused(own, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty")
    for out in (".", "../link"):
        with pytest.raises(ConfigError, match="exists already; pass a new directory"):
            spec_train.export(draft=str(own), format="hf", out=out)
        with pytest.raises(ConfigError, match="exists already; pass a new directory"):
            spec_train.vectors(out=out)


def test_speculators_needs_a_name_for_the_target(own, tmp_path, caplog):
    out = export(own, "speculators", tmp_path / "named")
    name = json.loads((own / "config.json").read_text())["spec_train"]["origin"]["target_name"]
    written = json.loads((out / "config.json").read_text())["speculators_config"]
    assert written["verifier"]["name_or_path"] == name
    assert f"warning[target-name]: the target is named {name}" in caplog.text
    edit(own, spec_train={"origin": {}})
    with pytest.raises(ConfigError, match="pass --target"):
        export(own, "speculators", tmp_path / "out")
    for name in ("/nowhere/at/all", "targt"):
        with pytest.raises(MissingError, match="no such directory"):
            export(own, "speculators", tmp_path / "out", name)


def test_the_command_line(own, tmp_path, target, capsys):
    common = ["export", "--draft", str(own), "--target", str(target)]
    assert main(common) == 0
    printed = capsys.readouterr().out
    for engine in ("vLLM 0.33.0", "SGLang 0.5.23", "llama.cpp 0.5.0", "speculators 0.9.0"):
        assert engine in printed
    assert main([*common, "--format", "deepspec"]) == 2
    assert main([*common, "--format", "vllm"]) == 0
    tiny_llama(hidden=64).save_pretrained(tmp_path / "wide")
    assert not spec_train.export(draft=str(own), target=str(tmp_path / "wide")).next_command
    assert main([*common, "--format", "vllm", "--out", str(tmp_path / "out")]) == 0
    assert same_draft(own, tmp_path / "out")
    assert main([*common, "--out", str(tmp_path / "more")]) == 2
    assert not (tmp_path / "more").exists()


def test_the_next_command_writes_beside_a_run_from_anywhere(own, tmp_path, monkeypatch):
    run = tmp_path / "a" / "run"
    shutil.copytree(own, run / "best")
    (run / "fit.json").write_text("{}")
    for here, draft, out in (
        (run.parent, "run/best", "run-vllm"),
        (run, "best", "../run-vllm"),
        (run / "best", "../best", "../../run-vllm"),
        (run / "best", ".", "../../run-vllm"),
        (run.parent, str(run / "best"), f"{run}-vllm"),
    ):
        monkeypatch.chdir(here)
        words = spec_train.export(draft=draft).next_command
        assert words[words.index("--out") + 1] == out, draft
    tensors = load_file(own / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"] * 2
    save_file(tensors, run / "best" / "model.safetensors", metadata={"format": "pt"})
    edited = spec_train.export(draft=str(run), accept_edited=True)
    assert edited.next_command[-1] == "--accept-edited"


def test_a_best_draft_that_is_older_than_the_last_one_is_said(own, tmp_path, caplog):
    """And how to export that one; nothing is said of a run whose best draft is its last."""
    run = tmp_path / "run"
    for name, step in (("best", 5), ("last", 9)):
        shutil.copytree(own, run / name)
        (run / name / "validation.json").write_text(json.dumps({"step": step}))
    (run / "fit.json").write_text("{}")
    with caplog.at_level("INFO"):
        spec_train.export(draft=str(run))
    said = "is of step 5, and `last` of step 9: no later validation was better, or there was none"
    assert said in caplog.text and f"--draft {run / 'last'}" in caplog.text
    caplog.clear()
    spec_train.export(draft=str(run / "last"))
    (run / "last" / "validation.json").write_text(json.dumps({"step": 5}))
    spec_train.export(draft=str(run))
    assert "no later validation" not in caplog.text


def fitted(dataset: HiddenStatesDataset, out: Path, start: Path, **changes: Any) -> Path:
    place = {"data": str(dataset.path), "out": str(out), "init_from": str(start)}
    config = Training(**place, steps=0, seq_len=64, device="cpu")
    fit("eagle3", config, Eagle3Options(**{"ttt_steps": 2, "draft_vocab_size": 40} | changes))
    return out


def test_fit_starts_from_a_published_draft(dataset, own, tmp_path):
    """No section of ours, no embedding, no token ids, a short length: the dataset supplies them."""
    raw = json.loads((own / "config.json").read_text())
    for name in ("spec_train", "dtype", "torch_dtype", "rope_parameters", "head_dim"):
        del raw[name]
    raw = {k: v for k, v in raw.items() if not k.endswith("_token_id")}
    tensors = load_file(own / "model.safetensors")
    embedding = tensors.pop("embed_tokens.weight")
    start = tiny.write(tmp_path / "theirs", raw | {"max_position_embeddings": 64}, tensors)
    after = load_draft(fitted(dataset, tmp_path / "run", start) / "last")
    assert after.config.max_position_embeddings == 512 and after.config.layers == (0, 1, 2)
    assert torch.equal(after.embed_tokens.weight, embedding)
    assert torch.equal(after.fc.weight, tensors["fc.weight"])
    with pytest.raises(DraftError, match="another shape or target"):
        fitted(dataset, tmp_path / "other", start, layers="0,2")


def test_a_target_given_as_a_draft_is_called_a_target(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(DraftError, match="Qwen3ForCausalLM is a target, and no draft"):
        load_draft(tmp_path)
