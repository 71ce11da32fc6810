"""Trees over block drafts: the likeliest paths of one block, verified in one pass."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_train.decoding.chains import Request, decode_plain
from spec_train.decoding.trees import TreeDrafter, TreeShape
from spec_train.losses.sampling import Greedy, make_sampler
from tests.marks import long_but
from tests.spec_train.decoding.test_chains import check_counts
from tests.spec_train.decoding.test_trees import Path, chain, check_likeliest, grow, slow_tree
from tests.spec_train.drafts.cases import (
    Document,
    case,
    make_documents,
    make_draft,
    make_head,
    reference_config,
    reference_state,
)
from tests.spec_train.drafts.dspark import reference as blocks
from tests.spec_train.evaluation import tools
from tests.spec_train.evaluation.tools import LIMIT, draft_for, teach
from tests.tolerance import same_but_for_a_tie

target, prompts = tools.target, tools.prompts

GROWN: dict[str, Any] = {
    "dflash": case("dflash", layout="mask"),
    "dspark": case("dspark", reduced=True),
    "dspark: gated": case("dspark", markov_head_type="gated", layout="mask"),
    "dspark: rnn": case("dspark", markov_head_type="rnn"),
    "dflash2": case("dflash2"),
    "domino": case("domino"),
    "lilicorr": case("lilicorr"),
    "xpress": case("xpress"),
}


def following(made: Any, draft: Any, document: Document, anchor: int, path: Path) -> Any:
    """Return the log-probability of every token after a path, and the path's confidence.

    The block is computed again for each path, as that of a document whose tokens are the path's.
    """
    config, state = reference_config(made), reference_state(draft)
    continued = replace(document, x=[*document.x[: anchor + 1], *path])
    logits, confidences = blocks.block_logits(state, config, continued, anchor)
    d, ids = len(path), draft.draft_ids.tolist()
    scores = logits[d]
    if config.stage is not None:
        block = config.stage.Block(state, config, continued, anchor)
        ids = block.tokens[d] if made.kind == "lilicorr" else block.candidates(scores)
        scores = block.scores(d, scores, ids)
    log_q = torch.log_softmax(scores, 0).tolist()
    return dict(zip(ids, log_q, strict=True)), float(confidences[d]) if confidences else 1.0


@pytest.mark.parametrize("name", GROWN)
@torch.no_grad()
def test_a_tree_holds_the_likeliest_paths_of_a_block(name: str) -> None:
    made = GROWN[name]
    draft, (document,) = make_draft(made), make_documents(made, [[1] * 12])
    least = 0.0
    if name == "dspark":  # the median confidence ends some paths
        after = following(made, draft, document, 4, ())[0]
        some = [following(made, draft, document, 4, (v,))[1] for v in after]
        draft.stop_below(least := sorted(some)[len(some) // 2])
    shape = TreeShape(nodes=9, topk=3)
    drafter, start, cut = TreeDrafter.of(draft, make_head(made), shape), 0, False
    for anchor in (4, 7):
        known, states = document.x[start + 1 : anchor + 1], document.aux[None, start:anchor]
        tree = drafter.propose(known, states, draft.depth)

        def likely(path: Path, anchor: int = anchor) -> dict[int, float]:
            log_q, confidence = following(made, draft, document, anchor, path)
            return log_q if confidence >= least else {}

        wanted, scores = slow_tree(likely, draft.depth, shape)
        check_likeliest(tree, wanted, scores, 7)
        cut |= len(wanted) < shape.nodes
        start = anchor
    assert drafter.passes == 2
    assert cut == bool(least)


KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 5},
    "dspark": {"block_size": 5, "markov_rank": 8, "markov_head_type": "rnn"},
}


@pytest.fixture(scope="module", params=long_but(["dspark"], KINDS))
def draft(request: Any, target: Any, prompts: list[list[int]]) -> Any:
    made = draft_for(request.param, target, **KINDS[request.param])
    return teach(made, target, prompts[:6], steps=30).requires_grad_(False)


def mean_length(made: Any) -> float:
    steps = [step for generation in made for step in generation.steps]
    return sum(step.emitted for step in steps) / len(steps)


def test_trees_are_lossless_and_accept_more_than_blocks(draft, target, prompts) -> None:
    some = prompts[::3]
    blocks, trees = ([way(target, draft, p) for p in some] for way in (chain, grow))
    for prompt, generation in zip(some, trees, strict=True):
        plain = decode_plain(target, Request(prompt, Greedy(), LIMIT))
        assert generation.tokens == plain.tokens
        check_counts(generation, 4, LIMIT, trees=True)
        assert generation.draft_passes <= len(generation.steps)
    assert mean_length(trees) > mean_length(blocks) > 1.1


@pytest.mark.long
def test_a_tree_of_one_branch_is_the_block(draft, target, prompts) -> None:
    trees, lines = [], []
    for prompt in prompts[6:12]:
        tree, line = grow(target, draft, prompt, nodes=4, topk=1), chain(target, draft, prompt)
        trees.append(tree.steps)
        lines.append(line.steps)
    same_but_for_a_tie(trees, lines)


def test_sampling_is_plain_sampling_with_the_same_seed(draft, target, prompts) -> None:
    accepted = 0
    for seed, prompt in enumerate(prompts[:4]):
        sampler, same = make_sampler(0.8, seed), make_sampler(0.8, seed)
        plain = decode_plain(target, Request(prompt, sampler, LIMIT))
        got = grow(target, draft, prompt, sampler=same)
        assert got.tokens == plain.tokens
        accepted += sum(step.accepted for step in got.steps)
    assert accepted > 4
