"""A tiny dataset and the block drafts built on it.

Test modules assign the fixtures to names: linters would flag imports as unused and shadowed.
"""

import json
from typing import Any

import pytest
import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import DRAFTS
from spec_train.losses.head import TargetHead
from tests.factory import tiny_dataset

SMALL: dict[str, Any] = {"num_layers": 2, "block_size": 4}
RANK: dict[str, Any] = {"markov_rank": 8}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> HiddenStatesDataset:
    return HiddenStatesDataset(tiny_dataset(tmp_path_factory.mktemp("dspark") / "data", n_docs=8))


@pytest.fixture
def head(dataset: HiddenStatesDataset) -> TargetHead:
    return TargetHead.from_dataset(dataset.path)


def build(dataset: HiddenStatesDataset, head: TargetHead, name: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    counts = torch.zeros(head.spec.vocab_size, dtype=torch.long)
    for i in range(len(dataset)):
        row = dataset[i]
        counts += torch.bincount(row["input_ids"][row["loss_mask"]], minlength=len(counts))
    kind = DRAFTS[name]
    small = SMALL | (RANK if name == "dspark" else {})
    return kind.build(
        kind.options_class(**{"mask_token_id": 3} | small | changes),
        target_config=json.loads((dataset.target_dir / "config.json").read_text()),
        manifest=dataset.manifest,
        head=head,
        token_counts=counts,
    )
