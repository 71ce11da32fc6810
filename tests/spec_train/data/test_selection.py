"""Laws of selection: what is left out is counted, and it is what has no loss."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spec_data.shards.packing import shift_left
from spec_train.data.splits import NO_SLOT, has_slot, select
from spec_train.drafts.slots import slot_masks


def dataset_of(masks: list[np.ndarray], read: list[int]) -> SimpleNamespace:
    """A dataset with these loss masks; it notes in `read` which of them are read."""

    def read_into(row, out, start, length):
        read.append(row)
        count = min(length, len(masks[row]))
        out["loss_mask"][:count] = torch.from_numpy(masks[row][:count])
        return count

    return SimpleNamespace(
        lengths=np.array([len(mask) for mask in masks]),
        supervised=np.array([int(mask.sum()) for mask in masks]),
        first_supervised=np.array([int(np.argmax([*mask, True])) for mask in masks]),
        read_into=read_into,
    )


def mask_of(length: int, first: int, count: int) -> np.ndarray:
    return (np.arange(length) >= first) & (np.arange(length) < first + count)


def test_selection_counts_every_document_it_leaves_out():
    masks = [
        mask_of(*spans)
        for spans in ((10, 2, 3), (700, 100, 5), (700, 512, 4), (20, 20, 0), (600, 511, 1))
    ]
    chosen = select(dataset_of(masks, []), 512)
    assert chosen.usable.tolist() == [True, True, False, False, False]
    assert chosen.cut == 1
    assert chosen.left_out == {
        "no supervised token": 1,
        "first supervised token past --seq-len 512": 1,
        NO_SLOT: 1,
    }


@pytest.mark.parametrize("share", [0.15, 0.5, 0.95])
def test_documents_without_a_slot_are_those_for_which_the_loss_counts_none(share):
    """Random masks, cut or not; the slots are counted by the code of the drafts."""
    rng = np.random.default_rng(int(share * 100))
    masks = [rng.random(rng.integers(1, 12)) < share for _ in range(400)]
    seq_len, read = 7, []
    chosen = select(dataset_of(masks, read), seq_len)
    slotless = 0
    for row, mask in enumerate(masks):
        cut = torch.from_numpy(mask[:seq_len])[None]
        one = torch.zeros_like(cut, dtype=torch.long)
        expected = bool(slot_masks(shift_left(cut, one), one).any())
        assert has_slot(mask[:seq_len]) == expected
        assert bool(chosen.usable[row]) == expected
        slotless += bool(cut.any()) and not expected
    assert chosen.left_out.get(NO_SLOT, 0) == slotless > 0
    assert chosen.usable.sum() + sum(chosen.left_out.values()) == len(masks)
    assert len(read) < 0.75 * len(masks)


def test_answers_to_the_end_need_no_mask():
    """The index tells: so a million documents are selected without reading one."""
    read: list[int] = []
    chosen = select(dataset_of([mask_of(n, n // 2, n) for n in range(10, 400)], read), 256)
    assert chosen.usable.all() and chosen.cut == 399 - 256
    alone = select(dataset_of([mask_of(n, n - 1, 1) for n in range(10, 400)], read), 512)
    assert not alone.usable.any() and alone.left_out == {NO_SLOT: 390} and not read
