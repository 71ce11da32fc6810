"""Pages at the end of `fit` and `eval`: what they hold, and that they never lose anything."""

import json
import shutil
from pathlib import Path

import pytest

import spec_train
from spec_data.pages.html_page import read_page_data
from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.cli import main
from spec_train.evaluation.on_dataset import _some_of
from spec_train.reports import page_after
from spec_train.reports.page_after import page_of
from tests.spec_train import fitted

place = fitted.place
FIT = {"steps": 2, "seq_len": 128, "device": "cpu", "validation": 0.4, "draft_vocab_size": 100}


@pytest.fixture(scope="module")
def run(place) -> Path:
    """A run that has ended, of the public function."""
    spec_train.fit("eagle3", place / "data", place / "public", ttt_steps=2, **FIT)
    return place / "public"


def titles(file: Path) -> list[str]:
    return [section["title"] for section in read_page_data(file)["sections"]]


def test_fit_leaves_a_page_with_its_best_draft_on_held_out_documents(run, place):
    page = run / "report.html"
    assert {"Overview", "Learning", "Depth", "Acceptance", "Drafted tokens"} <= set(titles(page))
    stored = json.loads((run / "acceptance.json").read_text())
    (figures,) = stored["data"]
    # every held-out document was small enough: the figures are those of an evaluation
    whole = spec_train.evaluate(run, data=place / "data", report="none", walk_only=True)
    assert figures == whole.figures["data"]
    assert figures["documents"] > 0 and figures["split"] == "validation"
    assert figures["samples"] and set(figures["texts"])


def test_the_sample_is_made_again_only_for_another_draft(run, monkeypatch, caplog):
    monkeypatch.setattr(page_after, "evaluate_data", lambda *a, **k: pytest.fail("walked again"))
    (run / "report.html").unlink()
    data = json.loads((run / "fit.json").read_text())["data"]
    spec_train.fit("eagle3", data, run, ttt_steps=2, **FIT)
    assert (run / "report.html").is_file() and "warning" not in caplog.text
    edited = json.loads((run / "acceptance.json").read_text())
    kept = json.dumps(edited)
    (run / "acceptance.json").write_text(json.dumps(edited | {"best": {"step": 9}}))
    calls = []
    monkeypatch.setattr(page_after, "evaluate_data", lambda *a, **k: calls.append(k) or {})
    spec_train.fit("eagle3", data, run, ttt_steps=2, **FIT)
    assert len(calls) == 1
    (run / "acceptance.json").write_text(kept)


def test_a_page_that_fails_is_a_warning(place, tmp_path, monkeypatch, caplog):
    def broken(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(page_after, "evaluate_data", broken)
    monkeypatch.setattr(page_after, "write_report", broken)
    monkeypatch.setattr(page_after, "write_page", broken)
    result = spec_train.fit("eagle3", place / "data", tmp_path / "run", ttt_steps=2, **FIT)
    assert result.finished and (tmp_path / "run" / "best").is_dir()
    for name in ("acceptance.json", "report.html"):
        text = f"warning: {tmp_path / 'run' / name} was not written: OSError: no space left"
        assert text in caplog.text
    found = spec_train.evaluate(tmp_path / "run", data=place / "data", limit=2)
    assert found.acceptance_length is not None and "eval.html was not written" in caplog.text


def test_data_that_are_gone_cost_the_sample_alone(place, tmp_path, monkeypatch, caplog):
    shutil.copytree(place / "data", tmp_path / "data")
    real = page_after.setup.fit

    def and_delete(*arguments):
        result = real(*arguments)
        shutil.rmtree(tmp_path / "data")
        return result

    monkeypatch.setattr(page_after.setup, "fit", and_delete)
    with caplog.at_level("INFO", "spec_train"):
        spec_train.fit("eagle3", tmp_path / "data", tmp_path / "run", ttt_steps=2, **FIT)
    assert "no sample of drafted tokens for the page" in caplog.text
    assert "warning: " not in caplog.text
    assert "Drafted tokens" not in titles(tmp_path / "run" / "report.html")


def test_every_dataset_of_several_has_a_sample(place, tmp_path):
    shutil.copytree(place / "data", tmp_path / "more")
    data = [place / "data", f"{tmp_path / 'more'}:2"]
    spec_train.fit("eagle3", data, tmp_path / "run", ttt_steps=2, **FIT)
    sections = {s["title"]: s for s in read_page_data(tmp_path / "run" / "report.html")["sections"]}
    rows = sections["Acceptance"]["parts"][0]["rows"]
    assert [row[0] for row in rows] == ["run, sample of data", "run, sample of more"]
    assert rows[0][3:] == rows[1][3:]  # the same documents
    (viewer,) = sections["Drafted tokens"]["parts"]
    assert {s["group"] for s in viewer["data"]["samples"]} == {0, 1}


def test_only_the_first_rank_writes_pages(place, tmp_path, monkeypatch):
    real = page_after.setup.fit

    def as_rank_1(*arguments):
        result = real(*arguments)
        monkeypatch.setenv("RANK", "1")
        return result

    monkeypatch.setattr(page_after.setup, "fit", as_rank_1)
    spec_train.fit("eagle3", place / "data", tmp_path / "run", ttt_steps=2, **FIT)
    assert not (tmp_path / "run" / "report.html").exists()


def test_eval_writes_the_page_that_its_option_names(run, place, tmp_path, capsys):
    common = ["eval", "--data", str(place / "data"), "--limit", "2", "--walk-only"]
    common += ["--device", "cpu"]
    files = {
        ("--draft", str(run)): run / "eval.html",
        ("--draft", str(run / "best"), "--json", str(tmp_path / "r.json")): tmp_path / "r.html",
        ("--draft", str(run), "--report", str(tmp_path / "p.html")): tmp_path / "p.html",
    }
    for more, file in files.items():
        file.unlink(missing_ok=True)
        assert main([*common, *more]) == 0
        assert {"Acceptance", "Drafted tokens"} <= set(titles(file))
    (run / "eval.html").unlink()
    assert main([*common, "--draft", str(run), "--report", "none"]) == 0
    assert main([*common, "--draft", str(run / "best")]) == 0
    assert not (run / "eval.html").exists() and not list((run / "best").glob("*.html"))
    missing = str(tmp_path / "no" / "p.html")
    assert main([*common, "--draft", str(run), "--report", missing]) == 2
    assert "--report" in capsys.readouterr().err
    assert (
        main([*common, "--draft", str(run), "--samples", "0", "--json", str(tmp_path / "0.json")])
        == 0
    )
    assert json.loads((tmp_path / "0.json").read_text())["data"]["samples"] == []
    assert "Drafted tokens" not in titles(run / "eval.html")


def test_eval_with_a_target_shows_its_responses(run, place):
    found = spec_train.evaluate(
        run, target=place / "target", prompts=place / "p.jsonl", max_new_tokens=12, device="cpu"
    )
    sections = {s["title"]: s for s in read_page_data(run / "eval.html")["sections"]}
    (viewer,) = sections["Drafted tokens"]["parts"]
    (sample,) = viewer["data"]["samples"]
    told = [
        token for part in sample["parts"][1:] for token in part.get("emitted", part.get("tokens"))
    ]
    assert len(told) == found.decoding.tokens and sample["real"]
    assert all(viewer["data"]["texts"][0][str(token)] for token in told)


def test_which_page_is_meant(tmp_path):
    from spec_train.options import EvalConfig

    assert page_of(EvalConfig(draft="d", data="x")) is None
    assert page_of(EvalConfig(draft="d", data="x", json="a.json")) == Path("a.html")
    assert page_of(EvalConfig(draft="d", data="x", json="a.json", report="none")) is None
    assert page_of(EvalConfig(draft="d", data="x", report="b.html")) == Path("b.html")
    with pytest.raises(ConfigError):
        EvalConfig(draft="d", data="x", samples=-1)


@pytest.mark.parametrize("most", [1, 100, 500, 10**6])
def test_the_sample_is_small_and_spread(place, most):
    dataset = HiddenStatesDataset(place / "data")
    everything = list(range(len(dataset)))
    found = _some_of(everything, dataset.lengths, most)
    tokens = int(dataset.lengths[found].sum())
    assert found == sorted(set(found)) and found
    assert tokens <= most or found == [int(dataset.lengths.argmin())]
    if most == 10**6:
        assert found == everything
