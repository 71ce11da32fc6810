"""Decoding with draft trees: the target's own output for every draft, and longer acceptance."""

import functools
from typing import Any

import pytest
import torch

from spec_train.decoding.chains import Generation, Request, decode_plain, decode_speculative
from spec_train.decoding.trees import (
    ROOT,
    DraftTree,
    TreeDrafter,
    TreeMasks,
    TreeShape,
    decode_tree,
)
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy, make_sampler
from tests.families import FAMILIES, VOCAB, WINDOW, tiny_model
from tests.spec_train.decoding.test_chains import COLUMNS, FORWARD, check_counts, prompt_of, states
from tests.spec_train.drafts.any_draft import draft_for, teach
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import LIMIT, config_of, decodes_alike_everywhere, run_eval
from tests.tolerance import close, same_but_for_a_tie

target, prompts = evaluate_tools.target, evaluate_tools.prompts
trained, workplace = evaluate_tools.trained, evaluate_tools.workplace


@pytest.fixture(scope="module")
def trained_eagle(target: Any, prompts: list[list[int]]) -> Any:
    draft = draft_for("eagle", target, depth=4)
    return teach(draft, target, prompts[:12], steps=100, lr=5e-3)


class ScriptedTrees:
    """Drafts random trees that contain a random length of `script`, and checks its inputs."""

    def __init__(self, script: list[int], aux: torch.Tensor, seed: int) -> None:
        self.script, self.aux, self.passes, self.rows = script, aux, 0, 0
        self.generator = torch.Generator().manual_seed(seed)
        self.branchy: set[int] = set()

    def _draw(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self.generator))

    def propose(self, tokens: list[int], states: torch.Tensor, depth: int) -> DraftTree:
        positions = range(self.rows, self.rows + len(tokens))
        close(states[0], self.aux[list(positions)], **FORWARD)
        assert tokens == [self.script[p + 1] for p in positions]
        self.rows += len(tokens)
        true = self.script[self.rows + 1 : self.rows + 1 + min(self._draw(6), depth)]
        found: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        at = ROOT
        while true or self._draw(4):  # the true path, its nodes among others
            if true and self._draw(2):
                token, parent = true.pop(0), at
                at = len(found)
            else:
                parent = self._draw(len(found) + 1) - 1
                token = self._draw(VOCAB)
            siblings = [t for t, p in zip(found, parents, strict=True) if p == parent]
            level = 1 if parent == ROOT else depths[parent] + 1
            if token in siblings or level > depth:
                if at == len(found):  # a wrong node took its place: it is the path from now on
                    at = next(
                        i
                        for i, (t, p) in enumerate(zip(found, parents, strict=True))
                        if (t, p) == (token, parent)
                    )
                continue
            found.append(token)
            parents.append(parent)
            depths.append(level)
        self.branchy.add(len(found) - max(depths, default=0))
        return DraftTree(found, parents)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_plain_greedy_with_branches_and_paths_of_every_length(family: str) -> None:
    """Prompt and response pass the window of the sliding families several times over."""
    model = tiny_model(family)
    masks = TreeMasks(model)
    prompt = prompt_of(2 * WINDOW + 3, seed=7)
    assert decodes_alike_everywhere(model, prompt, 48)
    plain = decode_plain(model, Request(prompt, Greedy(), 48))
    script = [*prompt, *plain.tokens]
    aux = states(model, script)
    lengths, branchy = set(), set()
    for seed in range(4):
        drafter = ScriptedTrees(script, aux, seed)
        got = decode_tree(model, masks, drafter, COLUMNS, Request(prompt, Greedy(), 48), 4)  # type: ignore[arg-type]
        assert got.tokens == plain.tokens
        check_counts(got, 4, 48, trees=True)
        lengths |= {r.accepted for r in got.steps}
        branchy |= drafter.branchy
    assert lengths >= {0, 1, 2, 3, 4}
    assert max(branchy) >= 3  # accepted rows were not always the first ones


masks_of = functools.cache(TreeMasks)  # a proof per model is enough


def grow(model: Any, draft: Any, prompt: list[int], nodes: int = 24, topk: int = 4, **changes: Any):
    settings: dict[str, Any] = {"sampler": Greedy(), "limit": LIMIT, "depth": 4} | changes
    shape = TreeShape(nodes=nodes, topk=topk)
    drafter = TreeDrafter.of(draft, TargetHead.from_model(model), shape)
    depth, request = settings.pop("depth"), Request(prompt, **settings)
    return decode_tree(model, masks_of(model), drafter, draft.state_columns, request, depth)


def chain(model: Any, draft: Any, prompt: list[int], depth: int = 4, **changes: Any) -> Generation:
    settings: dict[str, Any] = {"sampler": Greedy(), "limit": LIMIT} | changes
    drafter = draft.drafter(TargetHead.from_model(model))
    columns = draft.state_columns
    return decode_speculative(model, drafter, columns, Request(prompt, **settings), depth)


def test_a_tree_of_one_branch_is_the_chain(target, prompts, trained) -> None:
    draft = trained
    trees, lines = [], []
    for prompt in prompts[6:12]:
        tree, line = grow(target, draft, prompt, nodes=4, topk=1), chain(target, draft, prompt)
        assert tree.tokens == line.tokens
        trees.append((tree.steps, tree.draft_passes))
        lines.append((line.steps, line.draft_passes))
    same_but_for_a_tie(trees, lines)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_trees_are_lossless_and_accept_more_than_chains(
    target, prompts, trained, trained_eagle, kind
) -> None:
    draft = trained if kind == "eagle3" else trained_eagle
    lengths = []
    for decode in (chain, grow):
        got = [decode(target, draft, prompt) for prompt in prompts[::2]]
        for prompt, generation in zip(prompts[::2], got, strict=True):
            assert (
                generation.tokens == decode_plain(target, Request(prompt, Greedy(), LIMIT)).tokens
            )
            check_counts(generation, 4, LIMIT, decode is grow)
        rounds = [r for generation in got for r in generation.steps]
        lengths.append(sum(r.emitted for r in rounds) / len(rounds))
    assert lengths[1] > lengths[0] + 0.1 > 1.2, lengths


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_sampling_is_plain_sampling_with_the_same_seed(
    target, prompts, trained_eagle, temperature: float
) -> None:
    """Token for token: one random number chooses each token, with trees and without."""
    accepted = 0
    for seed, prompt in enumerate(prompts[:6]):
        plain = decode_plain(target, Request(prompt, make_sampler(temperature, seed), LIMIT))
        got = grow(target, trained_eagle, prompt, sampler=make_sampler(temperature, seed))
        assert got.tokens == plain.tokens
        accepted += sum(r.accepted for r in got.steps)
    assert accepted > 10


def test_eval_decodes_with_trees(workplace, capsys) -> None:
    with_chains = run_eval(config_of(workplace))
    chains_shown = capsys.readouterr().out
    config = config_of(workplace, tree_tokens=20)
    report = run_eval(config)
    shown = capsys.readouterr().out
    assert report["identical"] + report["ties"] == report["responses"] == 8
    assert report["ties"] <= 1 and report["different"] == []
    assert report["acceptance_length"] > with_chains["acceptance_length"]
    assert (report["tree_tokens"], report["draft_tokens"]) == (20, 4)
    assert with_chains["tree_tokens"] == 0 and report["options"]["tree_tokens"] == 20
    assert (
        report["draft_passes"] <= 4 * report["rounds"] < report["drafted"] <= 20 * report["rounds"]
    )
    assert "trees of 20 drafted tokens, depth 4" in shown
    assert "4 drafted each" in chains_shown
