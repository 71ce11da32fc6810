"""P-EAGLE drafts for the tiny dataset of `eagle3_tools` and for the tiny target of decoding tests.

Test modules assign the fixtures to names: linters would flag imports as unused and shadowed.
"""

import json
from typing import Any

import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts.peagle.draft import PeagleDraft
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import PeagleOptions


def build(dataset: HiddenStatesDataset, head: TargetHead, **changes: Any) -> PeagleDraft:
    torch.manual_seed(1)
    counts = torch.zeros(head.spec.vocab_size, dtype=torch.long)
    for i in range(len(dataset)):
        row = dataset[i]
        counts += torch.bincount(row["input_ids"][row["loss_mask"]], minlength=len(counts))
    options = {"draft_vocab_size": 40, "depths": 4, "num_layers": 2} | changes
    return PeagleDraft.build(
        PeagleOptions(**options),
        target_config=json.loads((dataset.target_dir / "config.json").read_text()),
        manifest=dataset.manifest,
        head=head,
        token_counts=counts,
    )
