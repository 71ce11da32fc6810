"""Serving-like acceptance from drafted chains: outcomes, censoring, averages; by plain loops."""

import numpy as np
import pytest

from spec_train.simulation.simulated_decoding import (
    EMITTED,
    STEPS,
    TOKENS,
    SimulatedDocument,
    figures,
    judge_chains,
    no_counts,
    train_serve_gap,
    uncut_length,
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


def test_chains_are_judged_as_the_definition_says():
    for seed in range(20):
        document = random_document(seed, on_policy=0.8, hit=0.7)
        got = judge_chains(*document)
        for t in range(len(got.accepted)):
            at_risk, accepted, censored = outcome(*document, t)
            assert got.at_risk[t].sum() == at_risk, (seed, t)
            assert got.at_risk[t, :at_risk].all(), (seed, t)
            assert (got.accepted[t], got.censored[t]) == (accepted, censored), (seed, t)
            assert got.hit[t, :accepted].all(), (seed, t)


def test_the_chains_of_every_slot_are_counted_whether_a_step_starts_there_or_not():
    for seed in range(20):
        document = random_document(seed, on_policy=0.8, hit=0.7)
        chains = [outcome(*document, t) for t in range(len(document[1]) - 1)]
        rates = figures(SimulatedDocument(document).counts())["every_slot_rate"]
        for d, rate in enumerate(rates):
            risk = sum(at_risk > d for at_risk, _, _ in chains)
            hits = sum(accepted > d for _, accepted, _ in chains)
            assert rate == (hits / risk if risk else None), (seed, d)


def test_a_draft_that_a_threshold_left_out_is_no_rejected_one():
    drafted, ids, best, mask = random_document(1, on_policy=1.0, hit=1.0)
    drafted[:, 2:] = -1
    found = figures(SimulatedDocument((drafted, ids, best, mask)).counts())
    assert found["accept_rate"] == found["every_slot_rate"] == [1.0, 1.0, None, None]


def test_a_censored_step_does_not_go_on_where_a_threshold_ends_chains():
    """Drafts that are always right, and end after the first or the second token, on any text."""
    counts, rng = no_counts(2), np.random.default_rng(0)
    for seed in range(60):
        drafted, ids, best, mask = random_document(seed, on_policy=0.5, hit=1.0, depths=2)
        drafted[rng.random(len(drafted)) < 0.5, 1] = -1
        counts += SimulatedDocument((drafted, ids, best, mask)).counts()
    assert 2.2 < figures(counts)["acceptance_length"] < 2.5  # less than two drafts and one more
    assert figures(counts)["accept_rate"] == [1.0, 1.0]


def test_every_supervised_token_of_an_on_policy_document_is_emitted_once():
    """All of each span except its first token, which comes from the prefill."""
    for seed in range(20):
        document = random_document(seed, on_policy=1.0, hit=0.7)
        found, mask = SimulatedDocument(document), document[3]
        assert not found.outcomes.censored.any(), seed
        for (start, end), steps in found.spans:
            assert sum(tokens for _, tokens in steps) == end - 1 - (start or 1), seed
            for slot, tokens in steps:
                _, accepted, _ = outcome(*document, slot)
                assert tokens in (accepted, accepted + 1), (seed, slot)
                if tokens == accepted:  # the drafts filled the span: nothing was left to add
                    after = slot + 2 + tokens
                    assert after == len(mask) or not mask[after], (seed, slot)
        counts = found.counts()
        assert figures(counts)["acceptance_length"] == counts[EMITTED] / counts[STEPS], seed


def test_a_chain_that_leaves_the_document_is_neither_hit_nor_miss_beyond():
    """Tokens 1..8. The target would say 9 after 3; the draft knows, and is right up to there."""
    ids = np.arange(1, 9)
    best = np.array([2, 3, 9, 5, 6, 7, 8, 0])
    mask = np.array([0, 1, 1, 1, 1, 1, 1, 1], dtype=bool)
    drafted = np.zeros((8, 3), dtype=np.int64)
    drafted[0] = [3, 9, 0]  # knows 2: right, then right and off the document, then unknowable
    drafted[2] = [5, 6, 0]  # knows 4: right, right, wrong
    drafted[5] = [8, 1, 1]  # knows 7: right, then past the end
    document = SimulatedDocument((drafted, ids, best, mask))
    got = document.outcomes
    assert got.at_risk[0].tolist() == [True, True, False] and got.censored[0]
    assert got.at_risk[2].tolist() == [True, True, True] and got.accepted[2] == 2
    assert got.at_risk[5].tolist() == [True, False, False] and not got.censored[5]
    # slot 0 keeps two drafts, the second off the document, whose token 4 comes instead
    assert document.spans == [((1, 8), [(0, 3), (2, 3), (5, 1)])]
    found = figures(document.counts())
    assert found["accept_rate"] == [1.0, 1.0, 0.0]
    assert found["censored"] == pytest.approx(1 / 3)
    assert found["acceptance_length"] == pytest.approx(7 / 3)  # nothing expected after depth 2


def test_a_step_that_fills_its_span_is_expected_to_emit_no_more():
    """It knows token 2 and can emit token 3 alone, accepted, though the document has another."""
    mask = np.array([0, 0, 1, 1], dtype=bool)
    drafted = np.array([[0, 0], [9, 0], [0, 0], [0, 0]])
    short = SimulatedDocument((drafted, np.arange(1, 5), np.array([2, 3, 9, 0]), mask))
    assert short.outcomes.censored[1] and short.spans == [((2, 4), [(1, 1)])]
    ids = np.arange(1, 40)  # beside a document in which every draft is right
    right = SimulatedDocument((ids[:, None] + [2, 3], ids, ids + 1, np.arange(39) > 0)).counts()
    counts = right + 10 * short.counts()
    assert figures(counts)["acceptance_length"] == counts[EMITTED] / counts[STEPS]


def test_the_length_on_texts_of_others_is_about_that_on_own_ones():
    """The figures of the module's docstring: drafts that hit in 0.85 of the cases, in 7 depths."""
    for length, *expected in ((8, 3.66, 3.73), (32, 4.55, 4.44), (200, 4.82, 4.75)):
        found = []
        for own in (0.6, 1.0):
            rng, counts = np.random.default_rng(1), no_counts(7)
            for _ in range(300 + 4000 // length):
                counts += SimulatedDocument(made_up(rng, length, own)).counts()
            found.append(figures(counts)["acceptance_length"])
        assert found == pytest.approx(expected, abs=0.02), length


def made_up(rng, length, own):
    """Arrays of an answer of which a share is the target's own choice."""
    total = length + 4
    ids = rng.integers(0, 50, total)
    best = np.where(rng.random(total) < own, np.roll(ids, -1), rng.integers(50, 99, total))
    places = np.minimum(np.arange(total)[:, None] + np.arange(1, 8), total - 1)
    drafted = np.where(rng.random((total, 7)) < 0.85, best[places], -7)
    return drafted, ids, best, np.arange(total) > 3


def test_counts_add_and_nothing_has_no_length():
    nothing = figures(no_counts(4))
    assert nothing["acceptance_length"] is None and nothing["accept_rate"] == [None] * 4
    document = random_document(3, on_policy=0.8, hit=0.7)
    counts = SimulatedDocument(document).counts()
    assert figures(counts + counts) == figures(counts) | {"rounds": 2 * counts[STEPS]}
    unsupervised = SimulatedDocument((*document[:3], np.zeros(30, dtype=bool))).counts()
    assert unsupervised[STEPS] == unsupervised[TOKENS] == 0


@pytest.mark.parametrize(
    "forced, served, rounds, warned",
    [
        *((3.0, 2.6, 500, True), (3.0, 2.8, 500, False), (3.0, 1.0, 20, False)),
        *((2.0, 2.4, 500, False), (3.0, None, 500, False), (None, 2.0, 500, False)),
        (1.2, 1.12, 500, False),  # nearly nothing is accepted: two fifths of it are no loss
    ],
)
def test_a_draft_that_is_worse_on_its_own_states_is_warned_of(forced, served, rounds, warned):
    text = train_serve_gap(forced, served, rounds)
    assert (text is not None) == warned
    assert text is None or "has 3.00 tokens per verification, with its own 2.60" in text


def test_the_uncut_length_adds_the_products_of_the_rates():
    assert uncut_length([0.5, 0.4, None, 0.9]) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    assert uncut_length([]) == uncut_length([None]) == 1
