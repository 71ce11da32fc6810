"""Failed steps: the micro-batch to blame, its documents, states and weights are named."""

import dataclasses
import math

import pytest
import torch

from spec_data.shards.errors import RunError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.splits import make_splits
from spec_train.drafts import DRAFTS
from spec_train.options.kinds import draft_options
from spec_train.options.training import Training
from spec_train.training.fit import fit
from spec_train.training.run_cost import dry_run
from tests import factory
from tests.spec_train.training.tools import change, run


@pytest.fixture
def config(tmp_path) -> Training:
    data = factory.tiny_dataset(tmp_path / "data", n_docs=40)
    return Training(
        data=str(data), out=str(tmp_path / "run"), steps=6, batch_size=2, accumulation=2,
        seq_len=48, lr=1e-3, validation=0.15, log_every=5, eval_every=40, save_every=2,
    )  # fmt: skip


def micro_batch(config: Training, step: int, number: int) -> list[int]:
    return make_splits(HiddenStatesDataset(config.data), config).train.batches(0)[step][number]


def test_a_stored_infinity_is_named_with_document_shard_and_token(config, tmp_path, monkeypatch):
    victim = micro_batch(config, step=2, number=2)[0]
    original, calls = factory.states_of, []

    def inject(model, ids, layers):
        columns = original(model, ids, layers)
        if len(calls) == victim:
            columns["hidden.L1"] = columns["hidden.L1"].clone()
            columns["hidden.L1"][1, 7] = math.inf
        calls.append(1)
        return columns

    monkeypatch.setattr(factory, "states_of", inject)
    data = factory.tiny_dataset(tmp_path / "bad", n_docs=40)
    with pytest.raises(RunError) as error:
        run(change(config, data=str(data)))
    text, name = str(error.value), HiddenStatesDataset(data).doc_ids[victim]
    assert "step 3 (epoch 0, batch 2): the loss is nan" in text
    assert "micro-batch 2 of 2" in text
    assert f"{name} in shards/unit-{victim // 10:05d}.arrow" in text
    assert f"not finite: hidden.L1 of {name} at 1 tokens, first at token 1" in text
    assert f"spec-data verify {data}" in text


@pytest.mark.parametrize("draft", ["eagle3", "dspark"])  # dspark: forecasts are sorted into bins
def test_a_learning_rate_that_is_too_large_leaves_the_states_finite(config, draft):
    with pytest.raises(RunError, match="Their stored states are finite") as error:
        large = change(config, lr=1e30, clip=0.0, save_every=100)
        fit(draft, large, draft_options(draft)())
    assert "lower --lr" in str(error.value)


def test_of_a_gradient_that_is_not_finite_the_micro_batch_is_found(config, monkeypatch):
    """The loss stays finite, and the draft draws random numbers: the same ones again."""
    victim = micro_batch(config, step=1, number=2)
    original, losses = DRAFTS["eagle3"].scored, []

    def poisoned(self, batch, head, counts):
        result = original(self, batch, head, counts)
        loss = result.loss * (0.5 + torch.rand(()))
        if self.training and victim in batch.rows:
            losses.append(float(loss.detach()))
            if loss.requires_grad:
                loss.register_hook(lambda gradient: gradient * math.inf)
        return dataclasses.replace(result, loss=loss)

    monkeypatch.setattr(DRAFTS["eagle3"], "scored", poisoned)
    with pytest.raises(RunError, match=r"step 2 .*gradient norm is nan.*micro-batch 2 of 2"):
        run(config)
    assert losses[0] == losses[1]


TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB. Of the "
    "allocated memory 70 GiB is allocated by PyTorch. See documentation\nof PyTorch"
)


def fill_memory(monkeypatch, owner, name: str, when=lambda *_: True, says=None) -> None:
    """Let a method meet full memory in calls for which `when(*arguments)` holds."""
    original = getattr(owner, name)

    def call(*given, **options):
        if when(*given):
            raise says or torch.OutOfMemoryError(TORCH_SAYS)
        return original(*given, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("command", ["fit", "dry-run"])
def test_full_memory_names_the_shape_that_failed_and_what_helps(config, monkeypatch, command):
    fill_memory(monkeypatch, DRAFTS["peagle"], "scored", lambda draft, *_: draft.training)
    options = draft_options("peagle")(depths=2, draft_vocab_size=0, segments=2)
    with pytest.raises(RunError) as error:
        if command == "fit":
            fit("peagle", config, options)
        else:
            dry_run("peagle", config, options)
    text = str(error.value)
    assert "out of device memory in step 1, with micro-batches of 2 x " in text
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB.)" in text
    assert "--batch-size 1 --accumulation 4 or --gradient-checkpointing or --sharding" in text
    assert "--segments 4 or a smaller --seq-len" in text
    assert "expandable_segments:True" in text and "\n" not in text


def test_full_memory_outside_a_step_says_where(config, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"in the validation or the"):
        fill_memory(patch, DRAFTS["eagle3"], "scored", lambda draft, *_: not draft.training)
        run(config)
    with monkeypatch.context() as patch, pytest.raises(RunError, match="memory in the set-up"):
        fill_memory(patch, DRAFTS["eagle3"], "build", says=RuntimeError("DefaultCPUAllocator: no"))
        run(config)
