"""Laws of selection: what is left out is counted, and it is what has no loss."""

import numpy as np
import pytest
import torch

from spec_data.shards.packing import shift_left
from spec_train.data.splits import NO_SLOT, has_slot, select_documents
from spec_train.drafts.slots import slot_masks

SEQ_LEN = 512


def test_selection_counts_every_document_it_leaves_out():
    lengths = np.array([10, 700, 700, 20, 600])
    supervised = np.array([3, 5, 4, 0, 1])
    first = np.array([2, 100, 512, 20, 511])
    chosen = select_documents(lengths, supervised, first, SEQ_LEN)
    assert chosen.usable.tolist() == [True, True, False, False, True]
    assert chosen.cut == 2
    assert chosen.left_out == {
        "no supervised token": 1,
        "first supervised token past --seq-len 512": 1,
    }
    assert chosen.usable.sum() + sum(chosen.left_out.values()) == len(lengths)


@pytest.mark.parametrize("share", [0.15, 0.5, 0.95])
def test_documents_without_a_slot_are_those_for_which_the_loss_counts_none(share):
    """Random masks, cut or not; the slots are counted by the code of the drafts."""
    rng = np.random.default_rng(int(share * 100))
    masks = [rng.random(rng.integers(1, 12)) < share for _ in range(400)]
    seq_len, read = 7, []

    def read_mask(row: int) -> np.ndarray:
        read.append(row)
        return masks[row][:seq_len]

    lengths = np.array([len(mask) for mask in masks])
    supervised = np.array([int(mask.sum()) for mask in masks])
    first = np.array([int(np.argmax([*mask, True])) for mask in masks])
    chosen = select_documents(lengths, supervised, first, seq_len, read_mask)
    plain = select_documents(lengths, supervised, first, seq_len)
    slotless = 0
    for row, mask in enumerate(masks):
        kept = torch.from_numpy(mask[:seq_len])[None]
        one = torch.zeros_like(kept, dtype=torch.long)
        expected = bool(slot_masks(shift_left(kept, one), one).any())
        assert has_slot(mask[:seq_len]) == expected
        assert bool(chosen.usable[row]) == expected
        slotless += bool(plain.usable[row]) and not expected
    assert chosen.left_out.get(NO_SLOT, 0) == slotless > 0
    assert chosen.usable.sum() + sum(chosen.left_out.values()) == len(masks)
    assert len(read) < 0.75 * len(masks)


def test_answers_to_the_end_need_no_mask():
    """The index tells: so a million documents are selected without reading one."""
    lengths, first = np.arange(10, 400), np.arange(10, 400) // 2

    def read_mask(row: int) -> np.ndarray:
        raise AssertionError(f"mask {row} was read")

    chosen = select_documents(lengths, lengths - first, first, 256, read_mask)
    assert chosen.usable.all() and chosen.cut == int((lengths > 256).sum())
    alone = select_documents(lengths, np.ones(390), lengths - 1, 512, read_mask)
    assert not alone.usable.any() and alone.left_out == {NO_SLOT: 390}
