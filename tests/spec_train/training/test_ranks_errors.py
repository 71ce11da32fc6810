"""When one process of a run fails, all processes end with its error message."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from spec_data.shards.errors import DatasetError, RunError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.splits import make_splits
from spec_train.drafts import DRAFTS
from spec_train.drafts.draft import DraftLoss
from spec_train.training import ranks, run_directory
from spec_train.training.ranks import Ranks
from spec_train.training.trainer import Trainer
from tests.spec_train.training import ranks_tools
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.ranks_tools import fit_on_ranks, on_ranks
from tests.spec_train.training.tools import change, masters

data, config = trainer_tools.data, trainer_tools.config
patience = ranks_tools.patience


VICTIMS: set[int] = set()


def planted(owner, name: str, when, error: BaseException):
    """Raise `error` in calls for which `when(rank, *arguments)` holds."""

    def prepare(rank: int) -> None:
        original = getattr(owner, name)

        def call(*arguments, **options):
            if when(rank, *arguments):
                raise error
            return original(*arguments, **options)

        setattr(owner, name, call)

    return prepare


break_reader = planted(
    *(HiddenStatesDataset, "read_into"),
    lambda rank, _, row, out, *more: rank == 1 and row in VICTIMS and "hidden.final" in out,
    DatasetError("document: damaged"),
)
break_loss = planted(
    *(DRAFTS["eagle3"], "scored"),
    lambda rank, draft, batch, *_: (
        rank == 1 and draft.training and any(set(pack) & VICTIMS for pack in batch.rows)
    ),
    MemoryError("out of memory: damaged"),
)
break_metrics = planted(
    *(run_directory.RunDirectory, "append_metrics"),
    lambda rank, _, line: line["split"] == "train",
    OSError("disk: damaged"),
)
break_writer = planted(
    *(run_directory, "save_file"),
    lambda rank, tensors, *_: any(name.startswith("optimizer") for name in tensors),
    run_directory.SafetensorError("I/O error: damaged"),
)
break_set_up = planted(
    DRAFTS["eagle3"], "build", lambda rank, *_: rank == 1, DatasetError("vocabulary: damaged")
)


@pytest.mark.parametrize(
    "prepare,failed,sharding",
    [
        (break_reader, 1, "ddp"),
        (break_loss, 1, "ddp"),
        pytest.param(break_loss, 1, "fsdp2", marks=pytest.mark.long),
        pytest.param(break_metrics, 0, "ddp", marks=pytest.mark.long),
        pytest.param(break_writer, 0, "ddp", marks=pytest.mark.long),
        (break_set_up, 1, "ddp"),
    ],
    ids=["reader", "loss", "loss fsdp2", "metrics", "writer", "set up"],
)
def test_an_error_on_one_rank_ends_all_with_its_message(config, prepare, failed, sharding):
    config = change(config, batch_size=1, save_every=2, sharding=sharding)
    splits = make_splits(HiddenStatesDataset(config.data), config, 2)
    VICTIMS.clear()
    VICTIMS.update(row for pack in splits.train.batches(0)[2][1::2] for row in pack)
    ended = fit_on_ranks(config, 2, prepare)
    assert all(end.code in (1, 2) for end in ended), ended
    for rank, end in enumerate(ended):
        assert "damaged" in end.text
        assert (f"rank {failed}: " in end.text) == (rank != failed), end.text
    saved = Path(config.out) / "last"
    if prepare in (break_reader, break_loss):  # what was being written when it happened is whole
        assert saved.resolve().name == "checkpoint-00000002"


def test_a_killed_rank_ends_the_others(config):
    """A killed rank cannot send a message, so the other ranks report it."""
    original = Trainer._train_step

    def prepare(rank):
        def killed(self, step):
            if rank == 1 and self.step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, step)

        Trainer._train_step = killed

    ended = fit_on_ranks(change(config, batch_size=1), 2, prepare)
    assert [end.code for end in ended] == [1, -signal.SIGKILL]
    assert "error: another process of this run has ended" in ended[0].text


def test_a_rank_that_hears_of_nothing_is_ended_too(monkeypatch):
    """As in a collective on GPUs, which does not notice that another rank has ended."""
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.4)

    def body(rank):
        with Ranks() as own:
            if own.rank == 1:
                raise RunError("damaged")
            time.sleep(1000)

    ended = on_ranks(body)
    assert [end.code for end in ended] == [1, 1]
    assert ended[0].text == "error: rank 1: damaged\n"


@pytest.mark.parametrize(
    "kind, sharding, draft",
    [
        pytest.param("loss", "fsdp2", "eagle3", marks=pytest.mark.long),
        ("gradient", "ddp", "eagle3"),
        pytest.param("gradient", "fsdp2", "dspark", marks=pytest.mark.long),
        pytest.param("loss", "fsdp2", "dspark", marks=pytest.mark.long),
    ],
)
def test_a_non_finite_number_on_one_rank_stops_all(config, kind, sharding, draft):
    config = change(config, batch_size=1, save_every=2, sharding=sharding)
    dataset = HiddenStatesDataset(config.data)
    victim = make_splits(dataset, config, 2).train.batches(0)[2][1]

    def prepare(rank):
        original = DRAFTS[draft].scored

        def poisoned(self, batch, head, counts):
            result = original(self, batch, head, counts)
            if self.training and victim in batch.rows:
                if kind == "loss":  # a constant: the gradients stay finite
                    return DraftLoss(result.loss + torch.inf, result.sums)
                result.loss.register_hook(lambda gradient: gradient * torch.inf)
            return result

        DRAFTS[draft].scored = poisoned

    ended = fit_on_ranks(config, 2, prepare, draft)
    assert [end.code for end in ended] == [1, 1]
    # Every rank finds it; on a loaded machine a slow one may quote the other.
    assert any("rank" not in end.text for end in ended)
    for end in ended:
        assert "step 3 (epoch 0, batch 2)" in end.text
        what = "the loss is inf" if kind == "loss" else "the gradient norm is nan"
        assert f"{what}; the step was not applied. Documents of micro-batch 2 of " in end.text
        named = end.text.split("Documents of ")[1].split(". Their stored states are finite")[0]
        assert all(dataset.doc_ids[row] in named for row in victim)
    assert (Path(config.out) / "last").resolve().name == "checkpoint-00000002"
    saved = masters(config.out)
    assert all(t.isfinite().all() for t in saved.values())
