"""Forwards of a small plan are made once: for the checks, for the codecs, and as data."""

import numpy as np
import pytest
import torch

import spec_data.generation.early as early_module
import spec_data.generation.replica as replica_module
from spec_data.generation.capture import forward_columns
from spec_data.shards.reader import HiddenStatesDataset
from tests.spec_data.runs import digests, run, save_target, write_corpus
from tests.spec_data.shards.codec_tools import MIXED


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "chats.jsonl", 30)


@pytest.fixture
def forwards(monkeypatch):
    """Count the tokens of every forward that makes columns."""
    counted = []

    def counting(target, batch, *args):
        counted.append(batch.tokens)
        return forward_columns(target, batch, *args)

    for module in ("early", "capture", "sample_check"):
        monkeypatch.setattr(f"spec_data.generation.{module}.forward_columns", counting)
    return counted


@pytest.mark.parametrize("given", [{}, MIXED, {"supervision": "topk:4"}, {"supervision": "logits"}])
def test_every_token_is_forwarded_once_and_the_bytes_do_not_depend_on_it(
    target, corpus, tmp_path, forwards, monkeypatch, given
):
    given = given | {"max_shard_size": "60KB"}
    manifest = run(target, corpus, tmp_path / "early", **given)
    assert sum(forwards) == manifest.raw["totals"]["tokens"]
    assert len(manifest.shards) > 1
    # The same proofs, but capture makes every forward again, as in a run that resumes.
    monkeypatch.setattr(
        replica_module, "CaptureSettings", _without_kept(replica_module.CaptureSettings)
    )
    forwards.clear()
    run(target, corpus, tmp_path / "again", **given)
    assert sum(forwards) == 2 * manifest.raw["totals"]["tokens"]
    assert digests(tmp_path / "early") == digests(tmp_path / "again")


def _without_kept(kind):
    def make(**values):
        assert values.pop("kept")
        return kind(**values)

    return make


def test_a_larger_plan_is_sampled_as_before(target, corpus, tmp_path, forwards, monkeypatch):
    monkeypatch.setattr(early_module, "_TOKENS", 100)
    manifest = run(target, corpus, tmp_path / "data", **MIXED)
    tokens = manifest.raw["totals"]["tokens"]
    assert tokens < sum(forwards) <= 2 * tokens  # the units, and the documents looked at
    assert manifest.codec["tokens"] <= tokens


def test_states_of_a_sparse_column_lie_at_their_tokens(target, corpus, tmp_path, monkeypatch):
    """Codec tables are made from these; a plain loop finds the same places."""
    seen = {}
    states = early_module.EarlyForwards.states

    def recording(self, plan, column, *args):
        seen[column.name] = states(self, plan, column, *args)
        return seen[column.name]

    monkeypatch.setattr(early_module.EarlyForwards, "states", recording)
    run(target, corpus, tmp_path / "coded", final="supervised", codec="int8c")
    run(target, corpus, tmp_path / "exact", final="supervised")
    exact, first = HiddenStatesDataset(tmp_path / "exact"), 0
    assert set(seen) == {"hidden.L0", "hidden.L2", "hidden.L4", "hidden.final"}
    for index in range(len(exact)):
        row = exact[index]
        mask = row["loss_mask"].tolist()
        for t in range(len(mask)):
            stored = t + 1 < len(mask) and mask[t + 1]
            final = seen["hidden.final"][first + t]
            assert bool(torch.isfinite(final).all()) == bool(stored)
            if stored:
                assert torch.equal(final.bfloat16(), row["hidden.final"][t])
            assert torch.equal(seen["hidden.L2"][first + t].bfloat16(), row["hidden.L2"][t])
        first += len(mask)
    assert first == int(np.sum(exact.lengths)) == len(seen["hidden.final"])
