"""A tiny dataset, batches of its documents, and a small draft of any kind, built on it.

Test modules assign the fixtures to names: linters would flag imports as unused and shadowed.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_data.shards.batch import DraftBatch
from spec_data.shards.packing import pack_documents, row_layout
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import DRAFTS
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import BlockOptions
from spec_train.options.kinds import DRAFT_OPTIONS
from tests.factory import tiny_dataset

SMALL: dict[str, dict[str, Any]] = {
    "eagle": {"depth": 4},
    "eagle3": {"draft_vocab_size": 40, "ttt_steps": 3},
    "peagle": {"draft_vocab_size": 40, "depths": 3, "num_layers": 2, "mask_token_id": 5},
    "dspark": {"num_layers": 2, "block_size": 3, "markov_rank": 4, "mask_token_id": 5},
    "dflash": {"num_layers": 2, "block_size": 3, "mask_token_id": 5},
    "dflash2": {"num_layers": 2, "block_size": 3, "mask_token_id": 5, "selector_top_k": 6},
    "lilicorr": {
        **{"num_layers": 2, "block_size": 3, "mask_token_id": 5, "lilicorr_hidden_size": 8},
        **{"lilicorr_num_layers": 1, "lilicorr_candidate_topk": 6, "lilicorr_num_heads": 2},
        "conv_kernel_size": 0,
    },
    "domino": {"num_layers": 2, "block_size": 3, "mask_token_id": 5, "emb_dim": 4},
    "xpress": {"num_layers": 2, "block_size": 3, "mask_token_id": 5, "xpress_rank": 16},
    "mtp": {"depth": 3},
}
"""Options of a small draft of each kind."""
BLOCK_KINDS = tuple(kind for kind, one in DRAFT_OPTIONS.items() if issubclass(one, BlockOptions))
"""Kinds that draft a block in one forward pass."""
SHAPED = tuple(name for name in DRAFTS if name != "mtp")
"""Kinds whose shape is chosen, on any target; the shape of its MTP block is the target's."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> HiddenStatesDataset:
    return HiddenStatesDataset(tiny_dataset(tmp_path_factory.mktemp("any") / "data", n_docs=8))


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
        token_counts=torch.arange(head.spec.vocab_size) * 7 % head.spec.vocab_size,
        target_dir=dataset.target_dir,
    )


def batch_of(dataset: HiddenStatesDataset, rows: Sequence[Sequence[int]], width: int) -> DraftBatch:
    """Return the documents `rows`, packed into rows of `width` slots."""
    document_ids, position_ids = row_layout(
        [[int(dataset.lengths[i]) for i in row] for row in rows], width
    )
    out: dict[str, Tensor] = {}
    for b, row in enumerate(rows):
        start = 0
        for i in row:
            item = {k: v for k, v in dataset[i].items() if isinstance(v, Tensor)}
            for name, value in item.items():
                value = value.float() if name.startswith("hidden.") else value
                shape = (*document_ids.shape, *value.shape[1:])
                whole = out.setdefault(name, torch.zeros(shape, dtype=value.dtype))
                whole[b, start : start + len(value)] = value
            start += int(dataset.lengths[i])
    return DraftBatch(
        document_ids=document_ids,
        position_ids=position_ids,
        hidden={k: out.pop(k) for k in list(out) if k.startswith("hidden.")},
        rows=[list(row) for row in rows],
        **out,
    )


def packed(dataset: HiddenStatesDataset, width: int = 64) -> DraftBatch:
    return batch_of(dataset, pack_documents(dataset.lengths.tolist(), width), width)
