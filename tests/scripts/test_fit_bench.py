"""The steps that `scripts/bench/fit.py` compares are the same: losses and gradients of any way."""

import argparse
import dataclasses
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
VOCAB, FEW = 1100, 300  # of the target, and the reduced draft vocabulary
DRAFTS = [("eagle", VOCAB), ("dflash", VOCAB)]
DRAFTS += [("eagle3", FEW), ("peagle", FEW), ("dspark", VOCAB)]


@pytest.fixture(scope="module")
def fit():
    sys.path.insert(0, str(BENCH))
    try:
        import fit
    finally:
        sys.path.remove(str(BENCH))
    return fit


@pytest.mark.parametrize("name, vocab", DRAFTS)
def test_baseline_and_recomputed_steps_have_the_gradients_of_ours(
    fit, name, vocab, monkeypatch
) -> None:
    """`measure` raises if they differ. Small sizes, and tiles of eight rows."""
    small = {"hidden": 64, "heads": 2, "head_dim": 32, "vocab": VOCAB}
    monkeypatch.setattr(fit, "SIZE", dataclasses.replace(fit.SIZE, **small))
    monkeypatch.setattr("spec_train.losses.tiles.TILE_ELEMENTS", 8 * vocab)
    ways = ["ours", "baseline"] + ["recomputed"] * fit.has_option(name, "gradient_checkpointing")
    args = argparse.Namespace(device="cpu", rounds=1)
    assert list(fit.measure(name, ways, 60, vocab, args)) == ways


def test_another_loss_or_gradient_is_refused(fit) -> None:
    ours = {"loss": 2.0, "gradients": [torch.ones(3), torch.zeros(2)]}
    fit.compare({"ours": ours, "other": ours})
    with pytest.raises(SystemExit, match="loss"):
        fit.compare({"ours": ours, "other": ours | {"loss": 2.001}})
    for wrong in ([torch.ones(3) * 1.01, torch.zeros(2)], [torch.ones(3), torch.ones(2) * 1e-6]):
        with pytest.raises(SystemExit, match="gradient"):
            fit.compare({"ours": ours, "other": ours | {"gradients": wrong}})
