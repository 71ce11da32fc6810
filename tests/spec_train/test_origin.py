"""A draft records its target: data of another target is refused, other prompts cause a warning."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec import structs

from spec_data.shards.errors import DraftError
from spec_data.shards.identity import CONTEXTS
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import load_draft
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.formats.origin import differing_rows, origin_of, require_same_embedding
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.draft_tools import read_json, reseal, write_json
from tests.spec_data.runs import run, save_target, write_corpus
from tests.spec_train.evaluation.tools import run_eval

KWARGS = {"enable_thinking": False}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, a dataset rendered with template kwargs, a run on it by its relative path."""
    folder = tmp_path_factory.mktemp("origin")
    save_target(folder / "target", template="qwen3")
    corpus = write_corpus(folder / "chats.jsonl", rows=12)
    run(
        folder / "target", corpus, folder / "data", layers="0,2",
        chat_template_kwargs=json.dumps(KWARGS),
    )  # fmt: skip
    (folder / "prompts.jsonl").write_text('{"prompt": "question 99"}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = Training(data="data", out="run", steps=1, seq_len=128, device="cpu")
        fit("eagle3", config, Eagle3Options(ttt_steps=2, draft_vocab_size=100))
    return folder


@pytest.mark.parametrize("revision", [None, "0123abcd" * 5])
def test_the_commit_of_a_target_on_the_hub_is_recorded(place, revision):
    manifest = HiddenStatesDataset(place / "data").manifest
    manifest = structs.replace(manifest, target=structs.replace(manifest.target, revision=revision))
    assert origin_of(manifest).get("target_revision") == revision


def decode(place: Path, draft: Path, **changes):
    options = {"max_new_tokens": 4, "device": "cpu"} | changes
    target, prompts = str(place / "target"), str(place / "prompts.jsonl")
    return run_eval(dict(draft=str(draft), target=target, prompts=prompts, **options))


def test_a_draft_names_its_target_and_its_rendering(place):
    manifest = HiddenStatesDataset(place / "data").manifest
    origin = dict(load_draft(place / "run" / "best").config.origin)
    assert sum(origin.pop(CONTEXTS).values()) > 0
    assert origin == manifest.identity | {
        "dataset_fingerprint": manifest.fingerprint,
        "head": {k: v for k, v in structs.asdict(manifest.head).items() if v is not None},
        "target_name": manifest.target.name,
    }
    assert origin["weights_hash"].startswith("sha256:") and origin["tokenizer_hash"]
    assert origin["rope.rope_type"] == "default"
    assert list(origin["template_kwargs_used"]) == ['{"enable_thinking": false}']
    assert json.loads((place / "run" / "fit.json").read_text())["data"] == str(place / "data")


def test_prompts_are_rendered_as_the_data_was_wherever_eval_runs(place, tmp_path, monkeypatch):
    """From another directory, from a copy of the draft alone, and without the data."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "run" / "best", tmp_path / "alone")
    for draft in (place / "run", tmp_path / "alone"):
        report = decode(place, draft)
        assert (report["chat_template_kwargs"], report["warnings"]) == (KWARGS, [])
    template = place / "target" / "chat_template.jinja"
    text = template.read_text()
    template.write_text("Once upon a time " + text)
    try:
        (warning,) = decode(place, tmp_path / "alone")["warnings"]
    finally:
        template.write_text(text)
    assert "chat_template_hash: the draft was fitted with" in warning


def test_eval_on_data_of_another_template_or_other_kwargs_says_so(place, tmp_path):
    shutil.copytree(place / "target", tmp_path / "target")
    template = tmp_path / "target" / "chat_template.jinja"
    template.write_text("Once upon a time " + template.read_text())
    run(tmp_path / "target", place / "chats.jsonl", tmp_path / "other", layers="0,2")
    for data, facts in (
        (place / "data", []),
        (tmp_path / "other", ["chat_template_hash", "chat_template_kwargs"]),
    ):
        report = run_eval(dict(draft=str(place / "run"), data=str(data), device="cpu"))
        assert sorted(line.split(":")[0] for line in report["warnings"]) == facts


def forget_origin(draft: Path) -> None:
    """Remove what a draft records of its target and its prompts."""
    raw = read_json(draft)
    del raw["spec_train"]["origin"]
    write_json(draft, raw)
    reseal(draft)


def test_drafts_without_an_origin_ask_the_data_and_else_say_that_they_do_not_know(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run", symlinks=True)
    forget_origin(tmp_path / "run" / "best")
    report = decode(place, tmp_path / "run")
    assert (report["chat_template_kwargs"], report["warnings"]) == (KWARGS, [])
    file = tmp_path / "run" / "fit.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data": "gone"}))
    report = decode(place, tmp_path / "run")
    assert report["chat_template_kwargs"] == {}
    (warning,) = report["warnings"]
    assert "prompts are rendered without any" in warning
    explicit = decode(place, tmp_path / "run", chat_template_kwargs=KWARGS)
    assert explicit["warnings"] == []


def test_rounding_is_no_difference_but_another_row_is():
    rows = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        assert differing_rows(rows.to(dtype), rows) == differing_rows(rows, rows.to(dtype)) == 0
    changed = rows.clone()
    changed[12_345, 2] *= 1.001
    assert differing_rows(changed, rows) == differing_rows(rows, changed) == 1 / 20_000
    changed[7] = torch.nan
    assert differing_rows(changed, rows) == 2 / 20_000
    assert differing_rows(changed, changed.clone()) == 0  # such a row is in the target itself
    with pytest.raises(DraftError, match=r"mine: a draft of another target.*theirs \(0\.01%"):
        require_same_embedding(changed, rows, "mine", "theirs")
    with pytest.raises(DraftError, match=r"100\.00%"):
        require_same_embedding(rows[:9], rows, "mine", "theirs")
