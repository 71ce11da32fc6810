"""Laws of the order of training: a pure function of seed, epoch and lengths."""

import hashlib
import itertools

import numpy as np
import pytest

from spec_data.shards.errors import ConfigError
from spec_data.shards.packing import fill_in_order
from spec_train.data import order as order_module
from spec_train.data.order import (
    SPLIT_BY_TOKENS,
    SPLIT_RULE,
    BatchPlan,
    FollowingPlan,
    below_border,
    hash_ids,
    hash_prompts,
    split_border,
    window_bounds,
)

SEQ_LEN = 512


def split_documents(ids, fraction, seed) -> np.ndarray:
    """Which documents are held out, bool [N]."""
    hashes = hash_ids(ids, seed)
    return below_border(hashes, split_border(hashes, fraction))


def lengths_of(count: int, seed: int = 0, median: int = 90) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(rng.normal(np.log(median), 0.9, count)), 1, 2000).astype(np.int64)


def make_plan(count: int = 700, seed: int = 3, **changes) -> BatchPlan:
    lengths = lengths_of(count)
    options = dict(seq_len=SEQ_LEN, packs_per_batch=8, seed=seed, window_tokens=8192) | changes
    usable = options.pop("usable", lengths % 7 != 0)
    return BatchPlan(lengths, np.flatnonzero(usable), **options)


def flat(plan: BatchPlan, epoch: int) -> list[int]:
    return [row for batch in plan.batches(epoch) for pack in batch for row in pack]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_usable_document_is_there_exactly_once(epoch):
    for plan in (make_plan(), make_plan(window_tokens=1)):  # also alone, beyond the window
        assert sorted(flat(plan, epoch)) == np.flatnonzero(lengths_of(700) % 7).tolist()
    assert make_plan(usable=np.zeros(700, bool)).batches(epoch) == []


def test_packs_hold_what_fits_and_only_the_last_batch_is_short():
    plan = make_plan()
    batches = plan.batches(0)
    assert all(len(batch) == 8 for batch in batches[:-1]) and 1 <= len(batches[-1]) <= 8
    clipped = np.minimum(lengths_of(700), SEQ_LEN)
    assert max(clipped[pack].sum() for batch in batches for pack in batch) <= SEQ_LEN


def test_order_is_a_function_of_seed_and_epoch():
    assert make_plan().batches(2) == make_plan().batches(2)
    plan = make_plan()
    forwards = [plan.batches(e) for e in range(3)]
    assert [plan.batches(e) for e in (2, 1, 0)] == forwards[::-1]
    orders = [flat(make_plan(seed=s), e) for s in (3, 4) for e in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_order_never_changes():
    """A run resumes with the order that it began with."""
    lengths = 1 + (np.arange(900) * 7919) % 401
    options = dict(seq_len=256, packs_per_batch=4, seed=11, window_tokens=20_000)
    plan = BatchPlan(lengths, np.flatnonzero(lengths % 5), **options)
    digest = hashlib.sha256(repr(plan.batches(1)).encode()).hexdigest()
    assert digest[:16] == "bda38b0781eab991"


def test_batches_come_one_by_one_and_nothing_is_packed_ahead(monkeypatch):
    plan = make_plan(5000, window_tokens=40_000)
    packed = []

    def spy(lengths, capacity):
        packed.append(len(lengths))
        return fill_in_order(lengths, capacity)

    monkeypatch.setattr(order_module, "fill_in_order", spy)
    batches = plan.iter_batches(1)
    first = next(batches)
    assert len(packed) == 1 and sum(packed) < len(plan.rows) / 4
    assert [first, *batches] == plan.batches(1)
    assert sum(packed) == 2 * len(plan.rows)
    assert plan.count_batches(1) == len(plan.batches(1))
    assert plan.count_batches(0) == len(list(plan.iter_batches(0)))


def test_state_goes_back_only_into_the_same_order():
    plan = make_plan(fingerprint="aaa")
    state = plan.state(2, 5)
    assert make_plan(fingerprint="aaa").position(state) == (2, 5)
    others = {
        "fingerprint": ("aaa", make_plan(fingerprint="bbb"), "bbb"),
        "seed": (3, make_plan(seed=4, fingerprint="aaa"), 4),
        "seq_len": (512, make_plan(seq_len=600, fingerprint="aaa"), 600),
        "rows_per_batch": (8, make_plan(packs_per_batch=16, fingerprint="aaa"), 16),
        "window_tokens": (8192, make_plan(window_tokens=99, fingerprint="aaa"), 99),
    }
    for name, (old, other, new) in others.items():
        with pytest.raises(ConfigError, match=f"{name} was {old!r}, is {new!r}"):
            other.position(state)
    with pytest.raises(ConfigError, match="documents was"):
        make_plan(fingerprint="aaa", usable=np.ones(700, bool)).position(state)


FOUR_PROMPTS = ["60c9171fdb3e271c", "a0880b0e3caccef4", "e2f77ed1baa643f2", "473fc29ce38a96a2"]
IDS = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(4000)]


def test_split_depends_on_the_document_alone():
    mask = split_documents(IDS, 0.1, seed=5)
    held = {d for d, v in zip(IDS, mask, strict=True) if v}
    order = np.random.default_rng(0).permutation(len(IDS))[:1500]
    part = split_documents([IDS[i] for i in order], 0.1, seed=5)
    assert part.tolist() == [IDS[i] in held for i in order]
    assert 0.08 < mask.mean() < 0.12
    other = split_documents(IDS, 0.1, seed=6)
    assert (mask & other).sum() < 0.3 * mask.sum()
    assert not (mask & ~split_documents(IDS, 0.2, seed=5)).any()  # a larger one only adds
    assert split_documents(["a"] * 5, 0.5, seed=0).sum() in (0, 5)
    assert not split_documents(IDS, 0.0, seed=0).any()
    assert split_documents([], 0.5, seed=0).tolist() == []


def test_split_never_changes_under_the_same_name():
    """Words of eight bytes, each xor-ed in and finalised; another function needs another name."""
    assert (SPLIT_BY_TOKENS, SPLIT_RULE) == ("tokens-1", "prompts-1")
    mask = split_documents([*IDS, "ü", "", "a longer one"], 0.25, seed=7)
    assert hashlib.sha256(mask.tobytes()).hexdigest()[:16] == "d996bb03ae1f0c18"
    hashes = hash_prompts(np.arange(4, dtype=np.uint64) << np.uint64(60), 7)
    assert [f"{number:016x}" for number in hashes.tolist()] == FOUR_PROMPTS


def slow_border(hashes, fraction, least) -> set[int]:
    """The hashes that are held out, by trying every border."""
    values = sorted(set(hashes))
    held = {i: sum(h < values[i] for h in hashes) for i in range(1, len(values))}
    usual = sum(v < fraction * (2**64 - 2048) for v in values)
    wanted = max(1, min(least, len(hashes) // 10))
    enough = min([i for i in held if held[i] >= wanted], default=max(held))
    most = max([i for i in held if held[i] <= 2 * fraction * len(hashes)], default=0)
    chosen = min(max(usual, enough), max(enough, most), max(held))
    return set(values[:chosen])


@pytest.mark.parametrize("seed", range(40))
def test_hashes_of_many_documents_are_held_out_together_and_not_too_many(seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**64, rng.integers(2, 30), dtype=np.uint64)
    hashes = np.repeat(values, rng.integers(1, rng.choice([2, 5, 40]), len(values)))
    fraction, least = float(rng.choice([0.02, 0.1, 0.4])), int(rng.choice([0, 8]))
    side = below_border(hashes, split_border(hashes, fraction, least))
    assert set(hashes[side].tolist()) == slow_border(hashes.tolist(), fraction, least)
    assert 0 < side.sum() < len(hashes)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 0.999999])
def test_neither_side_is_empty_once_there_are_two_documents(fraction):
    for count in (2, 10):
        assert 0 < split_documents(IDS[:count], fraction, seed=0).sum() < count


@pytest.mark.parametrize("count, fraction, expected", [(300, 0.02, 8), (50, 0.02, 5), (9, 0.02, 1)])
def test_a_least_number_of_documents_is_held_out(count, fraction, expected):
    """Those with the smallest hashes, so that the larger share holds out the smaller one's."""
    ids = [f"document {i}" for i in range(count)]
    seed = next(s for s in range(99) if split_documents(ids, fraction, s).sum() <= expected)
    hashes = hash_ids(ids, seed)
    side = below_border(hashes, split_border(hashes, fraction, least=8))
    assert side.sum() == expected
    assert not (split_documents(ids, fraction, seed) & ~side).any()
    assert not (side & ~split_documents(ids, 0.4, seed)).any()
    assert split_border(hashes, 0.4, least=8) == split_border(hashes, 0.4)
    assert split_border(hashes, 0.0, least=8) == 0


# --- the order beside generation ---

LENGTHS = np.random.default_rng(0).integers(4, 60, 200)
USABLE = np.arange(200) % 5 != 2
UNITS = np.array([0, 13, 40, 41, 90, 120, 170, 200])


def following_plan(**changes) -> FollowingPlan:
    given = dict(seq_len=64, packs_per_batch=3, seed=1, window_tokens=1000) | changes
    return FollowingPlan(LENGTHS, np.flatnonzero(USABLE), UNITS, **given)


def test_windows_are_whole_units_in_order():
    bounds = window_bounds(LENGTHS, np.flatnonzero(USABLE), UNITS, 1000).tolist()
    assert bounds[0] == 0 and bounds[-1] == 7 and len(bounds) > 3
    tokens = [
        sum(int(LENGTHS[r]) for r in range(UNITS[a], UNITS[b]) if USABLE[r])
        for a, b in itertools.pairwise(bounds)
    ]
    assert all(count >= 1000 for count in tokens[:-1])
    plan = following_plan()
    for number, rows in enumerate(plan.windows(0)):
        first, last = UNITS[bounds[number]], UNITS[bounds[number + 1]]
        assert sorted(rows.tolist()) == [r for r in range(first, last) if USABLE[r]]
        assert rows.tolist() != sorted(rows.tolist())


def test_every_epoch_has_every_document_once_and_the_first_one_never_looks_ahead():
    plan = following_plan()
    for epoch in range(3):
        rows = [r for batch in plan.iter_batches(epoch) for pack in batch for r in pack]
        assert sorted(rows) == plan.rows.tolist() and plan.documents(epoch) == len(rows)
    starts = [UNITS[b] for b in plan.bounds]
    windows = [[int(np.searchsorted(starts, r, "right")) for pack in batch for r in pack]
               for batch in plan.iter_batches(0)]  # fmt: skip
    assert all(min(b) >= max(a) - 1 and max(b) >= max(a) for a, b in itertools.pairwise(windows))
