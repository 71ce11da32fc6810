"""The rule of `tolerance` lets rounding pass and nothing that a test is there to find."""

import pytest
import torch

from tests.tolerance import close, decided, network, same_but_for_a_tie, same_choice, tolerance

SLOTS = 320


def losses() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(SLOTS, generator=generator) * 4 + 0.5


def test_another_order_passes_and_a_missing_or_doubled_slot_does_not() -> None:
    values = losses()
    total = values.sum()
    rule = {"terms": network(4, backward=True, slots=SLOTS), "dtype": torch.float32}
    close(values.flip(0).double().sum().float(), total, **rule)
    in_turn = torch.zeros(())
    for value in values:
        in_turn += value
    close(in_turn, total, **rule)
    smallest = values.min()
    for wrong in (total - smallest, total + smallest, values.roll(1) @ torch.rand(SLOTS)):
        with pytest.raises(AssertionError, match="they differ by"):
            close(wrong, total, **rule)
    with pytest.raises(AssertionError, match=r"\['loss'\]"):
        close({"loss": float(total - smallest)}, {"loss": float(total)}, **rule)


def test_only_ties_may_be_chosen_differently() -> None:
    step = tolerance(torch.float32, 100)
    values = torch.tensor([[1.0, 1.0 - step / 2, 0.5], [0.0, 2.0, 1.0]], dtype=torch.float64)
    for first in (0, 1):
        same_choice(values, torch.tensor([first, 1]), 100, torch.float32)
    for wrong in ([2, 1], [0, 2]):
        with pytest.raises(AssertionError, match="short by"):
            same_choice(values, torch.tensor(wrong), 100, torch.float32)
    assert not decided(values, 100, torch.float32) and decided(values[1:], 100, torch.float32)
    same_but_for_a_tie([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7])
    with pytest.raises(AssertionError, match=r"results \[0, 5\] of 6 differ"):
        same_but_for_a_tie([0, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7])
    with pytest.raises(AssertionError):
        same_but_for_a_tie([1, 2], [1, 2])
