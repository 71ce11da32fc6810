"""A tiny dataset, the EAGLE-3 drafts built on it and batches of its documents.

Test modules assign the fixtures to names: linters would flag imports as unused and shadowed.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_data.shards.packing import pack_documents, row_layout
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.batch import DraftBatch
from spec_train.drafts.eagle3.draft import Eagle3Draft
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import Eagle3Options
from tests.factory import tiny_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> HiddenStatesDataset:
    return HiddenStatesDataset(tiny_dataset(tmp_path_factory.mktemp("eagle3") / "data", n_docs=8))


@pytest.fixture
def head(dataset: HiddenStatesDataset) -> TargetHead:
    return TargetHead.from_dataset(dataset.path)


def build(dataset: HiddenStatesDataset, head: TargetHead, **changes: Any) -> Eagle3Draft:
    torch.manual_seed(1)
    counts = torch.zeros(head.spec.vocab_size, dtype=torch.long)
    for i in range(len(dataset)):
        row = dataset[i]
        counts += torch.bincount(row["input_ids"][row["loss_mask"]], minlength=len(counts))
    options = Eagle3Options(**{"draft_vocab_size": 40, "ttt_steps": 4} | changes)
    return Eagle3Draft.build(
        options,
        target_config=json.loads((dataset.target_dir / "config.json").read_text()),
        manifest=dataset.manifest,
        head=head,
        token_counts=counts,
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
