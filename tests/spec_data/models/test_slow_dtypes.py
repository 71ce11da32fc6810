"""A CPU that computes slowly in half precision is named, with what to do."""

import pytest
import torch
from torch import nn

from spec_data.models import loading as slow_dtypes
from spec_data.models.loading import slow_dtype, slow_model

CPU = torch.device("cpu")


def seconds_of(ratio):
    """Return a stand-in for the timing: half precision takes `ratio` times as long."""
    return lambda dtype: 1e-3 if dtype == torch.float32 else 1e-3 * ratio


@pytest.mark.parametrize(("ratio", "slow"), [(55.0, True), (4.0, True), (3.9, False), (0.5, False)])
def test_only_a_slow_dtype_is_named(monkeypatch, ratio, slow):
    monkeypatch.setattr(slow_dtypes, "_seconds", seconds_of(ratio))
    found = slow_dtype(torch.bfloat16, CPU)
    assert (found is not None) == slow
    if slow:
        assert f"about {ratio:.0f} times" in found and "--dtype float32" in found


def test_float32_gpus_and_small_models_are_not_timed(monkeypatch):
    monkeypatch.setattr(slow_dtypes, "_seconds", lambda dtype: pytest.fail("timed"))
    assert slow_dtype(torch.float32, CPU) is None
    assert slow_dtype(torch.bfloat16, torch.device("cuda")) is None
    assert slow_model(nn.Linear(8, 8, dtype=torch.bfloat16)) is None


def test_a_large_model_is_timed(monkeypatch):
    monkeypatch.setattr(slow_dtypes, "_seconds", seconds_of(55))
    assert "bfloat16" in slow_model(nn.Linear(1000, 1000, dtype=torch.bfloat16))
    assert slow_model(nn.Linear(1000, 1000)) is None


def test_the_timing_itself():
    assert slow_dtypes._seconds(torch.float32) > 0
