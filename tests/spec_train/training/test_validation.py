"""The held-out figures of `fit`: those of serving are the ones that `eval` finds."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import spec_train
from spec_data.shards.batch import DraftBatch
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts.eagle3.draft import Eagle3Draft
from spec_train.evaluation.on_dataset import choose_documents
from spec_train.evaluation.run_record import read_run
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.reports.run_page import page_of
from spec_train.simulation.ranges import EDGES, range_of, range_text
from spec_train.training.fit import fit
from spec_train.training.run_directory import held_out_file
from spec_train.training.validation import SAMPLES
from tests.marks import long_but
from tests.spec_train.drafts.any_draft import SMALL
from tests.spec_train.evaluation.tools import run_eval
from tests.spec_train.training.tools import learnable_dataset, metrics

TIES = 2  # rounds


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return learnable_dataset(tmp_path_factory.mktemp("data") / "set")


def config_of(data: Path, out: Path, **changes: Any) -> Training:
    config = Training(
        data=str(data), out=str(out), steps=40, batch_size=4, seq_len=80, lr=1e-2, validation=0.3,
        eval_every=20, save_every=40,
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("kind", long_but(["eagle3"], SMALL))
def test_the_serving_like_length_is_that_of_eval(data, tmp_path, kind):
    """Same held-out documents, same draft, same rounds but for ties."""
    config = config_of(data, tmp_path / "run", dtype="float32", batch_size=2)
    result = fit(kind, config, DRAFT_OPTIONS[kind](**SMALL[kind]))
    lines = [line for line in metrics(config.out) if line["split"] == "validation"]
    assert [line["step"] for line in lines] == [0, 20, 40]
    measured = run_eval(dict(draft=config.out, data=str(data), device="cpu", dtype="float32"))
    walk = measured["data"]["simulated"]
    best = next(line for line in lines if line["step"] == result.best["step"])
    assert best["serving_like_length"] == result.best["serving_like_length"]
    # other batches round otherwise, so that a draft may differ by a tie
    assert best["serving_like_rounds"] == pytest.approx(walk["rounds"], abs=TIES)
    assert best["serving_like_length"] == pytest.approx(walk["acceptance_length"], abs=0.05)
    assert walk["rounds"] > 20
    assert best["serving_like_length"] > 1.2 and lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    kept = json.loads(held_out_file(Path(config.out)).read_text())
    assert kept["step"] == result.best["step"] and len(kept["samples"]) == SAMPLES
    same = ("path", "split", "documents", "supervised_tokens", "on_policy")
    assert [kept[name] for name in same] == [measured["data"][name] for name in same]
    rounds = [[line["rounds"] for line in of["by_source"]] for of in (kept, measured["data"])]
    assert rounds[0] == pytest.approx(rounds[1], abs=TIES)
    for of in (kept, measured["data"]):  # by context, with intervals
        assert sum(line["rounds"] for line in of["by_context"]) == of["simulated"]["rounds"]
        most = max(of["by_context"], key=lambda line: line["rounds"])
        assert most["interval"][0] <= most["acceptance_length"] <= most["interval"][1]
        assert of["by_source"][0]["interval"]
        assert [line["mode"] for line in of["by_mode"]] == ["turn 1", "turn 2"]
    titles = [section.title for section in page_of([Path(config.out)]).sections]
    assert "Acceptance" in titles and "Answers" in titles


def test_a_run_warns_of_a_draft_that_is_worse_on_its_own_states(
    data, tmp_path, caplog, monkeypatch
):
    """Planted: chains that miss from the second depth on, as with too few unroll steps."""
    original = Eagle3Draft.chains

    def forgetful(self, batch: DraftBatch, *args: Any, **options: Any):
        found = original(self, batch, *args, **options)
        return torch.cat([found[..., :1], found[..., 1:] * 0 + 999_999], dim=-1)

    config = config_of(data, tmp_path / "sound", steps=30)
    options = DRAFT_OPTIONS["eagle3"](draft_vocab_size=0, ttt_steps=3, norm_before_fc=False)
    monkeypatch.setattr("spec_train.simulation.simulated_decoding.ENOUGH", 20)
    fit("eagle3", config, options)
    assert "warning[serving-gap]" not in caplog.text
    monkeypatch.setattr(Eagle3Draft, "chains", forgetful)
    fit("eagle3", dataclasses.replace(config, out=str(tmp_path / "worse")), options)
    assert "does worse on its own tokens and states" in caplog.text


def test_few_held_out_documents_are_named(data, tmp_path, caplog):
    options = DRAFT_OPTIONS["eagle3"](**SMALL["eagle3"])
    for name, changes, named in (
        ("some", {"validation": 0.8, "validation_documents": 0}, False),
        ("few", {"validation_documents": 3}, True),
        ("none", {"validation": 0.0, "eval_every": None}, False),
    ):
        caplog.clear()
        fit("eagle3", config_of(data, tmp_path / name, steps=1, **changes), options)
        said = "warning[held-out]: 3 held-out documents with" in caplog.text
        assert said == named, name


def test_a_draft_knows_the_contexts_of_its_training_and_eval_names_others(data, tmp_path, caplog):
    """Trained on the first 20 tokens of documents of up to 80, measured on all."""
    options = DRAFT_OPTIONS["eagle3"](**SMALL["eagle3"])
    config = config_of(data, tmp_path / "cut", steps=4, seq_len=20, save_every=2, eval_every=4)
    fit("eagle3", config, options, until=2)
    assert fit("eagle3", config, options).finished  # resumed: what it learned stays

    def contexts(run: Path) -> dict[str, int]:
        section = json.loads((run / "last" / "config.json").read_text())["spec_train"]
        return section["origin"]["contexts"]

    dataset, record = HiddenStatesDataset(data), read_run(tmp_path / "cut", tmp_path / "cut/last")
    trained = choose_documents(dataset, "train", record)[0]
    expected: dict[str, int] = {}
    for document in trained:
        first, length = int(dataset.first_supervised[document]), int(dataset.lengths[document])
        for start in {EDGES[range_of(k)] for k in range(first, min(length, 20))}:
            expected[str(start)] = expected.get(str(start), 0) + 1
    assert contexts(tmp_path / "cut") == dict(sorted(expected.items(), key=lambda x: int(x[0])))
    assert list(contexts(tmp_path / "cut"))[-1] == "16"

    given = dict(draft=config.out, data=str(data), device="cpu", dtype="float32")
    caplog.clear()
    report = run_eval(given)
    unseen = [line for line in report["data"]["by_context"] if line["start"] >= 32]
    count = sum(line["rounds"] for line in unseen)
    assert unseen and f"warning[unseen]: {count:,} of" in caplog.text
    assert any("no training document has an answer there" in text for text in report["warnings"])

    longer = config_of(data, tmp_path / "whole", steps=2, init_from=str(tmp_path / "cut" / "last"))
    fit("eagle3", longer, DRAFT_OPTIONS["eagle3"]())
    whole = contexts(tmp_path / "whole")
    assert all(whole[start] > count for start, count in expected.items()) and "32" in whole
    caplog.clear()
    run_eval(given | {"draft": str(tmp_path / "whole" / "last")})
    assert "warning[unseen]" not in caplog.text


def test_the_card_has_the_acceptance_by_context_and_mode(data, tmp_path):
    options = DRAFT_OPTIONS["eagle3"](**SMALL["eagle3"])
    fit("eagle3", config_of(data, tmp_path / "run", steps=4, eval_every=4), options)
    told = json.loads((tmp_path / "run" / "best" / "validation.json").read_text())
    kept = json.loads(held_out_file(tmp_path / "run").read_text())
    for name in ("by_source", "by_context", "by_mode"):
        assert told[name] == kept[name]
    assert "samples" not in told and "texts" not in told
    spec_train.export(tmp_path / "run", tmp_path / "out", format="vllm")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Acceptance by context, mode and source" in card
    for line in told["by_context"]:
        row = f"| {range_text(line['start'], line['end'])} | {line['rounds']:,} |"
        row += f" {line['acceptance_length']:.2f} |"
        assert row in card
    for line in told["by_mode"]:
        between = "{:.2f} to {:.2f}".format(*line["interval"])
        row = f"| {line['mode']} | {line['rounds']:,} | {line['acceptance_length']:.2f} |"
        assert f"{row} {between} |" in card
    assert "| source |" not in card, "one source alone"
