"""Every loss against its slow reference: values, sums and gradients, in float64; and its serving.

The plain loops of `lay_out` lay out the documents for the fast function. The reference takes them
one by one. The two must agree for every layout.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_data.shards.batch import MASS, PROBABILITIES
from spec_data.shards.schema import FINAL
from spec_train.attention import masked
from tests import tolerance
from tests.spec_train.drafts.cases import (
    BLOCKS,
    DEFAULT_ROPE,
    EVERY,
    HIDDEN,
    REFERENCES,
    Case,
    case,
    each_in_one_layout,
    expectation,
    gradients,
    lay_out,
    layouts_of,
    loss_of,
    make_documents,
    make_draft,
    make_head,
    only_the_past_counts,
    reference_config,
    reference_state,
    same_gradients,
)
from tests.spec_train.drafts.dspark import reference as dspark_reference
from tests.spec_train.drafts.slot_loss import SlotLoss
from tests.spec_train.drafts.slow_layer import slot_counts
from tests.tolerance import network

# up to seven layers or steps; gradients are sums over up to 100 slots of each depth
TERMS = network(7, backward=True, slots=500)
close = functools.partial(tolerance.close, terms=TERMS)

MIXED = "sliding_attention,full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PARTIAL = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.67}
NORMS = {"norm_before_fc": True, "norm_before_residual": True}
RELU = {"hidden_act": "relu"}
WEIGHTS = (1.0, 0.25, 0.5, 0.0)

eagle = functools.partial(case, "eagle")
eagle3 = functools.partial(case, "eagle3", True)
peagle = functools.partial(case, "peagle", True)
dspark = functools.partial(case, "dspark")
dflash = functools.partial(case, "dflash")
dflash2 = functools.partial(case, "dflash2")
domino = functools.partial(case, "domino")
xpress = functools.partial(case, "xpress")
lilicorr = functools.partial(case, "lilicorr")

CASES: dict[str, Case] = {
    "eagle": eagle(),
    "eagle: two layers": eagle(num_layers=2, terms=(1.0, 1.0), loss=SlotLoss(name="kl")),
    "eagle: window": eagle(sliding_window=3, terms=(1.0, 1.0), loss=SlotLoss(name="jsd")),
    "eagle: mixed layers": eagle(num_layers=2, sliding_window=2, layer_types=MIXED, steps=3),
    "eagle: another shape": eagle(loss=SlotLoss(name="reverse-kl"), num_layers=2, **EVERY),
    "eagle: q/k norm": eagle(
        qk_norm=True, terms=(0.3, 2.0), kv_heads=4, loss=SlotLoss(name="lk-lambda"), **RELU
    ),
    "eagle: noise": eagle(noise=True, kv_heads=1, terms=(1.0, 1.0), loss=SlotLoss(name="tv")),
    "eagle: softcap": eagle(head={"scale": 0.5, "softcap": 2.0, "has_bias": True}, steps=3),
    "eagle: regression alone": eagle(terms=(1.0, 0.0)),
    "eagle: hard": eagle(loss=SlotLoss(hard=True), head={"softcap": 2.0}),
    "eagle: partial linear rope": eagle(
        rope=DEFAULT_ROPE | PARTIAL, terms=(1.0, 1.0), loss=SlotLoss(name="lk-alpha")
    ),
    "eagle: three steps": eagle(num_layers=2, steps=3),
    "eagle3": eagle3(),
    "eagle3: whole vocabulary": case("eagle3"),
    "eagle3: the target's head": eagle3(train_head=False),
    "eagle3: no GQA": eagle3(heads=2, kv_heads=2, loss=SlotLoss(name="reverse-kl")),
    "eagle3: one kv head": eagle3(heads=3, kv_heads=1, loss=SlotLoss(name="kl", weights=WEIGHTS)),
    "eagle3: 3.1": eagle3(
        fc_norm=True, norm_output=True, loss=SlotLoss(name="lk-lambda", scale=0.9)
    ),
    "eagle3: norm_output": eagle3(norm_output=True, loss=SlotLoss(name="lk-alpha")),
    "eagle3: window": eagle3(sliding_window=3, loss=SlotLoss(name="jsd", hard=True)),
    "eagle3: window shorter than the unroll": eagle3(sliding_window=2, ttt_steps=5),
    "eagle3: long window": eagle3(sliding_window=50, loss=SlotLoss(name="tv")),
    "eagle3: seven steps": eagle3(ttt_steps=7, step_decay=0.5),
    "eagle3: one step": case("eagle3", loss=SlotLoss(hard=True), ttt_steps=1),
    "eagle3: norms before fc and residual": eagle3(fc_norm=True, **NORMS),
    "eagle3: mixed layers": eagle3(ttt_steps=3, sliding_window=2, num_layers=2, layer_types=MIXED),
    "eagle3: three layers, another shape": eagle3(ttt_steps=3, num_layers=3, **EVERY),
    "eagle3: q/k norm": eagle3(num_layers=2, qk_norm=True, mlp_bias="true", **RELU),
    "eagle3: yarn": case("eagle3", rope=DEFAULT_ROPE | YARN, loss=SlotLoss(name="lk-lambda")),
    "eagle3: 3.1, recomputed": eagle3(
        fc_norm=True, norm_output=True, sliding_window=3, gradient_checkpointing=True
    ),
    "peagle": peagle(),
    "peagle: whole vocabulary": case("peagle", loss=SlotLoss(name="tv")),
    "peagle: the target's head": peagle(train_head=False),
    "peagle: fc_norm": peagle(
        fc_norm=True, heads=3, kv_heads=1, loss=SlotLoss(name="kl", hard=True)
    ),
    "peagle: one layer": peagle(num_layers=1, loss=SlotLoss(name="jsd")),
    "peagle: window": peagle(sliding_window=3, loss=SlotLoss(weights=WEIGHTS)),
    "peagle: mixed layers": peagle(
        sliding_window=2, layer_types=f"{MIXED},sliding_attention", cod_ratio=1.0
    ),
    "peagle: another shape": peagle(loss=SlotLoss(name="lk-alpha"), num_layers=2, **EVERY),
    "peagle: norms": peagle(
        loss=SlotLoss(name="reverse-kl", weights=(0.1, 0.1, 0.2, 0.01)),
        **{"num_layers": 2, "qk_norm": True, **NORMS},
    ),
    "peagle: one depth": peagle(depths=1),
    "peagle: hardly anything kept": peagle(
        cod_ratio=0.3, floor=0.1, loss=SlotLoss(name="lk-lambda", hard=True)
    ),
    "peagle: a segment per slot": peagle(segments=1000, cod_ratio=1.0, depths=5),
    "peagle: a segment per slot, window": peagle(
        num_layers=2, sliding_window=2, segments=1000, cod_ratio=1.0
    ),
    "peagle: segments, mixed layers": peagle(
        sliding_window=2, layer_types=f"{MIXED},sliding_attention", cod_ratio=1.0, segments=3
    ),
    "peagle: recomputed": peagle(num_layers=2, gradient_checkpointing=True),
    "peagle: segments, recomputed": peagle(gradient_checkpointing=True, segments=3),
    "dspark": dspark(),
    "dspark: rnn": dspark(markov_head_type="rnn"),
    "dspark: no Markov head": dspark(
        markov_rank=0, qk_norm=False, loss=SlotLoss(name="lk-alpha"), **RELU
    ),
    "dspark: no heads": dspark(markov_rank=0, confidence_weight=0.0),
    "dspark: rnn, mask": dspark(
        markov_head_type="rnn", layout="mask", confidence_head_with_markov=False
    ),
    "dspark: mask, reduced": dspark(True, layout="mask", loss=SlotLoss(name="tv")),
    "dspark: gated, reduced": dspark(True, markov_head_type="gated"),
    "dspark: soft, weighted": dspark(True, loss_target="soft", position_weights="1,1,1,1"),
    "dspark: one slot": dspark(block_size=1, num_layers=1),
    "dspark: seven slots": dspark(block_size=7, num_layers=1, loss_target="soft"),
    "dspark: window": dspark(sliding_window=4),
    "dspark: window, mask": dspark(True, sliding_window=5, layout="mask", loss=SlotLoss(hard=True)),
    "dspark: non-causal": dspark(
        sliding_window=4, sliding_window_non_causal=True, layer_types=MIXED
    ),
    "dspark: mixed layers": dspark(
        sliding_window=7, block_size=7, layer_types="full_attention,sliding_attention"
    ),
    "dspark: sinks": dspark(
        loss=SlotLoss(name="jsd", hard=True),
        **{"attention_sink_bias": True, "num_layers": 1},
        **{"loss_target": "tokens", "confidence_weight": 0.0},
    ),
    "dspark: kl": dspark(True, loss=SlotLoss(name="kl"), position_weights="1,0.5,0,0.25"),
    "dspark: another shape": dspark(
        True, loss=SlotLoss(name="lk-lambda", hard=True), loss_target="hard", **EVERY
    ),
    "dspark: recomputed": dspark(gradient_checkpointing=True),
    "dspark: pace, reduced": dspark(True, position_weights="dpace:0.3"),
    "dspark: pace, soft": dspark(True, position_weights="dpace:0.3", loss=SlotLoss(name="kl")),
    "dflash: pace": dflash(True, position_weights="dpace", loss=SlotLoss(name="kl")),
    "dflash: mask": dflash(True, layout="mask", loss=SlotLoss(name="reverse-kl")),
    "dflash": dflash(),
    "dflash: non-causal": dflash(layout="mask", sliding_window=6, sliding_window_non_causal=True),
    "dflash: sinks, window, recomputed": dflash(
        attention_sink_bias=True, layout="mask", sliding_window=6, gradient_checkpointing=True
    ),
    "dflash2": dflash2(),
    "dflash2: three taps, target's choice": dflash2(
        **{"conv_kernel_size": 3, "conv_group_size": 1, "position_weights": "dpace"},
        **{"loss_target": "hard", "selector_weight": 0.5},
    ),
    "dflash2: kl, window, recomputed": dflash2(
        **{"loss": SlotLoss(name="kl"), "sliding_window": 6, "sliding_window_non_causal": True},
        **{"conv_kernel_size": 1, "gradient_checkpointing": True, "position_weights": "1,0.5,0,2"},
    ),
    "dflash2: two candidates": dflash2(
        selector_top_k=2, num_layers=1, conv_group_size=12, loss_target="hard"
    ),
    "dflash2: all candidates": dflash2(selector_top_k=14, block_size=3, **EVERY),
    "lilicorr": lilicorr(),
    "lilicorr: as wide as the draft, convolved": lilicorr(
        **{
            "lilicorr_hidden_size": 12,
            "lilicorr_candidate_topk": 12,
            "conv_kernel_size": 2,
            "conv_group_size": 4,
        },
        **{"margin_weight": 0.0, "position_weights": "1,0.5,2", "loss": SlotLoss(name="kl")},
    ),
    "domino": domino(progress=0.2),
    "domino: mask, later": domino(layout="mask", pure_draft_prefix_len=0, loss_target="soft"),
    "domino: first step": domino(pure_draft_prefix_len=2, base_weight=0.5, progress=0.0),
    "domino: kl": domino(
        loss=SlotLoss(name="kl"), position_weights="1,0.5,0,2", progress=0.25, sliding_window=6
    ),
    "xpress": xpress(),
    "xpress: kl, window, recomputed": xpress(
        loss=SlotLoss(name="kl"),
        **{"position_weights": "auto", "sliding_window": 6, "gradient_checkpointing": True},
    ),
}
"""Every option and every loss of a kind, several of them in one case."""


def in_layouts() -> list[tuple[str, str]]:
    found = []
    for kinds, first in ((("eagle", "eagle3", "peagle"), "eagle"), (BLOCKS, "dspark")):
        names = [name for name, made in CASES.items() if made.kind in kinds]
        found += each_in_one_layout(names, layouts_of(CASES[first]))
    return found


def check(made: Case, layout: str, backend: str = "auto") -> None:
    """Compare the loss, every sum and every gradient."""
    documents, state, loss, sums = expectation(made)
    draft = make_draft(made)
    draft.attention_backend = backend
    inputs: Any = lay_out(made, documents, layouts_of(made)[layout])
    calls: list[None] = []
    layer = draft.midlayer if hasattr(draft, "midlayer") else draft.layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    found = loss_of(made, draft, **inputs)
    first = len(calls)
    close(found.loss.detach(), loss)
    for name, value in sums.items():
        close(found.sums[name], torch.tensor(value, dtype=torch.float64), name=name)
    found.loss.backward()
    if getattr(made.settings, "segments", 1) == 1:
        assert len(calls) == first * (1 + getattr(draft.options, "gradient_checkpointing", False))
    same_gradients(draft, state, TERMS)
    figures = draft.summarise(found.sums)
    close(figures["loss"], float(loss))


LATER = {
    *("eagle: another shape", "eagle: q/k norm", "eagle: two layers"),
    *("eagle3: no GQA", "eagle3: q/k norm", "eagle3: 3.1", "eagle3: long window"),
    *("eagle3: whole vocabulary", "eagle3: one kv head", "eagle3: norm_output"),
    *("peagle: another shape", "peagle: one layer", "peagle: one depth", "peagle: window"),
    *("peagle: whole vocabulary", "peagle: the target's head", "peagle: mixed layers"),
    *("peagle: recomputed", "peagle: segments, recomputed", "peagle: fc_norm"),
    *("dspark: window", "dspark: rnn", "dspark: kl", "dspark: another shape", "dspark: no heads"),
    *("dspark: recomputed", "dspark: seven slots", "dspark: non-causal", "dspark: sinks"),
    *("dflash: mask", "dflash: non-causal", "dflash2: all candidates", "dflash2: two candidates"),
    *("eagle: mixed layers", "eagle: three steps", "eagle3: three layers, another shape"),
    *("peagle: a segment per slot, window", "peagle: segments, mixed layers"),
    *("peagle: hardly anything kept", "dspark: mixed layers", "dflash2: kl, window, recomputed"),
    *("domino: first step", "domino: kl", "lilicorr: as wide as the draft, convolved"),
    "xpress: kl, window, recomputed",
}
"""What another case of the kind, or the same option of another kind, tries as well."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*pair, marks=pytest.mark.long) if pair[0] in LATER else pair
        for pair in in_layouts()
    ],
)
def test_values_sums_and_gradients_are_the_reference(name: str, layout: str) -> None:
    check(CASES[name], layout)


ON_BACKENDS = ("eagle: two layers", "eagle3", "eagle3: one kv head", "eagle3: 3.1, recomputed")
ON_BACKENDS += ("eagle3: seven steps", "eagle3: one step", "eagle3: window shorter than the unroll")
ON_BACKENDS += ("peagle", "peagle: mixed layers", "dspark", "dspark: non-causal", "dflash2")
ON_BACKENDS += ("dspark: sinks", "dflash: sinks, window, recomputed")


@pytest.mark.parametrize("backend", ["dense", "merged"])
@pytest.mark.parametrize("name", ON_BACKENDS)
def test_every_attention_backend_matches_the_reference(name, backend, monkeypatch):
    monkeypatch.setattr(masked, "CHUNK", 5)  # several blocks per row, edges inside documents
    check(CASES[name], "two rows" if CASES[name].kind in BLOCKS else "one row", backend)


@pytest.mark.parametrize(
    "name", ["eagle: three steps", "eagle3", "peagle", "dspark: gated, reduced"]
)
def test_the_comparison_meets_every_situation(name: str) -> None:
    """There are hits, survivors and misses by the vocabulary: else equal sums prove little."""
    sums = expectation(CASES[name])[-1]
    assert all(hits > 0 for hits in sums["hits"]) and sums["drafted"][-1] < sums["drafted"][0]
    assert sums["hits"][0] < sums["drafted"][0]
    assert sums["survive"][1] > 0 and sums["survive"][-1] < sums["chains"]
    missed = sum(sums["drafted"]) - sum(sums["supervised"])
    assert (missed > 0) == CASES[name].reduced


LAST = {
    ("eagle", "x"): 4,  # token 5 is the last of the answer, token 4 the last known one
    ("eagle", "aux"): 4,  # whose state is the last teacher
    **{(kind, what): 4 for kind in ("eagle3", "peagle") for what in ("x", "z")},
    **{(kind, "aux"): 3 for kind in ("eagle3", "peagle", "dspark")},
    ("dspark", "x"): 5,  # the label of the cross-entropy
    ("dspark", "z"): 4,
    ("dflash2", "x"): 5,  # its loss reads no logits of the target
    ("dflash2", "aux"): 3,
    ("domino", "x"): 5,
    ("lilicorr", "aux"): 3,
    ("xpress", "x"): 5,
}
"""The last token of the answer's document whose token, state or logits count, by kind."""


@pytest.mark.parametrize(
    ("kind", "what", "changes"),
    [
        *((*pair, changes) for pair in LAST for changes in ({}, {"num_layers": 2})),
        *(("peagle", what, {"segments": 3}) for what in ("x", "aux", "z")),
    ],
    ids=str,
)
def test_other_documents_and_later_tokens_change_nothing(kind, what, changes) -> None:
    made = case(kind, **({"cod_ratio": 1.0} if kind == "peagle" else {}) | changes)
    draft = make_draft(made)
    masks = [[0] * 6, [0, 0, 1, 1, 1, 1, 0, 0, 0, 0], [0] * 5]
    documents = make_documents(made, masks, agreeing=False)
    if kind in BLOCKS:
        anchors = ([2], [2, 3, 4], [3])
        documents = [replace(d, picks=a) for d, a in zip(documents, anchors, strict=True)]
    only_the_past_counts(
        lambda changed: loss_of(made, draft, **lay_out(made, changed, [[0, 1, 2]])),
        *(draft, documents, what, LAST[kind, what]),
    )


# A chat of two turns, 12 tokens: question (2), answer (3), question (2), answer (4), a line break.
TWO_TURNS = [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]
# Slot t of step s counts if tokens t+1+s and t+2+s are part of an answer.
SERVING = [
    [0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0],
    [1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0],
    [1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0],
    [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0],
]


@pytest.mark.parametrize("name", ["eagle: three steps", "eagle3: whole vocabulary"])
def test_slot_masks_of_two_turns_are_those_written_by_hand(name: str) -> None:
    """A changed teacher row changes exactly the steps whose slot for that token counts."""
    length, made = len(TWO_TURNS), CASES[name]
    assert [
        [int(slot_counts(TWO_TURNS, t + s)) for t in range(length)] for s in range(4)
    ] == SERVING
    what = "aux" if made.kind == "eagle" else "z"
    draft, documents = make_draft(made), make_documents(made, [[1, 1], TWO_TURNS, [1, 1, 1]])

    def losses(second: Any) -> Tensor:
        inputs = lay_out(made, [documents[0], second, documents[2]], [[0, 1, 2]])
        if made.kind == "eagle":  # the draft reads the states, so only its teachers change here
            inputs["noise"] = inputs["noise"] + kept[FINAL] - inputs[FINAL]
        return loss_of(made, draft, **inputs).sums["loss"]

    kept = lay_out(made, documents, [[0, 1, 2]])
    before = losses(documents[1])
    for p in range(length):
        values = getattr(documents[1], what).clone()
        values[p] += torch.linspace(0, 1, values.shape[1])
        changed = (losses(replace(documents[1], **{what: values})) - before).abs() > 1e-9
        slots = [p - 1 - s for s in range(len(changed))]  # at step s, teacher p is at slot p-1-s
        wanted = [bool(SERVING[s][t]) if t >= 0 else False for s, t in enumerate(slots)]
        assert changed.tolist() == wanted, f"teacher of token {p}"


@pytest.mark.parametrize(
    ("name", "given"),
    itertools.product(
        ("eagle3", "eagle3: whole vocabulary", "peagle", "dspark: gated, reduced"),
        (FINAL, PROBABILITIES),
    ),
)
def test_every_form_of_a_teacher_gives_the_same_loss(name: str, given: str) -> None:
    made = CASES[name]
    draft, (documents, *_) = make_draft(made), expectation(made)
    inputs: Any = lay_out(made, documents, list(layouts_of(made).values())[-2])
    generator, shape = torch.Generator().manual_seed(5), (*inputs["input_ids"].shape, HIDDEN)
    states = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if given == FINAL:
        inputs["logits"] = make_head(made).logits(states)
        inputs["target_argmax"] = inputs["logits"].argmax(-1)
    expected = loss_of(made, draft, **inputs)
    expected.loss.backward()
    wanted = gradients(draft)
    logits = inputs.pop("logits")
    if given == FINAL:
        inputs[FINAL] = states
    else:
        inputs[MASS] = torch.softmax(logits, -1)[..., draft.draft_ids].sum(-1)
        inputs[PROBABILITIES] = torch.softmax(logits[..., draft.draft_ids], -1)
    result = loss_of(made, draft, **inputs)
    result.loss.backward()
    close(result.loss, expected.loss)
    for key, value in expected.sums.items():
        close(result.sums[key], value, name=key)
    tolerance.close_gradients(gradients(draft), wanted, terms=TERMS)


# -- serving ---------------------------------------------------------------------------------------


class Forced:
    """A sampler that drafts given tokens and records the logits that it receives."""

    def __init__(self, tokens: Iterator[int]) -> None:
        self.tokens, self.seen, self.ids = tokens, [], []

    def draft(self, logits: Tensor, draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, None]:
        self.seen.append(logits)
        self.ids.append(draft_ids)
        return torch.tensor(next(self.tokens)), None


SERVED = [
    *("eagle", "eagle: two layers", "eagle: partial linear rope", "eagle: mixed layers"),
    *("eagle3", "eagle3: 3.1", "eagle3: norm_output", "eagle3: one kv head", "eagle3: yarn"),
    *("eagle3: window", "eagle3: window shorter than the unroll", "eagle3: mixed layers"),
    *("eagle3: three layers, another shape", "eagle3: norms before fc and residual"),
    *("peagle: fc_norm", "peagle: window", "peagle: mixed layers", "dspark", "dspark: one slot"),
    *("dspark: gated, reduced", "dspark: rnn", "dspark: rnn, mask", "dspark: no Markov head"),
    *("dspark: window", "dspark: window, mask", "dspark: mixed layers", "dflash", "dflash: mask"),
    *("dspark: seven slots", "dflash: non-causal", "dflash2", "dflash2: all candidates"),
    *("dflash2: three taps, target's choice", "dflash2: kl, window, recomputed"),
    *("domino", "domino: mask, later", "domino: first step", "lilicorr", "xpress"),
]


@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_decoding_has_the_logits_of_training_at_every_slot(name: str) -> None:
    """With caches, for verified positions in chunks of any size; the reference is training's."""
    made = CASES[name]
    draft, config = make_draft(made), reference_config(made)
    (document,) = make_documents(made, [[1] * 18], agreeing=False)
    state, reference = reference_state(draft), REFERENCES[made.kind].reference_logits
    expected = reference(state, config, document, (4, 5, 8, 10), draft.depth)
    # no norm before EAGLE-1's first layer: differences grow from step to step
    terms = network(4**3 if made.kind == "eagle" else 7)
    for start, anchor in ((0, 4), (4, 5), (5, 8), (8, 10), (0, 10)):
        if not start:
            drafter = draft.drafter(make_head(made))
        sampler: Any = Forced(iter(document.x[anchor + 1 :]))
        known, states = document.x[start + 1 : anchor + 1], document.aux[None, start:anchor]
        drafted, _ = drafter.propose(known, states, draft.depth, sampler)
        assert drafted.tolist() == document.x[anchor + 1 : anchor + 1 + draft.depth]
        wanted = torch.stack([expected[anchor, d] for d in range(draft.depth)])
        if getattr(config, "stage", None):  # the candidates only
            wanted = wanted.gather(1, torch.stack(sampler.ids))
            unary = dspark_reference.block_logits(state, config, document, anchor)[0]
            best = torch.stack(unary).topk(config.top_k).indices
            assert torch.equal(best, torch.stack(sampler.ids))
        tolerance.close(torch.stack(sampler.seen), wanted, terms=terms)
