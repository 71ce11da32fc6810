"""eval names each fact in which the target is not that of the training, and uses its RoPE."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from spec_train import export
from spec_train.evaluation import evaluate
from tests.draft_tools import read_json, reseal, write_json
from tests.spec_data.runs import run, save_target, write_corpus
from tests.spec_train import fitted, flat
from tests.spec_train.evaluation.tools import run_eval
from tests.spec_train.fitted import ROWS, fine_tune, switch_yarn_on

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


LIMIT = 128


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A longrope target with a corpus of short documents."""
    folder = tmp_path_factory.mktemp("longrope")
    path = save_target(folder / "target", "phi3-longrope")
    config = json.loads((path / "config.json").read_text())
    config["original_max_position_embeddings"] = LIMIT
    config["rope_parameters"]["original_max_position_embeddings"] = LIMIT
    (path / "config.json").write_text(json.dumps(config))
    return path, write_corpus(folder / "chats.jsonl", 12)


@pytest.mark.parametrize("factors", ["short", "long"])
def test_eval_decodes_with_the_factors_of_the_capture(
    made: tuple[Path, Path], factors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, corpus = made
    run(target, corpus, tmp_path / "data", rope_factors=factors)
    flat.fit("eagle3", tmp_path / "data", tmp_path / "run", steps=1, ttt_steps=2, device="cpu")
    origin = json.loads((tmp_path / "run/last/config.json").read_text())["spec_train"]["origin"]
    assert origin["rope_factors"] == factors
    loaded = []
    load = evaluate.load_target

    def loading(*arguments: object) -> object:
        loaded.append(load(*arguments))  # type: ignore[arg-type]
        return loaded[-1]

    monkeypatch.setattr(evaluate, "load_target", loading)
    given = dict(
        draft=str(tmp_path / "run"),
        target=str(target),
        prompts=str(corpus),
        limit=1,
        max_new_tokens=4,
        device="cpu",
    )
    found = run_eval(given)
    assert not any("rope_factors" in line for line in found["warnings"])
    (model,) = loaded
    rope = model.config.rope_parameters
    rotary = model.model.rotary_emb
    dim = rotary.inv_freq.shape[0] * 2
    theta = rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    wanted = 1 / (torch.tensor(rope[f"{factors}_factor"]) * theta)
    assert torch.allclose(rotary.inv_freq.float(), wanted, rtol=1e-5)
    lines = [f.text for f in export(tmp_path / "run", target=target).of("spec-train")]
    named = any("short factors of longrope" in line for line in lines)
    assert named == (factors == "short")
