"""The bounds that `scripts/bench/rate_distortion.py` prints."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCH))
    try:
        import rate_distortion
    finally:
        sys.path.remove(str(BENCH))
    return rate_distortion


def slow_rate(spectrum, error: float) -> float:
    """Return the bits per value: raise a water level in small steps until the error is reached."""
    level, step = 0.0, 1e-5
    while sum(min(value, level + step) for value in spectrum) / len(spectrum) <= error:
        level += step
    bits = [0.5 * np.log2(value / level) if value > level else 0.0 for value in spectrum]
    return float(np.mean(bits))


@pytest.mark.parametrize("error", [0.01, 0.1, 0.4])
def test_water_filling(bench, error) -> None:
    spectrum = [2.0, 0.9, 0.5, 0.02, 1e-4]
    assert bench.water_filled(np.array(spectrum), error) == pytest.approx(
        slow_rate(spectrum, error), abs=2e-3
    )
    flat = bench.water_filled(np.ones(7), error)
    assert flat == pytest.approx(-0.5 * np.log2(error))  # a Gaussian's rate


def test_more_error_than_variance_takes_no_bits(bench) -> None:
    assert bench.water_filled(np.array([0.3, 0.1]), 0.2) == 0.0


def test_rotation_and_delta_find_what_is_correlated(bench) -> None:
    torch.manual_seed(0)
    source = torch.randn(4000, 8)
    mixed = source[:, :4].repeat(1, 2) + 0.05 * source  # eight channels, nearly four sources
    halves = bench.standardised((mixed[:2000], mixed[2000:]))
    alone, rotated = (bench.water_filled(bench.variances(halves, n), 0.01) for n in (1, 8))
    assert rotated < 0.6 * alone
    pairs = bench.groups(mixed.T.corrcoef().abs(), 2)
    assert sorted(tuple(sorted(pair.tolist())) for pair in pairs) == [(i, i + 4) for i in range(4)]
    above = tuple(half + 0.1 * torch.randn_like(half) for half in halves)
    for _, left in bench.predicted(halves, above):
        assert 0.005 < bench.variances(left, 1).mean() < 0.03
