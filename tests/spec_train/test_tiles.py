"""The passes over logits against torch's own functions, with widths that no block divides."""

import pytest
import torch

from spec_data.shards.schema import largest
from spec_train.losses.teacher_rows import TeacherRows
from spec_train.losses.tiles import dot, log_sums, softmax_sums
from tests.tolerance import close

SUMS = 2500  # terms of the longest sum
WIDTHS = [1, 7, 64, 1023, 1024, 1025, 2500]


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype) * 5


@pytest.mark.parametrize("width", WIDTHS)
def test_softmax_sums_and_the_largest_entry(width: int) -> None:
    x = drawn(3, 4, width)
    q, total, best = softmax_sums(x)
    close(q, x.softmax(-1), terms=SUMS)
    close(total, x.logsumexp(-1), terms=SUMS)
    assert torch.equal(best, x.argmax(-1))
    out = torch.empty_like(x)
    assert torch.equal(softmax_sums(x, out)[0], q) and torch.equal(out, q)
    close(log_sums(x[0]), x[0].logsumexp(-1), terms=SUMS)
    close(dot(x, q), (x * q).sum(-1), terms=SUMS)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_entry_is_found_everywhere(width: int) -> None:
    x = torch.zeros(width, width)
    x[torch.arange(width), torch.arange(width)] = 1
    peak, best = largest(x)
    assert (peak == 1).all() and torch.equal(best, torch.arange(width))
    equal = largest(torch.zeros(2, width))[1]
    assert (equal == 0).all()  # of equal entries the first


def test_numbers_that_are_not_finite_stay_visible() -> None:
    x = torch.zeros(3, 2000)
    x[0, 1500], x[1, 5], x[2, 70] = float("nan"), float("inf"), float("-inf")
    q, total, _ = softmax_sums(x)
    assert not total[:2].isfinite().any() and not q[:2].isfinite().all(-1).any()
    close(total[2], torch.tensor(1999.0).log(), dtype=torch.float32, terms=SUMS)


def test_entropy_of_logits_is_that_of_their_probabilities() -> None:
    z = drawn(5, 1200)
    rows = TeacherRows.of_logits(z, z.logsumexp(-1) + 0.5)
    plain = TeacherRows(rows.p).with_entropy()
    assert rows.entropy is not None and plain.entropy is not None and rows.mass is not None
    close(rows.entropy, plain.entropy, terms=SUMS)
    close(rows.mass, torch.full((5,), -0.5, dtype=z.dtype).exp(), terms=SUMS)
    assert rows.with_entropy() is rows
