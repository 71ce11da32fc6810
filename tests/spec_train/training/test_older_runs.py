"""Runs of older releases resume with the order and the split that they began with."""

import json
from pathlib import Path

import pytest

from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.order import ORDER
from spec_train.data.splits import Rules
from spec_train.training import setup
from spec_train.training.setup import make_splits
from spec_train.training.stored import dump_checked
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.test_trainer_resume import assert_same_run, stop_after
from tests.spec_train.training.tools import change, run

data, config = trainer_tools.data, trainer_tools.config


def as_older_releases(patch) -> None:
    """Start runs with the first order and the split of --seed alone, and do not record them."""
    original = setup.run_identity

    def rules_of(config, options, started):
        return change(config, split_seed=config.seed), Rules(order=1, least=0)

    def run_identity(*arguments):
        known = original(*arguments)
        newer = ("order", "split_seed", "split_border")
        return {name: v for name, v in known.items() if name not in newer}

    patch.setattr(setup, "rules_of", rules_of)
    patch.setattr(setup, "run_identity", run_identity)


def identity(out: str) -> dict:
    return json.loads((Path(out) / "run.json").read_text())["identity"]


def test_a_run_of_an_older_release_resumes_as_it_began(config, tmp_path, monkeypatch):
    """Bit for bit, with a seed whose split is not the one of a new run."""
    config = change(config, seed=3)
    with monkeypatch.context() as patch:
        as_older_releases(patch)
        run(change(config, out=str(tmp_path / "whole")))
        stop_after(5, patch)
        assert not run(config).finished
    before = identity(config.out)
    assert "order" not in before and "split_seed" not in before
    assert run(config).finished
    assert_same_run(tmp_path / "whole", config.out)
    assert identity(config.out) == before
    assert json.loads((Path(config.out) / "fit.json").read_text())["split_seed"] == 3
    again = run(config)  # also once it is finished
    assert again.finished and again.step == config.steps


def test_an_older_run_keeps_its_few_held_out_documents(config, tmp_path, monkeypatch):
    """It held out what --validation said, and a new run holds out a tenth of a small dataset."""
    config = change(config, validation=0.001)
    with monkeypatch.context() as patch:
        as_older_releases(patch)
        run(change(config, out=str(tmp_path / "whole")))
        stop_after(5, patch)
        assert not run(config).finished
    before = held_out(config.out)
    assert run(config).finished
    assert held_out(config.out) == before == 1
    assert_same_run(tmp_path / "whole", config.out)
    run(change(config, out=str(tmp_path / "new")))
    assert held_out(str(tmp_path / "new")) == 5


def held_out(out: str) -> int:
    return json.loads((Path(out) / "held-out.json").read_text())["documents"]


def test_an_older_run_takes_no_other_split(config, monkeypatch):
    with monkeypatch.context() as patch:
        as_older_releases(patch)
        run(change(config, seed=3, steps=2))
    with pytest.raises(ConfigError, match=r"--split-seed 4: .* --seed \(3\) decided the held-out"):
        run(change(config, seed=3, steps=2, split_seed=4))
    assert run(change(config, seed=3, steps=2, split_seed=3)).finished


def test_a_new_run_records_its_order_and_its_split(config):
    run(change(config, steps=2, split_seed=5))
    assert (identity(config.out)["order"], identity(config.out)["split_seed"]) == (ORDER, 5)
    with pytest.raises(ConfigError, match="split_seed: 5 -> 0"):
        run(change(config, steps=2))


def test_an_option_that_is_newer_than_a_run_has_its_default_there(config):
    """A release that adds options must not end the runs of the one before it."""
    run(change(config, steps=2))
    file = Path(config.out) / "run.json"
    table = json.loads(file.read_text())
    for name in ("clip", "slots", "window_tokens"):  # of the trainer, and of the draft
        del table["identity"][name]
    file.write_text(dump_checked(table))
    assert run(change(config, steps=2)).finished
    assert json.loads(file.read_text())["identity"] == table["identity"]
    with pytest.raises(ConfigError, match=r"clip: '\(absent\)' -> 0.25"):
        run(change(config, steps=2, clip=0.25))


def test_a_run_of_a_newer_release_is_refused(config):
    run(change(config, steps=2))
    file = Path(config.out) / "run.json"
    table = json.loads(file.read_text())
    table["identity"]["order"] = ORDER + 1
    file.write_text(dump_checked(table))
    with pytest.raises(ConfigError, match="a newer release started this run"):
        run(change(config, steps=2))


def test_seeds_are_compared_on_the_same_documents(config):
    """The held-out documents follow from --split-seed alone."""
    dataset = HiddenStatesDataset(config.data)
    found = [make_splits(dataset, change(config, seed=seed)) for seed in range(3)]
    assert len({tuple(splits.validation.rows) for splits in found}) == 1
    orders = {str(splits.train.batches(0)) for splits in found}
    assert len(orders) == 3
    other = make_splits(dataset, change(config, split_seed=1))
    assert set(other.validation.rows) != set(found[0].validation.rows)
