"""Laws of mixing: a weight is a count of appearances, and order is a function of settings alone."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np

from spec_train.data.mixture import MixedPlan, Share, copies
from spec_train.data.order import BatchPlan

SIZES = (300, 40, 90)
LENGTHS = np.random.default_rng(0).integers(4, 60, sum(SIZES))
USABLE = np.arange(sum(SIZES)) % 7 != 3
WEIGHTS = ("1", "2.5", "0.25")


def make_plan(weights=WEIGHTS, **changes) -> MixedPlan:
    first = np.cumsum([0, *SIZES]).tolist()
    shares = [
        Share(name=f"set{i}", first=first[i], last=first[i + 1], weight=Fraction(weight),
              fingerprint=f"print{i}")
        for i, weight in enumerate(weights)
    ]  # fmt: skip
    options = dict(seq_len=64, packs_per_batch=4, seed=3, window_tokens=2000) | changes
    return MixedPlan(LENGTHS, np.flatnonzero(USABLE), shares, **options)


def rows_of(plan: BatchPlan, epoch: int) -> list[int]:
    return [row for batch in plan.iter_batches(epoch) for pack in batch for row in pack]


def reference_copies(phase: Fraction, weight: Fraction, epoch: int) -> int:
    """How often a document appears in an epoch, in exact fractions: the running total's step."""
    return (phase + (epoch + 1) * weight) // 1 - (phase + epoch * weight) // 1


def test_copies_are_steps_of_an_evenly_growing_total():
    weights = map(Fraction, ("1", "3", "0.5", "2.25", "0.001", "0.333", "1.999"))
    for count, weight in itertools.product((1, 7, 100), weights):
        table = np.array([copies(count, weight, epoch, 5) for epoch in range(12)])
        phases = [Fraction(2 * rank + 1, 2 * count) for rank in range(count)]
        expected = np.array([[reference_copies(p, weight, e) for p in phases] for e in range(12)])
        for row, wanted in zip(table, expected, strict=True):
            assert sorted(row.tolist()) == sorted(wanted.tolist()), (count, weight)
            assert abs(int(row.sum()) - count * weight) < 1, (count, weight)
        # a document keeps its phase over the epochs
        assert Counter(map(tuple, table.T.tolist())) == Counter(map(tuple, expected.T.tolist()))


def test_an_epoch_holds_every_document_as_often_as_its_weight_says():
    plan = make_plan()
    total: Counter[int] = Counter()
    for epoch in range(4):
        seen = Counter(rows_of(plan, epoch))
        for share in plan.shares:
            rows = [r for r in range(share.first, share.last) if USABLE[r]]
            counts = [seen[row] for row in rows]
            assert set(counts) <= {int(share.weight), -int(-share.weight // 1)}
            assert abs(sum(counts) - share.weight * len(rows)) < 1
        assert not any(seen[row] for row in range(len(USABLE)) if not USABLE[row])
        assert plan.documents(epoch) == sum(seen.values())
        total += seen
    for share in plan.shares:  # 4 epochs of 2.5 and of 0.25: everyone alike
        whole = {total[r] for r in range(share.first, share.last) if USABLE[r]}
        assert whole == {int(4 * share.weight)}


def test_every_part_of_an_epoch_holds_all_datasets_in_their_share():
    """The smallest dataset is a twentieth of the tokens, far less than half a window apart."""
    plan = make_plan(("1", "1", "0.5"), window_tokens=3000)
    rows = np.array(rows_of(plan, 0))
    for share in plan.shares:
        own = (rows >= share.first) & (rows < share.last)
        for part in np.array_split(own, 4):
            assert 0.4 * own.mean() < part.mean() < 1.8 * own.mean()


def test_repeats_of_a_document_are_shuffled_apart():
    plan = make_plan(("2", "2", "2"))
    rows = rows_of(plan, 0)
    places: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row, []).append(place)
    gaps = np.array([b - a for a, b in places.values()])
    assert np.median(gaps) > len(rows) / 8


def test_a_dataset_with_fewer_documents_than_windows_lasts_the_whole_epoch():
    many, few = 4000, 12
    lengths = np.full(many + few, 30)
    shares = [
        Share(name=name, first=first, last=last, weight=Fraction(1), fingerprint=name)
        for name, first, last in (("many", 0, many), ("few", many, many + few))
    ]
    options = {"seq_len": 60, "packs_per_batch": 4, "seed": 3, "window_tokens": 2000}
    plan = MixedPlan(lengths, np.arange(len(lengths)), shares, **options)
    for epoch in range(3):
        rows = np.array(rows_of(plan, epoch))
        places = np.flatnonzero(rows >= many) / len(rows)
        assert len(places) == few and len(rows) == many + few
        assert places.min() < 0.25 and places.max() > 0.75
        assert np.diff(np.concatenate([[0], places, [1]])).max() < 0.3
