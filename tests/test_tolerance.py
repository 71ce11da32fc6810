"""The rule of `tolerance` lets rounding pass and nothing that a test is there to find."""

import pytest
import torch

from tests.tolerance import (
    close,
    close_gradients,
    close_in_norm,
    close_weights,
    decided,
    network,
    same_but_for_a_tie,
    same_choice,
    tolerance,
)

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


def test_a_gradient_without_one_of_its_slots_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, slopes = (torch.randn(SLOTS, n, generator=generator) for n in (32, 16))
    expected = {"weight": slopes.T @ inputs, "bias": slopes.sum(0)}
    rule = {"terms": network(2, backward=True, slots=SLOTS)}
    order = torch.randperm(SLOTS, generator=generator)
    close_gradients(
        {"weight": slopes[order].T @ inputs[order], "bias": slopes[order].sum(0)}, expected, **rule
    )
    less = {"weight": slopes[1:].T @ inputs[1:], "bias": slopes[1:].sum(0)}
    with pytest.raises(AssertionError):
        close_gradients(less, expected, **rule)
    close_in_norm(expected["weight"].bfloat16(), expected["weight"], torch.bfloat16, terms=1)
    with pytest.raises(AssertionError):
        close_in_norm(less["weight"] * 0.97, expected["weight"], torch.bfloat16, terms=4)


def test_weights_after_one_other_gradient_in_ten_are_found() -> None:
    def train(other: bool, noise: float) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(40, 40, generator=generator))
        optimizer = torch.optim.AdamW([weight], lr=1e-4)
        for step in range(10):
            gradient = torch.randn(40, 40, generator=generator)
            if other and step == 5:
                gradient[:20] *= 0.5
            weight.grad = gradient + noise * torch.randn(40, 40)
            optimizer.step()
        return {"weight": weight.detach()}

    expected = train(False, 0.0)
    close_weights(train(False, 1e-6), expected, 1e-4, 10)
    with pytest.raises(AssertionError, match="in the mean"):
        close_weights(train(True, 0.0), expected, 1e-4, 10)


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
