"""eval names each fact in which the target or its prompts are not those of the draft's training."""

import json
import shutil
from pathlib import Path

from spec_train.evaluation.same_target import system_warnings
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


def test_prompts_with_system_messages_that_the_training_data_lacks_are_named():
    ask, told = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    few = {"system_messages": {"with": 1, "without": 4}}
    (line,) = system_warnings(few, [[told, ask]] * 7)
    assert line.startswith("100% of the prompts and 20% of the conversations of the training data")
    (line,) = system_warnings({"system_messages": {"with": 4, "without": 1}}, [[ask]])
    assert line.startswith("0% of the prompts and 80%")
    assert system_warnings(few, [[ask]] * 7) == system_warnings({}, [[told, ask]]) == []


def test_the_share_of_system_messages_reaches_eval(place, target, tmp_path):
    messages = [{"role": role, "content": "w9"} for role in ("system", "user")]
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": messages}))
    lines = warned(place, target, prompts=str(tmp_path / "p.jsonl"))
    assert any(line.startswith("100% of the prompts and 0% of the conv") for line in lines)


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
    assert "not compared with the draft's training: architectures, config fields" in caplog.text
