"""--start-fc ridge: what `fc` begins as, and where it begins at random."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.resumable import read_record, write_record
from spec_train.data.mixture import open_documents
from spec_train.data.order import BatchPlan
from spec_train.data.splits import make_splits
from spec_train.drafts import draft_class
from spec_train.drafts.draft import Draft
from spec_train.losses.head import TargetHead
from spec_train.options.data_option import parse_sources
from spec_train.options.draft_options import DraftOptions
from spec_train.options.kinds import DRAFT_OPTIONS, draft_options
from spec_train.training import start_fc
from spec_train.training.fit import fit
from spec_train.training.start_draft import recorded_positions
from tests.factory import tiny_dataset
from tests.remote_tools import forget_memory, put_in_memory
from tests.spec_train.drafts.any_draft import SMALL
from tests.spec_train.training import ranks_tools
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.ranks_tools import fit_well
from tests.spec_train.training.tools import OPTIONS, change, masters, metrics

data, config = trainer_tools.data, trainer_tools.config
patience = ranks_tools.patience
KINDS = [name for name in DRAFT_OPTIONS if hasattr(draft_options(name), "start_fc")]
RIDGE = OPTIONS.__class__(ttt_steps=2, draft_vocab_size=40, start_fc="ridge")


def ridge_options(kind: str, **more) -> DraftOptions:
    return draft_options(kind)(**SMALL[kind] | more, start_fc="ridge")


def fresh(kind: str, dataset: HiddenStatesDataset, **more) -> Draft:
    """Return an untrained draft."""
    torch.manual_seed(3)
    head = TargetHead.from_dataset(dataset, torch.float32, torch.device("cpu"))
    return draft_class(kind).build(
        ridge_options(kind, **more).sized(dataset.manifest.hidden_size, 4),
        target_config=dataset.target_config(),
        manifest=dataset.manifest,
        head=head,
        token_counts=torch.ones(head.spec.vocab_size, dtype=torch.int64),
        target_dir=dataset.target_dir,
        positions=recorded_positions(dataset),
    )


def plan_of(dataset: HiddenStatesDataset, seed: int = 0, packs: int = 4) -> BatchPlan:
    rows = np.arange(len(dataset))
    return BatchPlan(dataset.lengths, rows, seq_len=24, packs_per_batch=packs, seed=seed)


def slow_fit(draft: Draft, dataset: HiddenStatesDataset, rows: list[int], norm: str):
    """Row after row, and least squares on rows to which the ridge is appended; in float64."""
    embedding = draft.embed_tokens.weight.double()
    sides: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {False: [], True: []}
    for number, row in enumerate(rows):
        document = dataset[row]
        for t in range(min(24, len(document["input_ids"])) - 1):
            parts = [document[f"hidden.L{k}"][t].double() for k in draft.config.layers]
            if norm == "each":
                parts = [part / (part.square().mean() + 1e-6).sqrt() for part in parts]
            x = torch.cat(parts)
            x = x / x.square().mean().sqrt()
            f = document["hidden.final"][t + 1].double()
            z = torch.cat([x, embedding[document["input_ids"][t + 1]]])
            sides[number % 8 == 1].append((z, f / f.square().mean().sqrt()))
    (z, y), (held_z, held_y) = (
        tuple(torch.stack(side) for side in zip(*sides[held], strict=True))
        for held in (False, True)
    )
    found = []
    for strength in (1e-3, 1e-2, 1e-1, 1.0):
        own = (strength * z.square().sum(0)).sqrt().diag()
        more = torch.cat([y, torch.zeros(z.shape[1], y.shape[1], dtype=torch.float64)])
        b = torch.linalg.lstsq(torch.cat([z, own]), more, driver="gelsd").solution
        wrong = (held_y - held_z @ b).square().sum()
        share = float(1 - wrong / (held_y - y.mean(0)).square().sum())
        found.append((share, strength, b))
    share, strength, b = max(found, key=lambda one: one[0])
    size = draft.main_weight.shape[1]
    states, weight = held_z[:, :size], b[:size].T
    usual = (states @ draft.main_weight.double().T).square().mean().sqrt()
    return weight * usual / (states @ weight.T).square().mean().sqrt(), share, strength


@pytest.mark.parametrize(
    ("kind", "more", "norm"),
    [
        ("eagle3", {}, "all"),
        ("eagle3", {"norm_before_fc": False}, "none"),
        ("peagle", {"fc_norm": True}, "each"),
        ("dspark", {}, "none"),
        ("dflash2", {"layers": "0,2"}, "none"),
    ],
    ids=str,
)
def test_it_is_the_regression_done_slowly(kind, more, norm, data, monkeypatch):
    monkeypatch.setattr(start_fc, "DOCUMENTS", 1)  # all tokens of every document
    dataset = HiddenStatesDataset(data)
    draft, plan = fresh(kind, dataset, **more), plan_of(dataset)
    rows = start_fc.sample_rows(plan, sum(draft.main_weight.shape))
    head = TargetHead.from_dataset(dataset, torch.float32, torch.device("cpu"))
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    fast = start_fc.fit_fc(draft, dataset, plan, rows, head)
    assert fast is not None and fast.explained > 0
    weight, share, strength = slow_fit(draft, dataset, rows.tolist(), norm)
    assert fast.ridge == strength
    assert fast.explained == pytest.approx(share, abs=1e-5)
    torch.testing.assert_close(fast.weight.double(), weight, rtol=1e-3, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_token_with_huge_states_counts_as_one(kind, data, monkeypatch):
    """As attention sinks are: here states a thousand times as large change nothing."""
    dataset = HiddenStatesDataset(data)
    draft, plan = fresh(kind, dataset), plan_of(dataset)
    rows = start_fc.sample_rows(plan, sum(draft.main_weight.shape))
    head = TargetHead.from_dataset(dataset, torch.float32, torch.device("cpu"))
    usual = start_fc.fit_fc(draft, dataset, plan, rows, head)
    original = HiddenStatesDataset.read_into

    def with_a_sink(self, index, out, *given):
        count = original(self, index, out, *given)
        for name in draft.state_columns:
            out[name][0] *= 1000
        return count

    monkeypatch.setattr(HiddenStatesDataset, "read_into", with_a_sink)
    huge = start_fc.fit_fc(draft, dataset, plan, rows, head)
    torch.testing.assert_close(huge.weight, usual.weight, rtol=1e-3, atol=1e-4)


def test_the_sample_is_bounded_and_what_the_run_reads_first(data, monkeypatch):
    dataset = HiddenStatesDataset(data)
    whole = start_fc.sample_rows(plan_of(dataset), 128)
    for packs in (1, 16):
        assert np.array_equal(whole, start_fc.sample_rows(plan_of(dataset, packs=packs), 128))
    assert not np.array_equal(whole, start_fc.sample_rows(plan_of(dataset, seed=1), 128))
    monkeypatch.setattr(start_fc, "MOST_ROWS", 128)
    monkeypatch.setattr(start_fc, "DOCUMENTS", 4)
    few = start_fc.sample_rows(plan_of(dataset), 128)
    assert np.array_equal(few, whole[: len(few)]) and len(few) < len(dataset)
    order = np.concatenate(list(plan_of(dataset).windows(0)))
    assert np.array_equal(few, order[: len(few)])
    draft = fresh("dspark", dataset)
    head = TargetHead.from_dataset(dataset, torch.float32, torch.device("cpu"))
    read = start_fc._read(draft, dataset, 0, int(dataset.lengths[0]), 5, head)
    assert [len(part) for part in read] == [5, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_it_changes_fc_alone_and_is_recorded(kind, config, tmp_path, caplog):
    random, ridge = (change(config, steps=0, out=str(tmp_path / name)) for name in ("a", "b"))
    fit(kind, random, draft_options(kind)(**SMALL[kind], start_fc="random"))
    caplog.set_level(logging.INFO)
    assert "fc  " not in caplog.text
    fit(kind, ridge, ridge_options(kind))
    (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("fc  ")]
    assert "starts as the ridge regression" in said and "% of the variance" in said
    a, b = (load_file(Path(run.out) / "last" / "model.safetensors") for run in (random, ridge))
    assert [name for name in a if not torch.equal(a[name], b[name])] == ["fc.weight"]
    assert json.loads((Path(ridge.out) / "fit.json").read_text())["start_fc"] == "ridge"


def test_processes_and_packs_do_not_matter(config, tmp_path, monkeypatch):
    alone, pair = (change(config, steps=0, out=str(tmp_path / name)) for name in ("a", "b"))
    fit("eagle3", alone, RIDGE)
    monkeypatch.setattr(ranks_tools, "OPTIONS", RIDGE)
    fit_well(change(pair, batch_size=1, accumulation=1))
    a, b = (Path(run.out) / "last" / "model.safetensors" for run in (alone, pair))
    assert a.read_bytes() == b.read_bytes()


def test_a_run_that_goes_on_is_the_uninterrupted_one(config, tmp_path):
    whole = change(config, out=str(tmp_path / "whole"))
    fit("eagle3", whole, RIDGE)
    fit("eagle3", config, RIDGE, 3)
    fit("eagle3", config, OPTIONS)  # as it began: not given, it is that of the run
    a, b = masters(whole.out), masters(config.out)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert metrics(whole.out)[-1]["loss"] == metrics(config.out)[-1]["loss"]
    other = OPTIONS.__class__(ttt_steps=2, draft_vocab_size=40, start_fc="random")
    with pytest.raises(ConfigError, match="start_fc"):
        fit("eagle3", whole, other)


def test_a_run_of_an_earlier_release_goes_on(config):
    """Its run.json does not know the option: it began at random."""
    fit("eagle3", config, OPTIONS.__class__(ttt_steps=2, draft_vocab_size=40, start_fc="random"), 3)
    record = read_record(Path(config.out) / "run.json")
    assert "start_fc" not in record["identity"]
    write_record(Path(config.out) / "run.json", record)
    assert fit("eagle3", config, OPTIONS).finished
    with pytest.raises(ConfigError, match="start_fc"):
        fit("eagle3", config, RIDGE)


def test_a_trained_draft_keeps_its_fc(config, tmp_path):
    fit("eagle3", config, OPTIONS, 1)
    further = change(config, steps=0, init_from=config.out, out=str(tmp_path / "further"))
    with pytest.raises(DraftError, match=r"--start-fc ridge .*\n*.*--init-from"):
        fit("eagle3", further, RIDGE)
    fit("eagle3", further, OPTIONS)
    a, b = (load_file(Path(run.out) / "last" / "model.safetensors") for run in (config, further))
    assert torch.equal(a["fc.weight"], b["fc.weight"])
    assert json.loads((Path(further.out) / "fit.json").read_text())["start_fc"] == "random"


def test_where_it_cannot_it_begins_at_random_and_says_why(config, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    sets = {"topk:3": {"supervision": "topk:3"}, "one": {"n_docs": 1}, "wide": {}}
    words = {"topk:3": "no final states", "one": "explained nothing", "wide": "too much memory"}
    for number, (name, more) in enumerate(sets.items()):
        if name == "wide":
            monkeypatch.setattr(start_fc, "MOST_INPUTS", 127)
        place = tiny_dataset(tmp_path / f"data-{number}", **{"n_docs": 12} | more)
        weights = []
        for options in (OPTIONS, RIDGE):
            out = str(tmp_path / f"{number}-{len(weights)}")
            plain = change(config, steps=0, eval_every=None, validation=0)
            caplog.clear()
            fit("eagle3", change(plain, data=str(place), out=out), options)
            weights.append((Path(out) / "last" / "model.safetensors").read_bytes())
        assert weights[0] == weights[1], name
        assert f"{words[name]}" in caplog.text and "random weights" in caplog.text


def test_data_that_are_passed_on_are_not_read_before(config, monkeypatch):
    dataset = HiddenStatesDataset(config.data)

    class Passing:
        passed_on = True

    monkeypatch.setattr(HiddenStatesDataset, "growing", Passing())
    assert "each document is read once" in start_fc._why_not(fresh("eagle3", dataset), dataset)


def test_data_that_grow_are_waited_for(config, monkeypatch, tmp_path):
    """What is read first was waited for, whoever reads it."""
    there: set[int] = set()
    wait, read = HiddenStatesDataset.wait_for, HiddenStatesDataset.read_into

    def waits(self, rows, stop):
        rows = list(rows)
        there.update(rows)
        return wait(self, rows, stop)

    def reads(self, index, out, *given, **more):
        assert index in there or "hidden.final" not in out
        return read(self, index, out, *given, **more)

    monkeypatch.setattr(HiddenStatesDataset, "wait_for", waits)
    monkeypatch.setattr(HiddenStatesDataset, "read_into", reads)
    fit("eagle3", change(config, steps=0, eval_every=None, validation=0), RIDGE)


def test_several_datasets_and_remote_ones_are_read(config, data, tmp_path, monkeypatch):
    second = tiny_dataset(tmp_path / "second", n_docs=40, seed=0)
    other = HiddenStatesDataset(second)
    both = (str(data), f"{second}:2")
    outs = []
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    put_in_memory(second, "memory://bucket/start")
    for name, places in (("here", both), ("there", (str(data), "memory://bucket/start:2"))):
        dataset = open_documents(parse_sources(places))
        splits = make_splits(dataset, change(config, data=places), 1)
        rows = start_fc.sample_rows(splits.train, 128)
        from_second = int((rows >= len(dataset) - len(other)).sum())
        assert 0 < from_second < len(rows)
        outs.append(tmp_path / name)
        fit("eagle3", change(config, data=places, steps=0, out=str(outs[-1])), RIDGE)
    a, b = ((out / "last" / "model.safetensors").read_bytes() for out in outs)
    assert a == b
    forget_memory()


def test_every_kind_that_joins_captured_layers_has_it():
    joining = [name for name in DRAFT_OPTIONS if hasattr(draft_options(name), "layer_ids")]
    assert joining == KINDS
    assert len(KINDS) >= 7
