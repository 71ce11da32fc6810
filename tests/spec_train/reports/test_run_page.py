"""The page about runs and evaluations: its figures are those of the files, by plain loops."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

import spec_train
from spec_data.pages.html_page import read_page_data
from spec_data.shards.errors import ConfigError, MissingError, RunError
from spec_train.cli import main
from spec_train.reports import run_sections
from spec_train.reports.run_page import short_names, write_report
from spec_train.reports.stored_figures import evaluation_of, read_run
from spec_train.training.result import better
from tests.spec_train.reports import written
from tests.spec_train.reports.written import (
    ATTACK,
    data_figures,
    metrics_lines,
    real_figures,
    write_run,
)


def parts_of(file: Path) -> dict[str, dict]:
    """Every part of a page that has a title, by its title."""
    sections = read_page_data(file)["sections"]
    return {part["title"]: part for s in sections for part in s["parts"] if "title" in part}


def test_the_curves_of_one_run_are_those_of_its_lines(tmp_path):
    lines = write_run(tmp_path / "run", seed=1)
    parts = parts_of(write_report([tmp_path / "run"]))
    for title, figure, split, name in (
        ("Teacher-forced acceptance length", "acceptance_length", "train", "training"),
        ("Teacher-forced acceptance length", "acceptance_length", "validation", "held out"),
        ("Loss", "loss", "train", "training"),
        ("Loss", "loss", "validation", "held out"),
        ("Product-limit length, held out", "product_limit_length", "validation", "run"),
        (
            "Serving-like acceptance length, held out",
            *("serving_like_length", "validation", "run"),
        ),
        ("Learning rate", "lr", "train", "run"),
        ("Gradient norm", "grad_norm", "train", "run"),
        ("Waiting for data", "data_wait", "train", "run"),
        ("Speed", "tokens_per_second", "train", "run"),
    ):
        expected = [[x["tokens"], x[figure]] for x in lines if x["split"] == split]
        shown = {own["name"]: own["points"] for own in parts[title]["series"]}
        assert shown[name] == expected, (title, name)
    for own in parts["Chains accepted up to a depth, over training"]["series"]:
        depth = int(own["name"].removeprefix("depth "))
        held = [line for line in lines if line["split"] == "validation"]
        for (tokens, share), line in zip(own["points"], held, strict=True):
            rates = [line[f"accept_rate/{d}"] for d in range(1, depth + 1)]
            assert tokens == line["tokens"] and share == pytest.approx(math.prod(rates))
            if depth == 3:  # the length is one plus the shares of all depths
                shares = [math.prod(rates[: d + 1]) for d in range(3)]
                assert line["acceptance_length"] == pytest.approx(1 + sum(shares))


@pytest.mark.parametrize("seed", range(6))
def test_the_best_draft_is_the_one_that_fit_keeps(tmp_path, seed):
    lines = write_run(tmp_path / "run", seed=seed)
    best = None
    for line in lines:
        if line["split"] == "validation" and (best is None or better(line, best)):
            best = line
    parts = parts_of(write_report([tmp_path / "run"]))
    (bars,) = parts["Acceptance by depth, best draft"]["series"]
    assert bars["values"] == [best[f"accept_rate/{d}"] for d in (1, 2, 3)]
    page = read_page_data(tmp_path / "run" / "report.html")
    items = {name: value for name, value, _ in page["sections"][0]["parts"][0]["items"]}
    assert items["best at step"] == best["step"] and items["steps"] == "40 of 40"
    assert items["trained tokens"] == max(line["tokens"] for line in lines)


def first_tiles(file):
    """The names and values of the two largest figures at the top of a page."""
    part = read_page_data(file)["sections"][0]["parts"][0]
    return [(name, value) for name, value, _ in part["items"][:2]]


def test_a_page_leads_with_real_decoding_else_with_the_length_as_in_serving(tmp_path):
    """Of four lengths, the first tile once had the most flattering one, the teacher-forced."""
    run, file = tmp_path / "run", tmp_path / "result.json"
    best = read_run(run, "run").best if write_run(run) else {}
    served = ("acceptance length, serving-like", best["serving_like_length"])
    assert first_tiles(write_report([run])) == [served, ("its 95 % interval", "1.25 to 1.75")]
    table = parts_of(run / "report.html")["Lengths of the best draft"]
    assert [row[0] for row in table["rows"]] == ["serving-like", "product-limit", "teacher-forced"]
    assert all(len(row[-1].split()) > 4 for row in table["rows"])  # each says what it is

    real = [("acceptance length, real decoding", 2.5), ("its 95 % interval", "2.25 to 2.75")]
    file.write_text(json.dumps(real_figures() | {"draft": str(run / "best")}))
    assert first_tiles(write_report([run, file], tmp_path / "both.html")) == real
    file.write_text(json.dumps(real_figures() | {"data": data_figures()}))
    assert first_tiles(write_report([file])) == real
    assert first_tiles(write_report([run, file], tmp_path / "other.html"))[0] == served
    file.write_text(json.dumps({"draft": "run", "warnings": [], "data": data_figures()}))
    assert first_tiles(write_report([file]))[0] == ("acceptance length, serving-like", 1.5)


def test_several_runs_share_their_charts_and_their_settings_are_compared(tmp_path):
    lines = {
        "a": write_run(tmp_path / "a", 1, seed_of_data=5, lr=0.1),
        "b": write_run(tmp_path / "b", 2, seed_of_data=5, lr=0.2),
    }
    file = write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html")
    parts = parts_of(file)
    for own in parts["Loss, held out"]["series"]:
        expected = [
            [x["tokens"], x["loss"]] for x in lines[own["name"]] if x["split"] == "validation"
        ]
        assert own["points"] == expected
    table = parts["Options in which the runs differ"]
    assert [column[0] for column in table["columns"]] == ["option", "a", "b"]
    assert table["rows"] == [["data", "data", "data"], ["lr", "0.1", "0.2"]]
    assert [row[0] for row in parts["Runs"]["rows"]] == ["a", "b"]
    assert read_page_data(file)["kind"] == "Runs"


def test_long_curves_are_thinned_evenly(monkeypatch):
    monkeypatch.setattr(run_sections, "MOST_POINTS", 7)
    points = [(float(i), 2.0 * i) for i in range(100)]
    found = run_sections.thinned(points)
    assert len(found) == 7 and found[0] == points[0] and found[-1] == points[-1]
    gaps = [b[0] - a[0] for a, b in pairwise(found)]
    assert max(gaps) - min(gaps) <= 1
    assert run_sections.thinned(points[:7]) == points[:7]


def test_a_run_that_trains_or_was_damaged_is_shown_as_far_as_it_goes(tmp_path):
    write_run(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text + '{"step": 42, "split": "tra')  # a line that is being written
    run = read_run(tmp_path / "run", "run")
    assert run.damaged == 0 and len(run.training) == 20
    file.write_text(text.replace('{"step": 2,', '{"st\0p": 2,}', 1))
    page = read_page_data(write_report([tmp_path / "run"]))
    notes = [part["text"] for part in page["sections"][0]["parts"] if part["kind"] == "note"]
    assert notes[0] == "run: 1 line of metrics.jsonl cannot be read."
    file.unlink()
    page = read_page_data(write_report([tmp_path / "run"]))
    assert [section["title"] for section in page["sections"]] == ["Overview", "Settings"]
    notes = [part["text"] for part in page["sections"][0]["parts"] if part["kind"] == "note"]
    assert "nothing was held out" in notes[0]
    (tmp_path / "run" / "fit.json").write_text("{")
    with pytest.raises(RunError, match=r"fit\.json: damaged"):
        write_report([tmp_path / "run"])


def test_what_a_reader_must_know_is_said_first(tmp_path):
    place = tmp_path / "run"
    lines = write_run(place)
    for line in lines:  # the first validation is the best one, and no chain was whole
        line["product_limit_length"] = 2.0 if line["step"] == 0 else 1.0
        line["acceptance_length"] = None
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = read_page_data(write_report([place]))["sections"][0]["parts"]
    notes = [part["text"] for part in parts if part["kind"] == "note"]
    assert "no validation was better than the draft at step 0" in notes[0]
    assert "no held-out answer is long enough" in notes[1]


def test_a_draft_that_serves_worse_than_it_trains_is_named(tmp_path):
    place = tmp_path / "run"
    lines = write_run(place)
    for served, named in ((2.7, False), (2.0, True)):
        for line in lines:
            line |= {"product_limit_length": 3.0, "serving_like_uncut": served}
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        parts = read_page_data(write_report([place]))["sections"][0]["parts"]
        notes = [part["text"] for part in parts if part["kind"] == "note"]
        assert any("serving-like rounds 2.00" in text for text in notes) == named


def test_forecasts_are_a_curve_and_a_table(tmp_path):
    lines = write_run(tmp_path / "run", seed=3, forecasts=True)
    best = read_run(tmp_path / "run", "run").best
    parts = parts_of(write_report([tmp_path / "run"]))
    bins = [row for row in best["confidence_bins"] if row[0]]
    curve, diagonal = parts["Forecast and acceptance"]["series"]
    assert curve["points"] == [[mean, share] for _, mean, share in bins]
    assert diagonal["points"] == [[0.0, 0.0], [1.0, 1.0]]
    rows = parts["Reliability: run"]["rows"]
    total = sum(row[0] for row in bins)
    assert len(rows) == 9 and "0.7–0.8" not in [row[0] for row in rows]
    for row, (weight, mean, share) in zip(rows, bins, strict=True):
        assert row[1:] == pytest.approx([weight / total, mean, share, mean - share])
    held = [line for line in lines if line["split"] == "validation"]
    (error,) = parts["Calibration error over training"]["series"]
    assert error["points"] == [[x["tokens"], x["confidence_calibration"]] for x in held]


def test_evaluations_are_shown_with_sources_positions_and_responses(tmp_path):
    figures = real_figures() | {"data": data_figures()}
    (tmp_path / "both.json").write_text(json.dumps(figures))
    file = write_report([tmp_path / "both.json"])
    assert file == tmp_path / "both.html"
    assert read_page_data(file)["title"] == "both.json"
    parts = parts_of(file)
    rows = parts["Evaluations"]["rows"]
    assert rows[0][0] == "both.json" and rows[0][3:7] == [2.5, 2.25, 2.75, 40]
    assert rows[1][0] == "both.json, dataset" and rows[1][3] == 1.5
    positions = {own["name"]: own["values"] for own in parts[
        "Acceptance length by position in the response"]["series"]}  # fmt: skip
    assert positions == {"both.json": [2.5, None, None], "both.json, dataset": [1.25, 1.75, None]}
    (contexts,) = parts["Acceptance length by length of the context"]["series"]
    assert (contexts["name"], contexts["values"]) == ("both.json", [2.5])
    assert parts["By set of prompts: both.json"]["rows"] == [
        ["maths ", 4.0, 20.0, 2.75, 1.0, 3.0],
        ["chat ", 4.0, 20.0, 2.25, 1.0, 3.0],
    ]
    (shares,) = parts["Time of decoding with the draft"]["series"]
    assert shares["values"] == list(figures["speed"]["shares"].values())
    sweeps = {own["name"]: own["points"] for own in parts["Speed-up by drafted tokens"]["series"]}
    assert sweeps == {
        "both.json, measured": [[2.0, 1.25], [4.0, 1.5]],
        "both.json, modelled": [[2.0, 1.5], [4.0, 1.75]],
    }
    table = parts["By source: both.json, dataset"]
    for row, line in zip(table["rows"], figures["data"]["by_source"], strict=True):
        assert row[0] == line["source"] and row[-1] == line["acceptance_length"]
    sections = {s["title"]: s for s in read_page_data(file)["sections"]}
    (viewer,) = sections["Drafted tokens"]["parts"]
    assert [s["evaluation"] for s in viewer["data"]["samples"]] == [rows[0][0]] * 2 + [
        rows[1][0]
    ] * 3
    assert viewer["data"]["texts"] == [figures["texts"], figures["data"]["texts"]]
    notes = [p for p in sections["Acceptance"]["parts"] if p["kind"] == "note"]
    assert [(p["text"], p["warning"]) for p in notes] == [("both.json: a warning .", True)]


def test_a_character_of_several_drafted_tokens_is_shown_once_it_ends(tmp_path):
    texts = written.texts() | {"10": "⟨F0 9F⟩", "11": "⟨98⟩", "12": "⟨81⟩", "14": "⟨80⟩"}
    figures = real_figures() | {"texts": texts}
    figures["samples"][0]["parts"][2].update(accepted=1, emitted=[11, 14], choice=14)
    (tmp_path / "e.json").write_text(json.dumps(figures))
    sections = read_page_data(write_report([tmp_path / "e.json"]))["sections"]
    (viewer,) = next(s for s in sections if s["title"] == "Drafted tokens")["parts"]
    (_, first, one, *_) = viewer["data"]["samples"][0]["parts"]
    assert "whole" not in first
    assert one["whole"] == {"drafted": {"1": "😁"}, "choice": {"0": "😀"}, "emitted": {"1": "😀"}}


def test_files_of_older_releases_have_fewer_sections(tmp_path):
    new = ("by_source", "by_position", "samples", "texts")
    old = {k: v for k, v in data_figures().items() if k not in new}
    (tmp_path / "old.json").write_text(json.dumps({"warnings": [], "data": old}))
    page = read_page_data(write_report([tmp_path / "old.json"]))
    assert [section["title"] for section in page["sections"]] == ["Acceptance"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: f.pop("warnings"),
        lambda f: f["data"].pop("path"),
        lambda f: f["data"].update(walk=[1]),
        lambda f: f["data"].update(by_source=[{"source": "a"}]),
        lambda f: f["data"]["by_position"][0].update(rounds="x"),
        lambda f: f["data"]["samples"][0]["parts"][2].update(accepted=9),
        lambda f: f["data"]["samples"][0]["parts"][2].update(drafted=["<b>"]),
        lambda f: f.update(accept_rate=["a"]),
        lambda f: f.update(data=None),
    ],
)
def test_a_damaged_evaluation_is_refused(tmp_path, damage):
    figures = real_figures() | {"data": data_figures()}
    damage(figures)
    with pytest.raises(ConfigError, match=r"x\.json: not a file of `spec-train eval --json`"):
        evaluation_of(figures, "x.json", "x")


def test_wrong_places_are_named(tmp_path, capsys):
    write_run(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "list.json").write_text("{}")
    with pytest.raises(MissingError, match="no such file or run"):
        write_report([tmp_path / "absent"])
    with pytest.raises(ConfigError, match="not a run of `spec-train fit`"):
        write_report([tmp_path / "folder"])
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        write_report([tmp_path / "text.json"])
    with pytest.raises(ConfigError, match="not a file of"):
        write_report([tmp_path / "list.json"])
    with pytest.raises(ConfigError, match="nothing to report"):
        write_report([])
    runs = [str(tmp_path / "run")] * 2
    assert main(["report", *runs]) == 2
    assert "--out is needed for a page about 2 places" in capsys.readouterr().err
    assert main(["report", *runs, "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "pass a file name in an existing directory" in capsys.readouterr().err
    assert main(["report", *runs, "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")


def test_from_python_and_equal_bytes(tmp_path):
    write_run(tmp_path / "run")
    first = spec_train.write_report(tmp_path / "run").read_bytes()
    assert spec_train.write_report([str(tmp_path / "run")]).read_bytes() == first


def test_names_are_as_long_as_needed():
    paths = [Path(p) for p in ("/a/x/run", "/a/y/run", "/a/y/other", "/a/y/other")]
    assert short_names(paths) == ["x/run", "y/run", "other", "other (2)"]
    assert short_names([Path("/a/b")]) == ["b"]


def test_texts_of_the_data_never_become_markup(tmp_path):
    write_run(tmp_path / "run", note=ATTACK)
    (tmp_path / "e.json").write_text(
        json.dumps(real_figures(ATTACK) | {"data": data_figures(0, ATTACK)})
    )
    file = write_report([tmp_path / "run", tmp_path / "e.json"], tmp_path / "page.html")
    assert "<img" not in file.read_text().split('id="data">')[1].split("</script>")[0]
    assert ATTACK in json.dumps(read_page_data(file), ensure_ascii=False)
    assert metrics_lines(0) == metrics_lines(0)
