"""Training: what determines the result of a run, and what does not change it."""

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import spec_train
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.resumable import read_record, write_record
from spec_train.data.splits import make_splits
from spec_train.drafts import DRAFTS, load_draft
from spec_train.training import trainer
from spec_train.training.fit import fit
from spec_train.training.run_directory import chosen_draft_dir, resolve_draft_dir
from spec_train.training.trainer import Trainer
from spec_train.training.validation import Validation
from tests.factory import tiny_dataset
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.tools import (
    OPTIONS,
    TIMING,
    change,
    command,
    environment,
    metrics,
    run,
)

data, config = trainer_tools.data, trainer_tools.config


def test_metrics_say_what_they_should(config):
    run(config)
    lines = metrics(config.out, timing=True)
    train = [m for m in lines if m["split"] == "train"]
    assert [m["step"] for m in train] == [5, 10, 12]
    assert [m["step"] for m in lines if m["split"] == "validation"] == [0, 4, 8, 12]
    wanted = {"epoch", "tokens", "loss", "acceptance_length", "lr", "grad_norm", *TIMING}
    wanted |= {f"{name}/{d}" for name in ("accept_rate", "expected_acceptance") for d in (1, 2)}
    assert all(wanted <= m.keys() for m in train)
    assert all(0 <= m["data_wait"] <= 1 and m["tokens_per_second"] > 0 for m in train)
    dataset = HiddenStatesDataset(config.data)
    plan = make_splits(dataset, config).train
    first = [row for batch in plan.batches(0)[:5] for pack in batch for row in pack]
    assert train[0]["tokens"] == dataset.lengths[first].sum()
    assert train[0]["epoch"] == round(len(first) / len(plan.rows), 4)
    batches = [batch for epoch in range(9) for batch in plan.batches(epoch)][:12]
    sizes = [sum(dataset.lengths[pack].sum() for pack in batch) for batch in batches]
    assert all(line["tokens"] == sum(sizes[: line["step"]]) for line in lines)


def test_the_time_left_is_that_of_steps_without_the_first_validation(config, monkeypatch):
    bars, validated, validate = [], [], Trainer.validate
    start = trainer.progress

    def measured(self: Trainer) -> None:
        validate(self)
        validated.append(bars[0]._time())

    monkeypatch.setattr(trainer, "progress", lambda **o: bars.append(start(**o)) or bars[0])
    monkeypatch.setattr(Trainer, "validate", measured)
    run(config)
    assert bars[0].start_t >= validated[0] and len(validated) == 4


def test_held_out_documents_are_never_trained_on(config, monkeypatch):
    dataset = HiddenStatesDataset(config.data)
    splits = make_splits(dataset, config)
    assert not set(splits.train.rows) & set(splits.measured)
    assert len(splits.train.rows) + splits.held_out == splits.selection.usable.sum()
    seen = set()
    original = Trainer._train_step

    def spy(self, step):
        seen.update(row for batch in step.batches for pack in batch.rows for row in pack)
        original(self, step)

    monkeypatch.setattr(Trainer, "_train_step", spy)
    run(change(config, steps=None, epochs=2))
    assert seen == set(splits.train.rows.tolist())


def test_no_steps_write_the_untrained_draft(config):
    result = run(change(config, steps=0))
    assert result.finished and result.step == 0 and result.best is None
    assert f"the draft in {Path(config.out) / 'last'} is untrained" in str(result)
    assert not (Path(config.out) / "best").exists()
    assert [m["split"] for m in metrics(config.out)] == ["validation"]
    assert resolve_draft_dir(config.out) == Path(config.out) / "last"
    assert type(load_draft(Path(config.out) / "last")) is DRAFTS["eagle3"]
    assert run(change(config, steps=0)).finished
    assert len(metrics(config.out)) == 1


def test_a_run_stopped_before_its_first_validation_means_its_last_draft(config, caplog):
    """It had a `best` of step 0, which `eval` and `export` took without a word."""
    caplog.set_level(logging.INFO)
    fit("eagle3", config, OPTIONS, until=0)
    assert fit("eagle3", change(config, eval_every=9), OPTIONS, until=2).best["step"] == 2
    shutil.rmtree(Path(config.out))
    stopped = stop_after(3, change(config, eval_every=9))
    assert (stopped.step, stopped.best) == (3, None) and "no trained draft" in str(stopped)
    out = Path(config.out)
    assert not (out / "best").exists()
    assert chosen_draft_dir(out) == out / "last"
    assert f"no trained draft was validated yet, so it means {out / 'last'}, step 3" in caplog.text
    caplog.clear()
    whole = run(change(config, eval_every=9))
    assert whole.best["step"] in (9, 12) and chosen_draft_dir(out) == out / "best"
    assert "no trained draft" not in caplog.text


def test_export_says_when_the_best_draft_is_older_than_the_last(config, caplog):
    """A run that was stopped between two validations: what came after the best is not exported."""
    caplog.set_level(logging.INFO)
    stopped = stop_after(6, change(config, eval_every=4))
    out = Path(config.out)
    assert (stopped.step, stopped.best["step"]) == (6, 4)
    spec_train.export(out)
    said = f"{out / 'best'} is of step 4, and `last` of step 6"
    assert said in caplog.text and f"--draft {out / 'last'}" in caplog.text
    caplog.clear()
    spec_train.export(out / "last")
    assert "and `last` of step" not in caplog.text


def test_a_best_draft_of_step_0_of_an_earlier_release_is_not_the_draft_of_its_run(config, caplog):
    stop_after(3, change(config, eval_every=9))
    out = Path(config.out)
    shutil.copytree((out / "last").resolve(), out / "best-00000000")
    (out / "best").symlink_to("best-00000000")
    (out / "best" / "validation.json").write_text('{"step": 0, "loss": 1.0}')
    assert chosen_draft_dir(out) == out / "last"
    assert chosen_draft_dir(out / "best") == out / "best"
    assert f"warning[untrained]: {out / 'best'}" in caplog.text
    state = out / "last" / "training_state.json"
    saved = read_record(state)
    write_record(state, saved | {"best": {"step": 0, "loss": 1.0}})
    done = run(change(config, eval_every=9))
    assert done.best["step"] > 0 and (out / "best").resolve().name != "best-00000000"
    assert not (out / "best-00000000").exists()


def stop_after(steps, config):
    """Run until SIGTERM arrives after a step."""
    trainer, seen = Trainer._train_step, []

    def step(self, step):
        trainer(self, step)
        seen.append(self.step)
        if len(seen) == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_step", step)
        return run(config)


def test_the_saved_embedding_is_the_targets_bit_for_bit(config):
    """In the dtype of the dataset's head, even if the target's config.json has another."""
    run(change(config, steps=1))
    own = load_file(Path(config.out) / "last" / "model.safetensors")["embed_tokens.weight"]
    target = load_file(Path(config.data) / "target" / "head.safetensors")["embed_tokens"]
    assert own.dtype == target.dtype and torch.equal(own, target)


def test_masters_are_fp32_and_what_is_frozen_is_not(config, monkeypatch):
    captured, original = [], Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self: captured.append(self) or original(self))
    run(change(config, dtype="bfloat16", steps=6))
    trainer = captured[0]
    assert {p.dtype for p in trainer.masters.params} == {torch.float32}
    trained = set(map(id, trainer.masters.params))
    assert trainer.stream.buffer_options.dtype == torch.bfloat16
    frozen = [p for p in trainer.draft.parameters() if id(p) not in trained]
    assert frozen and all(p.dtype == torch.bfloat16 for p in frozen)
    tensors = load_file(Path(config.out) / "last" / "training_state.safetensors")
    assert {t.dtype for n, t in tensors.items() if n.startswith(("master", "optimizer.exp"))} == {
        torch.float32
    }


def test_without_validation_the_last_draft_is_the_best(config):
    result = run(change(config, validation=0.0, eval_every=None))
    assert result.best["step"] == 12 and set(result.best.values()) == {12, None}
    best, last = (load_file(Path(config.out) / d / "model.safetensors") for d in ("best", "last"))
    assert all(torch.equal(best[n], last[n]) for n in best)


def test_on_short_answers_the_best_draft_is_a_trained_one(tmp_path, config):
    """Every answer is shorter than a chain, and so short a run has no accepted draft."""
    documents = [(list(range(i, i + 8)), [0] * 5 + [1] * 3, [("user", 0, 5)]) for i in range(40)]
    data = tiny_dataset(tmp_path / "short", documents=documents)
    result = run(change(config, data=str(data)), dataclasses.replace(OPTIONS, ttt_steps=5))
    held_out = [m for m in metrics(config.out) if m["split"] == "validation"]
    assert {m["chains"] for m in held_out} == {0}
    assert {m["acceptance_length"] for m in held_out} == {None}
    assert held_out[-1]["loss"] < held_out[0]["loss"]
    best = max(held_out, key=lambda m: (m["product_limit_length"], -m["loss"]))
    assert result.best["step"] == best["step"] > 0
    assert json.loads((Path(config.out) / "best" / "validation.json").read_text())["step"] > 0
    assert f"best draft: step {best['step']}, serving-like length" in str(result)


@pytest.mark.parametrize("lengths", [[2.0, 2.0, 2.0], [2.0, 2.5, 2.0]])
def test_of_drafts_accepted_equally_far_the_one_with_the_lower_loss_is_best(
    config, monkeypatch, lengths
):
    """A longer acceptance wins over a lower loss."""
    same = {"acceptance_length": 2.0, "serving_like_length": 1.9, "serving_like_rounds": 9}
    figures = iter(
        same | {"product_limit_length": length, "loss": loss}
        for length, loss in zip(lengths, [3.0, 2.0, 1.0], strict=True)
    )
    monkeypatch.setattr(Validation, "measure", lambda self: (next(figures), {}))
    result = run(change(config, steps=2, eval_every=1))
    assert result.best["step"] == (2 if lengths[1] == 2.0 else 1)


TARGET_FREE = """
import sys
from spec_train.cli import main
code = main(sys.argv[1:])
models = [m for m in sys.modules if m.startswith("transformers.models.") and ".modeling_" in m]
models = [m for m in models if not m.endswith(".auto.modeling_auto")]  # names of classes only
assert code == 0 and not models, (code, models)
assert "transformers.modeling_utils" not in sys.modules
assert not [m for m in sys.modules if m.startswith(("spec_data.corpus", "spec_train.evaluation"))]
"""


def test_fit_never_opens_the_target(config, tmp_path):
    """Not its weights (only the dataset exists) and not its model class."""
    shutil.copytree(config.data, tmp_path / "only" / "set")
    config = change(config, data=str(tmp_path / "only" / "set"), steps=3)
    arguments = [sys.executable, "-c", TARGET_FREE, *command(config)[3:], "--verbose"]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "60 documents" in done.stderr and "trainable" not in done.stdout


def test_seeds_are_compared_on_the_same_documents(config):
    """The held-out documents follow from --split-seed alone."""
    dataset = HiddenStatesDataset(config.data)
    found = [make_splits(dataset, change(config, seed=seed)) for seed in range(3)]
    assert len({tuple(splits.measured) for splits in found}) == 1
    orders = {str(splits.train.batches(0)) for splits in found}
    assert len(orders) == 3
    other = make_splits(dataset, change(config, split_seed=1))
    assert set(other.measured) != set(found[0].measured)
