"""Laws of training on several datasets: one target, every weight kept, each measured by itself."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.records import plain
from spec_data.shards.seal import file_records
from spec_train.cli import main
from spec_train.data.mixture import open_documents, unique_names
from spec_train.data.order import hash_prompts, split_border
from spec_train.data.splits import even_shares, make_splits
from spec_train.drafts import load_draft
from spec_train.evaluation.on_dataset import choose_documents
from spec_train.evaluation.run_record import RunRecord
from spec_train.options.data_option import DataSource, parse_source, parse_sources
from spec_train.options.training import Training
from spec_train.training.fit import count_supervised_tokens
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.spec_data.runs import generate_with, options, save_target, write_corpus
from tests.spec_data.shards.integrity_tools import write_manifest
from tests.spec_train.evaluation.tools import run_eval
from tests.spec_train.training.test_trainer_resume import assert_same_run, stop_after
from tests.spec_train.training.tools import OPTIONS, change, metrics, run
from tests.tolerance import close, network

MODEL = tiny_llama(seed=0)


def edit(data: Path, **changes) -> None:
    """Change a manifest's fields and let it say so."""
    raw = json.loads((data / "manifest.json").read_text())
    for name, value in changes.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) else value
    write_manifest(data, raw)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Datasets of one target: `a`, and `b` with fewer layers and a copy of half of `a`."""
    folder = tmp_path_factory.mktemp("mix")
    documents = random_documents(40, 64, seed=1)
    tiny_dataset(folder / "a", documents=documents, model=MODEL)
    tiny_dataset(
        folder / "b", documents=documents[:20] + random_documents(10, 64, seed=2), model=MODEL,
        layers=(1, 2),
    )  # fmt: skip
    return folder


def config_of(place, out, *data: str, **changes) -> Training:
    options = dict(
        out=str(out), steps=8, batch_size=2, accumulation=2, seq_len=48, lr=1e-3, validation=0.2,
        log_every=4, eval_every=4, save_every=5,
    )  # fmt: skip
    return Training(data=tuple(str(place / name) for name in data), **(options | changes))


def opened(config: Training):
    return open_documents(parse_sources(config.data))


def test_sources_are_directories_with_weights(tmp_path):
    assert parse_source("x/y") == DataSource(Path("x/y"))
    assert parse_source("x:2") == DataSource(Path("x"), Fraction(2))
    assert parse_source("a:b:0.125") == DataSource(Path("a:b"), Fraction(1, 8))
    assert parse_source("c:old") == DataSource(Path("c:old"))
    (tmp_path / "run:3").mkdir()
    assert parse_source(str(tmp_path / "run:3")).weight == 1
    assert [str(parse_source(text)) for text in ("x:1", "x:0.50")] == ["x", "x:0.5"]
    for bad in ("x:0", "x:-1", "x:nan", "x:0.0001", "x:1e3", "x:"):
        with pytest.raises(ConfigError, match="at most 3 decimals"):
            parse_source(bad)
    with pytest.raises(ConfigError, match="given twice"):
        parse_sources(("x", "x:2"))
    assert unique_names([Path("p/a"), Path("q/a"), Path("r/b"), Path("s/a")]) == [
        "a", "a#2", "b", "a#3",
    ]  # fmt: skip
    assert unique_names([Path("p/a#2"), Path("q/a"), Path("r/a"), Path("s/a#2")]) == [
        "a#2", "a", "a#3", "a#2#2",
    ]  # fmt: skip


def test_copies_of_a_document_are_on_one_side_in_every_dataset(place, tmp_path):
    config = config_of(place, tmp_path / "run", "a", "b:3", validation=0.4)
    mixture = opened(config)
    splits = make_splits(mixture, config)
    parts = [HiddenStatesDataset(place / name) for name in "ab"]
    ids = np.array([str(document["input_ids"].tolist()) for part in parts for document in part])
    train, held = set(ids[splits.train.rows]), set(ids[splits.measured])
    assert not train & held
    twice = [name for name in held if (ids == name).sum() == 2]
    assert len(twice) > 2
    assert splits.held_out == len(splits.measured)
    seen = {row for epoch in range(3) for batch in splits.train.batches(epoch)
            for pack in batch for row in pack}  # fmt: skip
    assert seen == set(splits.train.rows.tolist()) and not set(ids[list(seen)]) & held


def test_a_mixed_run_trains_measures_each_dataset_and_goes_on_bit_for_bit(
    place, tmp_path, monkeypatch
):
    config = config_of(place, tmp_path / "whole", "a:0.5", "b:2")
    assert run(config).finished
    held_out = [m for m in metrics(config.out) if m["split"] == "validation"]
    assert len(held_out) == 3
    names = {f"{figure}/{name}" for figure in ("loss", "acceptance_length") for name in "ab"}
    assert all(names <= m.keys() for m in held_out)
    stopped = change(config, out=str(tmp_path / "stopped"))
    with monkeypatch.context() as patch:
        stop_after(6, patch)
        assert not run(stopped).finished
    assert run(stopped).finished
    assert_same_run(config.out, stopped.out)
    state = json.loads((tmp_path / "whole" / "last" / "training_state.json").read_text())["stream"]
    prints = [HiddenStatesDataset(place / name).manifest.fingerprint for name in "ab"]
    assert state["fingerprint"] == prints and state["weights"] == ["1/2", "2"]
    with pytest.raises(ConfigError, match=r"weights: \['1/2', '2'\] -> \['1', '2'\]"):
        run(change(config, data=(str(place / "a"), str(place / "b:2"))))
    with pytest.raises(ConfigError, match="dataset: "):
        run(change(config, data=str(place / "a")))


def test_figures_of_a_dataset_are_those_of_its_held_out_documents(place, tmp_path):
    """Against an evaluation of the saved draft on that dataset alone, document by document."""
    config = config_of(place, tmp_path / "run", "a", "b:0.5", seq_len=256)
    run(config)
    last = [m for m in metrics(config.out) if m["split"] == "validation"][-1]
    report = {}
    for name in "ab":
        report[name] = run_eval(
            dict(draft=str(tmp_path / "run" / "last"), data=str(place / name), device="cpu")
        )["data"]
        assert report[name]["split"] == "validation"
        forced = report[name]["teacher_forced"]
        close(last[f"loss/{name}"], forced["loss"], terms=network(2), dtype=torch.float32)
        # a tie may add or lose one chain at every depth
        tie = OPTIONS.ttt_steps / forced["chains"]
        assert abs(last[f"acceptance_length/{name}"] - forced["acceptance_length"]) < 1.01 * tie
    mixture = opened(config)
    assert sum(r["documents"] for r in report.values()) == make_splits(mixture, config).held_out


def test_the_border_of_a_mixture_holds_for_its_parts(tmp_path, monkeypatch):
    """Where a dataset alone would have had to hold out a document, to have one at all."""
    tiny_dataset(tmp_path / "large", n_docs=60, seed=0, model=MODEL)
    tiny_dataset(tmp_path / "small", n_docs=3, seed=4, model=MODEL)
    config = config_of(tmp_path, tmp_path / "run", "large", "small", validation=0.05)
    run(config)
    small = HiddenStatesDataset(tmp_path / "small")
    splits = make_splits(opened(config), config)
    mine = [row - 60 for row in splits.measured.tolist() if row >= 60]
    assert mine == []  # the premise
    known = json.loads((tmp_path / "run" / "run.json").read_text())
    described = RunRecord(
        datasets=known["identity"]["dataset"], split_seed=0, seq_len=48,
        split_rule=known["identity"]["split_rule"], split_border=known["identity"]["split_border"],
    )  # fmt: skip
    with pytest.raises(DatasetError, match="no document to measure in split 'validation'"):
        choose_documents(small, "auto", described)
    assert choose_documents(small, "train", described)[0] == [0, 1, 2]
    alone = split_border(hash_prompts(small.prompts, 0), 0.05)
    assert len(choose_documents(small, "auto", replace(described, split_border=alone))[0]) == 1


def test_weights_that_take_no_document_are_refused(place, tmp_path):
    given = config_of(place, tmp_path / "run", "a:0.001", steps=None, epochs=1)
    with pytest.raises(ConfigError, match="no epoch takes a document"):
        run(given)
    assert not (tmp_path / "run" / "best").exists()


def test_no_dataset_is_starved_of_measured_documents():
    assert even_shares([100, 5, 40], 30) == [13, 5, 12]
    assert even_shares([100, 5, 40], 0) == [100, 5, 40]


def test_token_counts_are_weighted(place, tmp_path):
    config = config_of(place, tmp_path / "run", "a:0.5", "b:3", seq_len=20)
    mixture = opened(config)
    plan = make_splits(mixture, config).train
    expected = torch.zeros(64, dtype=torch.int64)
    for row in plan.rows.tolist():
        part, own = mixture._locate(row)
        document, times = part[own], 1 if row < 40 else 6
        for token, supervised in zip(
            document["input_ids"][:20], document["loss_mask"][:20], strict=True
        ):
            expected[token] += times * int(supervised)
    assert torch.equal(count_supervised_tokens(mixture, plan), expected)


def refused(place, tmp_path, *data) -> str:
    with pytest.raises(DatasetError) as error:
        run(config_of(place, tmp_path / "run", *data))
    return str(error.value)


def test_another_target_is_refused(place, tmp_path):
    other = tiny_dataset(tmp_path / "other", n_docs=8, model=tiny_llama(seed=5))
    text = refused(place, tmp_path, "a", str(other))
    assert "states of another target" in text and "embed_tokens: 100.00% of its rows" in text
    same = tiny_dataset(tmp_path / "same", n_docs=8, model=MODEL)
    edit(same, identity={"config_hash": "one", "weights_hash": "sha256:1"})
    twin = tiny_dataset(tmp_path / "twin", n_docs=8, model=MODEL)
    edit(twin, identity={"config_hash": "one", "weights_hash": "sha256:2"})
    text = refused(tmp_path, tmp_path, "same", "twin")
    assert f"weights_hash: {same} has 'sha256:1', {twin} has 'sha256:2'" in text
    edit(twin, identity={"weights_hash": "sha256:1"}, head={"scale": 0.5})
    assert "scale: 1.0 -> 0.5" in refused(tmp_path, tmp_path, "same", "twin")
    # an unknown hash (of `a`) does not differ: the tensors decide
    assert run(config_of(place, tmp_path / "fits", "a", str(same), steps=1)).finished


def test_a_head_that_differs_in_one_row_is_another_target(place, tmp_path):
    data = tiny_dataset(tmp_path / "near", n_docs=8, model=MODEL)
    file = data / "target" / "head.safetensors"
    tensors = load_file(file)
    tensors["lm_head"][3] += 0.5
    save_file(tensors, file)
    edit(data, files=plain(file_records(data, ["target/head.safetensors"])))
    text = refused(place, tmp_path, "a", str(data))
    assert "lm_head: 1.56% of its rows differ" in text and "embed_tokens" not in text


def test_other_supervision_is_refused_and_another_template_said(place, tmp_path, caplog):
    data = tiny_dataset(tmp_path / "logits", n_docs=8, model=MODEL)
    stored = json.loads((data / "manifest.json").read_text())["columns"]
    final = next(c for c in stored if c["name"] == "hidden.final")
    other = [{**c, "name": "logits", "width": 64} if c is final else c for c in stored]
    edit(data, supervision="logits", columns=other)
    text = refused(place, tmp_path, "a", str(data))
    assert "--supervision logits" in text and "final-hidden" in text
    edit(data, supervision="final-hidden", columns=stored, identity={"chat_template_hash": "x"})
    other = tiny_dataset(tmp_path / "other", n_docs=8, model=MODEL)
    edit(other, identity={"chat_template_hash": "y"})
    open_documents(parse_sources((str(data), str(other))))
    said = "warning[mixture]: prompts of an engine can match only one of two datasets"
    assert said in caplog.text
    assert f"chat_template_hash: {data} has 'x', {other} has 'y'" in caplog.text


def test_a_layer_that_one_dataset_lacks_cannot_be_asked_for(place, tmp_path, capsys):
    arguments = ["fit", "eagle3", "--data", str(place / "a"), str(place / "b"), "--out",
                 str(tmp_path / "run"), "--steps", "1", "--seq-len", "48", 
                 "--ttt-steps", "2"]  # fmt: skip
    assert main([*arguments, "--layers", "0,1"]) == 2
    assert "no layer [0], only [1, 2]" in capsys.readouterr().err
    assert main(arguments) == 0
    assert load_draft(tmp_path / "run" / "last").config.layers == (1, 2)


def test_flags_may_be_repeated_and_fit_json_repeats_the_run(place, tmp_path):
    a, b = str(place / "a"), str(place / "b")
    common = ["--steps", "3", "--seq-len", "48", "--ttt-steps", "2", "--validation", "0.2"]
    out, again = tmp_path / "run", tmp_path / "again"
    assert (
        main(["fit", "eagle3", "--data", f"{a}:0.5", "--data", b, "--out", str(out), *common]) == 0
    )
    assert json.loads((out / "fit.json").read_text())["data"] == [f"{a}:0.5", b]
    config = ["--config", str(out / "fit.json"), "--out", str(again)]
    assert main(["fit", "eagle3", *config]) == 0
    assert_same_run(out, again)
    assert main(["fit", "eagle3", "--data", f"{a}:0", "--out", str(again)]) == 2


def test_datasets_of_different_codecs_are_handed_out_decoded(tmp_path):
    target, corpus = save_target(tmp_path / "target"), write_corpus(tmp_path / "chats.jsonl")
    for name, codec in (("plain", "bf16"), ("int8", "fine"), ("mixed", "aux=default,final=fine")):
        generate_with(**options(target, corpus, tmp_path / name, codec=codec))
    names = ("plain", "int8:0.5", "mixed")
    config = config_of(tmp_path, tmp_path / "run", *names, seq_len=128, steps=6)
    mixture = opened(config)
    assert not any(column.lossy for column in mixture.manifest.columns)
    rows = len(mixture.datasets[0])
    for row in (1, rows + 1, 2 * rows + 1):
        dataset, own = mixture._locate(row)
        length, document = int(mixture.lengths[row]), dataset[own]
        out = {"input_ids": torch.zeros(length, dtype=torch.int64)}
        out["hidden.L2"] = torch.zeros(length, 32)
        assert mixture.read_into(row, out) == length == len(document["input_ids"])
        assert all(torch.equal(values, document[name].to(values)) for name, values in out.items())
        assert mixture.id_array[row].as_py() == dataset.doc_ids[own]
        assert mixture.shard_of(row) == str(dataset.path / dataset.shard_of(own))
    assert run(config).finished
    assert set(metrics(config.out)[-1]) >= {"loss/plain", "loss/int8", "loss/mixed"}
