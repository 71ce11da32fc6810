"""The P-EAGLE loss against the slow reference: values, sums and gradients, in float64."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_train.attention.masked import BACKENDS
from spec_train.drafts.draft import DraftLoss
from spec_train.drafts.peagle.draft import peagle_loss
from spec_train.losses import menu as losses
from spec_train.losses.menu import LossKind
from tests import tolerance
from tests.spec_train.drafts.eagle3.cases import VOCAB
from tests.spec_train.drafts.eagle3.reference import Document
from tests.spec_train.drafts.peagle.cases import (
    DEPTHS,
    MASKS,
    Case,
    expectation,
    lay_out_all,
    make_documents,
    make_draft,
    make_samples,
)
from tests.spec_train.drafts.shared import (
    each_in_one_layout,
    only_the_past_counts,
    same_gradients,
    same_sums,
)
from tests.spec_train.drafts.slot_loss import SlotLoss
from tests.spec_train.drafts.slow_layer import EVERY
from tests.tolerance import network

# up to two layers; gradients are sums over up to 100 slots of each depth
TERMS = network(2, backward=True, slots=500)
close = functools.partial(tolerance.close, terms=TERMS)

LAYOUTS = {
    "one row": [[8, 0, 1, 9, 2, 3, 4, 5, 6, 7]],
    "three rows": [[0, 5, 1], [6, 2, 3, 9], [7, 8, 4]],
    "unpacked": [[d] for d in range(len(MASKS))],
}
CASES = {
    "plain": Case(),
    "whole vocabulary": Case(reduced=False),
    "fc_norm": Case(fc_norm=True),
    "one kv head": Case(heads=3, kv_heads=1),
    "one layer": Case(layers=1),
    "window": Case(window=3),
    "window of two": Case(window=2),
    "mixed layers": Case(
        window=2, types="sliding_attention,full_attention,sliding_attention", ratio=1.0
    ),
    "another shape": Case(layers=2, shape=EVERY),
    "norms": Case(
        layers=2,
        shape=(("qk_norm", True), ("norm_before_fc", True), ("norm_before_residual", True)),
    ),
    "one depth": Case(depths=1),
    "everything kept": Case(ratio=1.0, depths=5),
    "ce, weighted": Case(loss=SlotLoss(weights=(1.0, 0.25, 0.5, 0.0))),
    "reverse kl": Case(loss=SlotLoss(name="reverse-kl", weights=(0.1, 0.1, 0.2, 0.01))),
    "jsd": Case(loss=SlotLoss(name="jsd")),
    "tv": Case(loss=SlotLoss(name="tv"), reduced=False),
    "alpha": Case(loss=SlotLoss(name="lk-alpha")),
    "lambda": Case(loss=SlotLoss(name="lk-lambda", hard=True)),
    "hard": Case(loss=SlotLoss(name="kl", hard=True)),
    "hardly anything kept": Case(ratio=0.3, floor=0.1),
}


def check_case(case: Case, layout: str, segments: int = 1, backend: str = "auto", **options):
    documents, samples, state, expected = expectation(case)
    draft = make_draft(case, **options)
    draft.attention_backend = backend
    inputs = lay_out_all(documents, samples, LAYOUTS[layout], case.depths)
    result = peagle_loss(
        draft,
        segments=segments,
        kind=LossKind.of(draft.options),
        position_weights=case.loss.weights or None,
        **inputs,
    )
    close(result.loss.detach(), expected.loss.detach())
    names = ("supervised", "drafted", "hits", "acceptance", "chains", "at_risk", "kept")
    sums = {name: getattr(expected, name) for name in names}
    sums |= {"survive": expected.survivors, "loss": expected.losses}
    assert sums.keys() == result.sums.keys() - {"weighted"}
    same_sums(result.sums, sums, TERMS)
    result.loss.backward()
    if case.depths == 1:  # the reference has no deeper element
        assert state["mask_hidden"].grad is None and not draft.mask_hidden.grad.any()
        draft.mask_hidden.requires_grad_(False)
        state = {name: value for name, value in state.items() if name != "mask_hidden"}
    same_gradients(draft, state, TERMS)


@pytest.mark.parametrize(("name", "layout"), each_in_one_layout(CASES, LAYOUTS))
def test_values_sums_and_gradients_are_the_reference(name: str, layout: str) -> None:
    check_case(CASES[name], layout)


@pytest.mark.parametrize("segments", [3, 1000])
@pytest.mark.parametrize("layout", ["one row", "three rows"])
@pytest.mark.parametrize("name", ["plain", "everything kept", "mixed layers"])
def test_segments_match_the_reference(name: str, layout: str, segments: int) -> None:
    check_case(CASES[name], layout, segments=segments)


@pytest.mark.parametrize("segments", [1, 3])
def test_recomputed_layers_match_the_reference(segments: int) -> None:
    check_case(CASES["plain"], "one row", segments=segments, gradient_checkpointing=True)


@pytest.mark.parametrize("name", ["plain", "mixed layers"])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "flex"])
def test_every_attention_backend_matches_the_reference(backend: str, name: str) -> None:
    check_case(CASES[name], "three rows", backend=backend)


def test_small_chunks_of_the_head_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks may end between elements of one slot: the teacher is then computed again, the same."""
    default = losses.head_loss.__defaults__
    assert default is not None
    small = (2, *default[1:])
    monkeypatch.setattr(losses.head_loss, "__defaults__", small)
    check_case(CASES["plain"], "one row")


def test_the_comparison_meets_every_situation() -> None:
    """There are hits, survivors and misses by the vocabulary: else equal sums prove little."""
    _, _, _, expected = expectation(Case())
    assert all(hits > 0 for hits in expected.hits)
    assert all(expected.supervised)
    misses = [a - b for a, b in zip(expected.drafted, expected.supervised, strict=True)]
    assert misses[0] > 0 and sum(misses[1:]) > 0
    assert 0 < expected.survivors[1] < expected.chains
    assert expected.drafted == sorted(expected.drafted, reverse=True)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("what", ["x", "aux", "z"])
def test_other_documents_and_later_tokens_change_nothing(what: str, segments: int) -> None:
    """Token 6 is the last answer token. The slot that drafts it knows token 5, has the teacher of
    token 5, and reads the states of token 4."""
    draft, case = make_draft(Case()), Case(ratio=1.0)
    masks = [[0] * 6, [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0], [0] * 5]
    documents, samples = make_documents(case, draft, masks), make_samples(case, masks)

    def run(changed: list[Document]) -> DraftLoss:
        inputs = lay_out_all(changed, samples, [[0, 1, 2]], DEPTHS)
        return peagle_loss(draft, segments=segments, **inputs)

    last = {"x": 5, "aux": 4, "z": 5}[what]
    only_the_past_counts(run, draft, documents, what, last, VOCAB)


def test_an_element_sees_its_past_and_no_other_rollout() -> None:
    """Other anchors' elements and later states change, but not the loss of a chain."""
    draft = make_draft(Case())
    masks = [[0, 1, 1, 1, 1, 1, 1, 1, 1, 1]]
    documents = make_documents(Case(), draft, masks)
    anchor = 3

    def losses_of(extra: list[tuple[int, int]], document: Document) -> Tensor:
        chain = [(anchor, d) for d in range(DEPTHS)]
        inputs = lay_out_all([document], [chain + extra], [[0]], DEPTHS)
        result = []
        for d in range(DEPTHS):  # at depth d, only one element at the slot has a loss
            mask = torch.zeros_like(inputs["loss_mask"])
            mask[0, anchor + d : anchor + d + 2] = True  # the known token and the drafted one
            result.append(peagle_loss(draft, **inputs | {"loss_mask": mask}).sums["loss"][d])
        return torch.stack(result)

    alone = losses_of([], documents[0])
    assert (alone > 0).all()
    rest = [(t, d) for d in range(1, DEPTHS) for t in (2, 4, 5) if t + d < 9]
    close(losses_of(rest, documents[0]), alone)
    aux = documents[0].aux.clone()
    aux[anchor + 1 :] += 1.0
    ids = [i if t <= anchor + 1 else (i + 1) % VOCAB for t, i in enumerate(documents[0].x)]
    close(losses_of(rest, replace(documents[0], aux=aux, x=ids)), alone)
    aux[anchor] += 1.0
    assert (losses_of(rest, replace(documents[0], aux=aux)) - alone).abs().min() > 1e-6


def test_a_sample_of_another_shape_is_refused() -> None:
    documents, samples, _, _ = expectation(Case())
    inputs = lay_out_all(documents, samples, LAYOUTS["one row"], DEPTHS)
    with pytest.raises(DraftError, match=r"sample is \[1, 4, \d+\]: expected \[1, depths, \d+\]"):
        peagle_loss(make_draft(Case()), **inputs | {"sample": inputs["sample"][..., 1:]})
