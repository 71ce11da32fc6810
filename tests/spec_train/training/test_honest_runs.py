"""A run names what it could not do: nothing to train on, no progress, a foreign vocabulary."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spec_data.shards.errors import DatasetError
from spec_train.training import trainer
from spec_train.training.result import no_gain
from spec_train.training.settings import with_intervals
from tests.factory import random_documents, tiny_dataset
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.tools import OPTIONS, change, masters, run

data, config = trainer_tools.data, trainer_tools.config


def answered(start: int) -> tuple[list[int], list[int], list]:
    ids = [(start * 7 + i) % 60 for i in range(14)]
    return ids, [0] * 6 + [1] * 8, [("user", 0, 6), ("assistant", 6, 14)]


def stub(start: int) -> tuple[list[int], list[int], list]:
    """A document whose answer is one token: nothing to draft."""
    ids = [(start + i) % 60 for i in range(9)]
    return ids, [0] * 8 + [1], [("user", 0, 8), ("assistant", 8, 9)]


def test_a_dataset_without_a_slot_is_refused(config, tmp_path):
    """Trained "to the end" with loss 0.000 otherwise."""
    bare = ([1, 2, 3, 4], [0, 0, 0, 0], [("user", 0, 4)])
    for documents, why in (
        ([stub(i) for i in range(12)], "12 with .*slot"),
        ([bare] * 3, "3 with no s"),
    ):
        empty = tiny_dataset(tmp_path / str(len(documents)), documents=documents)
        said = rf"nothing to train on: of {len(documents)} documents, {why}"
        with pytest.raises(DatasetError, match=said):
            run(change(config, data=str(empty)))


def test_a_step_without_a_slot_moves_no_weight(config, monkeypatch, caplog):
    """Slots can also be missing because the draft vocabulary has none of their tokens."""
    run(change(config, steps=3, save_every=3))
    before = masters(config.out)
    original, steps = trainer.slot_counts, []

    def none_at_last(draft, step, split, *run):
        counts = original(draft, step, split, *run)
        steps.append(step)
        return torch.zeros_like(counts) if len(steps) == 4 else counts

    monkeypatch.setattr(trainer, "slot_counts", none_at_last)
    other = change(config, out=config.out + "-4", steps=4, lr=1e-3, save_every=3, keep=9)
    run(other)
    folders = [Path(other.out) / f"checkpoint-0000000{step}" for step in (3, 4)]
    third, fourth = ((f / "model.safetensors").read_bytes() for f in folders)
    assert third == fourth and before
    assert "warning[empty-step]: step 4 has no slot to train on" in caplog.text


def test_training_that_does_not_improve_is_called_out(config, caplog):
    """From the best draft of a run, at a rate that moves no weight."""
    run(config)
    assert "did not improve" not in caplog.text
    result = run(change(config, out=config.out + "-b", init_from=config.out, lr=1e-30, seed=2))
    assert result.best["step"] > 0
    assert "warning[no-gain]: 12 steps did not improve the draft" in caplog.text
    assert no_gain(result.best, result.validation)


@pytest.mark.parametrize(("total", "every"), [(0, 1), (9, 1), (2499, 499), (100_000, 500)])
def test_every_run_validates_and_saves_five_times(config, total, every):
    for given, wanted in ((None, every), (7, 7)):
        sized = with_intervals(change(config, eval_every=given, save_every=None), total)
        assert (sized.eval_every, sized.save_every) == (wanted, every)


def halves(path: Path, first: int) -> Path:
    """A dataset over 30 of the 64 tokens of the same target."""
    documents = [
        ([first + i % 30 for i in ids], mask, turns)
        for ids, mask, turns in random_documents(30, 64, seed=first, shortest=12)
    ]
    return tiny_dataset(path, documents=documents)


def test_the_vocabulary_of_another_corpus_is_called_out(config, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    options = replace(OPTIONS, draft_vocab_size=32)
    one, two = halves(tmp_path / "one", 0), halves(tmp_path / "two", 32)
    first = change(config, data=str(one), steps=1, out=str(tmp_path / "first"))
    run(first, options)
    assert "vocabulary 32 of 64 tokens: 100.00 % of the supervised tokens" in caplog.text
    assert "not made for this data" not in caplog.text
    second = change(first, data=str(two), out=str(tmp_path / "second"), init_from=first.out)
    run(second, options)
    assert "warning[vocabulary]: the draft vocabulary is not made for this data" in caplog.text
    assert "chosen on these documents 100.0 %" in caplog.text
