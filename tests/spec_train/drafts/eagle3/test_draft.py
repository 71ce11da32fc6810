"""The EAGLE-3 draft: batches against plain tensors, training against serving.

The loss itself is compared with slow loops in `test_reference`.
"""

from typing import Any

import pytest
import torch

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import shift_left
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts.eagle3.draft import Unroll, eagle3_loss
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts.eagle3 import tools as eagle3_tools
from tests.spec_train.drafts.eagle3.tools import build, packed
from tests.tolerance import close, network, same_choice

dataset, head = eagle3_tools.dataset, eagle3_tools.head

FORWARD = {"terms": network(4), "dtype": torch.float32}  # four steps; sums are kept in float64


@pytest.mark.parametrize(
    "wrong",
    [
        {"logits": None},
        {"slot_mask": torch.ones(1, 5)},
        {"final_hidden": torch.zeros(1, 5, 32)},
        {"logits": None, "final_hidden": torch.zeros(1, 5, 32)},
        {"logits": None, "target_probs": torch.zeros(1, 5, 40)},
        {"kind": "mse"},
    ],
)
def test_contradictory_arguments_are_refused(
    dataset: HiddenStatesDataset, head: TargetHead, wrong: dict[str, Any]
) -> None:
    good = {
        "aux_hidden_states": torch.zeros(1, 5, 96),
        "input_ids": torch.zeros(1, 5, dtype=torch.long),
        "loss_mask": torch.ones(1, 5),
        "logits": torch.zeros(1, 5, 64),
    }
    draft = build(dataset, head)
    eagle3_loss(draft, **good)
    with pytest.raises(DraftError):
        eagle3_loss(draft, **good | wrong)


def test_renormalised_probabilities_alone_are_refused_for_a_reduced_vocabulary(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
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
    reduced, whole = build(dataset, head), build(dataset, head, draft_vocab_size=0)
    uniform = torch.full((*shape, 64), 1 / 64)
    eagle3_loss(whole, target_probs=uniform, **given)
    some = torch.full((*shape, 40), 1 / 40)
    with pytest.raises(DraftError, match="need target_mass"):
        eagle3_loss(reduced, target_probs=some, **given)
    eagle3_loss(reduced, target_probs=some, target_mass=torch.ones(shape), **given)


# --- serving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("backend", ["dense", "merged"])
@torch.no_grad()
def test_serving_drafts_what_the_unroll_computes(
    dataset: HiddenStatesDataset, head: TargetHead, norm_output: bool, backend: str
) -> None:
    """A decode loop with a KV cache, document by document, equals chains inside packs."""
    draft, depth = build(dataset, head, norm_output=norm_output), 4
    draft.use_attention(backend)
    batch = packed(dataset)
    chains = draft.chains(batch, head, depth)
    known = shift_left(batch.input_ids, batch.document_ids)
    every = torch.arange(known.shape[1]).expand_as(known)
    aux = batch.aux(draft.config.layers)
    unroll = Unroll(draft, aux, known, batch.document_ids, batch.position_ids, every)
    states = [unroll.advance(known)]
    states += [unroll.advance(chains[..., s]) for s in range(depth - 1)]
    logits = torch.stack([draft.logits(state) for state in states], dim=2)  # [B, T, S, Vd]
    for b in range(len(known)):
        for d in range(int(batch.document_ids[b].max()) + 1):
            slots = (batch.document_ids[b] == d).nonzero().squeeze(1)[:-1]
            cache, features = draft.new_caches(), draft.project(aux[b : b + 1, slots])
            for t, slot in enumerate(slots.tolist()):
                token, carried = known[b, slot].view(1, 1), features[:, t : t + 1]
                for s in range(depth):
                    carried = draft.step(token, carried, torch.tensor([[t + s]]), cache)
                    served = draft.logits(carried)[0, 0]
                    close(served, logits[b, slot, s], **FORWARD)
                    token = chains[b, slot, s].view(1, 1)
                    choice = (draft.draft_ids == token[0]).nonzero()[0, 0]
                    same_choice(served, choice, **FORWARD)
                for layer in cache:
                    layer.crop(t + 1)
                assert cache[0].length == t + 1
