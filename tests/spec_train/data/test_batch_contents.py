"""What batches hold, compared with random draws: lengths, sources, and their spread."""

import random
from statistics import mean, pstdev
from unittest.mock import patch

import numpy as np
import pytest

from spec_data.shards.packing import OPEN, fill_in_order, pack_documents
from spec_train.data.order import BatchPlan

SEQ_LEN, PACKS = 1024, 4
SEEDS = range(4)

Batches = list[list[list[int]]]


def log_normal(count: int, median: float, spread: float, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.normal(np.log(median), spread, count))
    return np.clip(drawn, 4, SEQ_LEN).astype(int).tolist()


MATHS = log_normal(3000, 170, 0.3, 0)


def random_draw(lengths: list[int], seed: int) -> Batches:
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    packs: list[list[int]] = [[]]
    room = SEQ_LEN
    for document in order:
        if lengths[document] > room:
            packs.append([])
            room = SEQ_LEN
        packs[-1].append(document)
        room -= lengths[document]
    return [packs[i : i + PACKS] for i in range(0, len(packs), PACKS)]


def lengths_per_pack(batches: Batches, lengths: list[int]) -> float:
    """Distinct lengths of a pack per document in it: 1 if no two documents are of one length."""
    found = [len({lengths[d] for d in pack}) / len(pack) for batch in batches for pack in batch]
    return mean(found)


def spread_of_length(batches: Batches, lengths: list[int]) -> float:
    """Standard deviation over batches of the mean length of a document."""
    return pstdev(mean(lengths[d] for pack in batch for d in pack) for batch in batches)


def single(lengths: list[int], seed: int, epoch: int) -> Batches:
    options = {"seq_len": SEQ_LEN, "packs_per_batch": PACKS, "seed": seed}
    plan = BatchPlan(np.array(lengths), np.arange(len(lengths)), **options)
    return plan.batches(epoch)[:-1]


@pytest.mark.parametrize("epoch", [0, 3])
def test_lengths_of_a_pack_and_of_a_batch_are_those_of_a_random_draw(epoch):
    drawn = [random_draw(MATHS, seed)[:-1] for seed in SEEDS]
    new = [single(MATHS, seed, epoch=epoch) for seed in SEEDS]
    with patch("spec_train.data.order.fill_in_order", pack_documents):  # by decreasing length
        old = [single(MATHS, seed, epoch=epoch) for seed in SEEDS]
    expected = mean(lengths_per_pack(batches, MATHS) for batches in drawn)
    assert mean(lengths_per_pack(batches, MATHS) for batches in new) > 0.97 * expected
    assert mean(lengths_per_pack(batches, MATHS) for batches in old) < 0.6 * expected
    expected = mean(spread_of_length(batches, MATHS) for batches in drawn)
    assert mean(spread_of_length(batches, MATHS) for batches in new) < 1.1 * expected
    assert mean(spread_of_length(batches, MATHS) for batches in old) > 1.8 * expected


def test_a_document_goes_into_the_fullest_pack_that_has_room():
    """Against a slow loop over all open packs."""
    lengths = log_normal(500, 90, 0.9, 8)
    packs: list[list[int]] = []
    closed: set[int] = set()
    for document, length in enumerate(lengths):
        free = [SEQ_LEN - sum(lengths[d] for d in pack) for pack in packs]
        still = [(room, i) for i, room in enumerate(free) if room and i not in closed]
        fits = [(room, i) for room, i in still if room >= length]
        if fits:
            packs[min(fits)[1]].append(document)
            continue
        if len(still) == OPEN:
            closed.add(min(still)[1])
        packs.append([document])
    assert closed
    assert fill_in_order(lengths, SEQ_LEN) == packs
    assert fill_in_order([], 8) == [] and fill_in_order([8, 8], 8) == [[0], [1]]
    for wrong in ([0], [9]):
        with pytest.raises(ValueError, match="packs hold 1 to 8"):
            fill_in_order(wrong, 8)
