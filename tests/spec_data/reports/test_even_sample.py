"""Documents of a page are an even sample, within a limit of tokens and of costs."""

import itertools

import numpy as np
import pytest

from spec_data.reports.even_sample import affordable, even_numbers, sample_text, shown_documents
from spec_data.reports.token_viewer import spans_of


@pytest.mark.parametrize("count, wanted", [(1, 1), (7, 3), (10, 10), (3, 9), (1000, 37), (0, 5)])
def test_an_even_sample_has_equal_distances(count, wanted):
    found = even_numbers(count, wanted).tolist()
    assert len(found) == min(count, wanted) == len(set(found))
    assert all(0 <= n < count for n in found) and found == sorted(found)
    steps = {b - a for a, b in itertools.pairwise(found)}
    assert not steps or max(steps) - min(steps) <= 1


def test_a_sample_keeps_to_its_tokens_and_says_how_many_documents_it_has():
    lengths = np.random.default_rng(0).integers(1, 500, 2000)
    found = shown_documents(lengths, 1500, 20_000)
    assert 0 < lengths[found].sum() <= 20_000 and lengths[found].sum() > 15_000
    assert shown_documents(np.array([9_000_000, 5]), 2).tolist() == [0]
    assert shown_documents(lengths, 5).tolist() == [0, 400, 800, 1200, 1600]
    assert sample_text(5, 2000, "--documents").startswith("This page holds 5 of 2,000 documents")
    assert "--documents N" in sample_text(5, 2000, "--documents")
    assert sample_text(7, 7, "--documents") == "All 7 documents are in this page."


def test_a_sample_that_costs_too_much_gets_smaller_and_stays_even():
    costs = np.full(100, 10.0)
    found = even_numbers(100, 32)
    assert affordable(found, costs, 1e6).tolist() == found.tolist()
    fewer = affordable(found, costs, 85.0)
    assert len(fewer) == 8 and set(fewer.tolist()) <= set(found.tolist())
    assert fewer[0] == 0 and np.diff(fewer).min() >= 8
    assert affordable(found, costs, 0.0).tolist() == [0]


@pytest.mark.parametrize("seed", range(5))
def test_spans_mark_what_was_marked(seed):
    flags = np.random.default_rng(seed).random(40) < 0.5
    spans, back = spans_of(flags), np.zeros(40, bool)
    for a, b in zip(spans[::2], spans[1::2], strict=True):
        assert a < b and not back[a:b].any()
        back[a:b] = True
    assert (back == flags).all() and spans_of(np.zeros(3, bool)) == []
