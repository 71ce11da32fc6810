"""Resuming: runs that are stopped, repeated or changed, and runs that start from a draft."""

import json
import math
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import spec_data
from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.splits import make_splits
from spec_train.drafts import load_draft
from spec_train.drafts.unroll import Unroll
from spec_train.training.fit import fit
from spec_train.training.run_directory import held_out_file, read_machine
from spec_train.training.trainer import Trainer
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.tools import (
    OPTIONS,
    change,
    make_noisy,
    masters,
    metrics,
    run,
    small_run,
)

data, config = trainer_tools.data, trainer_tools.config


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run; do not change it."""
    out = tmp_path_factory.mktemp("plain") / "whole"
    run(small_run(data, out))
    return out


@pytest.fixture(scope="module")
def noisy(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with a draft that draws random numbers; do not change it."""
    out = tmp_path_factory.mktemp("noisy") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        make_noisy(patch)
        run(small_run(data, out))
    return out


def assert_same_run(a: str | Path, b: str | Path) -> None:
    """Every byte of the last checkpoint and the best draft, all metrics, and the walk."""
    for part in ("last", "best"):
        names = sorted(p.name for p in (Path(a) / part).iterdir())
        assert names == sorted(p.name for p in (Path(b) / part).iterdir())
        for name in names:
            assert (Path(a) / part / name).read_bytes() == (Path(b) / part / name).read_bytes(), (
                f"{part}/{name} differs"
            )
    assert metrics(a) == metrics(b)
    walks = [json.loads(held_out_file(Path(run)).read_text()) for run in (a, b)]
    assert all(walk.pop("path") for walk in walks) and walks[0] == walks[1] and walks[0]["samples"]


@pytest.mark.parametrize(("stop_at", "number"), [(1, signal.SIGTERM), (7, signal.SIGHUP)])
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(
    config, noisy, stop_at, number, monkeypatch
):
    """Stopped in the middle of an epoch and between two lines of metrics, with a draft that draws
    random numbers."""
    make_noisy(monkeypatch)
    with monkeypatch.context() as patch:
        stop_after(stop_at, patch, number)
        result = run(config)
    assert (result.finished, result.step, result.stopped_by) == (False, stop_at, number)
    assert signal.getsignal(number) == signal.SIG_DFL
    torch.rand(17)  # what else the process draws must not matter
    assert run(config).finished
    assert_same_run(noisy, config.out)
    (machine,) = read_machine(Path(config.out))  # the same one after the stop
    assert machine["step"] == 0 and machine["versions"]["torch"] == torch.__version__


def test_a_run_that_pauses_at_steps_is_the_uninterrupted_one(config, whole):
    """As the runs of a search do; each pause is validated and saved."""
    for until in (3, 7, 7):
        paused = fit("eagle3", config, OPTIONS, until)
        assert (paused.step, paused.finished, paused.stopped_by) == (until, False, None)
        assert paused.validation[-1]["step"] == until
    assert run(config).finished
    a, b = masters(whole), masters(config.out)
    assert all(torch.equal(a[n], b[n]) for n in a)
    rates = [{line["step"]: line.get("lr") for line in metrics(p)} for p in (whole, config.out)]
    assert rates[0].items() <= rates[1].items()


def stop_after(steps: int, monkeypatch, number: int = signal.SIGTERM):
    """Send a signal in the last of these steps."""
    original = Trainer._train_step

    def signalled(self, step):
        if self.step == steps - 1:
            os.kill(os.getpid(), number)
        original(self, step)

    monkeypatch.setattr(Trainer, "_train_step", signalled)


def test_a_run_that_stops_in_its_first_validation_validates_once(config, whole, monkeypatch):
    validate = Trainer.validate

    def signalled(self):
        os.kill(os.getpid(), signal.SIGTERM)
        validate(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "validate", signalled)
        assert run(config).step == 0
    assert run(config).finished
    assert_same_run(whole, config.out)


def test_a_best_draft_that_is_newer_than_the_checkpoint_stays_the_best(config, whole):
    """A kill between the two: the same steps are measured again, or others are."""
    shutil.copytree(whole, config.out, symlinks=True)
    out = Path(config.out)
    newest = int((out / "best").resolve().name.removeprefix("best-"))
    for checkpoint in out.glob("checkpoint-*"):
        if int(checkpoint.name.removeprefix("checkpoint-")) >= newest:
            shutil.rmtree(checkpoint)
    figures = json.loads((out / "best" / "validation.json").read_text())
    changed = change(config, eval_every=1000, steps=config.steps)
    assert fit("eagle3", changed, OPTIONS, newest - 1).best["step"] == newest
    found = fit("eagle3", changed, OPTIONS).best
    assert (found["step"], found["loss"]) == (newest, figures["loss"])
    assert (out / "best" / "validation.json").is_file()


def test_the_speed_is_that_of_this_process(config, monkeypatch):
    """Of ten steps since the last line, nine were of an earlier one."""
    config = change(config, steps=10, log_every=10, save_every=100, eval_every=100)
    train = Trainer._train_step
    with monkeypatch.context() as patch:
        stop_after(9, patch)
        assert run(config).step == 9
    monkeypatch.setattr(Trainer, "_train_step", lambda *given: (time.sleep(0.1), train(*given)))
    run(config)
    (line,) = [line for line in metrics(config.out, timing=True) if line["split"] == "train"]
    most = config.batch_size * config.accumulation * config.seq_len
    assert 0 < line["tokens_per_second"] <= most / 0.1 and line["tokens"] > 2 * most


def test_a_run_may_go_on_with_activations_recomputed(config, whole, monkeypatch):
    """For example to save memory."""
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        assert not run(config).finished
    calls = []
    original = Unroll._attended

    def counted(self, *arguments):
        calls.append(torch.is_grad_enabled())
        return original(self, *arguments)

    monkeypatch.setattr(Unroll, "_attended", counted)
    assert run(config, replace(OPTIONS, gradient_checkpointing=True)).finished
    plan = make_splits(HiddenStatesDataset(config.data), config).train
    batches = [batch for epoch in range(9) for batch in plan.batches(epoch)][5:12]
    micro_batches = sum(math.ceil(len(batch) / config.batch_size) for batch in batches)
    assert sum(calls) == 2 * OPTIONS.ttt_steps * micro_batches
    a, b = masters(whole), masters(config.out)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert metrics(whole) == metrics(config.out)


def test_measuring_and_saving_do_not_touch_training(config, noisy, monkeypatch):
    make_noisy(monkeypatch)
    run(change(config, eval_every=100, save_every=1, log_every=1))
    a, b = masters(noisy), masters(config.out)
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_micro_batch_shape_may_change_on_resume_but_not_the_step(config):
    run(change(config, steps=12), OPTIONS)
    with pytest.raises(ConfigError, match="packs_per_step: 4 -> 8"):
        run(change(config, batch_size=4))
    assert run(change(config, batch_size=1, accumulation=4, save_every=3, keep=1)).finished


def test_a_finished_run_does_nothing_more(config, caplog):
    caplog.set_level("INFO")
    run(config)
    before = {p: p.stat().st_mtime_ns for p in Path(config.out).rglob("*.safetensors")}
    lines = metrics(config.out, timing=True)
    assert run(config).finished
    assert "nothing to do, finished at step 12" in caplog.text
    assert before == {p: p.stat().st_mtime_ns for p in Path(config.out).rglob("*.safetensors")}
    assert metrics(config.out, timing=True) == lines


def test_a_changed_setting_is_refused_by_name(config):
    config = change(config, steps=2)
    run(config)
    for name, value in (("lr", 2e-3), ("steps", 20), ("split_seed", 5)):
        with pytest.raises(ConfigError, match=f"{name}: .* -> {value}"):
            run(change(config, **{name: value}))
    with pytest.raises(ConfigError, match=r"ttt_steps: 2 -> 3"):
        run(config, replace(OPTIONS, ttt_steps=3))


def test_a_moved_dataset_is_the_same_and_another_is_refused(config, tmp_path):
    run(change(config, steps=2))
    shutil.copytree(config.data, tmp_path / "moved")
    assert run(change(config, steps=2, data=str(tmp_path / "moved"))).finished
    other = tiny_dataset(tmp_path / "other", n_docs=16, seed=3)
    with pytest.raises(ConfigError, match="dataset: "):
        run(change(config, steps=2, data=str(other)))


def test_init_from_takes_weights_and_vocabulary_but_not_training_options(config, tmp_path):
    run(config)
    other = change(config, out=str(tmp_path / "more"), steps=0, init_from=config.out, seed=3)
    run(other, replace(OPTIONS, ttt_steps=3))
    old, new = load_draft(Path(config.out) / "best"), load_draft(tmp_path / "more" / "last")
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True))
    assert torch.equal(old.draft_ids, new.draft_ids)
    assert (old.options.ttt_steps, new.options.ttt_steps) == (2, 3)


def test_init_from_a_draft_of_another_target_is_refused(config, tmp_path):
    """All shapes are equal, but the embedding is unrelated, and no tokenizer is recorded."""
    run(change(config, steps=1))
    data = tiny_dataset(tmp_path / "other", n_docs=60, seed=7)
    other = change(config, data=str(data), out=str(tmp_path / "more"), init_from=config.out)
    with pytest.raises(
        DraftError, match=r"--init-from .*another target than .*other: its .* nothing says"
    ):
        run(other)


def test_a_draft_read_from_disk_shares_the_targets_embedding(config, tmp_path, monkeypatch):
    """For --init-from and for a checkpoint: the embedding takes no extra memory."""
    captured, original = [], Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self: captured.append(self) or original(self))
    run(change(config, steps=6, save_every=2, eval_every=100))
    shutil.rmtree(Path(config.out) / "checkpoint-00000006")
    run(change(config, steps=6, save_every=2, eval_every=100))
    run(change(config, steps=0, out=str(tmp_path / "more"), init_from=config.out, dtype="bfloat16"))
    assert [trainer.step for trainer in captured] == [6, 6, 0]
    for trainer in captured:
        own = trainer.draft.embed_tokens.weight
        assert own.data_ptr() == trainer.head.embed_weight.data_ptr() and not own.requires_grad


def test_data_that_have_grown_are_trained_further_in_another_run(data, config, tmp_path):
    """Also where the larger data are a list, or a copy; a part of the data is no growth."""
    config = change(config, steps=2, eval_every=2, save_every=2)
    run(config)
    documents = random_documents(12, 64, 7)
    other = tiny_dataset(tmp_path / "more", seed=7, model=tiny_llama(64), documents=documents)
    spec_data.merge([data, other], tmp_path / "both")
    spec_data.copy(tmp_path / "both", tmp_path / "copied")
    spec_data.select(data, tmp_path / "some", sample="50%")
    advice = f"and more: train further on them with --init-from {config.out} in another --out"
    for larger in (tmp_path / "both", tmp_path / "copied", [str(data), str(other)]):
        with pytest.raises(ConfigError, match=re.escape(advice)):
            run(change(config, data=larger if isinstance(larger, list) else str(larger)))
    with pytest.raises(ConfigError, match="Resume with the old settings"):
        run(change(config, data=str(tmp_path / "some")))
    larger = change(config, data=str(tmp_path / "both"), out=str(tmp_path / "further"))
    run(change(larger, init_from=config.out))  # as the error says
