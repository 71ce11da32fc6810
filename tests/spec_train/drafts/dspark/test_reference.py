"""The DSpark loss against its slow reference: value, sums and every gradient, in float64."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_train.drafts.dspark.draft import dspark_loss
from spec_train.drafts.dspark.head_loss import block_rows_loss
from spec_train.losses.menu import LowRank, TeacherRows
from tests import tolerance
from tests.spec_train.drafts.dspark.cases import (
    DRAFT_IDS,
    Case,
    lay_out,
    make_documents,
    make_draft,
    make_head,
    reference_config,
    reference_state,
)
from tests.spec_train.drafts.dspark.reference import Document, reference_loss
from tests.spec_train.drafts.shared import gradients
from tests.spec_train.drafts.slot_loss import SlotLoss
from tests.spec_train.drafts.slow_layer import EVERY
from tests.tolerance import network

# two layers; gradients are sums over the slots of all blocks
TERMS = network(2, backward=True, slots=100)
close = functools.partial(tolerance.close, terms=TERMS)


MASKS = (
    [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
    [0, 1, 1, 1, 0, 0, 1, 1, 1],
    [1, 1, 1, 0, 1, 1],
    [0, 0, 1],
    [1, 1],
)
# The last two are not candidates: the first slot of a document, and one with nothing after it.
ANCHORS = ([3, 5, 6, 9], [1, 2, 6, 7], [1, 4, 5], [2], [0, 1])
CASES = (
    Case(),
    Case(kind="gated"),
    Case(kind="rnn"),
    Case(kind="none"),
    Case(kind="none", confidence=False),
    Case(confidence_reads_markov=False),
    Case(layout="mask", kind="rnn", confidence_reads_markov=False),
    Case(layout="mask", kind="rnn"),
    Case(layout="mask", reduced=True),
    Case(reduced=True, kind="gated"),
    Case(reduced=True, against="soft", weights=(1.0, 1.0, 1.0, 1.0)),
    Case(block_size=1, draft_layers=1),
    Case(block_size=7, draft_layers=1, against="soft"),
    Case(window=4),
    Case(window=5, layout="mask", reduced=True),
    Case(window=4, non_causal=True, types="sliding_attention,full_attention"),
    Case(window=6, non_causal=True, dflash=True, layout="mask"),
    Case(window=7, block_size=7, types="full_attention,sliding_attention"),
    Case(dflash=True, layout="mask"),
    Case(dflash=True, layout="anchor"),
    Case(reduced=True, loss=SlotLoss(hard=True), kind="gated"),  # with the document's tokens
    Case(reduced=True, loss=SlotLoss(name="kl"), weights=(1.0, 0.5, 0.0, 0.25)),
    Case(reduced=True, loss=SlotLoss(name="reverse-kl"), dflash=True),
    Case(loss=SlotLoss(name="jsd", hard=True), against="tokens", confidence=False),
    Case(reduced=True, loss=SlotLoss(name="tv"), layout="mask"),
    Case(loss=SlotLoss(name="lk-alpha"), kind="none"),
    Case(reduced=True, loss=SlotLoss(name="lk-lambda", hard=True), against="hard"),
    Case(shape=EVERY),
    Case(kind="none", draft_layers=1, shape=(("qk_norm", False), ("hidden_act", "relu"))),
)


def compare(
    case: Case, rows: list[list[int]], counts: list[float] | None = None, recompute: bool = False
) -> None:
    draft, config = make_draft(case), reference_config(case)
    draft.use_options(replace(draft.options, gradient_checkpointing=recompute))
    calls: list[None] = []
    draft.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    documents = make_documents(case, draft, MASKS)
    state, head = reference_state(draft), make_head()
    used = [(documents[d], ANCHORS[d]) for row in rows for d in row]
    expected = reference_loss(state, head.head_weight, config, used, counts)
    arguments: dict[str, Any] = lay_out(documents, rows, ANCHORS)
    if counts is not None:
        arguments["counts"] = torch.tensor(counts)
    found = dspark_loss(draft, head=head, **arguments)
    close(found.loss, expected.loss)
    found.loss.backward()
    assert len(calls) == 1 + recompute
    expected.loss.backward()
    found_gradients = gradients(draft)
    wanted = {name: state[name].grad for name in found_gradients}
    tolerance.close_gradients(found_gradients, wanted, terms=TERMS)
    assert sum(bool(x.abs().max() > 1e-6) for x in wanted.values()) > 10
    sums = {name: value.tolist() for name, value in found.sums.items()}
    for name in ("drafted", "hits"):
        assert sums[name] == getattr(expected, name)
    assert sums["survive"] == expected.survivors and sums["chains"] == expected.chains
    close(sums["acceptance"], expected.acceptance)
    if case.loss is None:
        close(sums["terms"], expected.terms)
        close(sums["term_weights"], expected.weights)
    else:
        close([sums["kind"], sums["terms"][2]], [expected.terms[0], expected.terms[2]])
        close([sums["kind_weight"], *sums["term_weights"][1:]], expected.weights)
    assert sum(sums["supervised"]) == expected.trained
    live = sum(document.m[a + 1 : a + 2] == [1] for document, anchors in used for a in anchors)
    assert sums["blocks"] == live
    close(sums["tau"], expected.tau - (sum(len(a) for _, a in used) - live))
    if config.confidence:
        close(sum(sums["confidence_number"]), expected.weights[2])
        close(sums["confidence_sum"], expected.forecasts)
        close(sums["confidence_accepted"], expected.accepted)
    figures = draft.summarise(found.sums)
    if counts is None:
        close(figures["loss"], float(expected.loss.detach()))
    close(figures["tau"], sums["tau"] / live)
    if expected.chains:
        length = 1 + sum(expected.survivors) / expected.chains
        close(figures["acceptance_length"], length)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_documents_match_the_reference(case: Case) -> None:
    compare(case, [[0, 1, 4], [2, 3]])


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_recomputed_layers_match_the_reference(case: Case) -> None:
    compare(case, [[0, 1, 4], [2, 3]], recompute=True)


@pytest.mark.parametrize("case", CASES[2:8:2], ids=str)
def test_documents_in_rows_of_their_own_match_the_reference(case: Case) -> None:
    compare(case, [[0], [1], [2], [3]])


def test_the_denominators_of_a_step_replace_those_of_the_batch() -> None:
    compare(Case(), [[0, 1], [2]], counts=[31.5, 40.0])


def test_the_documents_are_worth_comparing() -> None:
    """There are hits and misses at several depths, cut blocks, choices outside the vocabulary."""
    case = Case(reduced=True)
    draft = make_draft(case)
    documents = make_documents(case, draft, MASKS)
    used = list(zip(documents, ANCHORS, strict=True))
    config, head = reference_config(case), make_head()
    out = reference_loss(reference_state(draft), head.head_weight, config, used)
    assert out.drafted == sorted(out.drafted, reverse=True) and out.drafted[-1] < out.drafted[0]
    assert 0 < out.hits[0] < out.drafted[0] and sum(out.hits[1:]) > 0
    assert out.trained < sum(out.drafted) and out.chains
    assert out.weights[0] < out.weights[1]  # tokens outside the draft vocabulary


def test_final_states_and_the_head_are_a_teacher_as_well() -> None:
    case = Case(reduced=True, kind="gated")
    draft, head = make_draft(case), make_head()
    arguments = lay_out(make_documents(case, draft, MASKS), [[0, 1], [2]], ANCHORS)
    final = torch.randn(*arguments["input_ids"].shape, 12, dtype=torch.float64)
    arguments["logits"] = head.logits(final)
    expected = dspark_loss(draft, head=head, **arguments)
    del arguments["logits"]
    for sums in (None, head.logits(final).logsumexp(-1)):
        found = dspark_loss(
            draft, head=head, final_hidden=final, target_logsumexp=sums, **arguments
        )
        close(found.loss, expected.loss)
        for name, value in expected.sums.items():
            close(found.sums[name], value, name=name)


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


def test_a_teacher_is_asked_once_for_every_position() -> None:
    """Neighbouring blocks share their teachers; a chunk computes only the selected rows."""
    case = Case(kind="none", confidence=False)
    draft, head = make_draft(case), make_head()
    arguments = lay_out(make_documents(case, draft, MASKS), [[0]], [[3, 4, 5, 6]])
    final = torch.randn(1, arguments["input_ids"].shape[1], 12, dtype=torch.float64)
    asked: list[int] = []
    logits = head.logits

    def counted(states: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        asked.append(len(states))
        return logits(states, ids)

    head.logits = counted  # type: ignore[method-assign]
    arguments["target_argmax"] = arguments.pop("logits").argmax(-1)
    dspark_loss(draft, head=head, final_hidden=final, **arguments)
    # blocks at 3..6 reach to token 10: 4 + 4 + 4 + 4 drafts, teachers at positions 3..9
    assert asked == [7]


def test_the_reference_itself_counts_as_the_paper_says() -> None:
    """One block computed by hand: weights exp(-k/4), terms 0.1, 0.9 and 1.0."""
    case = Case(kind="none", block_size=2)
    draft, head, config = make_draft(case), make_head(), reference_config(case)
    document = make_documents(case, draft, [[0, 1, 1, 1]])[0]
    out = reference_loss(reference_state(draft), head.head_weight, config, [(document, [1])])
    close(out.weights, [1 + math.exp(-0.25)] * 3)
    ce, l1, bce = (term / out.weights[0] for term in out.terms)
    close(float(out.loss.detach()), 0.1 * ce + 0.9 * l1 + 1.0 * bce)
    assert isinstance(document, Document) and len(DRAFT_IDS) == 9
