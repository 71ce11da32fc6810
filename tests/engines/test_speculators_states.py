"""The speculators library reads the states that `spec-data export` writes for it."""

import importlib.util

import pytest
import torch

from spec_data.commands.convert import convert, export_dataset
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from tests.spec_data.conversion import layouts

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore"),  # those of the library
    pytest.mark.skipif(
        importlib.util.find_spec("speculators") is None,
        reason="the speculators library is not installed: bash scripts/engines_env.sh",
    ),
]


def test_its_own_dataset_returns_our_states(tmp_path):
    from speculators.train.data import ArrowDataset

    target = layouts.tiny_target(tmp_path / "target")
    source = layouts.specforge(tmp_path / "source", layouts.make_samples(target))
    given = {"source": str(source), "from_": "specforge", "target": str(target)}
    given |= {"out": str(tmp_path / "data"), "codec": "bf16"}
    convert(**given)
    other = tmp_path / "other"
    export_dataset(given["out"], "speculators", other)

    theirs = ArrowDataset(max_len=512, datapath=str(other), on_missing="raise")
    ours = HiddenStatesDataset(given["out"])
    weight = load_head_tensors(given["out"])["norm"]
    assert len(theirs) == len(ours)
    for i, document in enumerate(ours):
        sample = theirs[i]
        assert torch.equal(sample["input_ids"], document["input_ids"].long())
        assert torch.equal(sample["loss_mask"].long(), document["loss_mask"].long())
        aux = torch.cat([document[f"hidden.L{k}"] for k in (1, 2, 4)], -1)
        assert torch.equal(sample["hidden_states"], aux)
        last = sample["verifier_last_hidden_states"].float()
        final = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        torch.testing.assert_close(final, document["hidden.final"].float(), rtol=0.02, atol=0.02)
