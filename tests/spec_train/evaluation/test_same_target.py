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
from tests.spec_train.fitted import ROWS, edit, fine_tune, switch_yarn_on

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
        'chat_template_kwargs: the draft was fitted with {"enable_thinking": false}, these prompts '
        "have {}: 100 % of the prompts are rendered in another way"
    )


@pytest.mark.parametrize(
    ("silent", "thinking", "warns"),
    [(98, 2, True), (55, 45, True), (2, 98, False), (0, 100, False)],
)
def test_prompts_are_compared_with_the_share_of_documents_like_them(
    place, target, tmp_path, caplog, silent, thinking, warns
):
    """A draft of 2 % documents with thinking is not one that was trained with thinking."""
    shutil.copytree(place / "run" / "best", tmp_path / "mixed")
    raw = read_json(tmp_path / "mixed")
    counts = {'{"enable_thinking": false}': silent, '{"enable_thinking": true}': thinking}
    raw["spec_train"]["origin"]["template_kwargs_used"] = {k: n for k, n in counts.items() if n}
    raw["spec_train"]["origin"].pop("template_kwargs_tokens")
    write_json(tmp_path / "mixed", raw)
    reseal(tmp_path / "mixed")
    thinks = {"enable_thinking": True}
    lines = warned(place, target, draft=str(tmp_path / "mixed"), chat_template_kwargs=thinks)
    assert len(lines) == warns == caplog.text.count("warning[eval]")
    assert all(f"{silent} % of the prompts are rendered in another way" in x for x in lines)


def test_prompts_without_the_system_message_of_every_document_are_named(place, target, tmp_path):
    shutil.copytree(place / "run" / "best", tmp_path / "pirate")
    raw = read_json(tmp_path / "pirate")
    raw["spec_train"]["origin"]["system_messages"] = {"You are a pirate.": 8}
    write_json(tmp_path / "pirate", raw)
    reseal(tmp_path / "pirate")
    (line,) = warned(place, target, draft=str(tmp_path / "pirate"))
    assert "system message: the draft was fitted with 'You are a pirate.', these prompts" in line


def test_sampling_that_engines_apply_and_an_end_that_stops_nothing_are_named(place, target, caplog):
    edit(target / "generation_config.json", repetition_penalty=1.05, top_k=20, temperature=0.7)
    (line,) = warned(place, target)
    assert f"warning[eval]: {line}" in caplog.text
    assert "sets temperature 0.7, top_k 20, repetition_penalty 1.05, which engines apply" in line
    assert "decoded greedily without them" in line and "--generation-config vllm" in line
    assert "changes the target's distribution" in line
    other = {"eos_token_id": 1, "repetition_penalty": 1.0, "top_k": None, "temperature": 1.0}
    edit(target / "generation_config.json", **other)
    edit(target / "tokenizer_config.json", eos_token="<|endoftext|>")
    report = evaluated(place, target, temperature=0.5)
    (line,) = [line for line in report["warnings"] if "generation does not stop" in line]
    assert "ends an answer with <|im_end|> (" in line and "<|endoftext|>" in line


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
