"""The EAGLE-3 draft: batches against plain tensors, training against serving.

The loss itself is compared with slow loops in `test_reference`.
"""

import pytest
import torch

from spec_data.shards.errors import DraftError
from spec_train.drafts.eagle3.draft import eagle3_loss
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft
from tests.tolerance import network

dataset, head = any_draft.dataset, any_draft.head

FORWARD = {"terms": network(4), "dtype": torch.float32}  # four steps; sums are kept in float64


@pytest.mark.parametrize(
    "wrong",
    [
        {"logits": None},
        {"final_hidden": torch.zeros(1, 5, 32)},
        {"logits": None, "final_hidden": torch.zeros(1, 5, 32)},
        {"logits": None, "target_probs": torch.zeros(1, 5, 40)},
        {"kind": "mse"},
    ],
)
def test_contradictory_arguments_are_refused(dataset, head, wrong):
    good = {
        "aux_hidden_states": torch.zeros(1, 5, 96),
        "input_ids": torch.zeros(1, 5, dtype=torch.long),
        "loss_mask": torch.ones(1, 5),
        "logits": torch.zeros(1, 5, 64),
    }
    draft = build_draft("eagle3", dataset, head)
    eagle3_loss(draft, **good)
    with pytest.raises(DraftError):
        eagle3_loss(draft, **good | wrong)


def test_renormalised_probabilities_alone_are_refused_for_a_reduced_vocabulary(dataset, head):
    """The planted failure: acceptance with `target_probs` would be that of a renormalised target.

    Over the full vocabulary they are the target's own probabilities.
    """
    shape = (1, 5)
    given = {
        "aux_hidden_states": torch.zeros(*shape, 96),
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "loss_mask": torch.ones(shape),
        "position_mask": torch.ones(shape),
    }
    reduced = build_draft("eagle3", dataset, head)
    whole = build_draft("eagle3", dataset, head, draft_vocab_size=0)
    uniform = torch.full((*shape, 64), 1 / 64)
    eagle3_loss(whole, target_probs=uniform, **given)
    some = torch.full((*shape, 40), 1 / 40)
    with pytest.raises(DraftError, match="need target_mass"):
        eagle3_loss(reduced, target_probs=some, **given)
    eagle3_loss(reduced, target_probs=some, target_mass=torch.ones(shape), **given)


# --- serving -------------------------------------------------------------------------------------
