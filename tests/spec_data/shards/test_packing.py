"""Laws of packing: whole documents, nothing crosses a boundary, masks say exactly who sees whom."""

import itertools
import random

import numpy as np
import pytest
import torch

from spec_data.shards.packing import (
    block_causal_mask,
    cut_units,
    even_sample,
    pack_documents,
    row_layout,
    sample_documents,
    shift_left,
)


@pytest.mark.parametrize("seed", range(2))
def test_every_document_is_in_exactly_one_row_and_rows_fit(seed):
    lengths = np.random.default_rng(seed).integers(1, 100, 300).tolist()
    rows = pack_documents(lengths, 128)
    assert sorted(d for row in rows for d in row) == list(range(300))
    assert all(sum(lengths[d] for d in row) <= 128 for row in rows)
    assert rows == pack_documents(lengths, 128)
    # Best-fit decreasing never needs more than 11/9 of the optimum, and here the bound is tight.
    assert len(rows) <= 11 / 9 * np.ceil(sum(lengths) / 128) + 1
    assert sum(lengths) > 0.9 * 128 * len(rows)


@pytest.mark.parametrize("lengths", [[5, 0], [129]])
def test_documents_that_do_not_fit_are_refused(lengths):
    with pytest.raises(ValueError, match="packs hold 1 to 128"):
        pack_documents(lengths, 128)


def layout_by_hand(row_lengths, width):
    documents, positions = [], []
    for row in row_lengths:
        d = [i for i, n in enumerate(row) for _ in range(n)]
        p = [j for n in row for j in range(n)]
        documents.append(d + [-1] * (width - len(d)))
        positions.append(p + [0] * (width - len(p)))
    return documents, positions


ROWS = [[3, 1, 4], [8], [2, 2]]


def test_layout():
    documents, positions = row_layout(ROWS, 9)
    assert (documents.tolist(), positions.tolist()) == layout_by_hand(ROWS, 9)


def test_shift_moves_inside_documents_only():
    documents, _ = row_layout(ROWS, 9)
    values = torch.arange(1, 28).view(3, 9)
    shifted = shift_left(values, documents)
    for b in range(3):
        for t in range(9):
            inside = t + 1 < 9 and documents[b, t] == documents[b, t + 1] and documents[b, t] >= 0
            assert shifted[b, t] == (values[b, t + 1] if inside else 0)
    wide = torch.stack([values, values * 2], dim=-1).float()
    assert torch.equal(shift_left(wide, documents)[..., 1], shifted.float() * 2)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_mask_is_causal_within_documents_and_windows(window):
    documents, _ = row_layout(ROWS, 9)
    mask = block_causal_mask(documents, window)
    assert mask.shape == (3, 1, 9, 9)
    for b in range(3):
        for i in range(9):
            for j in range(9):
                sees = j <= i and documents[b, i] == documents[b, j]
                sees = sees and (window is None or i - j < window)
                assert bool(mask[b, 0, i, j]) == bool(sees)
    assert bool(mask.any(-1).all()), "a fully masked row would be NaN in softmax"


def test_an_even_sample_has_equal_distances():
    for case in itertools.product((0, 1, 2, 3, 7, 10, 100, 1000), (0, 1, 3, 8, 10, 37)):
        count, most = case
        sample = even_sample(range(count), most)
        assert len(sample) == min(count, most) == len(set(sample)), case
        assert all(0 <= n < count for n in sample) and sample == sorted(sample), case
        steps = {b - a for a, b in itertools.pairwise(sample)}
        assert not steps or max(steps) - min(steps) <= 1, case
        if sample:  # as far from the beginning as from the end
            assert abs(sample[0] - (count - 1 - sample[-1])) <= 1, case


def test_a_sample_of_documents_has_about_its_tokens():
    sample = sample_documents(np.full(1000, 50), 5000)
    assert len(sample) == 100 and set(np.diff(sample)) == {10}
    assert sample_documents(np.full(1000, 50), 1) == [500]
    assert sample_documents(np.full(1000, 50), 10**9) == list(range(1000))
    assert sample_documents(np.array([7]), 100) == [0]


def test_units_have_at_least_so_many_documents_and_are_else_as_small_as_asked() -> None:
    rng = random.Random(0)
    for _ in range(500):
        sizes, most = [rng.randint(1, 9) for _ in range(rng.randint(0, 12))], rng.randint(1, 20)
        for least in (1, 2, 3):
            units = cut_units(sizes, most, least)
            assert [d for unit in units for d in range(*unit)] == list(range(len(sizes)))
            for first, last in units:
                extra = least - 1 if last == len(sizes) else 0
                fits = any(sum(sizes[first : last - n]) <= most for n in range(extra + 1))
                assert fits or last - first <= least + extra
                assert last - first >= least or len(sizes) < least
