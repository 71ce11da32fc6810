"""The baselines of `scripts/bench/fit.py` compute the losses that they are compared with."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))

import fit


@pytest.mark.parametrize("name", fit.BASELINES)
def test_a_baseline_has_the_loss_and_the_gradients(name: str) -> None:
    steps = fit.Steps(name, 24, 512, "cpu")
    ways = ["ours", "baseline"] + ["recomputed"] * fit.has_option(name, "gradient_checkpointing")
    fit.compare({way: steps.checked(way) for way in ways})
