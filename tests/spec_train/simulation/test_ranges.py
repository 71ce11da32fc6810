"""Ranges of contexts: which of them training had, and what is said of the others."""

import numpy as np
import pytest

from spec_train.simulation.ranges import (
    EDGES,
    contexts_of,
    joined_contexts,
    range_json,
    range_of,
    unseen_contexts,
)


@pytest.mark.parametrize("seed", range(3))
def test_the_contexts_of_a_training_are_those_of_a_plain_loop(seed):
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 3000, 40)
    lengths = first + rng.integers(1, 200_000, 40)
    expected: dict[int, int] = {}
    for a, b in zip(first.tolist(), lengths.tolist(), strict=True):
        for number in {range_of(context) for context in range(a, b)}:
            expected[EDGES[number]] = expected.get(EDGES[number], 0) + 1
    found = contexts_of(first, lengths)
    assert found == {str(start): count for start, count in sorted(expected.items())}
    twice = joined_contexts([found, {"0": 5}, found])
    assert twice.pop("0") == 5 + 2 * found.get("0", 0)
    assert twice == {k: 2 * v for k, v in found.items() if k != "0"}


def test_a_range_ends_before_the_next_one():
    assert contexts_of(np.array([16]), np.array([32])) == {"16": 1}  # contexts 16 to 31
    assert contexts_of(np.array([15]), np.array([33])) == {"0": 1, "16": 1, "32": 1}
    assert contexts_of(np.array([131071]), np.array([131073])) == {"65536": 1, "131072": 1}


def line(start, rounds):
    return range_json(EDGES.index(start), rounds, 2.0 if rounds else None)


def test_measured_ranges_that_training_had_not_are_named_together():
    trained = {"32": 4, "64": 9}
    seen = [line(32, 10), line(64, 20)]
    assert unseen_contexts(trained, seen) is None
    assert unseen_contexts(None, [line(16, 5)]) is None and unseen_contexts({}, seen) is None
    text = unseen_contexts(trained, [line(16, 3), *seen, line(128, 40), line(256, 27)])
    assert "70 of 100 verifications have a context of 16 to 31 and 128 to 511 tokens" in text
    assert "--seq-len" in text
    text = unseen_contexts(trained, [*seen, line(128, 0), line(131072, 1)])
    assert text.startswith("1 of 31 verifications have a context of 131,072 or more tokens")
