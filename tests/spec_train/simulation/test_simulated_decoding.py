"""Serving-like acceptance from drafted chains: outcomes, censoring, averages; by plain loops."""

import dataclasses

import numpy as np
import pytest

from spec_train.simulation.simulated_decoding import (
    ServingSums,
    document_sums,
    judge_chains,
    supervised_spans,
    walk_rounds,
)


def random_document(seed: int, on_policy: float, hit: float, length: int = 30, depths: int = 4):
    """A random document; tokens are the target's choice, and drafts correct, at the given rates."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 9, length)
    best = np.append(ids[1:], 0)
    best = np.where(rng.random(length) < on_policy, best, rng.integers(0, 9, length))
    drafted = rng.integers(0, 9, (length, depths))
    for t in range(length):
        for d in range(depths):
            if t + 1 + d < length and rng.random() < hit:
                drafted[t, d] = best[t + 1 + d]
    mask = np.ones(length, dtype=bool)
    mask[: int(rng.integers(0, 6))] = False
    mask[12:15] = False
    return drafted, ids, best, mask


def outcome(drafted, ids, best, mask, t):
    """(depths at risk, accepted, censored) of the chain of slot t, in the words of the module."""
    length, depths = drafted.shape
    accepted = 0
    for d in range(1, depths + 1):
        token = t + 1 + d
        if token >= length or not mask[t + 1 : token + 1].all():
            return d - 1, accepted, False
        if drafted[t, d - 1] != best[token - 1]:
            return d, accepted, False
        accepted += 1
        if drafted[t, d - 1] != ids[token]:
            return d, accepted, True
    return depths, accepted, False


@pytest.mark.parametrize("seed", range(20))
def test_chains_are_judged_as_the_definition_says(seed):
    document = random_document(seed, on_policy=0.8, hit=0.7)
    got = judge_chains(*document)
    for t in range(len(got.accepted)):
        at_risk, accepted, censored = outcome(*document, t)
        assert got.at_risk[t].sum() == at_risk
        assert got.at_risk[t, :at_risk].all()
        assert (got.accepted[t], got.censored[t]) == (accepted, censored)
        assert got.hit[t, :accepted].all()


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_emits_every_supervised_token_of_an_on_policy_document_once(seed):
    """All of each span except its first token, which comes from the prefill."""
    drafted, ids, best, mask = random_document(seed, on_policy=1.0, hit=0.7)
    outcomes = judge_chains(drafted, ids, best, mask)
    spans = supervised_spans(mask)
    rounds = walk_rounds(outcomes, spans)
    assert not outcomes.censored.any()
    known = [start if start else 1 for start, _ in spans]
    assert sum(tokens for _, tokens in rounds) == sum(
        end - 1 - first for first, (_, end) in zip(known, spans, strict=True)
    )
    for slot, tokens in rounds:
        _, accepted, _ = outcome(drafted, ids, best, mask, slot)
        assert tokens in (accepted, accepted + 1)
        if tokens == accepted:  # the drafts filled the span: nothing was left to add
            assert slot + 2 + tokens == len(mask) or not mask[slot + 2 + tokens]
    sums = document_sums(drafted, ids, best, mask)
    assert sums.walk_figures().acceptance_length == sums.emitted / sums.rounds


def test_a_chain_that_leaves_the_document_is_neither_hit_nor_miss_beyond():
    """Tokens 1..8. The target would say 9 after 3; the draft knows, and is right up to there."""
    ids = np.arange(1, 9)
    best = np.array([2, 3, 9, 5, 6, 7, 8, 0])
    mask = np.array([0, 1, 1, 1, 1, 1, 1, 1], dtype=bool)
    drafted = np.zeros((8, 3), dtype=np.int64)
    drafted[0] = [3, 9, 0]  # knows 2: right, then right and off the document, then unknowable
    drafted[2] = [5, 6, 0]  # knows 4: right, right, wrong
    drafted[5] = [8, 1, 1]  # knows 7: right, then past the end
    got = judge_chains(drafted, ids, best, mask)
    assert got.at_risk[0].tolist() == [True, True, False] and got.censored[0]
    assert got.at_risk[2].tolist() == [True, True, True] and got.accepted[2] == 2
    assert got.at_risk[5].tolist() == [True, False, False] and not got.censored[5]
    # The walk: slot 0 keeps two drafts, the second off the document, whose token 4 comes instead.
    assert walk_rounds(got, supervised_spans(mask)) == [(0, 3), (2, 3), (5, 1)]
    figures = document_sums(drafted, ids, best, mask).walk_figures()
    assert figures.accept_rate == [1.0, 1.0, 0.0]
    assert figures.censored == pytest.approx(1 / 3)
    assert figures.acceptance_length == pytest.approx(7 / 3)  # nothing expected after depth 2


def test_product_limit_estimate_by_hand():
    """Four rounds: one fails at depth 1, one at depth 2, one never, one is censored after 1."""
    sums = ServingSums.zero(3)
    sums.walk_risk, sums.walk_hits = np.array([4, 2, 1]), np.array([3, 1, 1])
    sums.walk_censored = np.array([1, 0, 0])
    sums.rounds, sums.emitted = 4, 1 + 2 + 4 + 2
    figures = sums.walk_figures()
    assert figures.accept_rate == [0.75, 0.5, 1.0]
    assert figures.acceptance_length == pytest.approx((9 + 0.5 + 0.5) / 4)
    sums.slot_risk, sums.slot_hits = sums.walk_risk, sums.walk_hits
    assert sums.slot_figures().acceptance_length == pytest.approx(1 + 0.75 + 0.375 + 0.375)


def test_sums_add_and_nothing_has_no_length():
    documents = [random_document(seed, 0.8, 0.6) for seed in range(6)]
    total = ServingSums.zero(4)
    for nothing in (total.walk_figures(), total.slot_figures()):
        assert nothing.acceptance_length is None and nothing.accept_rate == [None] * 4
    for document in documents:
        total += document_sums(*document)
    outcomes = [outcome(*d, t) for d in documents for t in range(len(d[1]))]
    assert total.slot_hits.sum() == sum(accepted for _, accepted, _ in outcomes)
    assert total.slots == sum(at_risk > 0 for at_risk, _, _ in outcomes)
    assert total.spans == sum(len(supervised_spans(d[3])) for d in documents)
    unsupervised = document_sums(*documents[0][:3], np.zeros(30, dtype=bool))
    assert unsupervised.rounds == unsupervised.slots == unsupervised.tokens == 0


def test_sums_pass_through_an_array():
    sums = document_sums(*random_document(3, on_policy=0.8, hit=0.7))
    counts = sums.as_array()
    assert counts.shape == (5 * 4 + 7,)
    for name, value in vars(ServingSums.from_array(counts.astype(float))).items():
        np.testing.assert_array_equal(value, vars(sums)[name])
    twice = ServingSums.from_array(counts + counts)
    assert twice.walk_figures() == dataclasses.replace(sums.walk_figures(), rounds=2 * sums.rounds)
