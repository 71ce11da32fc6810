"""Block drafts cut by their confidence: nothing is lost, and data predicts the rounds."""

import copy
from typing import Any

import pytest
import torch

from spec_train.decoding.chains import Request, decode_plain, decode_speculative
from spec_train.drafts.block.draft import BlockDrafter
from spec_train.drafts.slots import NOT_DRAFTED
from spec_train.losses.sampling import Greedy, Sampled
from spec_train.simulation.simulated_decoding import no_counts
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import (
    COLUMNS,
    LIMIT,
    STOP,
    VOCAB,
    batch_of,
    draft_for,
    head_of,
    respond,
    teach,
)
from tests.spec_train.simulated import length, simulate

target, prompts = evaluate_tools.target, evaluate_tools.prompts


@pytest.fixture(scope="module")
def draft(target: Any, prompts: list[list[int]]) -> Any:
    options = {"num_layers": 2, "block_size": 5, "markov_rank": 8, "draft_vocab": 24}
    draft = teach(draft_for("dspark", target, **options), target, prompts[:8], steps=30)
    return draft.requires_grad_(False)


def test_the_first_draft_of_a_block_can_be_dropped_too(target, prompts, draft) -> None:
    head = head_of(target)
    draft.stop_below(1.0)  # no confidence reaches it
    request = Request(prompts[0], Greedy(), LIMIT, {STOP})
    got = decode_speculative(target, draft.drafter(head), COLUMNS, request, draft.depth)
    chains = draft.chains(batch_of(target, [respond(target, prompts[0])]), head, draft.depth)
    draft.stop_below(0.0)
    assert got.tokens == decode_plain(target, request).tokens
    assert got.steps and all((r.drafted, r.emitted) == (0, 1) for r in got.steps)
    assert bool((chains == NOT_DRAFTED).all())


def test_the_figure_with_a_threshold_is_that_of_blocks_cut_by_hand(target, prompts, draft):
    """The confidence depends on the previous token alone, so plain loops can cut the blocks.

    The planted failure: a block that always keeps its first draft has another, longer figure.
    """
    draft, head = copy.deepcopy(draft), head_of(target)
    weight = draft.confidence_head.proj.weight
    rank = draft.config.markov_rank
    weight.zero_()[:, -rank:].normal_(generator=torch.Generator().manual_seed(2))
    table = draft.markov_head.markov_w1.weight @ weight[0, -rank:]  # [V]
    confidence = (table + (draft.confidence_head.proj.bias or 0.0)).sigmoid()
    threshold = float(confidence.median())
    whole = {"cut": no_counts(draft.depth), "first kept": no_counts(draft.depth)}
    simulated, emitted, rounds = no_counts(draft.depth), 0, 0
    for prompt in prompts[:6]:
        batch = batch_of(target, [respond(target, prompt)])
        chains = draft.chains(batch, head, draft.depth)
        ids = batch.input_ids[0].tolist()
        for rule, sums in whole.items():
            expected = chains.clone()
            for t in range(len(ids) - 1):
                for d in range(draft.depth):
                    previous = ids[t + 1] if d == 0 else int(chains[0, t, d - 1])
                    if float(confidence[previous]) < threshold and (d or rule == "cut"):
                        expected[0, t, d:] = NOT_DRAFTED
                        break
            sums += simulate(batch, expected)
        draft.stop_below(threshold)
        simulated += simulate(batch, draft.chains(batch, head, draft.depth))
        request = Request(prompt, Greedy(), LIMIT, {STOP})
        got = decode_speculative(target, draft.drafter(head), COLUMNS, request, draft.depth)
        draft.stop_below(0.0)
        emitted += sum(r.emitted for r in got.steps)
        rounds += len(got.steps)
    found = length(simulated)
    by_hand, longer = (length(sums) for sums in whole.values())
    assert found == by_hand == emitted / rounds
    assert longer > found + 0.02


@pytest.mark.parametrize("threshold", [0.0, 0.999999])
def test_a_round_drafts_what_was_asked_for_at_most_and_nothing_below_the_threshold(
    threshold, target, prompts, draft
) -> None:
    states = torch.randn(1, 6, 64)
    found = []
    for count in (1, 2, 5, 50):
        drafter = BlockDrafter(draft, head_of(target), threshold)
        drafted, q = drafter.propose(prompts[0][:6] * 2, states.repeat(1, 2, 1), count, Greedy())
        assert len(q) == len(drafted) == (0 if threshold else min(count, 5))
        found.append(drafted.tolist())
        sampled, q = BlockDrafter(draft, head_of(target), threshold).propose(
            prompts[0][:6], states, count, Sampled(1.0, 0)
        )
        assert len(q) == len(sampled) and all(p.shape == (VOCAB,) for p in q)
        assert bool(q) != bool(threshold)
    assert all(few == found[-1][: len(few)] for few in found)  # wanting more changes none of them
