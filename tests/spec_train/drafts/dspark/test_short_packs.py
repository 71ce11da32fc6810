"""Block drafts: packs that are shorter than a block, as a stopped run and a short document have."""

import pytest
import torch
from torch.nn.functional import pad

from spec_data.shards.packing import PADDING
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.batch import padding_batch
from spec_train.drafts.dspark.loss import expected_weights
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts.dspark import tools as dspark_tools
from tests.spec_train.drafts.dspark.tools import build

dataset, head = dspark_tools.dataset, dspark_tools.head


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_a_rank_without_a_batch_counts_nothing(
    dataset: HiddenStatesDataset, head: TargetHead, kind: str
) -> None:
    """Every stop of a run sums these counts, also where a block is longer than the padding."""
    draft = build(dataset, head, kind, block_size=16)
    assert draft.slot_counts(padding_batch()).tolist() == [0, 0]


def test_a_document_shorter_than_a_block_counts_as_in_a_longer_pack() -> None:
    mask, documents = torch.tensor([[0, 1, 1, 1, 1]]), torch.zeros(1, 5, dtype=torch.int64)
    weights = 0.5 ** torch.arange(9, dtype=torch.float64)
    short = expected_weights(mask, documents, mask.bool(), weights, 8)
    longer = [pad(x, (0, 15), value=v) for x, v in ((mask, 0), (documents, PADDING))]
    assert short == expected_weights(*longer, longer[0].bool(), weights, 8) > 0
