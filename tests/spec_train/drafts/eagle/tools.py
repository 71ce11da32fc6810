"""EAGLE-1/2 drafts for tiny targets.

Test modules assign the fixtures to names: linters would flag imports as unused and shadowed.
"""

from typing import Any

import pytest
import torch

from spec_train.drafts.eagle.draft import EagleConfig, EagleDraft
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import EagleOptions
from tests.spec_train.evaluation.tools import VOCAB, batch_of, head_of, respond


def make_eagle(model: Any, vocab: int = VOCAB, **changes: Any) -> EagleDraft:
    """Return a random draft for a target, without a dataset."""
    torch.manual_seed(1)
    options = EagleOptions(**{"depth": 4} | changes)
    config = EagleConfig.from_target(
        model.config.to_dict(), vocab_size=vocab, options=options, dtype="float32"
    )
    draft = EagleDraft(config, options)
    draft.adopt(TargetHead.from_model(model))
    return draft.eval()


@pytest.fixture(scope="module")
def trained_eagle(target, prompts) -> EagleDraft:
    """Return a sometimes right draft, trained on the responses to the first twelve prompts."""
    draft, head = make_eagle(target).train(), head_of(target)
    batch = batch_of(target, [respond(target, p) for p in prompts[:12]])
    optimizer = torch.optim.AdamW(draft.trainable_parameters(), lr=5e-3)
    for _ in range(100):
        optimizer.zero_grad()
        draft.loss(batch, head, draft.slot_counts(batch)).loss.backward()
        optimizer.step()
    return draft.eval()
