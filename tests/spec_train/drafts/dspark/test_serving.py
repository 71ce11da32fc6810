"""Block drafts in decoding: logits equal those of training, output equals the target's own."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_train.decoding.chains import Request, decode_plain, decode_speculative
from spec_train.drafts.dspark.draft import BlockDrafter, DSparkDraft
from spec_train.drafts.slots import NOT_DRAFTED
from spec_train.losses.sampling import Greedy, Sampled
from spec_train.simulation.simulated_decoding import EMITTED, STEPS, no_counts
from tests.spec_train.drafts.any_draft import draft_for
from tests.spec_train.drafts.dspark.cases import (
    Case,
    make_documents,
    make_draft,
    make_head,
    reference_config,
    reference_state,
)
from tests.spec_train.drafts.dspark.reference import block_logits
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import (
    COLUMNS,
    LIMIT,
    STOP,
    VOCAB,
    batch_of,
    head_of,
    respond,
)
from tests.spec_train.simulated import length, simulate
from tests.tolerance import close, network, same_but_for_a_tie

target, prompts = evaluate_tools.target, evaluate_tools.prompts

CASES = (
    Case(),
    Case(kind="gated", block_size=7, draft_layers=1),
    Case(kind="rnn", reduced=True),
    Case(kind="rnn", layout="mask"),
    Case(kind="none"),
    Case(dflash=True, layout="mask", block_size=6),
    Case(dflash=True, layout="anchor"),
    Case(window=4),
    Case(window=5, block_size=5, layout="mask", types="sliding_attention,full_attention"),
    Case(window=6, non_causal=True, dflash=True, layout="mask"),
)


class Forced:
    """A sampler that drafts given tokens and records the logits that it receives."""

    def __init__(self, tokens: Iterator[int]) -> None:
        self.tokens, self.seen = tokens, []

    def draft(self, logits: Tensor, draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, None]:
        self.seen.append(logits)
        return torch.tensor(next(self.tokens)), None


@pytest.mark.parametrize("pieces", [[4, 1, 3, 2], [10]], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoding_has_the_logits_of_training_at_every_slot(case: Case, pieces: list[int]) -> None:
    """With caches, for verified positions in chunks of any size; the reference is training's."""
    draft, head = make_draft(case), make_head()
    document = make_documents(case, draft, [[1] * 20])[0]
    config, state = reference_config(case), reference_state(draft)
    drafter, start = BlockDrafter(draft, head, 0.0), 0
    for rounds, piece in enumerate(pieces, start=1):
        anchor = start + piece
        sampler = Forced(iter(document.x[anchor + 1 :]))
        drafted, _ = drafter.propose(
            document.x[start + 1 : anchor + 1],
            document.aux[None, start:anchor],
            100,
            sampler,  # type: ignore[arg-type]
        )
        start = anchor
        assert drafted.tolist() == list(document.x[anchor + 1 : anchor + 1 + config.depth])
        with torch.no_grad():
            expected, _ = block_logits(state, head.head_weight, config, document, anchor)
        close(torch.stack(sampler.seen), torch.stack(expected), terms=network(2))
        assert drafter.passes == rounds


SMALL: dict[str, Any] = {"num_layers": 2, "block_size": 5, "markov_rank": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "rnn": {"markov_head_type": "rnn", "layout": "mask"},
    "small": {"draft_vocab": 24},
}


def teach(draft: DSparkDraft, model: Any, prompts: list[list[int]]) -> DSparkDraft:
    """Train a few dozen steps on the target's own responses: the draft is sometimes right."""
    head, batch = head_of(model), batch_of(model, [respond(model, p) for p in prompts[:8]])
    optimizer = torch.optim.AdamW(draft.train().trainable_parameters(), lr=6e-3)
    for _ in range(30):
        optimizer.zero_grad()
        draft.loss(batch, head, draft.slot_counts(batch)).loss.backward()
        optimizer.step()
    return draft.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def drafts(target, prompts) -> dict[str, DSparkDraft]:
    return {
        name: teach(draft_for("dspark", target, **SMALL | options), target, prompts)
        for name, options in OPTIONS.items()
    }


def median_confidence(draft: DSparkDraft, model: Any, prompts: list[list[int]]) -> float:
    """Return a threshold that ends some blocks early, but not all."""
    batch = batch_of(model, [respond(model, p) for p in prompts[:4]])
    sums = draft.loss(batch, head_of(model), None).sums
    return float(sums["confidence_sum"].sum() / sums["confidence_number"].sum())


@pytest.mark.parametrize("name", OPTIONS)
def test_blocks_cut_by_their_confidence_lose_nothing_and_are_simulated_alike(
    name, target, prompts, drafts
) -> None:
    draft = drafts[name]
    draft.stop_below(median_confidence(draft, target, prompts))
    head, depth = head_of(target), draft.depth
    total, simulated, real, drafted = no_counts(depth), [], [], set()
    passes, cut = 0, False
    for prompt in prompts[:6]:
        request = Request(prompt, Greedy(), LIMIT, {STOP})
        got = decode_speculative(target, draft.drafter(head), COLUMNS, request, depth)
        response = got.tokens
        document = prompt + response, [0] * len(prompt) + [1] * len(response)
        assert document == respond(target, prompt)
        batch = batch_of(target, [document])
        chains = draft.chains(batch, head, depth)
        sums = simulate(batch, chains)
        total += sums
        simulated.append((sums[EMITTED], sums[STEPS]))
        real.append((sum(r.emitted for r in got.steps), len(got.steps)))
        drafted |= {r.drafted for r in got.steps}
        assert got.draft_passes <= len(got.steps)
        passes += got.draft_passes - sum(r.drafted > 0 for r in got.steps)
        cut |= bool((chains == NOT_DRAFTED).any())
    draft.stop_below(0.0)
    assert cut and passes >= 0  # a round may also end before its first draft
    same_but_for_a_tie(simulated, real)
    assert length(total) == total[EMITTED] / total[STEPS]
    assert length(total) > 1.1, "a draft that is never right proves little"
    assert max(drafted) == depth
    assert len(drafted - {0}) > 2


@pytest.mark.parametrize("name", OPTIONS)
def test_the_first_draft_of_a_block_can_be_dropped_too(name, target, prompts, drafts) -> None:
    draft, head = drafts[name], head_of(target)
    draft.stop_below(1.0)  # no confidence reaches it
    request = Request(prompts[0], Greedy(), LIMIT, {STOP})
    got = decode_speculative(target, draft.drafter(head), COLUMNS, request, draft.depth)
    chains = draft.chains(batch_of(target, [respond(target, prompts[0])]), head, draft.depth)
    draft.stop_below(0.0)
    assert got.tokens == decode_plain(target, request).tokens
    assert got.steps and all((r.drafted, r.emitted) == (0, 1) for r in got.steps)
    assert bool((chains == NOT_DRAFTED).all())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_figure_with_a_threshold_is_that_of_blocks_cut_by_hand(name, target, prompts, drafts):
    """The confidence depends on the previous token alone, so plain loops can cut the blocks.

    The planted failure: a block that always keeps its first draft has another, longer figure.
    """
    draft, head = copy.deepcopy(drafts[name]), head_of(target)
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
    threshold, target, prompts, drafts
) -> None:
    draft = drafts["small"]
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
