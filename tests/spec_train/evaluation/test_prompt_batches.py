"""`spec-train eval --batch-prompts`: the figures of prompts decoded one by one."""

import json
from pathlib import Path
from typing import Any

import pytest

from spec_data.shards.errors import RunError
from spec_train.evaluation import paired_decoding, prompt_batches
from tests.spec_train.evaluation import tools
from tests.spec_train.evaluation.tools import VOCAB, config_of, run_eval

target, prompts, trained, workplace = tools.target, tools.prompts, tools.trained, tools.workplace

TIMES = (
    "tokens_per_second",
    "plain_tokens_per_second",
    "speedup",
    "timed_pairs",
    "speed",
    "modelled",
)
TIMES += ("sweep",)


@pytest.fixture(autouse=True)
def pairs(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paired_decoding, "TIMED_PAIRS", 2)


def counted(report: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in report.items() if k not in (*TIMES, "batch_prompts", "options")}


@pytest.fixture
def mixed(workplace: Path, tmp_path: Path) -> Path:
    """Prompts of several lengths, one that fills the context, and chats of up to three turns."""
    rows = [json.loads(line) for line in (workplace / "prompts.jsonl").read_text().splitlines()]
    rows.insert(4, {"prompt": "w9 " * 600})
    rows.insert(5, {"turns": ["w9 w10", "w11", "w12 w13"]})
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_every_figure_is_that_of_prompts_one_by_one(workplace, mixed, tmp_path, monkeypatch):
    reports, saved = [], []
    for width, cache in ((1, "a"), (3, "b"), (3, "a")):
        monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / cache))
        own = tmp_path / f"{len(saved)}.jsonl"
        config = config_of(
            workplace,
            prompts=str(mixed),
            batch_prompts=width,
            save_responses=str(own),
            max_new_tokens=20,
        )
        reports.append(run_eval(config))
        saved.append(own.read_text())
    alone, batched, again = reports
    assert (alone["batch_prompts"], batched["batch_prompts"]) == (1, 3)
    assert alone["responses"] == 11 and len(alone["too_long"]) == 1
    assert counted(batched) == counted(alone) and saved[0] == saved[1] == saved[2]
    lines = alone["per_prompt"]  # several turns of a chat are one prompt
    assert 1 < len(lines) < alone["responses"]
    for name in ("rounds", "emitted"):
        assert sum(line[name] for line in lines) == alone[name]
    low, high = alone["interval"]
    assert low < alone["acceptance_length"] < high
    # what one by one has kept is what batches compare with
    assert again["plain_responses_kept"] == 9 and batched["plain_responses_kept"] == 2
    assert again["identical"] == alone["identical"] == 11
    assert batched["timed_pairs"] == 2


def test_samples_are_those_of_prompts_one_by_one(workplace, tmp_path, caplog):
    one_turn = tmp_path / "p.jsonl"
    rows = (workplace / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    one_turn.write_text("\n".join(rows[:6]) + "\n", encoding="utf-8")
    found = [
        run_eval(config_of(workplace, prompts=str(one_turn), batch_prompts=n, temperature=1.0))
        for n in (1, 3)
    ]
    assert found[1]["batch_prompts"] == 3 and counted(found[0]) == counted(found[1])
    caplog.clear()
    report = run_eval(config_of(workplace, batch_prompts=3, temperature=1.0))
    assert report["batch_prompts"] == 1
    assert "one by one: the samples of chats with several turns" in caplog.text


def test_a_wrong_token_of_a_batch_fails_the_run(workplace, monkeypatch):
    honest = prompt_batches.decode_batch

    def liar(*arguments: Any, **options: Any) -> Any:
        drafting = arguments[3] if len(arguments) > 3 else None
        if drafting is None:
            return honest(*arguments, **options)
        model, requests, width, _, done = arguments

        def changed(number: int, generation: Any) -> None:
            generation.tokens[1] = (generation.tokens[1] + 1) % VOCAB
            done(number, generation)

        return honest(model, requests, width, drafting, changed)

    monkeypatch.setattr(prompt_batches, "decode_batch", liar)
    with pytest.raises(RunError, match="3 of 5 responses"):
        run_eval(config_of(workplace, limit=5, batch_prompts=2))


def test_the_width_that_is_chosen(workplace, monkeypatch, caplog):
    """8 in float32, 1 in half precision and for trees; 1 for a target that cannot share."""
    monkeypatch.setattr(paired_decoding, "TIMED_PAIRS", 1)
    assert run_eval(config_of(workplace, limit=2))["batch_prompts"] == 8
    assert run_eval(config_of(workplace, limit=2, dtype="bf16"))["batch_prompts"] == 1
    trees = config_of(workplace, limit=2, tree_tokens=6)
    assert run_eval(trees)["batch_prompts"] == 1
    monkeypatch.setattr(prompt_batches, "why_alone", lambda model, longest: "it is strange")
    assert run_eval(config_of(workplace, limit=2, batch_prompts=2))["batch_prompts"] == 1
    assert "prompts are decoded one by one: it is strange" in caplog.text
