"""The Python functions of spec_train: the commands' results, and errors in words."""

import json
import logging
import signal
from pathlib import Path

import pytest
import torch

import spec_data
import spec_train
import spec_train.api
from spec_data.shards.errors import ConfigError, MissingError
from spec_train.training.trainer import Trainer
from tests import api_workspace
from tests.api_workspace import FIT
from tests.spec_train import flat

workspace, here = api_workspace.workspace, api_workspace.here


def test_an_interrupted_fit_saves_and_stops_what_called_it(here, tmp_path, monkeypatch):
    """In a notebook the next cell must not go on with a draft of two steps."""
    original = Trainer._train_step

    def interrupted(self, step):
        if self.step == 1:
            signal.raise_signal(signal.SIGINT)
        original(self, step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_train_step", interrupted)
        flat.fit("eagle3", "data", tmp_path / "run", **FIT)
    assert (tmp_path / "run" / "last").resolve().name == "checkpoint-00000002"
    assert flat.fit("eagle3", "data", tmp_path / "run", **FIT).finished


def test_fit_logs_its_validation_and_returns_it(here, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="spec_train"):
        result = flat.fit("eagle3", Path("data"), tmp_path / "run", **FIT)
    lines = [m for m in caplog.messages if m.startswith("validation at step ")]
    assert len(lines) == len(result.validation) == 3
    for text, line in zip(lines, result.validation, strict=True):
        assert f"loss {line['loss']:.4f}" in text
        assert f"serving-like length {line['serving_like_length']:.3f}" in text
        assert line["serving_like_interval"] is None  # two documents say nothing of others
    assert result.finished and result.step == 4 and result.best["step"] in (0, 2, 4)
    assert result.training[-1]["step"] == 4 and "tokens_per_second" in result.training[-1]
    again = flat.fit("eagle3", "data", tmp_path / "run", **FIT)
    assert again.finished and again.validation == result.validation


@pytest.mark.parametrize(
    ("kind", "small"),
    [("eagle", {"depth": 2}), ("dspark", {"block_size": 2, "num_layers": 1, "mask_token_id": 3})],
)
def test_a_draft_is_fitted_loaded_and_simulated(kind, small, here, tmp_path):
    shared = {k: v for k, v in FIT.items() if k not in ("ttt_steps", "draft_vocab_size")}
    result = flat.fit(kind, "data", tmp_path / "run", **shared | small | {"steps": 1})
    draft = spec_train.load_draft(result.directory)
    assert draft.name == kind and not draft.training
    open_data = spec_data.open_dataset("data")
    found = spec_train.simulate_acceptance(draft, open_data, limit=5)
    assert found.split == "all" and found.documents == 5 and found.acceptance_length >= 1
    stored = spec_train.evaluate(result.directory, data="data", split="all", limit=5)
    assert stored.data.documents == 5 and stored.data.accept_rate == found.accept_rate
    held_out = spec_train.evaluate(tmp_path / "run", data=Path("data")).data
    assert held_out.split == "validation"
    assert str(held_out).startswith("acceptance length") and "simulated on" in str(held_out)


def test_simulation_leaves_the_draft_as_it_was(here):
    draft = spec_train.load_draft("run").train()
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    spec_train.simulate_acceptance(draft, "data", limit=3)
    assert draft.training
    assert all(torch.equal(before[name], value) for name, value in draft.state_dict().items())
    for wrong in ({"limit": -1}, {"draft_tokens": -1}):
        with pytest.raises(ConfigError, match="expected at least 0"):
            spec_train.simulate_acceptance(draft, "data", **wrong)


def test_evaluate_returns_the_figures_of_the_command(here, tmp_path, capsys):
    both = spec_train.evaluate(
        "run", data="data", target="target", prompts="prompts.jsonl", max_new_tokens=6,
        device="cpu", limit=2,
    )  # fmt: skip
    assert capsys.readouterr().out == "", "functions print nothing"
    stored = json.loads(json.dumps(both.facts()))
    assert both.figures == stored and both.acceptance_length == stored["acceptance_length"]
    assert both.decoding.acceptance_length == both.acceptance_length
    assert both.decoding.identical == both.decoding.responses == 2
    assert both.data.documents == stored["data"]["documents"] and both.draft_tokens == 2
    simulated = both.figures["data"]["simulated"]["acceptance_length"]
    assert both.figures["gap"] == simulated - both.acceptance_length
    text = str(both)
    assert text.startswith("acceptance length") and "real decoding" in text.splitlines()[0]
    assert "minus real" in both.details() and "simulated length" in both.details()
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        spec_train.evaluate("run")


def test_drafts_are_loaded_where_and_as_asked(here):
    stored = spec_train.load_draft("run")
    assert stored.embed_tokens.weight.dtype == getattr(torch, stored.config.dtype)
    half = spec_train.load_draft(Path("run"), dtype="bfloat16")
    assert half.embed_tokens.weight.dtype == torch.bfloat16 and not half.training
    with pytest.raises(ConfigError, match="choose from auto"):
        spec_train.load_draft("run", dtype="int3")
    with pytest.raises(MissingError, match="no such draft"):
        spec_train.load_draft("nothing")
