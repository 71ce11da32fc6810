"""Samples are even, whatever is sampled."""

import itertools

import numpy as np
import pytest

from spec_data.shards.even_sample import even_sample, sample_documents


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 10, 100, 1000])
@pytest.mark.parametrize("most", [0, 1, 3, 8, 10, 37])
def test_an_even_sample_has_equal_distances(count, most):
    sample = even_sample(range(count), most)
    assert len(sample) == min(count, most) == len(set(sample))
    assert all(0 <= n < count for n in sample) and sample == sorted(sample)
    steps = {b - a for a, b in itertools.pairwise(sample)}
    assert not steps or max(steps) - min(steps) <= 1
    if sample:  # as far from the beginning as from the end
        assert abs(sample[0] - (count - 1 - sample[-1])) <= 1


def test_a_sample_of_documents_has_about_its_tokens():
    sample = sample_documents(np.full(1000, 50), 5000)
    assert len(sample) == 100 and set(np.diff(sample)) == {10}
    assert sample_documents(np.full(1000, 50), 1) == [500]
    assert sample_documents(np.full(1000, 50), 10**9) == list(range(1000))
    assert sample_documents(np.array([7]), 100) == [0]
