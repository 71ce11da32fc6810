"""Every kind of draft in decoding: nothing is lost, and data predicts the rounds."""

from typing import Any

import pytest
import torch

from spec_train.decoding.chains import Request, decode_plain, decode_speculative
from spec_train.losses.sampling import Greedy, make_sampler
from spec_train.simulation.simulated_decoding import EMITTED, STEPS, no_counts
from tests.factory import tiny_llama
from tests.marks import long_but
from tests.spec_train.decoding.test_chains import exact_distribution
from tests.spec_train.evaluation import tools
from tests.spec_train.evaluation.tools import (
    LIMIT,
    STOP,
    batch_of,
    draft_for,
    head_of,
    respond,
    teach,
)
from tests.spec_train.simulated import length, simulate
from tests.tolerance import same_but_for_a_tie

target, prompts = tools.target, tools.prompts

TRAINED: dict[str, dict[str, Any]] = {
    "eagle": {"depth": 4},
    "eagle3": {"ttt_steps": 4},
    "mtp": {"depth": 4},
    "peagle": {"depths": 4, "num_layers": 2},
    "dspark": {"block_size": 5, "markov_rank": 8, "num_layers": 2},
    "dspark small": {"block_size": 5, "markov_rank": 8, "draft_vocab": 24},
    "dspark cut": {"block_size": 5, "markov_rank": 8, "markov_head_type": "rnn", "layout": "mask"},
    "dflash": {"block_size": 5, "num_layers": 2},
    "dflash2": {"block_size": 5, "num_layers": 2, "selector_top_k": 4},
    "lilicorr": {
        **{"block_size": 5, "num_layers": 2, "lilicorr_candidate_topk": 4},
        **{"lilicorr_hidden_size": 8, "lilicorr_num_layers": 1, "lilicorr_num_heads": 2},
    },
    "domino": {"block_size": 5, "num_layers": 2, "gru_hidden_dim": 8},
    "xpress": {"block_size": 5, "num_layers": 2, "xpress_rank": 8},
}
"""Options by name; "cut": a threshold of the confidence ends some blocks early."""


SHORT = ["eagle3", "mtp", "dflash2"]


@pytest.fixture(scope="module", params=long_but(SHORT, TRAINED))
def draft(request: Any, target: Any, prompts: list[list[int]]) -> Any:
    name = request.param
    draft = teach(draft_for(name.split()[0], target, **TRAINED[name]), target, prompts[:6], 28)
    if name.endswith("cut"):
        batch = batch_of(target, [respond(target, p) for p in prompts[:4]])
        sums = draft.loss(batch, head_of(target), None).sums
        mean = sums["confidence_sum"].sum() / sums["confidence_number"].sum()
        draft.stop_below(float(mean))
    return draft.requires_grad_(False)


def test_greedy_decoding_is_the_targets_own_and_simulated_decoding_is_the_same(
    draft: Any, target: Any, prompts: list[list[int]]
) -> None:
    head, depth = head_of(target), draft.depth
    total, simulated, real, lengths, drafted = no_counts(depth), [], [], set(), set()
    cut = getattr(draft, "confidence_threshold", 0.0) > 0
    for prompt in prompts[:6]:
        request = Request(prompt, Greedy(), LIMIT, {STOP})
        drafter = draft.drafter(head)
        got = decode_speculative(target, drafter, draft.state_columns, request, depth)
        document = prompt + got.tokens, [0] * len(prompt) + [1] * len(got.tokens)
        assert document == respond(target, prompt)
        per_round = sum(r.drafted if draft.name.startswith(("eagle", "mtp")) else 1
                        for r in got.steps if r.drafted)  # fmt: skip
        # a block may also end before its first draft
        assert per_round <= got.draft_passes <= (len(got.steps) if cut else per_round)
        batch = batch_of(target, [document])
        sums = simulate(batch, draft.chains(batch, head, depth))
        total += sums
        simulated.append((sums[EMITTED], sums[STEPS]))
        real.append((sum(r.emitted for r in got.steps), len(got.steps)))
        lengths |= {r.accepted for r in got.steps}
        drafted |= {r.drafted for r in got.steps}
    assert len(lengths) >= 3, "rounds of few lengths prove little"
    assert max(drafted) == depth and (len(drafted - {0}) > 2 or not cut)
    same_but_for_a_tie(simulated, real)
    assert length(total) == total[EMITTED] / total[STEPS] > 1.1


def test_packing_changes_no_chain(draft: Any, target: Any, prompts: list[list[int]]) -> None:
    documents, head = [respond(target, p) for p in prompts[:5]], head_of(target)
    together = draft.chains(batch_of(target, documents), head, draft.depth)
    alone = [draft.chains(batch_of(target, [d]), head, draft.depth) for d in documents]
    lengths = [len(ids) for ids, _ in documents]
    # the last slot of a document has no known token
    packed, single = (
        [chain for part in parts for chain in part[0, :-1].tolist()]
        for parts in (together.split(lengths, dim=1), alone)
    )
    same_but_for_a_tie(packed, single)


SAMPLED = {
    "eagle3": {"draft_vocab": 3},
    "mtp": {"depth": 3},
    "peagle": {"depths": 3, "num_layers": 2},
    "dspark": {"block_size": 3, "markov_rank": 4},
    "dspark cut": {"block_size": 3, "markov_rank": 4},
    "dflash2": {"block_size": 4, "selector_top_k": 3},
    "lilicorr": {"block_size": 4, "lilicorr_candidate_topk": 3},
    "domino": {"block_size": 3, "pure_draft_prefix_len": 0},
    "xpress": {"block_size": 4, "xpress_rank": 4},
}


@pytest.mark.parametrize("name", long_but(["eagle3", "dflash2"], SAMPLED))
def test_sampling_has_the_targets_distribution(name):
    """Compare hundreds of short responses with the exact probabilities of all responses."""
    kind, options = name.removesuffix(" cut"), SAMPLED[name]
    torch.manual_seed(0)
    model = tiny_llama(4, layers=3, hidden=16).requires_grad_(False)
    draft = draft_for(kind, model, vocab=4, layers=(0, 1), **options).requires_grad_(False)
    if kind == "dspark":  # drafts that differ from the target's tokens, and are cut by themselves
        for table in (draft.markov_head.markov_w1, draft.markov_head.markov_w2):
            table.weight.normal_(std=1.5)
        draft.confidence_head.proj.weight.zero_()[:, -4:].normal_(std=2.0)
        draft.stop_below(0.5 if name == "dspark cut" else 0.0)
    if kind == "dflash2":  # a path that depends on the tokens before
        for table in draft.candidate_selector.parameters():
            table.normal_(std=1.5)
    if kind == "lilicorr":
        for table in (draft.lilicorr.in_head, draft.lilicorr.out_head):
            table.weight.normal_(std=1.5)
    if kind == "domino":
        for table in (*draft.prefix_gru.parameters(), *draft.embed_proj.parameters()):
            table.normal_(std=1.5)
    if kind == "xpress":
        for table in draft.xpress_head.parameters():
            table.normal_(std=1.0)
    prompt, limit, temperature, samples = [1, 2], 3, 1.5, 300
    exact = exact_distribution(model, prompt, limit, stop=0, temperature=temperature)
    counts, accepted, cut = dict.fromkeys(exact, 0), 0, 0
    head = head_of(model)
    for seed in range(samples):
        request = Request(prompt, make_sampler(temperature, seed), limit, {0})
        got = decode_speculative(model, draft.drafter(head), draft.state_columns, request, 3)
        counts[tuple(got.tokens)] += 1
        accepted += sum(r.accepted for r in got.steps)
        cut += sum(r.drafted == 0 for r in got.steps)
    assert accepted > samples / 20  # the accepting path is tested too
    assert cut > samples / 20 or name != "dspark cut"
    common = [r for r in exact if exact[r] * samples >= 5]
    pairs = [(counts[r], exact[r] * samples) for r in common]
    pairs.append((samples - sum(c for c, _ in pairs), samples - sum(e for _, e in pairs)))
    chi_square = sum((c - e) ** 2 / max(e, 1e-9) for c, e in pairs)
    freedom = len(pairs) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    again = decode_plain(model, Request(prompt, make_sampler(temperature, 0), limit, {0})).tokens
    assert tuple(again) in exact
