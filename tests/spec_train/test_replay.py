"""Failed steps: the responsible batch is named and saved, and replay reproduces the failure."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from spec_data.shards.errors import DatasetError, DraftError, MissingError, RunError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.cli import main
from spec_train.drafts import DRAFTS
from spec_train.options.training import Training
from spec_train.training.replay import read_failure, replay_step
from spec_train.training.setup import make_splits
from tests import factory
from tests.spec_train.training.tools import change, run


def config_of(data: Path, out: Path, **changes) -> Training:
    options = dict(
        data=str(data), out=str(out), steps=12, batch_size=2, accumulation=2, seq_len=48, lr=1e-3,
        validation=0.15, log_every=5, eval_every=40, save_every=2,
    )  # fmt: skip
    return Training(**(options | changes))


def training_row(data: Path, config: Training, step: int) -> int:
    plan = make_splits(HiddenStatesDataset(data), config).train
    return plan.batches(0)[step - 1][2][0]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A dataset with one infinite value in the states of one document, a run that failed on it in
    step 3, and its message."""
    folder = tmp_path_factory.mktemp("poisoned")
    sound = factory.tiny_dataset(folder / "sound", n_docs=60)
    config = config_of(sound, folder / "run")
    victim = training_row(sound, config, step=3)
    original, calls = factory.states_of, []

    def inject(model, ids, layers):
        columns = original(model, ids, layers)
        if len(calls) == victim:
            columns["hidden.L1"] = columns["hidden.L1"].clone()
            columns["hidden.L1"][1, 7] = math.inf
        calls.append(1)
        return columns

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "states_of", inject)
        data = factory.tiny_dataset(folder / "data", n_docs=60)
    with pytest.raises(RunError) as error:
        run(change(config, data=str(data)))
    return data, folder / "run" / "failed-step-3", victim, str(error.value)


def test_the_error_names_document_shard_and_state(poisoned):
    data, failed, victim, text = poisoned
    name = HiddenStatesDataset(data).doc_ids[victim]
    assert "step 3 (epoch 0, batch 2): the loss is nan" in text
    assert f"{name} in shards/unit-{victim // 10:05d}.arrow" in text
    assert f"hidden.L1 of {name} at 1 tokens, first at token 1" in text
    assert f"spec-train replay {failed}" in text


def test_a_stored_infinity_is_found_from_what_was_saved_alone(poisoned, tmp_path, capsys):
    """The shards are deleted, and everything else was moved."""
    data, failed, victim, _ = poisoned
    shutil.copytree(failed, tmp_path / "failed")
    shutil.copytree(data / "target", tmp_path / "head" / "target")
    shutil.copy(data / "manifest.json", tmp_path / "head" / "manifest.json")
    out = tmp_path / "report.json"
    arguments = ["replay", str(tmp_path / "failed"), "--data", str(tmp_path / "head")]
    assert main([*arguments, "--device", "cpu", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    name = HiddenStatesDataset(data).doc_ids[victim]
    assert report["reproduced"] and report["loss"] == report["loss_then"] == "nan"
    shard = f"shards/unit-{victim // 10:05d}.arrow"
    assert report["states"] == [
        {"doc_id": name, "shard": shard, "column": "hidden.L1", "tokens": 1, "first": 1}
    ]
    assert report["weights"] == []
    assert report["modules"][0]["module"] == "fc" and report["modules"][0]["what"] == "input"
    assert "fc.weight" in report["gradients"]
    printed = capsys.readouterr().out
    assert "fc (Linear): 1 of " in printed
    assert "modules with values that are not finite, in order" in printed


def test_a_learning_rate_that_is_too_large_shows_in_weights_and_modules(tmp_path, capsys):
    data = factory.tiny_dataset(tmp_path / "data", n_docs=40)
    config = config_of(data, tmp_path / "run", lr=1e30, clip=0.0, save_every=100)
    with pytest.raises(RunError, match="Their stored states are finite") as error:
        run(config)
    (failed,) = (tmp_path / "run").glob("failed-step-*")
    assert f"replay {failed}" in str(error.value)
    report = replay_step(failed, device="cpu").facts()
    assert report["reproduced"] and report["states"] == []
    assert report["modules"] and report["modules"][0]["what"] == "output"
    state, _ = read_failure(failed)
    assert state["config"]["lr"] == 1e30 and state["options"]["ttt_steps"] == 2
    assert "stored states" not in capsys.readouterr().out


@pytest.fixture
def gradient_failure(tmp_path, monkeypatch):
    """A run whose loss stays finite while the gradient of one micro-batch does not; the draft draws
    random numbers. Returns the directory and the loss of that micro-batch in the run."""
    data = factory.tiny_dataset(tmp_path / "data", n_docs=40)
    config = config_of(data, tmp_path / "run")
    victim = make_splits(HiddenStatesDataset(data), config).train.batches(0)[1][2]
    original, losses = DRAFTS["eagle3"].loss, []

    def poisoned(self, batch, head, counts):
        result = original(self, batch, head, counts)
        loss = result.loss * (0.5 + torch.rand(()))
        if self.training and victim in batch.rows:
            losses.append(float(loss.detach()))
            if loss.requires_grad:
                loss.register_hook(lambda gradient: gradient * math.inf)
        return dataclasses.replace(result, loss=loss)

    monkeypatch.setattr(DRAFTS["eagle3"], "loss", poisoned)
    with pytest.raises(RunError, match="the gradient norm is nan"):
        run(config)
    return tmp_path / "run" / "failed-step-2", losses


def test_of_a_gradient_that_is_not_finite_the_micro_batch_to_blame_is_saved(gradient_failure):
    failed, losses = gradient_failure
    state, _ = read_failure(failed)
    assert state["micro_batch"] == 1
    assert float(state["losses"][1]) == losses[0] == losses[1]  # found again with the same draws
    report = replay_step(failed, device="cpu").facts()
    assert report["loss"] == report["loss_then"]


def test_a_batch_that_is_finite_here_is_not_reproduced(poisoned, tmp_path, monkeypatch):
    data = poisoned[0].parent / "sound"
    original = DRAFTS["eagle3"].loss

    def failing(self, batch, head, counts):
        result = original(self, batch, head, counts)
        return dataclasses.replace(result, loss=result.loss * math.nan)

    with monkeypatch.context() as patch, pytest.raises(RunError):
        patch.setattr(DRAFTS["eagle3"], "loss", failing)
        run(config_of(data, tmp_path / "run"))
    replayed = replay_step(tmp_path / "run" / "failed-step-1", device="cpu")
    assert not replayed.facts()["reproduced"] and "so not reproduced" in str(replayed)
    assert replayed.next_command[:3] == ["spec-train", "fit", "eagle3"]


def test_a_full_disk_does_not_hide_the_cause(poisoned, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spec_train.training.failure.save_file", full)
    with pytest.raises(RunError, match=r"the loss is nan.* could not be saved .*the disk is full"):
        run(config_of(poisoned[0], tmp_path / "run"))
    assert not list((tmp_path / "run").glob("failed-step-*"))


def test_what_cannot_be_replayed_says_why(poisoned, tmp_path, monkeypatch):
    data, failed, _, _ = poisoned
    with pytest.raises(MissingError, match=r"failure\.json: no such file; pass a failed-step"):
        replay_step(data, device="cpu")
    gone = tmp_path / "gone"
    with pytest.raises(MissingError, match=r"manifest\.json and target/ are enough"):
        replay_step(failed, gone, "cpu")
    other = factory.tiny_dataset(tmp_path / "other", n_docs=8, seed=3)
    with pytest.raises(DatasetError, match="not the one that the run used"):
        replay_step(failed, other, "cpu")
    shutil.copytree(failed, tmp_path / "old")
    (tmp_path / "old" / "batch.safetensors").write_bytes(b"no")
    with pytest.raises(DraftError, match="damaged"):
        replay_step(tmp_path / "old", device="cpu")
