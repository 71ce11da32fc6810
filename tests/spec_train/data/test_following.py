"""The order of a run beside generation: a pure function of the plan that never looks ahead."""

import itertools

import numpy as np

from spec_train.data.order import FollowingPlan, window_bounds

LENGTHS = np.random.default_rng(0).integers(4, 60, 200)
USABLE = np.arange(200) % 5 != 2
UNITS = np.array([0, 13, 40, 41, 90, 120, 170, 200])


def plan_of(**changes) -> FollowingPlan:
    given = dict(seq_len=64, packs_per_batch=3, seed=1, window_tokens=1000) | changes
    return FollowingPlan(LENGTHS, USABLE, UNITS, **given)


def test_windows_are_whole_units_in_order():
    bounds = window_bounds(LENGTHS, USABLE, UNITS, 1000).tolist()
    assert bounds[0] == 0 and bounds[-1] == 7 and len(bounds) > 3
    tokens = [
        sum(int(LENGTHS[r]) for r in range(UNITS[a], UNITS[b]) if USABLE[r])
        for a, b in itertools.pairwise(bounds)
    ]
    assert all(count >= 1000 for count in tokens[:-1])
    plan = plan_of()
    for number, rows in enumerate(plan.windows(0)):
        first, last = UNITS[bounds[number]], UNITS[bounds[number + 1]]
        assert sorted(rows.tolist()) == [r for r in range(first, last) if USABLE[r]]
        assert rows.tolist() != sorted(rows.tolist())


def test_every_epoch_has_every_document_once_and_the_first_one_never_looks_ahead():
    plan = plan_of()
    for epoch in range(3):
        rows = [r for batch in plan.iter_batches(epoch) for pack in batch for r in pack]
        assert sorted(rows) == plan.rows.tolist() and plan.documents(epoch) == len(rows)
    starts = [UNITS[b] for b in plan.bounds]
    windows = [[int(np.searchsorted(starts, r, "right")) for pack in batch for r in pack]
               for batch in plan.iter_batches(0)]  # fmt: skip
    assert all(min(b) >= max(a) - 1 and max(b) >= max(a) for a, b in itertools.pairwise(windows))
