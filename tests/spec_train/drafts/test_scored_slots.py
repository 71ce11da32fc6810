"""Drafts that no figure counts are left out of simulated evaluation; the figures stay the same.

The documents are made from the draft's own chains, so that some chains are accepted for several
tokens, some are censored, and most end early.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_data.shards.batch import DraftBatch
from spec_train.drafts.slots import NOT_DRAFTED
from spec_train.simulation.simulated_decoding import BY_DEPTH, judge_chains
from tests.spec_train.drafts.test_windows import DEPTH, DRAFTS_OF, MIXED, make
from tests.spec_train.evaluation import tools
from tests.spec_train.evaluation.tools import VOCAB, head_of
from tests.spec_train.simulated import simulate

target = tools.target
LENGTHS = ((14, 9), (20, 3))
"""Tokens of the documents of two packs."""


def random_batch(draft: Any, head: Any, generator: torch.Generator) -> DraftBatch:
    """Two packs of random documents and states, of which later parts are the draft's chains."""
    rows, width = len(LENGTHS), sum(LENGTHS[0])
    documents = torch.zeros(rows, width, dtype=torch.long)
    positions = torch.zeros_like(documents)
    for row, lengths in enumerate(LENGTHS):
        first = lengths[0]
        documents[row, first:] = 1
        positions[row] = torch.cat([torch.arange(n) for n in lengths])
    ids = torch.randint(8, VOCAB, (rows, width), generator=generator)
    size = draft.config.target_hidden_size
    hidden = {
        name: torch.randn(rows, width, size, generator=generator, dtype=torch.float64)
        for name in draft.state_columns
    }
    mask = torch.rand(rows, width, generator=generator) < 0.9
    batch = DraftBatch(
        input_ids=ids,
        loss_mask=mask,
        target_argmax=torch.randint(8, VOCAB, (rows, width), generator=generator),
        position_ids=positions,
        document_ids=documents,
        hidden=hidden,
        rows=[[0, 1], [2, 3]],
    )
    return planted(draft, head, batch, generator)


def planted(draft: Any, head: Any, batch: DraftBatch, generator: torch.Generator) -> DraftBatch:
    """Continue the documents with chains of the draft, of random lengths, from left to right."""
    ids, choice = batch.input_ids.clone(), batch.target_argmax.clone()
    slot = 0
    while slot + 2 < ids.shape[1]:
        chains = draft.chains(replace(batch, input_ids=ids), head, DEPTH)  # [B, T, DEPTH]
        for row in range(len(ids)):
            accepted = int(torch.randint(0, DEPTH + 1, (1,), generator=generator))
            for d in range(min(accepted, ids.shape[1] - slot - 2)):
                choice[row, slot + 1 + d] = chains[row, slot, d]
                if torch.rand(1, generator=generator) < 0.85:  # else the document differs
                    ids[row, slot + 2 + d] = chains[row, slot, d]
        slot += 3
    return replace(batch, input_ids=ids, target_argmax=choice)


def counted_drafts(batch: DraftBatch, chains: Tensor) -> Tensor:
    """Which drafts count, bool [B, T, DEPTH], by the loops of the evaluation."""
    found = torch.zeros(chains.shape, dtype=torch.bool)
    arrays = batch.input_ids, batch.target_argmax, batch.loss_mask
    for row in range(len(chains)):
        for document in (0, 1):
            own = batch.document_ids[row] == document
            parts = (values[row, own].numpy() for values in (chains, *arrays))
            found[row, own] = torch.from_numpy(judge_chains(*parts).at_risk)
    return found


@pytest.mark.parametrize("types", ["auto", MIXED])
@pytest.mark.parametrize("kind", DRAFTS_OF)
def test_the_figures_are_those_of_all_drafts(kind: str, types: str, target: Any) -> None:
    window = {} if types == "auto" else {"sliding_window": 4, "layer_types": types}
    draft, head = make(kind, target, **window), head_of(target)
    left_out = 0
    with torch.no_grad():
        for seed in range(2):
            batch = random_batch(draft, head, torch.Generator().manual_seed(seed))
            every = draft.chains(batch, head, DEPTH)
            some = draft.chains(batch, head, DEPTH, scored_only=True)
            counts = counted_drafts(batch, every)
            assert int(counts[..., 1:].sum()) > 3, "no chain goes on: nothing is tested"
            assert torch.equal(some[counts], every[counts])
            left_out += int((some == NOT_DRAFTED).sum())
            assert simulate(batch, every).tolist() == simulate(batch, some).tolist()
    assert left_out > every.numel() / 4


@pytest.mark.parametrize("kind", DRAFTS_OF)
def test_nothing_that_counts_is_no_error(kind: str, target: Any) -> None:
    draft, head = make(kind, target), head_of(target)
    with torch.no_grad():
        batch = random_batch(draft, head, torch.Generator().manual_seed(0))
        wrong = replace(batch, target_argmax=torch.full_like(batch.input_ids, NOT_DRAFTED))
        none = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
        for case in (wrong, none):
            chains = draft.chains(case, head, DEPTH, scored_only=True)
            assert not simulate(case, chains)[BY_DEPTH + DEPTH : BY_DEPTH + 2 * DEPTH].any()
