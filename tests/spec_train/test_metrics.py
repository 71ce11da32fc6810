"""Acceptance figures of chains written by hand; sums add up."""

import torch

from spec_train.losses.metrics import add_sums, chain_sums, summarise


def _sums(hits: list[list[int]], drafted: list[list[int]]) -> dict[str, torch.Tensor]:
    """Sums of S = 2 depths; every drafted slot supervised, loss 2 and 3, acceptance 1/2."""
    h, m = torch.tensor(hits, dtype=torch.bool), torch.tensor(drafted, dtype=torch.bool)
    count = m.sum(1).double()
    return {
        "loss": count * torch.tensor([2.0, 3.0], dtype=torch.float64),
        "supervised": count,
        "weighted": count * torch.tensor([0.6, 0.4], dtype=torch.float64),
        "acceptance": count / 2,
        **chain_sums(h & m, m),
    }


def test_a_chain_survives_while_every_draft_before_hit() -> None:
    # slots:          hit,hit  hit,miss  miss,hit  hit,(not drafted)
    hits, drafted = [[1, 1, 0, 1], [1, 0, 1, 1]], [[1, 1, 1, 1], [1, 1, 1, 0]]
    figures = summarise(_sums(hits, drafted))
    assert figures["chains"] == 3
    assert figures["acceptance_length"] == 2.0  # 1 + 2/3 + 1/3
    assert (figures["accept_rate/1"], figures["accept_rate/2"]) == (2 / 3, 1 / 2)
    assert (figures["hit_rate/1"], figures["hit_rate/2"]) == (3 / 4, 2 / 3)
    assert figures["expected_acceptance/1"] == 0.5
    assert abs(figures["loss"] - (0.6 * 2 + 0.4 * 3)) < 1e-12


def test_sums_of_parts_give_the_figures_of_the_whole() -> None:
    hits, drafted = [[1, 1, 0, 1], [1, 0, 1, 1]], [[1, 1, 1, 1], [1, 1, 1, 0]]
    parts = [
        _sums([row[:1] for row in hits], [row[:1] for row in drafted]),
        _sums([row[1:] for row in hits], [row[1:] for row in drafted]),
    ]
    first = parts[0]["hits"].clone()
    assert summarise(add_sums(parts)) == summarise(_sums(hits, drafted))
    assert torch.equal(parts[0]["hits"], first)  # adding leaves the parts alone


def test_chains_that_end_early_tell_of_the_depths_they_have() -> None:
    """Four chains of one depth, three of them hit; two of the three go on, and one hits again."""
    hits, drafted = [[1, 1, 1, 0], [1, 0, 1, 1]], [[1, 1, 1, 1], [1, 1, 0, 0]]
    figures = summarise(_sums(hits, drafted))
    assert figures["product_limit_length"] == 1 + 3 / 4 + 3 / 4 * 1 / 2
    assert (figures["chains"], figures["acceptance_length"]) == (2, 2.5)
    whole = summarise(_sums([row[:2] for row in hits], [row[:2] for row in drafted]))
    assert whole["product_limit_length"] == whole["acceptance_length"]


def test_without_whole_chains_there_is_no_acceptance_length_but_an_estimate() -> None:
    figures = summarise(_sums([[1, 0], [0, 0]], [[1, 1], [0, 0]]))
    assert figures["acceptance_length"] is None and figures["chains"] == 0
    assert figures["product_limit_length"] == 1.5
    assert figures["hit_rate/1"] == 0.5
    assert figures["hit_rate/2"] is figures["accept_rate/1"] is None


def test_what_was_not_measured_is_none_and_never_nan() -> None:
    figures = summarise(_sums([[0], [0]], [[0], [0]]))
    assert figures.pop("chains") == 0
    assert set(figures.values()) == {None}
