"""The EAGLE-1/2 loss against the slow reference: values, sums and gradients, in float64.

The plain loops of `lay_out` lay out the documents for the fast function. The reference takes them
one by one. The two must agree for every layout.
"""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spec_train.drafts.draft import DraftLoss
from spec_train.drafts.eagle.draft import EagleDraft, eagle_loss, supervised_slots
from spec_train.losses.menu import LossKind
from tests import tolerance
from tests.spec_train.drafts.eagle.cases import (
    VOCAB,
    Case,
    lay_out,
    make_documents,
    make_draft,
    make_head,
    reference_config,
    reference_state,
)
from tests.spec_train.drafts.eagle.reference import Document, Reference, chain, head, reference_loss
from tests.spec_train.drafts.shared import (
    each_in_one_layout,
    only_the_past_counts,
    same_gradients,
    same_sums,
)
from tests.spec_train.drafts.slot_loss import LOSSES, SlotLoss
from tests.spec_train.drafts.slow_layer import EVERY
from tests.tolerance import network, same_choice

# up to two layers; gradients are sums over up to 100 slots of each depth
TERMS = network(2, backward=True, slots=500)
close = functools.partial(tolerance.close, terms=TERMS)

TWO_TURNS = [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]
# Slot t counts if tokens t+1 and t+2 are part of an answer.
SLOTS = [0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
MASKS = [
    TWO_TURNS,
    [1],
    [0, 1],
    [1, 1, 1],
    [0, 1, 1],
    [0, 1, 1, 0, 1, 0, 1, 1, 1, 1, 0],  # gaps inside an answer
    [0, 0, 0, 0],  # nothing supervised
    [1] * 9,
]
LAYOUTS = {
    "one row": [[5, 0, 1, 7, 2, 3, 4, 6]],
    "three rows": [[0, 5, 1], [6, 2, 3], [7, 4]],
    "unpacked": [[d] for d in range(len(MASKS))],
}
CASES = {
    "plain": Case(),
    "two layers": Case(layers=2),
    "window": Case(window=3),
    "window of two": Case(window=2),
    "mixed layers": Case(layers=2, window=2, types="sliding_attention,full_attention"),
    "another shape": Case(layers=2, shape=EVERY),
    "q/k norm": Case(shape=(("qk_norm", True), ("hidden_act", "relu"))),
    "noise": Case(noise=True, kv_heads=1),
    "scaled head": Case(scale=0.25),
    "softcap and bias": Case(scale=0.5, softcap=2.0, bias=True),
    "weights": Case(regression_weight=0.3, ce_weight=2.0, kv_heads=4),
    "regression alone": Case(ce_weight=0.0),
    "hard": Case(loss=SlotLoss(hard=True), softcap=2.0),
    **{name: Case(loss=SlotLoss(name=name), ce_weight=1.0) for name in LOSSES[1:]},
    "partial linear rope": Case(
        rope=(
            ("rope_type", "linear"),
            ("rope_theta", 100.0),
            ("factor", 2.0),
            ("partial_rotary_factor", 0.67),
        )
    ),
}


def fast(draft: EagleDraft, case: Case, inputs: dict[str, Tensor], **more) -> DraftLoss:
    return eagle_loss(
        draft,
        head=make_head(case),
        regression_weight=case.regression_weight,
        ce_weight=case.ce_weight,
        kind=LossKind.of(case.options()),
        **inputs,
        **more,
    )


@functools.cache
def expectation(case: Case) -> tuple[list[Document], dict[str, Tensor], Reference]:
    """Return the documents of `MASKS`, the reference's weights with their gradients, its sums."""
    documents = make_documents(case, MASKS)
    state = reference_state(make_draft(case))
    expected = reference_loss(state, reference_config(case, make_head(case)), documents)
    expected.loss.backward()
    expected.loss = expected.loss.detach()  # kept for the session: without its graph
    return documents, state, expected


@pytest.mark.parametrize(("name", "layout"), each_in_one_layout(CASES, LAYOUTS))
def test_loss_and_gradients_are_those_of_the_reference(name: str, layout: str) -> None:
    case = CASES[name]
    documents, state, expected = expectation(case)
    draft = make_draft(case)
    inputs = lay_out(documents, LAYOUTS[layout])
    if layout != "unpacked":  # the target's stored choices, or those of the head
        inputs["target_argmax"] = make_head(case).logits(inputs["final_hidden"]).argmax(-1)
    result = fast(draft, case, inputs)
    close(result.loss.detach(), expected.loss.detach())
    second = "cross_entropy" if case.loss.name == "ce" else "distribution_loss"
    sums = {"smooth_l1": [expected.smooth_l1], second: [expected.cross_entropy]}
    sums |= {name: getattr(expected, name)[:1] for name in ("supervised", "hits", "acceptance")}
    same_sums(result.sums, sums, TERMS)
    result.loss.backward()
    same_gradients(draft, state, TERMS)


@pytest.mark.parametrize("backend", ["dense", "merged"])
def test_back_ends_agree(backend: str) -> None:
    case = CASES["two layers"]
    documents, state, expected = expectation(case)
    draft = make_draft(case)
    draft.attention_backend = backend
    result = fast(draft, case, lay_out(documents, LAYOUTS["three rows"]))
    close(result.loss.detach(), expected.loss.detach())
    result.loss.backward()
    same_gradients(draft, state, TERMS)


@pytest.mark.parametrize("name", ["plain", "two layers", "softcap and bias", "mixed layers"])
def test_figures_of_deeper_steps_are_those_of_the_reference(name: str) -> None:
    """Chains that read the documents' tokens and the draft's own states."""
    case = CASES[name]
    documents, _, _ = expectation(case)
    draft = make_draft(case)
    config = reference_config(case, make_head(case))
    with torch.no_grad():
        expected = reference_loss(reference_state(draft), config, documents, steps=3)
        inputs = lay_out(documents, LAYOUTS["three rows"])
        best = make_head(case).logits(inputs["final_hidden"]).argmax(-1)
        result = fast(draft, case, inputs, target_argmax=best, steps=3)
    close(result.loss, expected.loss)
    names = ("supervised", "hits", "acceptance", "chains")
    sums = {name: getattr(expected, name) for name in names} | {"survive": expected.survivors}
    same_sums(result.sums, sums, TERMS)
    assert 0 < expected.hits[2] < expected.supervised[2] and expected.survivors[2] > 0
    assert result.sums["weighted"].tolist() == [expected.supervised[0], 0, 0]


def test_the_slots_are_those_written_out_by_hand() -> None:
    mask, ids = torch.tensor([TWO_TURNS]), torch.zeros(1, len(TWO_TURNS), dtype=torch.long)
    assert supervised_slots(mask, ids)[0, 0].int().tolist() == SLOTS
    case = Case()
    documents = make_documents(case, [TWO_TURNS])
    draft, inputs = make_draft(case), lay_out(documents, [[0]])
    before = fast(draft, case, inputs).sums
    for t in range(1, len(TWO_TURNS)):  # the teacher of slot t - 1, and nothing before it
        moved = inputs["final_hidden"].clone()
        moved[0, t] += 1.0
        after = fast(draft, case, inputs | {"final_hidden": moved}).sums
        later = any(SLOTS[t - 1 :])
        assert ((after["smooth_l1"] - before["smooth_l1"]).abs() > 1e-9).item() == later


@pytest.mark.parametrize("what", ["x", "f"])
@pytest.mark.parametrize("case", [Case(), Case(layers=2)])
def test_other_documents_and_later_tokens_change_nothing(case: Case, what: str) -> None:
    """Token 5 is the last of the answer, token 4 the last known one, with the last teacher."""
    draft = make_draft(case)
    documents = make_documents(case, [[0] * 6, [0, 0, 1, 1, 1, 1, 0, 0, 0, 0], [0] * 5])
    only_the_past_counts(
        lambda changed: fast(draft, case, lay_out(changed, [[0, 1, 2]])),
        *(draft, documents, what, 4, VOCAB),
    )


@pytest.mark.parametrize(
    "name",
    ["plain", "two layers", "partial linear rope", "window", "window of two", "mixed layers"],
)
def test_serving_with_a_cache_is_the_chain_computed_anew(name: str) -> None:
    """Step 0 equals training; deeper steps equal the slow recomputation without a cache."""
    case = CASES[name]
    draft, target = make_draft(case), make_head(case)
    state, config = reference_state(draft), reference_config(case, target)
    documents = make_documents(case, [[1] * 7, [1] * 5])
    inputs = lay_out(documents, [[0, 1]])
    fields = {name: inputs[name] for name in ("input_ids", "document_ids", "position_ids")}
    batch = SimpleNamespace(**fields, hidden={"hidden.final": inputs["final_hidden"]})
    chains = draft.chains(batch, target, 4)
    start = 0
    with torch.no_grad():
        for document in documents:
            x = torch.tensor(document.x)
            for t in range(len(x) - 1):
                slow = chain(state, config, document, t, None, 4)
                drafted = chains[0, start + t].tolist()
                for f, token in zip(slow, drafted, strict=True):
                    same_choice(head(config, f), token, network(2), f.dtype)
                caches = draft.new_caches()
                carried = draft.step(
                    x[None, 1 : t + 2],
                    draft.project(document.f[None, : t + 1]),
                    torch.arange(t + 1)[None],
                    caches,
                )[:, -1:]
                for s in range(4):
                    if s:
                        token = torch.tensor([[drafted[s - 1]]])
                        carried = draft.step(token, carried, torch.tensor([[t + s]]), caches)
                    # no norm before the first layer: differences grow from step to step
                    close(carried[0, 0], slow[s], terms=network(4 ** (s + 1)))
                assert caches[-1].length == t + 4
            start += len(x)
