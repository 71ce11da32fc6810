"""The page about runs and evaluations: its figures are those of the files, by plain loops."""

import json
import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import pytest

import spec_train
from spec_data.pages.page import Page
from spec_data.shards.errors import ConfigError, MissingError, RunError
from spec_data.shards.resumable import write_record
from spec_train.cli import main
from spec_train.reports import run_page
from spec_train.reports.results import Run, evaluations
from spec_train.reports.run_page import page_of, short_names, write_report
from spec_train.simulation.ranges import range_text
from spec_train.training.result import better
from spec_train.training.run_directory import DECODED, RunDirectory
from tests.spec_train.reports.written import (
    data_figures,
    real_figures,
    write_run,
)


def parts_of(page: Page) -> dict[str, dict]:
    """The fields of every part of a page that has a title, by its title."""
    parts = [part for section in page.sections for part in section.parts]
    return {part.title: vars(part) for part in parts if hasattr(part, "title")}


@pytest.mark.parametrize(
    ("title", "curve", "split", "figure"),
    [
        ("Acceptance length", "serving-like", "validation", "serving_like_length"),
        ("Acceptance length", "product-limit", "validation", "product_limit_length"),
        ("Acceptance length", "teacher-forced", "validation", "acceptance_length"),
        ("Acceptance length", "teacher-forced, training", "train", "acceptance_length"),
        ("Loss", "training", "train", "loss"),
        ("Loss", "held out", "validation", "loss"),
    ],
)
def test_the_curves_of_one_run_are_those_of_its_lines(tmp_path, title, curve, split, figure):
    lines = write_run(tmp_path / "run", seed=1)
    parts = parts_of(page_of([tmp_path / "run"]))
    expected = [(x["tokens"], x[figure]) for x in lines if x["split"] == split]
    assert parts[title]["series"][curve] == expected


@pytest.mark.parametrize("seed", range(3))
def test_the_best_draft_is_the_one_that_fit_keeps(tmp_path, seed):
    lines = write_run(tmp_path / "run", seed=seed)
    best = None
    for line in lines:
        held_out = line["split"] == "validation" and line["step"]  # at step 0 nothing is trained
        if held_out and (best is None or better(line, best)):
            best = line
    page = page_of([tmp_path / "run"])
    table = next(section for section in page.sections if section.title == "The run").parts[0]
    items = dict(table.rows)
    assert items["best at step"] == str(best["step"]) and items["steps"] == "40 of 40"
    figures = {name: value for name, value, _ in page.figures}
    assert figures["its held-out loss"] == best["loss"]
    assert figures["trained tokens"] == max(line["tokens"] for line in lines)
    length = f"{best['serving_like_length']:.2f} tokens per verification"
    assert f"step {best['step']}," in page.lead and length in page.lead and "on data:" in page.lead
    assert page.sections[0].title == "Learning"


def test_a_run_says_how_its_prompts_were_rendered(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "best").mkdir()
    origin = {"template_kwargs_used": {'{"a": 1}': 55, "{}": 45}, "system_messages": {"Hi": 9}}
    origin["generation_defaults"] = {"repetition_penalty": 1.05}
    config = {"spec_train": {"origin": origin}}
    (tmp_path / "run" / "best" / "config.json").write_text(json.dumps(config))
    page = page_of([tmp_path / "run"])
    table = next(section for section in page.sections if section.title == "The run").parts[0]
    rows = dict(table.rows)
    assert rows["chat template kwargs"] == '{"a": 1} in 55 %, {} in 45 %'
    assert rows["system message"] == "'Hi'"
    assert rows["sampling that engines apply"] == "repetition_penalty 1.05"


def test_a_run_says_what_it_was_given_and_the_command_that_repeats_it(tmp_path):
    """Options that are not the default, whoever gave them; lists of JSON are tuples of defaults."""
    options = {"data": ["a/x:2", "b"], "out": "run", "seed": 0, "batch_size": 3, "layers": [1, 2]}
    write_run(tmp_path / "my run", **options, ttt_steps=7, step_decay=0.5, unheard=1)
    record = {"identity": {"draft": "eagle3", "dataset": ["aa", "bb"]}, "total_steps": 40}
    write_record(tmp_path / "my run" / "run.json", record)
    parts = parts_of(page_of([tmp_path / "my run"]))
    given = {"--lr": "0.1", "--batch-size": "3", "--layers": "1, 2", "--step-decay": "0.5"}
    assert dict(parts["Settings"]["rows"]) == given | {"--unheard": "1"}
    made = dict(parts["Made from"]["rows"])
    assert made["datasets"] == "a/x, b" and made["their fingerprints"] == "aa, bb"
    assert "target" not in made and "trained on" not in made  # nothing is known of it
    words = shlex.split(made["the same run again"])
    assert words[:3] == ["spec-train", "fit", "eagle3"] and words[-2:] == ["--out", "OTHER"]
    assert Path(words[words.index("--config") + 1]).samefile(tmp_path / "my run" / "fit.json")


def test_a_run_says_on_what_it_trained(tmp_path):
    """After each change of the machine or of a library; a note of undone steps is dropped."""
    facts = {"device": "cpu", "threads": 1, "versions": {"spec-data": "1.0", "torch": "2.13"}}
    newer = facts | {"threads": 8, "versions": {"spec-data": "1.1", "torch": "2.13"}}
    write_run(tmp_path / "run")
    record = {"identity": {"draft": "eagle3", "dataset": []}, "total_steps": 40}
    write_record(tmp_path / "run" / "run.json", record)

    def said():
        return dict(parts_of(page_of([tmp_path / "run"]))["Made from"]["rows"]).get("trained on")

    run = RunDirectory(tmp_path / "run")
    for step in (0, 10):
        run.write_machine(facts, step)
        assert said() == "cpu, 1 thread; spec-data 1.0, torch 2.13"
    run.write_machine(newer, 20)
    then = "from step 0: cpu, 1 thread; spec-data 1.0, torch 2.13. from step {}: cpu, 8 threads; "
    assert said() == then.format(20) + "spec-data 1.1, torch 2.13"
    run.write_machine(newer, 15)  # the checkpoint of step 20 was damaged
    assert said() == then.format(15) + "spec-data 1.1, torch 2.13"
    for damage in ("{", "[]", '{"sittings": [{"step": 0}]}', '{"sittings": 3}'):
        (tmp_path / "run" / "machine.json").write_text(damage)
        assert said() is None
    run.write_machine(facts, 30)
    assert said() == "cpu, 1 thread; spec-data 1.0, torch 2.13"
    run.close()


def test_a_directory_of_runs_is_a_page_of_them_all_with_links_to_their_own(tmp_path, capsys):
    names = ("b", "a", "javascript:alert(1)", "q?#%&<>\"'")
    for name in names:
        write_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "list.txt").touch()
    assert main(["report", str(tmp_path / "runs" / "a")]) == 0
    for name in names[2:]:
        (tmp_path / "runs" / name / "report.html").touch()
    assert main(["report", str(tmp_path / "runs")]) == 0
    text = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    links = re.findall(r'<a href="([^"]*)">', text)
    assert len(links) == 3, "b has no page of its own"
    for link in links:
        file = tmp_path / "runs" / unquote(link)
        assert link.startswith("./") and file.is_file() and file.name == "report.html"
    rows = page_of([tmp_path / "runs"]).sections[0].parts[0].rows
    assert [row[0] for row in rows] == sorted(names)
    both = page_of([tmp_path / "runs", tmp_path / "runs" / "a"])  # a is there already
    assert len(both.sections[0].parts[0].rows) == len(names)
    assert main(["report", str(tmp_path / "runs" / "notes")]) == 2
    assert "no run lies in it" in capsys.readouterr().err


def test_a_link_to_a_page_that_lies_elsewhere_is_not_made(tmp_path):
    for name in ("x/a", "x/b"):
        write_run(tmp_path / name)
        (tmp_path / name / "report.html").touch()
    (tmp_path / "y").mkdir()
    write_report([tmp_path / "x/a", tmp_path / "x/b"], tmp_path / "y" / "both.html")
    assert "<a href" not in (tmp_path / "y" / "both.html").read_text(encoding="utf-8")


def first_figure(page):
    """The name and the value of the first figure at the top of a page."""
    return page.figures[0][:2]


def test_a_page_leads_with_real_decoding_else_with_the_length_as_in_serving(tmp_path):
    """Of four lengths, the first tile once had the most flattering one, the teacher-forced."""
    run, file = tmp_path / "run", tmp_path / "result.json"
    best = Run(run, "run").best if write_run(run) else {}
    name = "acceptance length, serving-like; its 95 % interval 1.25 to 1.75"
    served = (name, best["serving_like_length"])
    assert first_figure(page_of([run])) == served

    real = ("acceptance length, real decoding; its 95 % interval 2.25 to 2.75", 2.5)
    file.write_text(json.dumps(real_figures() | {"draft": str(run / "best")}))
    assert first_figure(page_of([run, file])) == real
    stored = run / DECODED
    (run / "best").symlink_to("best-00000010")
    stored.write_text(json.dumps(real_figures() | {"draft": "best-00000010"}))
    assert first_figure(page_of([run])) == real
    stored.write_text(json.dumps(real_figures() | {"draft": "best-00000005"}))
    assert first_figure(page_of([run])) == served, "that was another draft"
    file.write_text(json.dumps(real_figures() | {"data": data_figures()}))
    page = page_of([file])
    assert first_figure(page) == real and page.sections[0].title == "Answers"
    assert [value for _, value, _ in page.figures[1:]] == ["1.50 times", "8 of 8"]
    assert first_figure(page_of([run, file])) == served
    file.write_text(json.dumps({"draft": "run", "warnings": [], "data": data_figures()}))
    assert first_figure(page_of([file])) == ("acceptance length, serving-like", 1.5)


def test_lengths_of_other_decoding_are_named_and_not_ranked(tmp_path):
    """A tree, or a temperature, has another length than greedy blocks: it is no better draft."""
    files, given = [], {"greedy": {}, "warm": {"temperature": 1.0}, "tree": {"tree_tokens": 16}}
    for name, changes in given.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(real_figures() | {"acceptance_length": 2.75} | changes))
    page = page_of(files)
    kinds = ["real decoding", "real decoding at temperature 1", "real decoding, trees of 16"]
    table = parts_of(page)["Evaluations"]
    assert [row[1] for row in table["rows"]] == kinds and table["best"] is None
    assert "best" not in page.lead
    for file, kind in zip(files, kinds, strict=True):
        name = f"acceptance length, {kind}; its 95 % interval 2.25 to 2.75"
        assert first_figure(page_of([file])) == (name, 2.75)


def test_several_runs_share_their_charts_and_their_settings_are_compared(tmp_path):
    lines = {
        "a": write_run(tmp_path / "a", 1, seed_of_data=5, lr=0.1, device="cpu"),
        "b": write_run(tmp_path / "b", 2, seed_of_data=5, lr=0.2, device="auto", keep=3),
    }
    page = page_of([tmp_path / "a", tmp_path / "b"])
    parts = parts_of(page)
    for name, curve in parts["Loss"]["series"].items():
        held = [x for x in lines[name] if x["split"] == "validation"]
        assert curve == [(x["tokens"], x["loss"]) for x in held]
    table = parts["Options in which the runs differ"]
    assert [column[0] for column in table["columns"]] == ["option", "a", "b"]
    assert table["rows"] == [["lr", "0.1", "0.2"]], "what changes no draft is not named"
    (runs,) = page.sections[0].parts
    lengths = [Run(tmp_path / name, name).best["serving_like_length"] for name in "ab"]
    best = lengths.index(max(lengths))
    assert [row[:2] for row in runs.rows] == [["a", lengths[0]], ["b", lengths[1]]]
    assert runs.best == best and page.lead.startswith(f"{'ab'[best]} is the best of 2 runs: ")
    assert [value for _, value, _ in page.figures[:2]] == sorted(lengths, reverse=True)
    assert page.kind == "Runs"
    assert parts["Loss"]["x"] == parts["Acceptance length"]["x"], "equal axes"


def test_a_training_loss_beside_others_is_called_so(tmp_path):
    write_run(tmp_path / "a")
    lines = [x for x in write_run(tmp_path / "b") if x["split"] == "train"]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "b" / "metrics.jsonl").write_text(text)
    parts = parts_of(page_of([tmp_path / "a", tmp_path / "b"]))
    assert list(parts["Loss"]["series"]) == ["a", "b, training"]


@pytest.mark.parametrize(
    "words", [["report", "--json"], ["--json"], ["--quiet", "report", "--json"]]
)
def test_an_evaluation_after_json_is_not_replaced(tmp_path, capsys, words):
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file in files:
        Path(file).write_text(json.dumps(real_figures()))
    command = [] if "report" in words else ["report"]
    words = [*words, files[0], *command, files[1], "--out", str(tmp_path / "both.html")]
    assert main(words) == 2
    assert f"to replace it, write --json={files[0]}" in capsys.readouterr().err
    assert Path(files[0]).read_text() == json.dumps(real_figures())
    assert main(["report", files[1], f"--json={files[0]}"]) == 0
    assert Path(files[0]).read_text() != json.dumps(real_figures())


def test_an_option_that_one_kind_of_draft_alone_has_is_not_compared(tmp_path):
    write_run(tmp_path / "a", loss="ce", ttt_steps=7)
    write_run(tmp_path / "b", loss="kl", block_size=7)
    page = page_of([tmp_path / "a", tmp_path / "b"])
    assert parts_of(page)["Options in which the runs differ"]["rows"] == [["loss", "ce", "kl"]]


def test_no_run_is_the_best_of_equal_ones(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, 1)
    page = page_of([tmp_path / "a", tmp_path / "b"])
    assert page.sections[0].parts[0].best is None and "none of which is the best" in page.lead


def test_long_curves_are_thinned_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(run_page, "MOST_POINTS", 7)
    lines = write_run(tmp_path / "run")
    curve = parts_of(page_of([tmp_path / "run"]))["Loss"]["series"]["training"]
    whole = [(x["tokens"], x["loss"]) for x in lines if x["split"] == "train"]
    assert len(curve) == 7 < len(whole) and set(curve) < set(whole) and curve[-1] == whole[-1]


def test_a_run_that_trains_or_was_damaged_is_shown_as_far_as_it_goes(tmp_path):
    write_run(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text + '{"step": 42, "split": "tra')  # a line that is being written
    assert len(Run(tmp_path / "run", "run").training) == 20
    file.write_text(text.replace('"step"', '"at"'))  # lines that lack what others have
    assert page_of([tmp_path / "run"]).sections[0].title == "Learning"
    for damage in ('{"st\0p": 2,}', '{"step": "two",', '{"lr": "high", "step": 2,', "[]", "7"):
        rest = "" if damage in ("[]", "7") else None
        lines = [damage] if rest == "" else [text.replace('{"step": 2,', damage, 1)]
        file.write_text("".join(lines) + "\n")
        with pytest.raises(RunError, match=r"metrics\.jsonl: damaged"):
            page_of([tmp_path / "run"])
    file.unlink()
    page = page_of([tmp_path / "run"])
    assert [section.title for section in page.sections] == ["Learning", "The run"]
    assert page.lead.endswith("nothing was validated yet.")
    notes = [part.text for part in page.sections[0].parts if part.kind == "note"]
    assert "nothing was held out" in notes[0]
    (tmp_path / "run" / "fit.json").write_text("{")
    with pytest.raises(RunError, match=r"fit\.json: damaged"):
        page_of([tmp_path / "run"])


def test_a_draft_that_serves_worse_than_it_trains_is_named(tmp_path):
    place = tmp_path / "run"
    lines = write_run(place)
    for served, named in ((2.7, False), (2.0, True)):
        for line in lines:  # the first validation is the best one
            line |= {
                "product_limit_length": 3.0,
                "every_slot_length": served,
                "loss": line["step"],
            }
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        parts = page_of([place]).sections[0].parts
        notes = [part.text for part in parts if part.kind == "note"]
        assert any("with its own 2.00" in text for text in notes) == named
        assert any("no validation was better than the draft at step 0" in text for text in notes)


def test_evaluations_are_shown_with_sources_depths_and_responses(tmp_path):
    figures = real_figures() | {"data": data_figures()}
    (tmp_path / "both.json").write_text(json.dumps(figures))
    page = page_of([tmp_path / "both.json"])
    assert page.title.startswith("both.json")
    parts = parts_of(page)
    rows = parts["Evaluations"]["rows"]
    assert rows[0][0] == "both.json" and rows[0][3:7] == [2.5, 2.25, 2.75, 40]
    assert rows[1][0] == "both.json, dataset" and rows[1][3] == 1.5
    rates = figures["data"]["simulated"]["accept_rate"]
    assert parts["Acceptance by depth"]["series"] == {
        "both.json": [(1, 0.5), (2, None), (3, None)],
        "both.json, dataset": list(enumerate(rates, 1)),
    }
    assert parts["By set of prompts: both.json"]["rows"] == [
        ["maths ", 4, 20, 2.75, 1.0, 3.0],
        ["chat ", 4, 20, 2.25, 1.0, 3.0],
    ]
    table = parts["By source: both.json, dataset"]
    for row, line in zip(table["rows"], figures["data"]["by_source"], strict=True):
        assert row[0] == line["source"] and row[-3] == line["acceptance_length"]
    sections = {s.title: s for s in page.sections}
    (viewer,) = sections["Answers"].parts
    ids = [document["id"] for document in viewer.data["documents"]]
    names = [rows[0][0]] * 2 + [rows[1][0]] * 3
    assert all(own.startswith(f"{name} · ") for own, name in zip(ids, names, strict=True))
    notes = [p for p in sections["Acceptance"].parts if p.kind == "note"]
    assert [(p.text, p.warning) for p in notes] == [("both.json: a warning .", True)]


def test_acceptance_by_position_and_by_context_is_shown_where_it_was_measured(tmp_path):
    figures = real_figures() | {"data": data_figures()}
    (tmp_path / "e.json").write_text(json.dumps(figures))
    parts = parts_of(page_of([tmp_path / "e.json"]))
    assert {title for title in parts if title.startswith("By tokens")} == {
        "By tokens of the answer: e.json, dataset",  # one range alone says no more than the length
        "By tokens of the context: e.json",
    }
    table = parts["By tokens of the answer: e.json, dataset"]
    assert table["rows"] == [
        ["16 to 31", 10, 1.75, 1.25, 2.25],
        ["32 to 63", 20, 1.25, 0.75, 1.75],
        ["64 to 127", 30, None, None, None],
    ]
    assert [name for name, _ in table["columns"]] == [
        *("tokens before", "verifications", "acceptance length", "from", "to"),
    ]
    table = parts["By mode: e.json, dataset"]
    assert table["rows"] == [
        ["without thinking", 40, 2.5, None, None],
        ["with thinking", 30, 1.5, 1.25, 1.75],
    ]
    assert "By mode: e.json" not in parts  # of one mode alone
    for one in (figures, figures["data"]):  # as earlier releases wrote them
        del one["by_position"], one["by_context"], one["by_mode"]
    (tmp_path / "e.json").write_text(json.dumps(figures))
    assert not [
        title
        for title in parts_of(page_of([tmp_path / "e.json"]))
        if title.startswith(("By tokens", "By mode"))
    ]
    assert range_text(131072, None) == "131,072 or more"


def response_of(figures) -> dict:
    """The first response of an evaluation as the viewer shows it."""
    one = evaluations(figures, "e.json", "e")[0]
    return run_page.response(1, one, one.result.samples[0])


def test_the_length_of_another_checkpoint_is_not_that_of_the_run(tmp_path):
    write_run(tmp_path / "run")
    for part, taken in (("checkpoint-00000010", False), ("best", True), ("", True)):
        figures = real_figures() | {"draft": str(tmp_path / "run" / part)}
        (tmp_path / "a.json").write_text(json.dumps(figures))
        page = page_of([tmp_path / "run", tmp_path / "a.json"])
        assert (page.figures[0][1] == figures["acceptance_length"]) == taken, part


def test_the_best_of_several_evaluations_is_marked_and_told_first(tmp_path):
    lengths = {"a.json": 2.25, "b.json": 2.75, "c.json": 2.5}
    for name, length in lengths.items():
        (tmp_path / name).write_text(json.dumps(real_figures() | {"acceptance_length": length}))
    page = page_of([tmp_path / name for name in lengths])
    assert page.lead == "b.json is the best of 3: 2.75 tokens per verification."
    assert page.figures[0][1] == 2.75 and parts_of(page)["Evaluations"]["best"] == 1
    page = page_of([tmp_path / "a.json"])
    assert page.lead == "8 answers of target ; the draft proposes 3 tokens at a time."
    assert parts_of(page)["Evaluations"]["best"] is None


def test_lengths_on_other_data_are_not_ranked(tmp_path):
    """Easier prompts, or documents, have longer lengths: that makes no better draft."""
    line = {"prompt": "1e", "rounds": 40, "emitted": 110}
    simulated = {"draft": "run", "warnings": []}
    given = [
        [real_figures(), real_figures() | {"acceptance_length": 2.75, "per_prompt": [line]}],
        [simulated | {"data": data_figures(text=text)} for text in ("x", "y")],
    ]
    given[1][1]["data"]["simulated"]["acceptance_length"] = 1.75
    for figures in given:
        files = [tmp_path / "a.json", tmp_path / "b.json"]
        for file, own in zip(files, figures, strict=True):
            file.write_text(json.dumps(own))
        page = page_of(files)
        assert parts_of(page)["Evaluations"]["best"] is None and "best" not in page.lead
    for name, seed, data in (("a", 1, ["one", "two"]), ("b", 2, ["two:2", "one"]), ("c", 3, "one")):
        write_run(tmp_path / name, seed, data=data)
    for names, ranked in (("ab", True), ("ac", False)):
        runs = [tmp_path / name for name in names]
        assert ("is the best of 2 runs" in page_of(runs).lead) == ranked
        written = spec_train.write_report(runs, out=tmp_path / "page.html")
        assert bool(written.next_command) == ranked


def test_the_next_command_exports_the_best(tmp_path):
    write_run(tmp_path / "a", 1)
    write_run(tmp_path / "b", 2)
    served = {name: Run(tmp_path / name, name).best["serving_like_length"] for name in "ab"}
    best = max(served, key=served.__getitem__)
    export = ("spec-train", "export", "--draft")
    ended = spec_train.write_report([tmp_path / "a", tmp_path / "b"], out=tmp_path / "c.html")
    assert ended.next_command == (*export, str(tmp_path / best))
    for name, length in (("x", 2.0), ("y", 2.5)):
        figures = real_figures() | {"draft": name, "acceptance_length": length}
        (tmp_path / f"{name}.json").write_text(json.dumps(figures))
    ended = spec_train.write_report([tmp_path / "x.json", tmp_path / "y.json"], out=tmp_path / "d")
    assert ended.next_command == (*export, "y", "--target", "target ")


def test_every_token_of_a_response_is_shown_with_what_became_of_it():
    decoded = response_of(real_figures())
    context, response = decoded["segments"]
    assert context["title"].startswith("context, 5 tokens before") and not context["learned"]
    words = [item["words"] for item in response["items"]]
    assert words[0] == [["t10 ", "target"]]
    assert words[1] == [
        *(["t11 ", "accepted"], ["\n", "accepted"], ["t14 ", "target"]),
    ]
    assert words[3] == [["t19 ", "target"]]
    assert "step 1 of 3, after 1 tokens: 2 of 4" in response["items"][1]["about"][0]
    assert 'target\'s token: "t14 "' in response["items"][1]["about"][2]
    assert decoded["head"].startswith("3 verification steps, 7 tokens: 2.33 per step. 4 of 7")
    stored = response_of({"draft": "run", "warnings": [], "data": data_figures()})
    words = [item["words"] for item in stored["segments"][1]["items"]]
    assert words[4] == [["t22 ", "document"]] and words[5] == [["t24 ", "document"]]
    assert 'document goes on with "t24 "' in stored["segments"][1]["items"][5]["about"][3]


def test_an_answer_stands_beside_that_of_the_target_alone_with_its_time():
    figures = real_figures()
    assert all("seconds" not in segment for segment in response_of(figures)["segments"])
    plain = {"tokens": [10, 11, 12, 14, 15, 16, 17, 19], "seconds": 4.0, "draft_seconds": 2.0}
    figures["samples"][0]["plain"] = plain
    context, alone, drafted = response_of(figures)["segments"]
    assert "seconds" not in context and (alone["seconds"], drafted["seconds"]) == (4.0, 2.0)
    assert alone["title"] == "the target alone: 8 tokens in 4.00 s, 2.0 per second"
    assert drafted["title"] == "with the draft: 8 tokens in 2.00 s, 4.0 per second"
    both = ["".join(w for item in s["items"] for w, _ in item["words"]) for s in (alone, drafted)]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: f.pop("warnings"),
        lambda f: f["data"].pop("path"),
        lambda f: f["data"].update(by_source=["a"]),
        lambda f: f["data"]["samples"][0]["parts"][2].update(accepted=9),
        lambda f: f.update(data=None),
    ],
)
def test_a_damaged_evaluation_is_refused(tmp_path, damage):
    figures = real_figures() | {"data": data_figures()}
    damage(figures)
    with pytest.raises(ConfigError, match=r"x\.json: not a file of `spec-train eval --json`"):
        evaluations(figures, "x.json", "x")


def test_wrong_places_are_named(tmp_path, capsys):
    write_run(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "list.json").write_text("{}")
    with pytest.raises(MissingError, match="no such file or run"):
        page_of([tmp_path / "absent"])
    with pytest.raises(ConfigError, match="not a run of `spec-train fit`"):
        page_of([tmp_path / "folder"])
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        page_of([tmp_path / "text.json"])
    with pytest.raises(ConfigError, match="not a file of"):
        page_of([tmp_path / "list.json"])
    with pytest.raises(ConfigError, match="nothing to report"):
        spec_train.write_report([])
    runs = [str(tmp_path / "run")] * 2
    assert main(["report", *runs]) == 2
    assert "--out is needed for a page about 2 places" in capsys.readouterr().err
    assert main(["report", *runs, "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "pass a file name" in capsys.readouterr().err
    assert main(["report", *runs, "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip().endswith(str(tmp_path / "page.html"))


def test_names_tell_paths_apart():
    assert short_names([Path("a/x/run"), Path("a/other")]) == ["run", "other"]
    assert short_names([Path("a/x/run"), Path("a/y/run")]) == ["a/x/run", "a/y/run"]
