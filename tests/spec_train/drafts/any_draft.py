"""A tiny dataset and a small draft of any kind, built on it.

Test modules assign the fixtures to names: linters would flag imports as unused and shadowed.
"""

import json
from typing import Any

import pytest
import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import DRAFTS
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DRAFT_OPTIONS
from tests.factory import tiny_dataset

SMALL: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {"draft_vocab_size": 40, "ttt_steps": 3},
    "peagle": {"draft_vocab_size": 40, "depths": 3, "draft_layers": 2, "mask_token_id": 5},
    "dspark": {"num_draft_layers": 2, "block_size": 3, "markov_rank": 4, "mask_token_id": 5},
    "dflash": {"num_draft_layers": 2, "block_size": 3, "mask_token_id": 5},
}
"""Options of a small draft of each kind."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> HiddenStatesDataset:
    return HiddenStatesDataset(tiny_dataset(tmp_path_factory.mktemp("any") / "data", n_docs=6))


@pytest.fixture(scope="module")
def head(dataset: HiddenStatesDataset) -> TargetHead:
    return TargetHead.from_dataset(dataset.path)


def build_draft(name: str, dataset: HiddenStatesDataset, head: TargetHead, **options: Any) -> Any:
    """Return a fresh draft of kind `name` with `SMALL` options, changed by `options`."""
    torch.manual_seed(1)
    return DRAFTS[name].build(
        DRAFT_OPTIONS[name](**SMALL[name] | options),
        target_config=json.loads((dataset.target_dir / "config.json").read_text()),
        manifest=dataset.manifest,
        head=head,
        token_counts=torch.arange(head.spec.vocab_size).flip(0),
    )
