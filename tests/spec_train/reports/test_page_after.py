"""Pages at the end of `fit` and `eval`: what they hold, and that they never lose anything."""

import json
import re
from pathlib import Path

import pytest

import spec_train
from spec_data.shards.errors import RunError
from spec_train.cli import main
from spec_train.evaluation import on_target
from spec_train.reports import run_page
from spec_train.reports.results import evaluations
from spec_train.training import fit as fitting
from tests.spec_train import fitted, flat

place = fitted.place
FIT = {"steps": 2, "seq_len": 128, "device": "cpu", "validation": 0.4, "draft_vocab_size": 100}


@pytest.fixture(scope="module")
def run(place) -> Path:
    """A run that has ended, of the public function."""
    result = flat.fit("eagle3", place / "data", place / "public", ttt_steps=2, **FIT)
    shown = result._repr_html_()
    assert "<svg" in shown and ">Learning</h2>" in shown and "<script" not in shown
    assert [line["split"] for line in result.history].count("train") == len(result.training) > 0
    return place / "public"


def titles(file: Path) -> list[str]:
    return re.findall(r"<h2[^>]*>(.*?)</h2>", file.read_text())


def test_a_page_that_fails_is_a_warning(place, tmp_path, monkeypatch, caplog):
    def broken(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(run_page, "write_page", broken)
    result = flat.fit("eagle3", place / "data", tmp_path / "run", ttt_steps=2, **FIT)
    assert result.finished and (tmp_path / "run" / "best").is_dir()
    text = (
        f"warning[page]: {tmp_path / 'run' / 'report.html'} was not written: OSError: no space left"
    )
    assert text in caplog.text
    found = spec_train.evaluate(tmp_path / "run", data=place / "data", limit=2)
    assert found.acceptance_length is not None and "eval.html was not written" in caplog.text


def test_only_the_first_rank_writes_pages(place, tmp_path, monkeypatch):
    real = fitting.fit

    def as_rank_1(*arguments, **given):
        result = real(*arguments, **given)
        monkeypatch.setenv("RANK", "1")
        return result

    monkeypatch.setattr(fitting, "fit", as_rank_1)
    flat.fit("eagle3", place / "data", tmp_path / "run", ttt_steps=2, **FIT)
    assert not (tmp_path / "run" / "report.html").exists()


def test_fit_and_eval_write_their_pages_into_the_run(run, place, tmp_path, capsys):
    common = ["eval", "--data", str(place / "data"), "--limit", "2", "--device", "cpu"]
    file, result = run / "eval.html", tmp_path / "r.json"
    file.unlink(missing_ok=True)
    assert titles(run / "report.html")[:3] == ["Learning", "Acceptance", "Answers"]
    assert main([*common, "--draft", str(run), "--json", str(result)]) == 0
    assert titles(file)[:2] == ["Answers", "Acceptance"]
    assert titles(spec_train.write_report(result).path) == titles(file)
    written = json.loads(result.read_text())
    assert f"{written['acceptance_length']:.3f}" in capsys.readouterr().out
    file.unlink()
    assert main([*common, "--draft", str(run / "best")]) == 0
    assert not (run / "eval.html").exists() and not list((run / "best").glob("*.html"))


def test_the_page_of_a_run_does_not_lead_with_decoding_that_was_wrong(run, place, monkeypatch):
    def liar(*arguments, **options):
        generation = decode(*arguments, **options)
        generation.tokens[3] += 1
        return generation

    given = dict(target=place / "target", prompts=place / "p.jsonl", max_new_tokens=12)
    decode, before = on_target.decode_speculative, (run / "report.html").read_bytes()
    monkeypatch.setattr(on_target, "decode_speculative", liar)
    with pytest.raises(RunError, match="greedy decoding with the draft differs"):
        spec_train.evaluate(run, device="cpu", **given)
    spec_train.write_report(run)
    assert (run / "report.html").read_bytes() == before


def test_eval_with_a_target_shows_its_responses(run, place):
    found = spec_train.evaluate(
        run, target=place / "target", prompts=place / "p.jsonl", max_new_tokens=12, device="cpu"
    )
    assert "Answers" in titles(run / "eval.html")
    shown = (run / "report.html").read_text()
    assert "acceptance length, real decoding" in shown and "with the draft: " in shown
    assert spec_train.write_report(run).path.read_text() == shown
    assert "<svg" in found._repr_html_() and "Evaluations" in found._repr_html_()
    (one,) = evaluations(found.figures, "eval", "run")
    (sample,) = one.result.samples
    told = [
        token
        for part in sample.parts[1:]
        for token in getattr(part, "emitted", None) or part.tokens
    ]
    assert len(told) == found.decoding.tokens and sample.plain.tokens == told
    assert min(sample.plain.seconds, sample.plain.draft_seconds) > 0
    assert all(one.result.texts[str(token)] for token in told)
