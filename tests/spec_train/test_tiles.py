"""The passes over logits against torch's own functions, with widths that no block divides."""

import pytest
import torch

from spec_train.losses.teacher_rows import SharedRows, TeacherRows
from spec_train.losses.tiles import dot, largest, log_sums, product, softmax_sums, tiles
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


def test_tiles_cover_all_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_train.losses.tiles.TILE_ELEMENTS", 30)
    cpu = torch.device("cpu")
    assert tiles(7, 10, cpu) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert tiles(2, 100, cpu) == [slice(0, 1), slice(1, 2)] and tiles(0, 10, cpu) == []
    assert tiles(7, 10, torch.device("cuda")) == [slice(0, 7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_product_uses_the_buffer_only_if_no_dtype_changes(dtype: torch.dtype) -> None:
    states, weight, bias = (drawn(*s).to(dtype) for s in ((2, 3, 4), (5, 4), (5,)))
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    buffer = torch.full((40,), 7.0, dtype=wide)
    found = product(states, weight, bias, buffer)
    expected = torch.nn.functional.linear(states, weight, bias)
    assert found.dtype == wide and found.shape == (2, 3, 5)
    close(found, expected.to(wide), dtype=dtype, terms=SUMS)
    assert (buffer[0] == 7) == (dtype == torch.bfloat16) and (buffer[30:] == 7).all()


def test_entropy_of_logits_is_that_of_their_probabilities() -> None:
    z = drawn(5, 1200)
    rows = TeacherRows.of_logits(z, z.logsumexp(-1) + 0.5)
    plain = TeacherRows(rows.p).with_entropy()
    assert rows.entropy is not None and plain.entropy is not None and rows.mass is not None
    close(rows.entropy, plain.entropy, terms=SUMS)
    close(rows.mass, torch.full((5,), -0.5, dtype=z.dtype).exp(), terms=SUMS)
    assert rows.with_entropy() is rows


def test_shared_rows_are_rows_by_index() -> None:
    rows = TeacherRows.of_logits(drawn(3, 20), None)
    index, label = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([4, -1, 3, 2, 1])
    shared = SharedRows(rows, index).labelled(label)[1:4]
    assert torch.equal(shared.p, rows.p[index[1:4]]) and shared.entropy is not None
    assert shared.label is not None and shared.label.tolist() == [0, 3, 2]
    assert SharedRows(rows, index).to(torch.float32)[0:2].p.dtype == torch.float32
