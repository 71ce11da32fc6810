"""`spec-train eval`: the acceptance simulated on a dataset equals that of real decoding."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import spec_data
from spec_data.shards.errors import ConfigError, DatasetError, DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.resumable import write_record
from spec_train.data.order import SPLIT_RULE, hash_prompts, split_border
from spec_train.drafts.dspark.options import DSparkOptions
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.evaluation import on_dataset as evaluate_data
from spec_train.evaluation.evaluate import _doubts
from spec_train.evaluation.on_dataset import choose_documents
from spec_train.evaluation.run_record import RunRecord, read_run
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.factory import tiny_dataset, tiny_llama
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import STEPS, VOCAB, head_of, run_eval
from tests.tolerance import close, network

target, prompts = evaluate_tools.target, evaluate_tools.prompts
trained, workplace = evaluate_tools.trained, evaluate_tools.workplace


@pytest.fixture(scope="module")
def data(tmp_path_factory, target) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tiny"
    return tiny_dataset(folder, n_docs=20, layers=(0, 1, 2), model=target)


def test_pack_size_changes_no_figure_and_teacher_forcing_is_the_drafts_own(
    workplace, data, target, trained, monkeypatch
):
    config = dict(draft=str(workplace / "draft"), data=str(data), device="cpu")
    forward = {"terms": network(STEPS), "dtype": torch.float32}
    whole = run_eval(config)["data"]
    monkeypatch.setattr(evaluate_data, "PACK_TOKENS", 1)
    single = run_eval(config)["data"]
    assert whole["simulated"] == single["simulated"]
    close(single["teacher_forced"], whole["teacher_forced"], **forward)
    assert whole["documents"] == 20 and whole["split"] == "all"
    assert 0 <= whole["on_policy"] < 0.5  # random documents are nobody's own words
    dataset = HiddenStatesDataset(data)
    batch = evaluate_data.read_pack(dataset, range(20), trained.columns(), torch.float32)
    sums = trained.loss(batch, head_of(target), trained.slot_counts(batch)).sums
    close(whole["teacher_forced"], trained.summarise(sums), **forward)


def test_the_anchors_of_a_block_draft_are_the_same_in_every_call(data, tmp_path):
    training = Training(data=str(data), out=str(tmp_path / "run"), steps=0, device="cpu")
    fit("dspark", training, DSparkOptions(num_layers=1, block_size=3, num_anchors=4))
    config = dict(draft=str(tmp_path / "run"), data=str(data), split="all", device="cpu")
    figures = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        figures.append(run_eval(config)["data"]["teacher_forced"])
        assert torch.initial_seed() == seed
    assert figures[0] == figures[1]


def test_a_run_says_which_documents_were_held_out(workplace, data, tmp_path, caplog):
    dataset = HiddenStatesDataset(data)
    known = RunRecord(
        datasets=[dataset.manifest.fingerprint],
        split_rule=SPLIT_RULE,
        split_seed=0,
        split_border=split_border(hash_prompts(dataset.prompts, 0), 0.3),
        seq_len=2048,
    )
    held_out, name = choose_documents(dataset, "auto", known)
    train, _ = choose_documents(dataset, "train", known)
    everything, _ = choose_documents(dataset, "all", known)
    assert name == "validation" and 0 < len(held_out) < len(everything)
    assert sorted(held_out + train) == everything
    assert choose_documents(dataset, "auto", replace(known, datasets=["another"]))[1] == "all"
    assert choose_documents(dataset, "validation", replace(known, datasets=["x"]))[0] == held_out
    assert choose_documents(dataset, "auto", None)[1] == "all"
    assert choose_documents(dataset, "auto", replace(known, split_border=0))[1] == "all"
    assert "the draft has learned these documents" in caplog.text
    with pytest.raises(ConfigError, match="--split train: only a run directory"):
        choose_documents(dataset, "train", None)

    run = tmp_path / "run"
    run.mkdir()
    (run / "best").symlink_to(workplace / "draft", target_is_directory=True)
    options = {"data": str(data), "seed": 0, "validation": 0.3, "seq_len": 2048}
    (run / "fit.json").write_text(json.dumps(options))
    identity = {"dataset": known.datasets[0], "split_rule": SPLIT_RULE, "split_seed": 0}
    identity["split_border"] = known.split_border
    table = {"identity": identity, "total_steps": 2}
    write_record(run / "run.json", table)
    for draft in (run, run / "best"):
        report = run_eval(dict(draft=str(draft), data=str(data), device="cpu"))
        assert report["data"]["split"] == "validation"
        assert report["data"]["documents"] == len(held_out)
    write_record(run / "run.json", table | {"identity": identity | {"split_rule": "x"}})
    with pytest.raises(ConfigError, match=f"by rule 'x', this release uses '{SPLIT_RULE}'"):
        run_eval(dict(draft=str(run), data=str(data), device="cpu"))
    (run / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        run_eval(dict(draft=str(run), data=str(data), device="cpu"))


def test_of_a_view_of_the_data_too_what_was_held_out_is_measured(data, tmp_path):
    """Or of the data that the run's view was made of, or of a view of it."""
    spec_data.select(data, tmp_path / "view", where="number >= 1")
    spec_data.select(tmp_path / "view", tmp_path / "second", sample=0.8)
    dataset, view, second = map(HiddenStatesDataset, (data, tmp_path / "view", tmp_path / "second"))
    assert second.manifest.ancestors() >= {view.manifest.fingerprint, dataset.manifest.fingerprint}
    border = split_border(hash_prompts(dataset.prompts, 0), 0.4)
    known = RunRecord(
        datasets=[], split_rule=SPLIT_RULE, split_seed=0, split_border=border, seq_len=2048
    )
    held_out = {
        tuple(dataset[i]["input_ids"].tolist())
        for i in choose_documents(dataset, "validation", known)[0]
    }
    pairs = [(view, dataset), (second, dataset), (dataset, view), (second, view), (view, second)]
    for measured, trained in pairs:
        made = trained.manifest
        run = replace(known, datasets=[made.fingerprint], made_of=frozenset(made.ancestors()))
        chosen, split = choose_documents(measured, "auto", run)
        assert split == "validation"
        assert {tuple(measured[i]["input_ids"].tolist()) for i in chosen} <= held_out


def test_of_a_second_capture_too_what_was_held_out_is_measured(data, target, tmp_path):
    """With other columns, say: nothing but its documents shows what the run has learned."""
    training = Training(
        data=str(data), out=str(tmp_path / "run"), steps=1, device="cpu", validation=0.3
    )
    fit("eagle3", training, Eagle3Options(ttt_steps=1))
    anew = tiny_dataset(
        tmp_path / "anew", n_docs=20, layers=(0, 1, 2), model=target, supervision="logits"
    )
    fingerprints = {HiddenStatesDataset(path).manifest.fingerprint for path in (data, anew)}
    assert len(fingerprints) == 2
    figures = [
        run_eval(dict(draft=str(tmp_path / "run"), data=str(path), device="cpu"))["data"]
        for path in (data, anew)
    ]
    assert figures[0]["documents"] == figures[1]["documents"] < len(HiddenStatesDataset(anew))
    assert [part["split"] for part in figures] == ["validation", "validation"]
    # one that shares documents with the run's is new for the rest
    more = tiny_dataset(tmp_path / "more", n_docs=50, layers=(0, 1, 2), model=target)
    found = run_eval(dict(draft=str(tmp_path / "run"), data=str(more), device="cpu"))["data"]
    assert found["documents"] == figures[0]["documents"] + 30


def test_what_a_run_learned_is_not_measured_where_other_data_of_it_cannot_be_read(target, tmp_path):
    """A run on two datasets, of which only one was moved."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for seed, path in enumerate(paths):
        tiny_dataset(path, n_docs=20, layers=(0, 1, 2), model=target, seed=seed)
    given = dict(data=tuple(map(str, paths)), out=str(tmp_path / "run"), steps=1, device="cpu")
    fit("eagle3", Training(**given, validation=0.3), Eagle3Options(ttt_steps=1))

    def measured(path: Path) -> tuple[list[int], str]:
        facts = read_run(tmp_path / "run", (tmp_path / "run" / "best").resolve())
        return choose_documents(HiddenStatesDataset(path), "auto", facts)

    for path in paths:
        before = measured(path)
        assert before[1] == "validation" and 0 < len(before[0]) < 20
        moved = path.rename(tmp_path / "moved")
        assert measured(moved) == before
        moved.rename(path)
    paths[0].rename(tmp_path / "gone")  # of the other one, what is not its own is still known
    anew = dict(n_docs=20, layers=(0, 1, 2), model=target, seed=1, supervision="logits")
    assert measured(tiny_dataset(tmp_path / "anew", **anew)) == before


def test_what_the_run_of_init_from_learned_is_not_measured(data, tmp_path, caplog):
    """By another split, which `fit` warns of; or all of it."""
    start, facts = None, []
    for name, seed, validation in (("one", 0, 0.3), ("two", 1, 0.5), ("all", 0, 0.0)):
        given = dict(data=str(data), out=str(tmp_path / name), steps=1, device="cpu")
        given |= dict(split_seed=seed, validation=validation, init_from=start)
        fit("eagle3", Training(**given), Eagle3Options(ttt_steps=1))
        start = str(tmp_path / name)
        facts.append(read_run(tmp_path / name, (tmp_path / name / "best").resolve()))
    dataset = HiddenStatesDataset(data)
    first, second = (replace(run, earlier=()) for run in facts[:2])
    both = {*choose_documents(dataset, "auto", first)[0]}
    both &= {*choose_documents(dataset, "auto", second)[0]}
    assert both and choose_documents(dataset, "auto", facts[1]) == (sorted(both), "validation")
    assert "the draft has learned these documents" not in caplog.text
    assert choose_documents(dataset, "auto", facts[2]) == (list(range(20)), "all")
    assert "the draft has learned these documents" in caplog.text


def test_a_dataset_of_another_target_or_without_a_layer_is_refused(workplace, tmp_path):
    tiny_dataset(tmp_path / "wide", n_docs=2, vocab=80)
    tiny_dataset(tmp_path / "few", n_docs=2, vocab=VOCAB, layers=(0, 1))
    other = tiny_llama(VOCAB, seed=9)
    tiny_dataset(tmp_path / "other", n_docs=2, layers=(0, 1, 2), model=other)
    for name, said in (
        ("other", r"draft: a draft of another target than that of .*other \(100"),
        ("wide", "target of vocabulary 64, .*wide has 80"),
        ("few", r"layers \[0, 2\]; .*few holds \[0, 1\], without \[2\]"),
    ):
        config = dict(draft=str(workplace / "draft"), data=str(tmp_path / name), device="cpu")
        with pytest.raises(DraftError, match=said):
            run_eval(config)


def test_a_damaged_head_is_named_and_not_a_draft_that_shares_it(workplace, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "target" / "head.safetensors").write_bytes(b"")
    config = json.loads((workplace / "draft" / "config.json").read_text())
    del config["spec_train"]  # as a published draft, whose files may lack what the target has
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "draft" / "model.safetensors")
    with pytest.raises(DatasetError, match=r"head\.safetensors: empty \(0 bytes\)"):
        run_eval(dict(draft=str(tmp_path / "draft"), data=str(tmp_path / "data"), device="cpu"))


def test_a_gap_is_told_where_both_lengths_are_of_the_same_depth():
    forced = {"product_limit_length": 3.0} | {f"accept_rate/{d}": 0.7 for d in range(1, 5)}
    deeper = [*[0.5] * 4, *[1.0] * 4]
    given = ([0.5] * 4, True), (deeper, True), ([0.5] * 2, False), ([0.7] * 4, False)
    for rates, told in given:
        simulated = {"rounds": 500, "every_slot_rate": rates}
        warnings = _doubts({"data": {"teacher_forced": forced, "simulated": simulated}})
        assert any("with its own 1.94" in text for text in warnings) == told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "nothing to evaluate on"),
        ({"target": True}, "prompts"),
        ({"prompts": True, "data": True}, "target"),
        ({"data": True, "tree_tokens": 8}, "--tree-tokens"),
        ({"data": True, "draft_tokens": "2,3"}, "--draft-tokens"),
        ({"data": True, "temperature": -1.0}, "--temperature -1.0"),
        ({"data": True, "temperature": 1e-320}, "--temperature 1e-320"),
        ({"data": True, "temperature": float("nan")}, "--temperature nan"),
        ({"data": True, "max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"target": True, "prompts": True, "mask": "all"}, "--mask all"),
        # what would change nothing
        ({"data": True, "temperature": 0.7}, "--temperature would"),
        ({"data": True, "max_new_tokens": 3}, "--max-new-tokens would"),
        ({"data": True, "cost_ratio": 0.05}, "--cost-ratio would"),
        ({"data": True, "chat_template_kwargs": {"a": 1}}, "--chat-template-kwargs would"),
        ({"target": True, "prompts": True, "split": "train"}, "--split would"),
        (
            {"draft": None, "server": "http://localhost:1", "prompts": True, "draft_tokens": 4},
            "--draft-tokens would",
        ),
        *(
            ({"data": True, "draft_tokens": text}, "--draft-tokens")
            for text in ("-1", "x", "2,", "2,0", "2.5", "²")
        ),
    ],
)
def test_options_that_contradict_each_other(workplace, data, options, said):
    paths = {"target": workplace / "target", "prompts": workplace / "prompts.jsonl", "data": data}
    given = {name: paths.get(name, value) for name, value in options.items()}
    with pytest.raises(ConfigError, match=said):
        run_eval({"draft": workplace / "draft", **given})
