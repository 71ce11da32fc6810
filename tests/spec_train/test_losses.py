"""Losses and their hand-made gradients against autograd of the formulas; chunks change nothing."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.schema import HeadSpec, apply_head
from spec_train.losses.menu import LossKind, TeacherRows, distribution_loss, head_loss
from spec_train.options.draft_options import KINDS
from tests.spec_train.drafts.slot_loss import SlotLoss
from tests.tolerance import LAYER, close


def _formula(logits: Tensor, teacher: TeacherRows, kind: LossKind) -> Tensor:
    """The slow losses of every slot, for autograd: [n, S] of logits [n, S, Vd]."""
    slow = SlotLoss(name=kind.name, hard=kind.hard, scale=kind.scale, decay=kind.decay)
    assert teacher.label is not None
    rows = zip(teacher.p, teacher.full(), logits.log_softmax(-1), teacher.label, strict=True)
    return torch.stack(
        [
            torch.stack([slow(p, full, q, int(token)) for q in log_q])
            for p, full, log_q, token in rows
        ]
    )


def _hard_too(names: tuple[str, ...]) -> list[tuple[str, bool]]:
    """All losses with soft and hard targets, but for the one that is infinite."""
    pairs = [(name, hard) for name in names for hard in (False, True)]
    return [pair for pair in pairs if pair != ("reverse-kl", True)]


EVERY = _hard_too(KINDS)
CHUNKS = [(*case, 7) for case in EVERY]  # a loss does not know of chunks
CHUNKS += [(*case, size) for case in (("ce", False), ("lk-lambda", True)) for size in (1, 1 << 20)]


def _case(n: int = 5, steps: int = 3, size: int = 4, vocab: int = 11, reduced: bool = False):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, weight = draw(n, steps, size).requires_grad_(), draw(vocab, size).requires_grad_()
    p = (2 * draw(n, vocab)).softmax(-1)
    weights = torch.rand(n, steps, generator=generator, dtype=torch.float64)
    weights[1, 2] = 0
    mass = torch.rand(n, generator=generator, dtype=torch.float64) if reduced else None
    label = torch.randint(vocab, (n,), generator=generator)
    return hidden, weight, TeacherRows(p, mass, label=label), weights


def _part(teacher: TeacherRows, part: slice) -> TeacherRows:
    return teacher[torch.arange(part.start, part.stop)]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("name", "hard"), EVERY)
def test_slot_losses_and_gradients_are_those_of_the_formulas(name, hard, reduced):
    kind = LossKind(name=name, hard=hard, scale=0.9, decay=2.0)
    hidden, weight, teacher, _ = _case(reduced=reduced)
    logits = F.linear(hidden, weight).detach().requires_grad_()
    expected = _formula(logits, teacher, kind)
    (slope,) = torch.autograd.grad(expected.sum(), logits)
    given = logits.detach().clone()  # it is overwritten
    loss, acceptance, found, best = distribution_loss(given, teacher, kind)
    assert torch.equal(best, logits.argmax(-1))
    close(loss, expected.detach(), terms=2 * LAYER)
    close(found, slope, terms=2 * LAYER)
    overlap = torch.minimum(teacher.full()[:, None], logits.softmax(-1)).sum(-1)
    close(acceptance, overlap.detach(), terms=2 * LAYER)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("name", "hard", "chunk"), CHUNKS)
def test_chunks_change_neither_value_nor_gradient(name, hard, chunk, reduced):
    kind = LossKind(name=name, hard=hard)
    hidden, weight, teacher, weights = _case(reduced=reduced)
    logits = F.linear(hidden, weight)
    expected = (_formula(logits, teacher, kind) * weights).sum()
    asked: list[int] = []

    def rows(part: slice) -> TeacherRows:
        asked.extend(range(part.start, part.stop))
        return _part(teacher, part)

    total, stats = head_loss(hidden, weight, rows, weights, kind, chunk)
    assert asked == [0, 1, 2, 3, 4]  # the teacher of a row is made once for all steps
    close(total, expected, terms=2 * LAYER)
    assert torch.equal(stats.best, logits.argmax(-1))
    for found, wanted in zip(
        torch.autograd.grad(3 * total, [hidden, weight]),
        torch.autograd.grad(3 * expected, [hidden, weight]),
        strict=True,
    ):
        close(found, wanted, terms=2 * LAYER)


def test_figures_without_gradients_are_the_same() -> None:
    hidden, weight, teacher, weights = _case()
    with_graph, _ = head_loss(
        hidden, weight, lambda part: _part(teacher, part), weights, LossKind()
    )
    with torch.no_grad():
        total, _ = head_loss(hidden, weight, lambda part: _part(teacher, part), weights, LossKind())
    assert not total.requires_grad
    assert torch.equal(total, with_graph)


def test_a_frozen_head_leaves_the_states_their_gradient() -> None:
    hidden, weight, teacher, weights = _case()
    total, _ = head_loss(
        hidden, weight.detach(), lambda part: _part(teacher, part), weights, LossKind()
    )
    (found,) = torch.autograd.grad(total, [hidden])
    expected = (_formula(F.linear(hidden, weight), teacher, LossKind()) * weights).sum()
    close(found, torch.autograd.grad(expected, [hidden])[0], terms=2 * LAYER)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_scale_bias_and_softcap_of_a_head_are_part_of_the_loss(softcap, chunk):
    hidden, weight, teacher, weights = _case()
    bias = torch.linspace(-1, 1, len(weight), dtype=torch.float64)
    spec = HeadSpec(vocab_size=11, hidden_size=4, tied=False, scale=0.3, softcap=softcap)
    logits = apply_head(hidden, weight, bias, spec)
    expected = (_formula(logits, teacher, LossKind()) * weights).sum()
    total, stats = head_loss(
        hidden, weight, lambda part: _part(teacher, part), weights, LossKind(), chunk, bias, spec
    )
    close(total, expected, terms=2 * LAYER)
    assert torch.equal(stats.best, logits.argmax(-1))
    for found, wanted in zip(
        torch.autograd.grad(total, [hidden, weight]),
        torch.autograd.grad(expected, [hidden, weight]),
        strict=True,
    ):
        close(found, wanted, terms=2 * LAYER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "hard"), EVERY)
def test_distributions_without_overlap_stay_finite(name, hard, dtype):
    """p and q are exactly 0, subnormal or 1 here, and each is all of what the other is not."""
    p = torch.tensor([[1, 0, 0], [0, 0, 1], [1e-44, 1, 0]], dtype=dtype)
    logits = torch.tensor([[[-1e4, 1e4, 0]], [[90, 0, 0]], [[-1e30, 0, 1e30]]], dtype=dtype)
    teacher = TeacherRows(p, torch.tensor([1, 1e-9, 0], dtype=dtype), label=p.argmax(-1))
    loss, acceptance, slope, _ = distribution_loss(logits, teacher, LossKind(name=name, hard=hard))
    assert all(part.isfinite().all() for part in (loss, acceptance, slope))
    assert not hard or name in ("jsd", "tv") or bool((loss > 10).any())


@pytest.mark.parametrize(("name", "hard"), EVERY)
def test_a_draft_that_equals_its_target_is_the_minimum(name: str, hard: bool) -> None:
    """Of a hard target, its token is. The losses of acceptance have a kink at a soft minimum."""
    logits = torch.randn(4, 1, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    label = logits.argmax(-1)[:, 0]
    if hard:
        logits = logits + 60 * F.one_hot(label, 9)[:, None]
    teacher = TeacherRows(logits[:, 0].softmax(-1), label=label)
    kind = LossKind(name=name, hard=hard)
    loss, _, slope, _ = distribution_loss(logits.clone(), teacher, kind)
    if hard or name in ("ce", "kl", "reverse-kl", "jsd"):
        close(slope, torch.zeros_like(slope), terms=LAYER, magnitude=1.0)
    if name not in ("ce", "lk-lambda") or hard:
        close(loss, torch.zeros_like(loss), terms=LAYER, magnitude=1.0)


@pytest.mark.parametrize(("name", "hard"), EVERY)
def test_half_precision_states_give_float32_sums(name: str, hard: bool) -> None:
    kind = LossKind(name=name, hard=hard)
    hidden, weight, teacher, weights = _case(reduced=True)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    total, stats = head_loss(
        *low,
        lambda part: _part(teacher, part).to(torch.float32),
        weights.float(),
        kind,
        1 << 20,
    )
    expected, _ = head_loss(hidden, weight, lambda part: _part(teacher, part), weights, kind)
    assert total.dtype == stats.loss.dtype == torch.float32
    # states, weights, logits and teacher are rounded, in sums of 15 slots
    sizes = (weights * stats.loss.double().abs().clamp_min(1)).sum()
    close(total.double(), expected, terms=4, dtype=torch.bfloat16, magnitude=float(sizes))
    total.backward()
    assert [x.grad.dtype for x in low] == [torch.bfloat16] * 2
    assert all(bool(x.grad.isfinite().all()) for x in low)
