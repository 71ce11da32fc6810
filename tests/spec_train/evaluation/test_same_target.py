"""eval names each fact in which the target or its prompts are not those of the draft's training."""

import shutil
from pathlib import Path

from tests.draft_tools import read_json, reseal, write_json
from tests.spec_train import fitted
from tests.spec_train.evaluation.tools import run_eval
from tests.spec_train.fitted import (
    ROWS,
    fine_tune,
    switch_yarn_on,
)

place, target = fitted.place, fitted.target


def evaluated(place: Path, target: Path | str, **changes) -> dict:
    options = {"max_new_tokens": 2, "device": "cpu", "draft": str(place / "run")} | changes
    options = {"prompts": str(place / "p.jsonl")} | options
    return run_eval(dict(target=str(target), **options))


def warned(place: Path, target: Path, **changes) -> list[str]:
    return evaluated(place, target, **changes)["warnings"]


def test_the_right_kwargs_of_rows_are_used_and_no_false_warning(place, target):
    report = evaluated(place, target)
    assert (report["chat_template_kwargs"], report["warnings"]) == (ROWS, [])
    assert report["not_compared"] == []
    assert warned(place, target, chat_template_kwargs=ROWS) == []


def test_other_kwargs_than_those_of_the_rows_are_named(place, target):
    (line,) = warned(place, target, chat_template_kwargs={})
    assert line.startswith(
        'chat_template_kwargs: the draft was fitted with {"enable_thinking": false}, this target '
        "has {}: prompts are rendered in another way"
    )


def test_a_fine_tuned_target_is_named(place, target):
    fine_tune(target)
    (line,) = warned(place, target)
    assert line.startswith("weights_hash: the draft was fitted with sha256:")
    assert "fine-tuned" in line


def test_yarn_switched_on_is_named(place, target):
    switch_yarn_on(target)
    lines = warned(place, target)
    assert (
        "rope_type: the draft was fitted with 'default', this target has 'yarn'; expect lower "
        "acceptance" in lines
    )
    assert [line.split(":")[0] for line in lines] == [
        "factor", "original_max_position_embeddings", "rope_type",
    ]  # fmt: skip


def test_a_draft_with_fewer_facts_says_what_was_not_compared(place, target, tmp_path, caplog):
    shutil.copytree(place / "run" / "best", tmp_path / "old")
    raw = read_json(tmp_path / "old")
    names = ("weights_hash", "chat_template_hash", "head")
    origin = {name: raw["spec_train"]["origin"][name] for name in names}
    raw["spec_train"]["origin"] = origin | {"chat_template_kwargs": ROWS}
    write_json(tmp_path / "old", raw)
    reseal(tmp_path / "old")
    with caplog.at_level("INFO"):
        report = evaluated(place, target, draft=str(tmp_path / "old"))
    assert report["warnings"] == []
    assert "rope.rope_type" in report["not_compared"]
    assert "not compared with the draft's training: architectures, config, " in caplog.text
