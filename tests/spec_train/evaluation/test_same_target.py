"""eval names each fact in which the target or its prompts are not those of the draft's training."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from spec_data.shards.errors import MissingError, TargetError
from spec_train.draft_options import Eagle3Options
from spec_train.evaluation.report import run_eval
from spec_train.options import EvalConfig, FitConfig
from spec_train.training.setup import fit
from tests.draft_tools import read_json, unseal, write_json
from tests.spec_data.runs import run, save_target, write_corpus

ROWS = {"enable_thinking": False}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A target, data of it whose rows have template kwargs of their own, and a draft."""
    folder = tmp_path_factory.mktemp("same")
    save_target(folder / "target", template="qwen3")
    lines = write_corpus(folder / "c.jsonl", 8).read_text().splitlines()
    rows = [json.loads(line) | {"chat_template_kwargs": ROWS} for line in lines]
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "p.jsonl").write_text('{"prompt": "question 1"}\n')
    run(folder / "target", folder / "c.jsonl", folder / "data", layers="0,2")
    config = FitConfig(
        data=str(folder / "data"), out=str(folder / "run"), steps=1, seq_len=128, device="cpu"
    )
    fit("eagle3", config, Eagle3Options(ttt_steps=2, draft_vocab_size=100))
    return folder


@pytest.fixture
def target(place, tmp_path) -> Path:
    """A copy of the target, to be changed."""
    shutil.copytree(place / "target", tmp_path / "changed")
    return tmp_path / "changed"


def evaluated(place: Path, target: Path | str, **changes) -> dict:
    options = {"max_new_tokens": 2, "device": "cpu", "draft": str(place / "run")} | changes
    return run_eval(EvalConfig(target=str(target), prompts=str(place / "p.jsonl"), **options))


def warned(place: Path, target: Path, **changes) -> list[str]:
    return evaluated(place, target, **changes)["warnings"]


def scale(file: Path, ending: str, factor: float) -> None:
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(ending):
            tensors[name] = tensors[name] * factor
    save_file(tensors, file, metadata={"format": "pt"})


def test_the_right_kwargs_of_rows_are_used_and_no_false_warning(place, target):
    report = evaluated(place, target)
    assert (report["chat_template_kwargs"], report["warnings"]) == (ROWS, [])
    assert report["not_compared"] == []
    assert warned(place, target, chat_template_kwargs=json.dumps(ROWS)) == []


def test_other_kwargs_than_those_of_the_rows_are_named(place, target):
    (line,) = warned(place, target, chat_template_kwargs="{}")
    assert line.startswith(
        'chat_template_kwargs: the draft was fitted with {"enable_thinking": false}, this target '
        "has {}: prompts are rendered in another way"
    )


def test_a_fine_tuned_target_is_named(place, target):
    scale(target / "model.safetensors", "norm.weight", 1.01)
    (line,) = warned(place, target)
    assert line.startswith("weights_hash: the draft was fitted with sha256:")
    assert "fine-tuned" in line


def test_weights_rounded_to_3_bits_are_named(place, target):
    file = target / "model.safetensors"
    tensors = load_file(file)
    for name, value in tensors.items():
        step = value.abs().amax().clamp_min(1e-9) / 3
        tensors[name] = (value / step).round() * step
    save_file(tensors, file, metadata={"format": "pt"})
    lines = warned(place, target)
    assert any(line.startswith("weights_hash: ") for line in lines)


def test_yarn_switched_on_is_named(place, target):
    file = target / "config.json"
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": rope}))
    lines = warned(place, target)
    assert (
        "rope_type: the draft was fitted with 'default', this target has 'yarn'; expect lower "
        "acceptance" in lines
    )
    assert [line.split(":")[0] for line in lines] == [
        "factor", "original_max_position_embeddings", "rope_type",
    ]  # fmt: skip


def test_another_pre_tokenisation_is_named(place, target):
    file = target / "tokenizer.json"
    changed = {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True,
                                 "trim_offsets": True, "use_regex": False}}  # fmt: skip
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    (line,) = warned(place, target)
    assert line.startswith("tokenizer.pre_tokenizer: the draft was fitted with 'Sequence ")
    assert "text is split into other pieces" in line


def test_a_draft_with_fewer_facts_says_what_was_not_compared(place, target, tmp_path, caplog):
    shutil.copytree(place / "run" / "best", tmp_path / "old")
    raw = read_json(unseal(tmp_path / "old"))
    names = ("weights_hash", "chat_template_hash", "head")
    origin = {name: raw["spec_train"]["origin"][name] for name in names}
    raw["spec_train"]["origin"] = origin | {"chat_template_kwargs": ROWS}
    write_json(tmp_path / "old", raw)
    with caplog.at_level("INFO"):
        report = evaluated(place, target, draft=str(tmp_path / "old"))
    assert report["warnings"] == []
    assert "rope.rope_type" in report["not_compared"]
    assert "not compared with the draft's training: architectures, config fields" in caplog.text


def test_a_target_that_cannot_be_loaded_whole_is_refused_in_words(place, target):
    for name in ("", "/nowhere", "./nowhere"):
        with pytest.raises(MissingError, match="--target"):
            evaluated(place, name)
    file = target / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    with pytest.raises(TargetError, match=r"model\.safetensors: truncated or damaged"):
        evaluated(place, target)
    file.write_bytes(whole)
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lack lm_head\.weight"):
        evaluated(place, target)
