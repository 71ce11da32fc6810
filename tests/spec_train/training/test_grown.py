"""A run goes on with a dataset that has grown: which documents, killed and resumed, refusals."""

import json
import shutil
from pathlib import Path

import pytest

import spec_data
from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.options.training import Training
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.spec_train.training.test_trainer_resume import assert_same_run, stop_after
from tests.spec_train.training.tools import change, metrics, run


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> tuple[Path, Path]:
    """A dataset, and a larger one that begins with its documents."""
    folder = tmp_path_factory.mktemp("grown")
    base = tiny_dataset(folder / "base", n_docs=20)
    more = tiny_dataset(
        folder / "more", seed=7, model=tiny_llama(), documents=random_documents(16, 64, 7)
    )
    spec_data.merge([base, more], folder / "all")
    return base, folder / "all"


@pytest.fixture
def begun(sets, tmp_path) -> Training:
    """The options of a run that is finished on the smaller dataset."""
    config = Training(
        data=str(sets[0]), out=str(tmp_path / "run"), steps=3, batch_size=2, seq_len=48, lr=1e-3,
        validation=0.15, log_every=1, eval_every=2, save_every=2, device="cpu",
    )  # fmt: skip
    assert run(config).finished
    return config


def test_a_run_goes_on_with_all_documents(begun, sets, tmp_path, monkeypatch):
    longer = change(begun, data=str(sets[1]), steps=7)
    shutil.copytree(begun.out, tmp_path / "killed", symlinks=True)
    result = run(longer)
    assert result.finished and result.step == 7
    saved = json.loads((Path(begun.out) / "last/training_state.json").read_text())
    state = saved.get("state", saved)["stream"]
    assert state["fingerprint"] == HiddenStatesDataset(sets[1]).manifest.fingerprint
    epochs = [line["epoch"] for line in metrics(begun.out) if "loss" in line and "epoch" in line]
    first = [epoch for epoch in epochs if epoch > 0][3:]
    assert state["epoch"] >= 1 and min(first) > 1, "from the next whole epoch on"
    assert json.loads((Path(begun.out) / "run.json").read_text())["total_steps"] == 7
    killed = change(longer, out=str(tmp_path / "killed"))
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        assert not run(killed).finished
    assert run(killed).finished
    assert_same_run(begun.out, killed.out)


def test_what_is_no_growth_is_refused(begun, sets, tmp_path):
    for steps in (3, 2):
        with pytest.raises(ConfigError, match=r"first 20 of the 36 documents.*above 3"):
            run(change(begun, data=str(sets[1]), steps=steps))
    with pytest.raises(ConfigError, match="lr:"):
        run(change(begun, data=str(sets[1]), steps=7, lr=1e-2))
    with pytest.raises(ConfigError, match="dataset:"):
        run(change(begun, data=str(tiny_dataset(tmp_path / "other", n_docs=20, seed=3)), steps=7))
