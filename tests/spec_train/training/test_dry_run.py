"""`fit --dry-run`: what a run will cost, without a trace of it."""

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_data.shards.errors import ConfigError
from spec_train.cli import main
from spec_train.data.splits import make_splits
from spec_train.training import run_cost
from spec_train.training.fit import open_data
from spec_train.training.run_cost import STEPS, dry_run
from spec_train.training.trainer import Trainer
from tests.spec_train.training import tools
from tests.spec_train.training.tools import OPTIONS, change, run

data, config = tools.data, tools.config


def test_it_is_the_run_that_fit_makes(config, caplog) -> None:
    caplog.set_level(logging.INFO)
    cost = dry_run("eagle3", change(config, steps=None, epochs=2), OPTIONS)
    assert not Path(config.out).exists()
    for word in ("validation at step", "finished", "6 of 6"):
        assert word not in caplog.text
    said = next(r.getMessage() for r in caplog.records if r.getMessage().startswith("training"))
    assert f"steps 0 to {cost.steps}," in said
    assert cost.steps > STEPS and cost.seconds > 0 and cost.peak_bytes > 1e6
    assert logging.getLogger("spec_train.training").level == logging.NOTSET
    result = run(change(config, steps=None, epochs=2))
    assert result.finished and result.step == cost.steps
    for folder, expected in (("last", cost.checkpoint_bytes), ("best", cost.draft_bytes)):
        found = sum(f.stat().st_size for f in (Path(config.out) / folder).glob("*.safetensors"))
        assert expected < found < expected + 10_000  # headers, and the vocabulary map
    lines = [line for line in tools.metrics(config.out) if line.get("split") == "validation"]
    assert len(lines) == cost.validations


def test_a_few_steps_say_nothing_about_a_draft(config, caplog) -> None:
    dry_run("eagle3", change(config, steps=2, lr=1e-30), OPTIONS)
    assert "warning[no-gain]" not in caplog.text


def test_a_run_that_exists_is_left_alone(config) -> None:
    run(change(config, steps=2))
    files = {p: p.stat().st_mtime_ns for p in Path(config.out).rglob("*")}
    assert dry_run("eagle3", change(config, steps=40), OPTIONS).steps == 40
    assert files == {p: p.stat().st_mtime_ns for p in Path(config.out).rglob("*")}


def planted(monkeypatch, *times: float) -> None:
    """Let the dry run read these times: steps end at all but the first."""
    left = iter(times)
    monkeypatch.setattr(run_cost, "time", SimpleNamespace(perf_counter=lambda: next(left)))

    def steps(trainer: Trainer, after_step: Callable[[], None], *, trial: bool) -> SimpleNamespace:
        assert trial
        while trainer.step < trainer.until:
            trainer.step += 1
            after_step()
        return SimpleNamespace(stopped_by=None)

    monkeypatch.setattr(Trainer, "run", steps)


def test_the_time_is_that_of_all_steps_and_validations(config, monkeypatch) -> None:
    """Six steps that end at planted times; the last of them also validates."""
    planted(monkeypatch, 0.0, 5.0, 9.0, 10.0, 11.0, 12.0, 16.0)
    cost = dry_run("eagle3", change(config, steps=100, eval_every=40), OPTIONS)
    assert (cost.step_seconds, cost.validation_seconds, cost.validations) == (1.0, 3.0, 4)
    assert cost.seconds == 100 * 1.0 + 4 * 3.0


@pytest.mark.parametrize(
    ("times", "step", "validation"),
    [((0.0, 100.0, 190.0, 285.0), 90.0, 5.0), ((0.0, 20.0, 41.0, 62.0, 84.0), 21.0, 1.0)],
    ids=["three at least", "no more after a minute"],
)
def test_slow_steps_are_fewer(config, monkeypatch, times, step, validation) -> None:
    planted(monkeypatch, *times)
    cost = dry_run("eagle3", change(config, steps=100), OPTIONS)
    assert (cost.step_seconds, cost.validation_seconds) == (step, validation)


def test_a_few_held_out_documents_stand_for_all(config, monkeypatch) -> None:
    """Their time is taken times the tokens of all of them."""
    planted(monkeypatch, 0.0, 5.0, 9.0, 10.0, 11.0, 12.0, 16.0)
    monkeypatch.setattr(run_cost, "_FEW_BATCHES", 1)
    asked, measured = change(config, steps=100, validation=0.6, batch_size=1), []

    def made(*words: Any) -> Trainer:
        measured.extend(words[4].measured.tolist())
        return Trainer(*words)

    monkeypatch.setattr(run_cost, "Trainer", made)
    cost = dry_run("eagle3", asked, OPTIONS)
    dataset = open_data(asked)
    held = make_splits(dataset, asked).measured.tolist()
    assert set(measured) < set(held) and len(measured) >= 8
    tokens = [sum(min(int(dataset.lengths[i]), 48) for i in rows) for rows in (held, measured)]
    assert cost.validation_seconds == pytest.approx(3.0 * tokens[0] / tokens[1])


def test_held_out_documents_are_measured_once_and_the_part_is_named(config, monkeypatch) -> None:
    said, measured, validate = [], [], Trainer.validate
    monkeypatch.setattr(run_cost, "part", lambda *words: said.append(words))

    def counted(trainer: Trainer) -> None:
        measured.append(trainer.step)
        validate(trainer)

    monkeypatch.setattr(Trainer, "validate", counted)
    dry_run("eagle3", change(config, steps=100), OPTIONS)
    last = measured[0]
    assert measured == [last] and last > 1
    assert said == [("the first step",), *(("step", n, last) for n in range(1, last + 1))]


def test_a_signal_ends_it_without_a_figure(config, monkeypatch) -> None:
    train = Trainer._train_step

    def signalled(trainer: Trainer, step: object) -> None:
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
        train(trainer, step)

    monkeypatch.setattr(Trainer, "_train_step", signalled)
    with pytest.raises(KeyboardInterrupt):
        dry_run("eagle3", change(config, steps=100), OPTIONS)


def test_following_is_refused(config) -> None:
    with pytest.raises(ConfigError, match="--dry-run with --follow"):
        dry_run("eagle3", change(config, follow=True), OPTIONS)


def test_the_command(config, capsys, caplog) -> None:
    caplog.set_level(logging.INFO)
    words = ["fit", "eagle3", "--data", config.data, "--out", config.out, "--steps", "9"]
    assert main([*words, "--seq-len", "48", "--ttt-steps", "2", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == ["time", "memory", "disk"]
    assert not Path(config.out).exists()
    after = next(r.getMessage() for r in caplog.records if "next:" in r.getMessage())
    assert after.split()[1:4] == ["spec-train", "fit", "eagle3"]
    assert "--ttt-steps 2" in after and "--dry-run" not in after
