"""Draft trees: how they grow, what the target sees of them, and what decoding with them gives."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_data.shards.errors import ConfigError, TargetError
from spec_train.decoding.chains import Generation, Request, decode_plain, decode_speculative
from spec_train.decoding.trees import (
    EMPTY,
    ROOT,
    DraftTree,
    TreeDrafter,
    TreeMasks,
    TreeSession,
    TreeShape,
    accepted_path,
    decode_tree,
    tree_mask,
)
from spec_train.drafts.drafting import ChainDrafter, KVCache
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Greedy, Sampled, make_sampler
from tests.families import FAMILIES, VOCAB, WINDOW, tiny_model
from tests.marks import long_but
from tests.spec_train.decoding.test_chains import (
    COLUMNS,
    DECODED,
    FORWARD,
    check_counts,
    prompt_of,
    states,
)
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import (
    LIMIT,
    config_of,
    decode_without_ties,
    draft_for,
    run_eval,
    teach,
)
from tests.tolerance import close, network, same_but_for_a_tie, tolerance

target, prompts = evaluate_tools.target, evaluate_tools.prompts
trained, workplace = evaluate_tools.trained, evaluate_tools.workplace
Path = tuple[int, ...]

#        0        1
#      2   3      4
#      5
TREE = DraftTree([1, 2, 0, 2, 1, 1], [ROOT, ROOT, 0, 0, 1, 2])

# --- growing -------------------------------------------------------------------------------------


def slow_tree(
    after: Callable[[Path], dict[int, float]], depth: int, shape: TreeShape
) -> tuple[set[Path], dict[Path, float]]:
    """Compute every path of a tree from the start, one by one, with all scores.

    `after` returns the log-probability of each token after a path.
    """
    found: dict[Path, float] = {}
    frontier: list[Path] = [()]
    for _ in range(depth):
        level: dict[Path, float] = {}
        for path in frontier:
            ranked = sorted(after(path).items(), key=lambda item: -item[1])[: shape.topk]
            for token, score in ranked:
                level[(*path, token)] = score + found.get(path, 0.0)
        found |= level
        frontier = sorted(level, key=lambda path: -level[path])[: shape.topk]
    return set(sorted(found, key=lambda path: -found[path])[: shape.nodes]), found


def following(
    chain: ChainDrafter, known: list[int], states: Tensor, path: Path
) -> dict[int, float]:
    """Return the log-probability of each token after a path, with fresh caches."""
    draft: Any = chain.draft
    caches = [KVCache() for _ in chain.caches]
    position = torch.arange(len(known))[None]
    state = draft.step(torch.tensor([known]), draft.project(states), position, caches)[:, -1:]
    for i, token in enumerate(path):
        place = torch.tensor([[len(known) + i]])
        state = draft.step(torch.tensor([[token]]), state, place, caches)
    scores = torch.log_softmax(draft.logits(state)[0, 0].float(), -1)
    return dict(zip(draft.draft_ids.tolist(), scores.tolist(), strict=True))


def paths(tree: DraftTree) -> list[Path]:
    found: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((() if parent == ROOT else found[parent]) + (token,))
    return found


def check_likeliest(tree: DraftTree, wanted: set[Path], scores: dict[Path, float], layers: int):
    """A tree has the wanted paths, or in their place one as likely as the last."""
    grown = set(paths(tree))
    assert len(grown) == len(tree.tokens) == len(wanted)
    last = min((scores[path] for path in wanted), default=0.0)
    for path in grown - wanted:
        assert last - scores[path] < tolerance(torch.float32, network(layers)) * abs(last)


@pytest.mark.parametrize("shape", [(12, 3), (1, 4), (200, 2)])
@pytest.mark.parametrize("kind", ["eagle", "two layers", "eagle3", "eagle3 of few tokens"])
@torch.no_grad()
def test_a_tree_holds_the_likeliest_nodes(target, trained, kind: str, shape) -> None:
    head = TargetHead.from_model(target)
    layers = 2 if kind == "two layers" else 1
    if kind == "eagle3":
        draft = trained
    elif kind == "eagle3 of few tokens":
        draft = draft_for("eagle3", target, draft_vocab=7, ttt_steps=4)
    else:
        draft = draft_for("eagle", target, depth=4, num_layers=layers)
    size = TreeShape(nodes=shape[0], topk=shape[1])
    drafter = TreeDrafter.of(draft, head, size)
    generator = torch.Generator().manual_seed(0)
    width = 32 * len(draft.state_columns)
    states = torch.randn(1, 8, width, generator=generator)
    known = torch.randint(64, (8,), generator=generator).tolist()
    for stop, depth in ((5, 4), (8, 3)):  # the second call goes on from the first
        start = 0 if stop == 5 else 5
        tree = drafter.propose(known[start:stop], states[:, start:stop], depth)
        after = functools.partial(following, draft.drafter(head), known[:stop], states[:, :stop])
        wanted, scores = slow_tree(after, depth, size)
        check_likeliest(tree, wanted, scores, depth)
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert max(tree.depths) <= depth
    assert drafter.passes == 4 + 3


class CertainDraft:
    """Certain of one token after each, so that a path is exactly as likely as its parent."""

    draft_ids = torch.arange(20)

    def project(self, aux: Tensor) -> Tensor:
        return aux

    def step(self, token_ids, carried, position_ids, caches, seen=None) -> Tensor:
        caches[0].append(*torch.zeros(2, 1, 1, token_ids.shape[1], 1))
        return token_ids[..., None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot((hidden[..., 0].long() + 1) % 20, 20) * 1000.0


@pytest.mark.parametrize("nodes", [1, 3, 6, 20, 60])
def test_of_equally_likely_nodes_parents_are_kept_first(nodes: int) -> None:
    drafter = TreeDrafter(ChainDrafter(CertainDraft(), 20), TreeShape(nodes=nodes, topk=6))
    tree = drafter.propose([4, 7], torch.zeros(1, 2, 1), 6)
    assert len(tree.tokens) == nodes
    assert all(ROOT <= parent < node for node, parent in enumerate(tree.parents))
    certain = [tuple(range(8, 8 + length)) for length in range(1, 7)]  # one path, as likely as 1
    assert set(paths(tree)) >= set(certain[:nodes])


def test_drafts_that_cannot_grow_trees_are_refused(target) -> None:
    class Parallel:
        name = "parallel"

        def drafter(self, head: Any) -> object:
            return object()

    with pytest.raises(ConfigError, match=r"--tree-tokens: a parallel draft cannot grow trees"):
        TreeDrafter.of(Parallel(), TargetHead.from_model(target), TreeShape(nodes=8, topk=2))  # type: ignore[arg-type]


# --- keeping -------------------------------------------------------------------------------------


def logits_of(best: list[int], vocab: int = 3) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(best), vocab).float()


@pytest.mark.parametrize(
    ("best", "path", "chosen", "tried"),
    [
        ([0, 0, 0, 0, 0, 0, 0], [], 0, 1),
        ([1, 1, 0, 0, 0, 0, 0], [0], 1, 2),
        ([1, 2, 0, 0, 0, 0, 0], [0, 3], 0, 2),  # node 3 has no children
        ([1, 0, 0, 1, 0, 0, 2], [0, 2, 5], 2, 3),
        ([2, 0, 1, 0, 0, 0, 0], [1, 4], 0, 2),
    ],
)
def test_greedy_follows_the_targets_choices(best, path, chosen: int, tried: int) -> None:
    found = accepted_path(TREE, logits_of(best), Greedy())
    assert (found.nodes, found.chosen, found.tried) == (path, chosen, tried)


class _Given(Sampled):
    """Uniform numbers from a list."""

    def __init__(self, numbers: tuple[float, ...]) -> None:
        super().__init__(1.0, 0)
        self._numbers = list(numbers)

    def _uniforms(self, count: int) -> list[float]:
        return [self._numbers.pop(0) for _ in range(count)]


def multi_round(p: list[float], candidates: list[int]) -> tuple[dict[int, float], list[float]]:
    """EAGLE-2's rule at one node: probability of each candidate, and of what replaces them."""
    left, reach, accepted = list(p), 1.0, {}
    for token in candidates:
        accepted[token] = reach * left[token]
        reach *= 1 - left[token]
        left[token] = 0.0
        total = sum(left)
        left = [x / total for x in left] if total else left
    return accepted, [reach * x for x in left]


def test_sampling_has_the_targets_distribution_exactly() -> None:
    """Enumerated over a grid of uniform numbers that weighs every outcome exactly."""
    twelfths = [[6, 3, 3], [1, 2, 9], [4, 4, 4], [12, 0, 0], [3, 6, 3], [5, 5, 2], [0, 0, 12]]
    p = torch.tensor(twelfths, dtype=torch.float64) / 12
    logits = p.log()
    grid = [(i + 0.5) / 12 for i in range(12)]
    seen = torch.zeros(3, 4, 4, 4, dtype=torch.float64)  # 3: not emitted in this round
    arrived = torch.zeros(6, dtype=torch.float64)
    pending: list[tuple[float, ...]] = [()]
    while pending:
        numbers = pending.pop()
        try:
            found = accepted_path(TREE, logits, _Given(numbers))
        except IndexError:  # this path reads one more
            assert len(numbers) < 4
            pending += [(*numbers, u) for u in grid]
            continue
        out = [*(TREE.tokens[i] for i in found.nodes), found.chosen, 3, 3, 3][:4]
        seen[tuple(out)] += 1 / 12 ** len(numbers)
        arrived[found.nodes] += 1 / 12 ** len(numbers)
    terms = 12**8  # equal terms round in equal ways: 12**4 roundings add up, without a root
    close(seen.sum((1, 2, 3)), p[0], terms=terms)
    rows = {0: p[1 + 0], 1: p[1 + 1]}  # after the two children of the root
    for node, after in rows.items():
        second = seen[TREE.tokens[node], :3].sum((1, 2))
        close(second / second.sum(), after, terms=terms)
    third = seen[1, 0, :3].sum(-1)  # after node 2, itself a child of node 0
    close(third / third.sum(), p[3], terms=terms)
    for node, children in ((ROOT, [0, 1]), (0, [2, 3]), (1, [4]), (2, [5])):
        reached = 1.0 if node == ROOT else float(arrived[node])
        accepted, _ = multi_round(p[node + 1].tolist(), [TREE.tokens[c] for c in children])
        for child in children:
            wanted = reached * accepted[TREE.tokens[child]]
            close(float(arrived[child]), wanted, terms=terms, magnitude=reached)
    accepted, rest = multi_round(p[0].tolist(), [1, 2])  # and that rule is lossless itself
    both = [rest[t] + accepted.get(t, 0.0) for t in range(3)]
    close(both, p[0].tolist(), terms=8)


# --- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [TREE, EMPTY, DraftTree([3, 4, 5], [ROOT, 0, 1])])
def test_a_row_sees_the_past_and_its_own_path_within_the_window(tree) -> None:
    n = len(tree.tokens)

    def path(row: int) -> list[int]:  # rows from a node up to the root
        out = [row]
        while out[-1] != 0:
            out.append(tree.parents[out[-1] - 1] + 1)
        return out

    for cached, window in itertools.product((0, 1, 5), (None, 1, 3, 50)):
        found = tree_mask(tree, cached, window)
        assert found.shape == (1 + n, cached + 1 + n)
        for row, key in itertools.product(range(1 + n), range(cached + 1 + n)):
            position = cached + len(path(row)) - 1
            if key < cached:
                place, visible = key, True
            else:
                place, visible = cached + len(path(key - cached)) - 1, key - cached in path(row)
            near = window is None or position - place < window
            assert bool(found[row, key]) == (visible and near), (cached, window, row, key)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_branch_is_computed_as_if_it_were_alone(family: str) -> None:
    """Far beyond the windows of the sliding families, with cached tokens of every number."""
    model = tiny_model(family)
    masks = TreeMasks(model)
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randint(VOCAB, (30,), generator=generator).tolist()
    for cached in (0, 7, 21):
        from_cache = _logits(model, sequence[: cached + 1], TREE, masks)
        for row, seen in enumerate(TREE.ancestry().tolist()):
            nodes = [t for t, on in zip(TREE.tokens, seen[1:], strict=True) if on]
            ids = torch.tensor([[*sequence[: cached + 1], *nodes]])
            alone = model(input_ids=ids, use_cache=False).logits[0, -1]
            close(from_cache[row], alone, terms=network(6))


def _logits(model: Any, sequence: list[int], tree: DraftTree, masks: TreeMasks) -> Tensor:
    session = TreeSession(model, masks)
    if len(sequence) > 1:
        session.forward(sequence[:-1])
    return session.verify(sequence[-1], tree)[0]


def test_models_that_ignore_tree_masks_are_refused(monkeypatch) -> None:
    model = tiny_model("llama")
    original = type(model).forward

    def deaf(self, *arguments, attention_mask=None, **options):
        return original(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", deaf)
        with pytest.raises(TargetError, match="ignores or misreads tree masks"):
            TreeMasks(model)
    TreeMasks(model)
    model.config.layer_types = ["chunked_attention"] * 6
    with pytest.raises(TargetError, match="in every known form"):
        TreeMasks(model)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(TargetError, match="flash_attention_2"):
        TreeMasks(model)


# --- decoding ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("family", DECODED)
def test_greedy_is_plain_greedy_with_branches_and_paths_of_every_length(family: str) -> None:
    """Prompt and response pass the window of the sliding families several times over."""
    model = tiny_model(family)
    masks = TreeMasks(model)
    prompt = prompt_of(2 * WINDOW + 3, seed=7)
    plain = decode_without_ties(model, prompt, 48)
    assert plain is not None
    script = [*prompt, *plain]
    aux = states(model, script)
    lengths, branchy = set(), set()
    for seed in range(4):
        drafter = ScriptedTrees(script, aux, seed)
        got = decode_tree(model, masks, drafter, COLUMNS, Request(prompt, Greedy(), 48), 4)  # type: ignore[arg-type]
        assert got.tokens == plain
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


@pytest.mark.long
def test_a_tree_of_one_branch_is_the_chain(target, prompts, trained) -> None:
    draft = trained
    trees, lines = [], []
    for prompt in prompts[6:12]:
        tree, line = grow(target, draft, prompt, nodes=4, topk=1), chain(target, draft, prompt)
        assert tree.tokens == line.tokens
        trees.append((tree.steps, tree.draft_passes))
        lines.append((line.steps, line.draft_passes))
    same_but_for_a_tie(trees, lines)


@pytest.fixture(scope="module")
def plain_tokens(target: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What the target says to every second prompt."""
    requests = [Request(prompt, Greedy(), LIMIT) for prompt in prompts[::2]]
    return [decode_plain(target, request).tokens for request in requests]


@pytest.mark.parametrize("kind", long_but(["eagle3"], ["eagle", "eagle3"]))
def test_trees_are_lossless_and_accept_more_than_chains(
    target, prompts, plain_tokens, trained, trained_eagle, kind
) -> None:
    draft = trained if kind == "eagle3" else trained_eagle
    lengths = []
    for decode in (chain, grow):
        got = [decode(target, draft, prompt) for prompt in prompts[::2]]
        for plain, generation in zip(plain_tokens, got, strict=True):
            assert generation.tokens == plain
            check_counts(generation, 4, LIMIT, decode is grow)
        rounds = [r for generation in got for r in generation.steps]
        lengths.append(sum(r.emitted for r in rounds) / len(rounds))
    assert lengths[1] > lengths[0] + 0.1 > 1.2, lengths


@pytest.mark.parametrize("temperature", [pytest.param(0.5, marks=pytest.mark.long), 1.5])
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


@pytest.mark.long
def test_eval_decodes_with_trees(workplace, capsys) -> None:
    with_chains, report = (run_eval(config_of(workplace, tree_tokens=n)) for n in (0, 20))
    shown = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert report["identical"] + report["ties"] == report["responses"] == 8
    assert report["ties"] <= 1 and report["different"] == []
    assert report["acceptance_length"] > with_chains["acceptance_length"]
    passes, rounds, drafted = (report[name] for name in ("draft_passes", "rounds", "drafted"))
    assert passes <= 4 * rounds < drafted <= 20 * rounds
    assert "4 drafted each" in shown and "trees of 20 drafted tokens, depth 4" in shown
