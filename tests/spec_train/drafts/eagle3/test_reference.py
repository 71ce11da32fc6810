"""The EAGLE-3 loss against the slow reference: values, sums and gradients, in float64.

The plain loops of `lay_out` lay out the documents for the fast function. The reference takes them
one by one. The two must agree for every layout.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_data.shards.schema import HeadSpec
from spec_train.attention import masked as attention
from spec_train.drafts.draft import DraftLoss
from spec_train.drafts.eagle3.draft import Eagle3Draft, eagle3_loss
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LossKind
from tests import tolerance
from tests.spec_train.drafts.eagle3.cases import (
    STEPS,
    VOCAB,
    WIDTH,
    Case,
    lay_out,
    make_documents,
    make_draft,
    reference_config,
    reference_state,
)
from tests.spec_train.drafts.eagle3.reference import (
    Document,
    Reference,
    reference_logits,
    reference_loss,
    slot_counts,
)
from tests.spec_train.drafts.shared import (
    each_in_one_layout,
    gradients,
    only_the_past_counts,
    same_gradients,
    same_sums,
)
from tests.spec_train.drafts.slot_loss import SlotLoss
from tests.spec_train.drafts.slow_layer import EVERY
from tests.tolerance import network

# up to seven steps; gradients are sums over up to 100 slots of each depth
TERMS = network(7, backward=True, slots=500)
close = functools.partial(tolerance.close, terms=TERMS)
close_gradients = functools.partial(tolerance.close_gradients, terms=TERMS)

# A chat of two turns, 12 tokens: question (2), answer (3), question (2), answer (4), a line break.
TWO_TURNS = [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]
# Slot t of step s counts if tokens t+1+s and t+2+s are part of an answer.
SERVING = [
    [0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0],
    [1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0],
    [1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0],
    [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0],
]

MASKS = [
    TWO_TURNS,
    [1],
    [0, 1],
    [1, 1],
    [1, 1, 1],
    [0, 1, 1],
    [0, 0, 1, 1, 1, 1, 1, 1, 1],
    [0, 1, 1, 0, 1, 0, 1, 1, 1, 1, 0],  # gaps inside an answer
    [0, 0, 0, 0, 0],  # nothing supervised
    [1] * 12,
]


def fast(draft: Eagle3Draft, case: Case, **inputs: Tensor | TargetHead | None) -> DraftLoss:
    return eagle3_loss(
        draft,
        steps=case.steps,
        decay=case.decay,
        kind=LossKind(
            name=case.loss.name,
            hard=case.loss.hard,
            scale=case.loss.scale,
            decay=case.loss.decay,
        ),
        position_weights=case.loss.weights or None,
        **inputs,
    )


def assert_same(draft: Eagle3Draft, result: DraftLoss, state: Any, expected: Reference) -> None:
    """Compare the loss, every sum and every gradient."""
    close(result.loss.detach(), expected.loss.detach())
    sums = {name: getattr(expected, name) for name in ("chains", "at_risk", "kept")}
    sums |= {"survive": expected.survivors, "loss": [float(step.loss) for step in expected.steps]}
    for name in ("supervised", "drafted", "hits", "acceptance"):
        sums[name] = [getattr(step, name) for step in expected.steps]
    same_sums(result.sums, sums, TERMS)
    result.loss.backward()
    same_gradients(draft, state, TERMS)


@functools.cache
def expectation(case: Case) -> tuple[list[Document], dict[str, Tensor], Reference]:
    """Return the documents of `MASKS`, the reference's weights with their gradients, its sums."""
    draft = make_draft(case)
    documents = make_documents(case, draft, MASKS)
    state = reference_state(draft)
    expected = reference_loss(state, reference_config(case, draft), documents)
    expected.loss.backward()
    for part in (expected, *expected.steps):
        part.loss = part.loss.detach()  # kept for the session: without its graph
    return documents, state, expected


LAYOUTS = {
    "one row": [[8, 0, 1, 9, 2, 3, 4, 5, 6, 7]],
    "three rows": [[0, 5, 1], [6, 2, 3, 9], [7, 8, 4]],
    "unpacked": [[d] for d in range(len(MASKS))],
}
CASES = {
    "plain": Case(),
    "whole vocabulary": Case(reduced=False),
    "alpha": Case(loss=SlotLoss(name="lk-alpha")),
    "lambda": Case(loss=SlotLoss(name="lk-lambda"), reduced=False),
    "scaled lambda": Case(loss=SlotLoss(name="lk-lambda", scale=0.9)),
    "kl": Case(loss=SlotLoss(name="kl", weights=(1.0, 0.25, 0.5, 0.0))),
    "reverse kl": Case(loss=SlotLoss(name="reverse-kl")),
    "jsd": Case(loss=SlotLoss(name="jsd", hard=True)),
    "tv": Case(loss=SlotLoss(name="tv")),
    "hard": Case(loss=SlotLoss(hard=True), reduced=False),
    "no GQA": Case(heads=2, kv_heads=2),
    "one kv head": Case(heads=3, kv_heads=1),
    "3.1": Case(fc_norm=True, norm_output=True),
    "fc_norm": Case(fc_norm=True),
    "norm_output": Case(norm_output=True, loss=SlotLoss(name="lk-alpha")),
    "window": Case(window=3),
    "window of two": Case(window=2, steps=3),
    "window shorter than the unroll": Case(window=2, steps=5),
    "long window": Case(window=50),
    "seven steps": Case(steps=7, decay=0.5),
    "one step": Case(steps=1),
    "norms before fc and residual": Case(
        fc_norm=True, shape=(("norm_before_fc", True), ("norm_before_residual", True))
    ),
    "two layers": Case(shape=(("num_layers", 2), ("qk_norm", True))),
    "a window in one of two layers": Case(
        steps=3,
        window=2,
        shape=(("num_layers", 2), ("layer_types", "sliding_attention,full_attention")),
    ),
    "three layers, another shape": Case(steps=3, shape=(("num_layers", 3), *EVERY)),
    "q/k norm": Case(shape=(("qk_norm", True), ("hidden_act", "relu"), ("mlp_bias", "true"))),
    "yarn": Case(
        rope=(
            ("rope_type", "yarn"),
            ("rope_theta", 100.0),
            ("factor", 4.0),
            ("original_max_position_embeddings", 16),
        )
    ),
}


def check_case(case: Case, layout: str, backend: str = "auto") -> None:
    documents, state, expected = expectation(case)
    draft = make_draft(case)
    draft.attention_backend = backend
    result = fast(draft, case, **lay_out(documents, LAYOUTS[layout]))
    assert_same(draft, result, state, expected)


@pytest.mark.parametrize(("name", "layout"), each_in_one_layout(CASES, LAYOUTS))
def test_values_sums_and_gradients_are_the_reference(name: str, layout: str) -> None:
    check_case(CASES[name], layout)


@pytest.mark.parametrize("backend", ["dense", "merged"])
@pytest.mark.parametrize(
    "name", ["plain", "one kv head", "3.1", "seven steps", "one step", "window", "window of two"]
)
def test_every_attention_backend_matches_the_reference(name, backend, monkeypatch):
    monkeypatch.setattr(attention, "CHUNK", 5)  # several blocks per row, edges inside documents
    check_case(CASES[name], "one row", backend)


@pytest.mark.parametrize("backend", ["dense", "merged"])
@pytest.mark.parametrize("name", ["plain", "3.1", "seven steps", "one step", "window"])
def test_recomputed_steps_match_the_reference(name: str, backend: str) -> None:
    case = CASES[name]
    documents, state, expected = expectation(case)
    draft = make_draft(case)
    draft.use_options(replace(draft.options, gradient_checkpointing=True))
    draft.attention_backend = backend
    calls: list[None] = []
    draft.midlayer.mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    result = fast(draft, case, **lay_out(documents, LAYOUTS["one row"]))
    assert len(calls) == case.steps
    assert_same(draft, result, state, expected)
    assert len(calls) == 2 * case.steps


def test_the_comparison_meets_every_situation() -> None:
    """There are hits, survivors and misses by the vocabulary: else equal sums prove little."""
    _, _, expected = expectation(Case())
    assert all(step.hits > 0 for step in expected.steps)
    assert all(0 < step.supervised < step.drafted for step in expected.steps)
    assert 0 < expected.survivors[1] < expected.chains


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("given", ["final_hidden", "logsumexp", "target_probs"])
def test_every_form_of_input_gives_the_same_loss(given: str, reduced: bool) -> None:
    case = Case(reduced=reduced)
    draft = make_draft(case)
    documents, _, _ = expectation(case)
    inputs = lay_out(documents, LAYOUTS["three rows"])
    if given != "target_probs":
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
        states = torch.randn(
            *inputs["input_ids"].shape, WIDTH, generator=generator, dtype=torch.float64
        )
        inputs["logits"] = states @ weight.T
    expected = fast(draft, case, **inputs)
    expected.loss.backward()
    wanted = gradients(draft)
    logits = inputs.pop("logits")
    inputs["target_argmax"] = logits.argmax(-1)
    if given != "target_probs":
        spec = HeadSpec(vocab_size=VOCAB, hidden_size=WIDTH, tied=True)
        inputs["head"] = TargetHead(spec, weight, weight)
        inputs["final_hidden"] = states
        if given == "logsumexp":  # without it, all rows of the head are used
            inputs["target_logsumexp"] = logits.logsumexp(-1)
    else:
        everything = torch.softmax(logits, -1)
        inputs["target_mass"] = everything[..., draft.draft_ids].sum(-1)
        inputs["target_probs"] = torch.softmax(logits[..., draft.draft_ids], -1)
        inputs["position_mask"] = torch.isin(logits.argmax(-1), draft.draft_ids)
    result = fast(draft, case, **inputs)
    result.loss.backward()
    close(result.loss, expected.loss)
    for name, value in expected.sums.items():
        close(result.sums[name], value)
    close_gradients(gradients(draft), wanted)


def test_slot_masks_of_two_turns_are_those_written_by_hand() -> None:
    """A changed teacher row changes exactly the steps whose slot for that token counts."""
    expected = SERVING
    length = len(TWO_TURNS)
    assert expected == [
        [int(slot_counts(TWO_TURNS, t, s)) for t in range(length)] for s in range(STEPS)
    ]
    case = Case(reduced=False)
    draft = make_draft(case)
    documents = make_documents(case, draft, [[1, 1], TWO_TURNS, [1, 1, 1]])
    before = fast(draft, case, **lay_out(documents, [[0, 1, 2]])).sums
    for p in range(length):
        z = documents[1].z.clone()
        z[p] += torch.linspace(0, 1, VOCAB)
        moved = [documents[0], replace(documents[1], z=z), documents[2]]
        after = fast(draft, case, **lay_out(moved, [[0, 1, 2]])).sums
        changed = (after["loss"] - before["loss"]).abs() > 1e-9
        slot = [p - 1 - s for s in range(STEPS)]  # at step s, teacher p is at slot p-1-s
        wanted = [bool(expected[s][slot[s]]) if slot[s] >= 0 else False for s in range(STEPS)]
        assert changed.tolist() == wanted, f"teacher of token {p}"


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "3.1", "norm_output", "one kv head", "yarn"),
        *("window", "window of two", "window shorter than the unroll"),
        *("a window in one of two layers", "three layers, another shape"),
        "norms before fc and residual",
    ],
)
def test_serving_forwards_give_the_logits_of_the_unroll(name: str) -> None:
    """A chain drafted from slot t with a key-value cache equals column t of the training unroll."""
    case = CASES[name]
    draft = make_draft(case)
    (document,) = make_documents(case, draft, [TWO_TURNS])
    expected = reference_logits(
        reference_state(draft), reference_config(case, draft), document.x, document.aux
    )
    x = torch.tensor(document.x)
    with torch.no_grad():
        features = draft.project(document.aux[None])
        for t in range(len(x) - 1):
            cache = draft.new_caches()
            carried = draft.step(
                x[None, 1 : t + 2], features[:, : t + 1], torch.arange(t + 1)[None], cache
            )[:, -1:]
            for s in range(min(case.steps, len(x) - 1 - t)):
                if s:
                    position = torch.tensor([[t + s]])
                    carried = draft.step(x[None, t + 1 + s, None], carried, position, cache)
                close(draft.logits(carried)[0, 0], expected[t, s].detach())


@pytest.mark.parametrize("what", ["x", "aux", "z"])
@pytest.mark.parametrize("case", [Case(), Case(fc_norm=True)])
def test_other_documents_and_later_tokens_change_nothing(case: Case, what: str) -> None:
    """Token 5 is the last answer token: the slot that drafts it knows token 4, has its teacher, and
    reads the states of token 3."""
    draft = make_draft(case)
    masks = [[0] * 6, [0, 0, 1, 1, 1, 1, 0, 0, 0, 0], [0] * 5]
    documents = make_documents(case, draft, masks)
    last = {"x": 4, "aux": 3, "z": 4}[what]
    only_the_past_counts(
        lambda changed: fast(draft, case, **lay_out(changed, [[0, 1, 2]])),
        *(draft, documents, what, last, VOCAB),
    )
