"""Speculative decoding with draft trees: one verification forward per tree, with KV caches.

Shares the target's session and the counting with `chains`; a tree with one branch is a chain. After
a verification the target's cache keeps only the positions of the accepted path.

Shapes: n nodes of a tree, V target vocabulary, A captured layers times the target's hidden size.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from spec_data.shards.errors import ConfigError, TargetError, an
from spec_train.decoding.chains import (
    Generation,
    Request,
    TargetSession,
    Verified,
    cache_argument,
    decode_steps,
    decoder_config,
    why_stepwise,
)
from spec_train.drafts import DRAFTS
from spec_train.drafts.block.draft import BlockDrafter
from spec_train.drafts.draft import Draft
from spec_train.drafts.drafting import ChainDrafter
from spec_train.drafts.unroll import AutoregressiveDraft
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Sampler

# -- tree growth -----------------------------------------------------------------------------------
# Dynamic draft trees (EAGLE-2, arXiv 2406.16858): how a tree grows, and which nodes are accepted.
#
# Growing. Each level expands its `topk` likeliest nodes into `topk` children each. The likelihood
# of a node is the product of the draft's probabilities along its path. Of all nodes the `nodes`
# likeliest are kept. A node is never likelier than its parent, so the kept nodes form a tree.
# A draft that reads its own states has a forward per level. A block draft has one in all: its
# second stage says what follows a path, by its own probabilities of the slot's candidates; without
# a stage, each slot's probabilities are the same after every path.
#
# Accepting. Starting at the root, the target's next token is chosen as without a draft (its argmax,
# or a sample of its distribution). The path continues at the child with exactly this token; if
# there is none, the token ends the step. So the output is the target's own for every tree: greedy
# equals plain greedy decoding, and sampling consumes one random number per token like plain
# sampling. The multi-round rejection sampling of EAGLE-2 results in the same: its candidates are
# selected, not sampled, so each is a draft distribution with probability 1: accept x with p(x);
# otherwise remove x from p, normalise, try the next.
#
# Shapes: n nodes, m expanded nodes, k children of each, C tokens that a draft chooses from, V
# target vocabulary.


ROOT = -1  # parent of the first level: the last known token


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Size of a tree: `nodes` in total; `topk` nodes expanded per level, `topk` children each."""

    nodes: int
    topk: int = 10


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens; each parent comes before its children."""

    tokens: list[int]  # target ids [n]
    parents: list[int]  # index of the parent node, or ROOT [n]

    @property
    def depths(self) -> list[int]:
        """Depth of every node [n]; 1 for children of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def ancestry(self) -> Tensor:
        """Return which entries lie on the path from the root to each entry, itself included.

        Returns:
            Bool [1 + n, 1 + n]. Entry 0 is the root, entry i + 1 is node i; [a, b] is true if b is
            on the path to a.
        """
        seen = torch.eye(1 + len(self.tokens), dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            seen[i + 1] |= seen[parent + 1]
        return seen


EMPTY = DraftTree([], [])


@dataclass(frozen=True)
class AcceptedPath:
    """The result of a verification."""

    nodes: list[int]  # accepted ones, from the first level on
    chosen: int  # the target's own token after them
    tried: int  # entries on the path, the root included, that had children


def accepted_path(tree: DraftTree, logits: Tensor, sampler: Sampler) -> AcceptedPath:
    """Follow the target's choices through the tree of n nodes.

    `logits` are the target's [1 + n, V], in its dtype: after the root, then after each node.
    """
    children: dict[int, dict[int, int]] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        children.setdefault(parent, {})[token] = node
    nodes: list[int] = []
    at, tried = ROOT, 0
    while True:
        chosen = sampler.first(logits[at + 1])
        tried += at in children
        following = children.get(at, {}).get(chosen)
        if following is None:
            return AcceptedPath(nodes, chosen, tried)
        nodes.append(following)
        at = following


class TreeDrafter:
    """Drafts trees instead of chains for one sequence."""

    def __init__(self, drafter: ChainDrafter | BlockDrafter, shape: TreeShape) -> None:
        """Draft with a new `drafter`."""
        self._drafter, self._shape = drafter, shape

    @property
    def passes(self) -> int:
        """Forward passes of the draft so far."""
        return self._drafter.passes

    @classmethod
    def of(cls, draft: Draft, head: TargetHead, shape: TreeShape) -> "TreeDrafter":
        """Start drafting one sequence.

        Raises:
            ConfigError: the draft cannot say what follows a token that it has drafted.
        """
        drafter = draft.drafter(head)
        if not isinstance(drafter, ChainDrafter | BlockDrafter):
            ones = (name for name, one in DRAFTS.items() if issubclass(one, AutoregressiveDraft))
            raise ConfigError(
                f"--tree-tokens: {an(draft.name)} draft cannot grow trees; leave it out. Those "
                f"that draft token by token ({', '.join(ones)}) and block drafts can"
            )
        return cls(drafter, shape)

    def propose(self, tokens: Sequence[int], states: Tensor, depth: int) -> DraftTree:
        """Append verified positions and grow a tree of at most `depth` levels after the last.

        `tokens` and `states` are those of `Drafter.propose`; `depth` is at least 1, and at most
        that of a block.
        """
        drafter, topk = self._drafter, self._shape.topk
        branches, device = drafter.branches(tokens, states), states.device
        nodes: list[Tensor] = []  # of every level: target ids, log-likelihoods, and the index of
        scores: list[Tensor] = []  # the parent, counted over all levels
        parents: list[Tensor] = []
        last = torch.tensor(tokens[-1:], device=device)  # of the m paths that go on, int64 [m]
        score, number = torch.zeros(1, device=device), torch.full((1,), ROOT, device=device)
        for level in range(depth):
            if level:
                frontier = self._likeliest(scores[-1], topk)  # indices into the newest level
                branches.pick(frontier // (len(nodes[-1]) // len(last)))
                last, score = nodes[-1][frontier], scores[-1][frontier]
                number = sum(map(len, nodes[:-1])) + frontier
            logits, candidates, confidence = branches.advance(last)  # [m, C], .., [m]
            best = torch.log_softmax(logits.float(), -1).topk(min(topk, logits.shape[-1]), dim=-1)
            ids = drafter.draft.draft_ids[best.indices]
            if candidates is not None:
                ids = candidates.gather(-1, best.indices)
            likelihood = best.values + score[:, None]  # [m, k]
            if drafter.threshold and confidence is not None:
                unsure = confidence < drafter.threshold
                likelihood = likelihood.masked_fill(unsure[:, None], -math.inf)
            nodes.append(ids.flatten())
            scores.append(likelihood.flatten())
            parents.append(number.repeat_interleave(ids.shape[1]))
        return self._pruned(torch.cat(nodes), torch.cat(scores), torch.cat(parents))

    def _pruned(self, tokens: Tensor, score: Tensor, parent: Tensor) -> DraftTree:
        """Return the tree of the likeliest of N candidates, by log-likelihoods float32 [N].

        `tokens` are target ids, `parent` the index of the parent candidate or ROOT, int64 [N] each.
        """
        nodes = self._likeliest(score, self._shape.nodes).sort().values
        nodes = nodes[score[nodes] > -math.inf]
        number = torch.full_like(tokens, ROOT)  # candidate -> node
        number[nodes] = torch.arange(len(nodes), device=nodes.device)
        above = parent[nodes]
        above = torch.where(above == ROOT, ROOT, number[above.clamp_min(0)])
        return DraftTree(*torch.stack([tokens[nodes], above]).tolist())

    @staticmethod
    def _likeliest(score: Tensor, count: int) -> Tensor:
        """Return the indices of the `count` largest scores, int64 [min(count, N)].

        Of equal scores the first wins, so a parent comes before its children.
        """
        order: Any = torch.sort(score, descending=True, stable=True)
        return order.indices[:count]


# -- tree masks ------------------------------------------------------------------------------------
# The attention mask of a tree of tokens, in the form that a target accepts.
#
# Each entry of a verification forward sees the cached tokens and its own path, within the layer's
# window; its position follows from its depth. Models take such a mask as one 4-D tensor, or as one
# tensor per layer type if only some layers have a sliding window. Models do not declare which form
# they support, so each form is tested before use, on a small tree whose paths are also computed one
# by one. A model that fails every form is refused. A form without the windows of the model's layers
# is never tested: the small tree is shorter than a window and would pass wrongly.
#
# Shapes: n nodes of a tree, T tokens cached before them, V vocabulary.


_WINDOWED, _PLAIN = "sliding_attention", "full_attention"
_TEST_TREE = DraftTree([3, 4, 5, 6, 7], [ROOT, ROOT, 0, 1, 2])  # branches of different lengths
_TEST_PROMPT = [1, 2, 3, 4, 5, 6]


def tree_mask(tree: DraftTree, cached: int, window: int | None) -> Tensor:
    """Return what each entry of a verification sees, bool [1 + n, cached + 1 + n].

    The first dimension and the last 1 + n of the second are the root and the nodes of the tree; the
    first `cached` of the second are the tokens cached before, at positions 0, 1, ... A layer with a
    `window` sees that many positions, its own included.
    """
    seen = torch.cat([torch.ones(1 + len(tree.tokens), cached).bool(), tree.ancestry()], dim=1)
    if window is None:
        return seen
    depths = torch.tensor([0, *tree.depths])
    positions = torch.cat([torch.arange(cached), cached + depths])  # [cached + 1 + n]
    return seen & (cached + depths[:, None] - positions < window)


class TreeMasks:
    """Builds tree masks for one target, in a form that was tested with it."""

    def __init__(self, model: Any) -> None:
        """Find the form.

        Raises:
            TargetError: no form works with the model.
        """
        if (kinds := why_stepwise(model)) is not None:
            raise TargetError(
                f"{type(model).__name__} has layers with {kinds}: rejected branches cannot be "
                "removed from its cache; leave --tree-tokens out to draft chains"
            )
        self._device, self._dtype = model.device, model.dtype
        config = decoder_config(model)
        self._attn = config._attn_implementation
        self._types = set(getattr(config, "layer_types", None) or ())
        self._window = getattr(config, "sliding_window", None)
        if self._attn not in ("sdpa", "eager"):
            raise TargetError(
                f"{type(model).__name__} with {self._attn} attention accepts no tree mask; "
                "leave --tree-tokens out to draft chains"
            )
        per_type = [True] if self._types else []
        if not self._types <= {_WINDOWED, _PLAIN}:
            per_type = []
        elif len(self._types) < 2 or self._window is None:  # one mask is right for every layer
            per_type.append(False)
        for self._per_type in per_type:
            if self._works(model):
                return
        raise TargetError(
            f"{type(model).__name__} ignores or misreads tree masks in every known form; leave "
            "--tree-tokens out to draft chains"
        )

    def layout(self, tree: DraftTree, cached: int) -> dict[str, Any]:
        """Return the model's arguments for a verification forward over the root and the nodes.

        `attention_mask` [1, 1, 1 + n, cached + 1 + n], bool for sdpa and the model's dtype for
        eager, or a dict of such masks by layer type; `position_ids` int64 [1, 1 + n].
        """
        depths = torch.tensor([[0, *tree.depths]], device=self._device)
        mask: Any
        if self._per_type:
            mask = {
                kind: self._mask(tree, cached, self._window if kind == _WINDOWED else None)
                for kind in sorted(self._types)
            }
        else:
            mask = self._mask(tree, cached, None if self._types == {_PLAIN} else self._window)
        return {"attention_mask": mask, "position_ids": cached + depths}

    def _mask(self, tree: DraftTree, cached: int, window: int | None) -> Tensor:
        seen = tree_mask(tree, cached, window).to(self._device)[None, None]
        if self._attn == "sdpa":
            return seen
        blocked = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return blocked.masked_fill_(~seen, torch.finfo(self._dtype).min)

    @torch.inference_mode()
    def _works(self, model: Any) -> bool:
        """Return whether the logits after each node equal those of its path computed alone."""
        vocab = model.get_output_embeddings().weight.shape[0]
        prompt, root = [i % vocab for i in _TEST_PROMPT], 8 % vocab
        tree = DraftTree([i % vocab for i in _TEST_TREE.tokens], _TEST_TREE.parents)

        def run(tokens: list[int], cache: Any, **layout: Any) -> Tensor:
            ids = torch.tensor([tokens], device=self._device)
            layout[cache_argument(model)] = cache
            out = model(input_ids=ids, use_cache=True, **layout)
            return out.logits[0].float()

        cache = DynamicCache()
        run(prompt, cache)
        try:
            at_once = run([root, *tree.tokens], cache, **self.layout(tree, len(prompt)))
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError):
            return False  # the model does not accept a mask of this form
        alone = []
        for path in tree.ancestry().tolist():
            tokens = list(itertools.compress([root, *tree.tokens], path))
            alone.append(run([*prompt, *tokens], DynamicCache())[-1])
        expected = torch.stack(alone)
        scale = expected.std(-1, keepdim=True).expand_as(expected).norm()
        limit = max(1e-3, 16 * torch.finfo(self._dtype).eps)
        return bool((at_once - expected).norm() / scale < limit)


# -- trees -----------------------------------------------------------------------------------------


class TreeSession(TargetSession):
    """One sequence in the target; verifies all branches of a tree in one forward."""

    def __init__(self, model: Any, masks: TreeMasks, columns: Sequence[str] = ()) -> None:
        """Start empty; see TargetSession."""
        super().__init__(model, columns)
        self._masks = masks
        self._before = 0  # tokens cached before the last verification

    def verify(self, root: int, tree: DraftTree) -> tuple[Tensor, Any]:
        """Append the root token and the nodes to the cache.

        Returns:
            Logits [1 + n, V] and states [1, 1 + n, A], both in the model's dtype; the states are
            None without columns.
        """
        self._before = self._cache.get_seq_length()
        tokens = [root, *tree.tokens]
        return self.forward(tokens, **self._masks.layout(tree, self._before))

    def keep(self, entries: Sequence[int]) -> None:
        """Keep only these entries of the last verification, ascending (0: the root).

        DynamicCache can only drop its last positions, so the layers' tensors are replaced.
        """
        for layer in self._cache.layers:
            if layer.is_initialized:  # in some models several layers share one cache
                accepted = torch.tensor(entries, device=layer.keys.device) + self._before  # [k]
                for name in ("keys", "values"):
                    cached = getattr(layer, name)  # [1, heads, T, head_dim]
                    first, last = cached[..., : self._before, :], cached.index_select(-2, accepted)
                    setattr(layer, name, torch.cat([first, last], dim=-2))


@torch.inference_mode()
def decode_tree(
    model: Any,
    masks: TreeMasks,
    drafter: TreeDrafter,
    columns: Sequence[str],
    request: Request,
    depth: int,
) -> Generation:
    """Decode with trees of up to `depth` levels; other arguments as for `decode_speculative`.

    A `VerificationStep` counts drafted nodes; `tried` counts the depths that had a node to accept.
    """
    session = TreeSession(model, masks, columns)

    def draft(tokens: list[int], states: Any, levels: int) -> DraftTree:
        return drafter.propose(tokens, states, levels) if levels else EMPTY

    def verify(last: int, tree: DraftTree) -> Verified:
        logits, states = session.verify(last, tree)
        path = accepted_path(tree, logits, request.sampler)
        entries = [0, *(node + 1 for node in path.nodes)]  # the root, and accepted nodes
        session.keep(entries)
        accepted = [tree.tokens[i] for i in path.nodes]
        return Verified(
            accepted=accepted,
            chosen=path.chosen,
            states=states[:, entries],
            drafted=len(tree.tokens),
            tried=path.tried,
            tokens=accepted,
        )

    return decode_steps(session, request, depth, draft, verify, lambda: drafter.passes)
