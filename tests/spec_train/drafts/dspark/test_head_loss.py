"""The loss of block drafts per row, its denominators, and how often it asks its teacher."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_data.shards.schema import FINAL
from spec_train.drafts.block.draft import block_rows_loss
from spec_train.losses.menu import LowRank, TeacherRows
from tests import tolerance
from tests.spec_train.drafts.cases import (
    BLOCK_MASKS,
    case,
    lay_out,
    loss_of,
    make_documents,
    make_draft,
    make_head,
    reference_config,
    reference_state,
)
from tests.spec_train.drafts.dspark.reference import reference_loss
from tests.tolerance import network

close = functools.partial(tolerance.close, terms=network(2, backward=True, slots=100))


def rows_of(teacher: TeacherRows, part: slice) -> TeacherRows:
    return teacher[torch.arange(part.start, part.stop)]


@pytest.mark.parametrize("shared", [None, [0, 0, 1, 1, 1, 1, 2, 3]])
@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_chunks_change_nothing_and_gradients_are_autograds(
    rows, labelled, reduced, shared, monkeypatch
):
    """Rows may share a latent vector, across tiles (of two rows) and chunks."""
    monkeypatch.setattr("spec_train.losses.tiles.TILE_ELEMENTS", 2 * 11)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = 8 if shared is None else 4
    latent_of = torch.arange(8) if shared is None else torch.tensor(shared)
    hidden, latent, w2 = (x.requires_grad_() for x in (draw(8, 6), draw(count, 4), draw(11, 4)))
    weight, p = draw(11, 6), torch.softmax(draw(8, 11), -1)
    ce, l1 = draw(8).abs(), draw(8).abs()
    labels = torch.randint(11, (8,), generator=generator)
    mass = torch.rand(8, generator=generator, dtype=torch.float64) if reduced else None
    teacher = TeacherRows(p, mass)
    given = labels if labelled else None
    total, figures = block_rows_loss(
        hidden,
        weight,
        lambda part: rows_of(teacher, part),
        given,
        ce,
        l1,
        LowRank(latent, w2, None if shared is None else (latent_of, shared)),
        chunk_rows=rows,
    )
    found = torch.autograd.grad(2.5 * total, [hidden, latent, w2])
    log_q = torch.log_softmax(hidden @ weight.T + latent[latent_of] @ w2.T, -1)
    distance = (log_q.exp() - p).abs().sum(-1)
    entropy = -(log_q.gather(1, labels[:, None])[:, 0] if labelled else (p * log_q).sum(-1))
    expected = (ce * entropy + l1 * distance).sum()
    close(total, expected)
    close(figures.overlap, 1 - distance / 2)
    full = p if mass is None else mass[:, None] * p
    close(figures.acceptance, torch.minimum(full, log_q.exp()).sum(-1))
    if mass is not None:  # the identity of the module's docstring
        far = (log_q.exp() - full).abs().sum(-1)
        close(figures.acceptance, (1 + mass - far) / 2)
    close(figures.cross_entropy, entropy)
    assert torch.equal(figures.best, log_q.argmax(-1))
    wanted = torch.autograd.grad(2.5 * expected, [hidden, latent, w2])
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


def test_nothing_that_grows_with_rows_times_vocabulary_is_kept_for_the_backward() -> None:
    rows, vocab = 200, 900
    hidden, latent, w2 = (torch.randn(n, 4, requires_grad=True) for n in (rows, rows, vocab))
    weight, kept = torch.randn(vocab, 4), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    asked: list[int] = []

    def teacher(part: slice) -> TeacherRows:
        asked.append(part.stop - part.start)
        return TeacherRows(torch.full((asked[-1], vocab), 1 / vocab))

    ones = torch.ones(rows)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        bias = LowRank(latent, w2)
        total, _ = block_rows_loss(hidden, weight, teacher, None, ones, ones, bias, chunk_rows=64)
    total.backward()
    assert asked == [64, 64, 64, 8]
    assert kept and max(kept) == vocab * 4  # the gradient of W2
    assert hidden.grad is not None and latent.grad is not None and w2.grad is not None


def test_a_teacher_is_asked_once_for_every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring blocks share their teachers; a chunk computes only the selected rows."""
    made = case("dspark", markov_rank=0, confidence_weight=0.0)
    draft, head = make_draft(made), make_head(made)
    (document,) = make_documents(made, BLOCK_MASKS[:1])
    arguments = lay_out(made, [document], [[0]])
    arguments["anchors"] = torch.tensor([[3, 4, 5, 6]])
    arguments["real"] = torch.ones(1, 4, dtype=torch.bool)
    del arguments["logits"]
    arguments[FINAL] = torch.randn(1, arguments["input_ids"].shape[1], 12, dtype=torch.float64)
    asked: list[int] = []
    logits = head.logits

    def counted(states: torch.Tensor, *how: Any, **more: Any) -> torch.Tensor:
        asked.append(len(states))
        return logits(states, *how, **more)

    monkeypatch.setattr(head, "logits", counted)
    loss_of(made, draft, head=head, **arguments)
    # blocks at 3..6 reach to token 10: 4 + 4 + 4 + 4 drafts, teachers at positions 3..9
    assert asked == [7]


def test_the_denominators_of_a_step_replace_those_of_the_batch() -> None:
    made, counts = case("dspark"), [31.5, 40.0]
    draft, documents = make_draft(made), make_documents(made, BLOCK_MASKS)
    expected, _ = reference_loss(reference_state(draft), reference_config(made), documents, counts)
    inputs = lay_out(made, documents, [[0, 1, 2, 3, 4]])
    close(loss_of(made, draft, counts=torch.tensor(counts), **inputs).loss, expected.detach())


def test_the_reference_itself_counts_as_the_paper_says() -> None:
    """One block computed by hand: weights exp(-k/4), terms 0.1, 0.9 and 1.0."""
    made = case("dspark", markov_rank=0, block_size=2)
    (document,) = make_documents(made, [[0, 1, 1, 1]])
    loss, sums = reference_loss(
        reference_state(make_draft(made)), reference_config(made), [replace(document, picks=[1])]
    )
    close(sums["term_weights"], [1 + math.exp(-0.25)] * 3)
    ce, l1, bce = (term / sums["term_weights"][0] for term in sums["terms"])
    close(float(loss.detach()), 0.1 * ce + 0.9 * l1 + 1.0 * bce)
