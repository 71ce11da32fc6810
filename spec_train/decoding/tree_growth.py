"""Dynamic draft trees (EAGLE-2, arXiv 2406.16858): how a tree grows, and which nodes are accepted.

Growing. Each level expands its `topk` likeliest nodes into `topk` children each. The likelihood of
a node is the product of the draft's probabilities along its path. Of all nodes the `nodes`
likeliest are kept. A node is never likelier than its parent, so the kept nodes form a tree.

Accepting. Starting at the root, the target's next token is chosen as without a draft (its argmax,
or a sample of its distribution). The walk continues at the child with exactly this token; if there
is none, the token ends the round. So the output is the target's own for every tree: greedy equals
plain greedy decoding, and sampling consumes one random number per token like plain sampling. A
child x is accepted with probability p(x). The multi-round rejection sampling of EAGLE-2 results in
the same: its candidates are selected, not sampled, so each one is tried as a draft distribution
with probability 1 for it: accept with p(x); otherwise remove x from p, normalise, try the next.
(Sampling children from the draft and keeping the likeliest would be different: which children are
kept then depends on the sample, and the acceptance rule for sampled candidates does not hold.)

Shapes: n nodes, m expanded nodes, k children of each, V / Vd target / draft vocabulary, H hidden
size of the draft, T entries of the draft's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import ConfigError
from spec_train.drafts.drafting import ChainDrafter
from spec_train.drafts.protocol import Draft
from spec_train.head import TargetHead
from spec_train.sampling import Sampler

ROOT = -1  # parent of the first level: the last known token


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Size of a tree: `nodes` in total; `topk` nodes expanded per level, `topk` children each."""

    nodes: int
    topk: int


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens; each parent comes before its children."""

    tokens: list[int]  # target ids [n]
    parents: list[int]  # index of the parent node, or ROOT [n]

    @property
    def depths(self) -> list[int]:
        """Depth of every node [n]; 1 for children of the root."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return found

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
class Walk:
    """The result of a verification."""

    path: list[int]  # accepted nodes, from the first level on
    chosen: int  # the target's own token after them
    tried: int  # entries on the path, the root included, that had children

    def entries(self) -> list[int]:
        """Return the entries of the verification forward to keep: the root and accepted nodes."""
        return [0, *(node + 1 for node in self.path)]


def walk(tree: DraftTree, logits: Tensor, sampler: Sampler) -> Walk:
    """Follow the target's choices through the tree.

    Args:
        tree: n nodes.
        logits: the target's logits [1 + n, V], in its dtype: after the root, then after each node.
        sampler: chooses the target's tokens.
    """
    children: dict[int, dict[int, int]] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        children.setdefault(parent, {})[token] = node
    path: list[int] = []
    at, tried = ROOT, 0
    while True:
        chosen = sampler.first(logits[at + 1])
        tried += at in children
        following = children.get(at, {}).get(chosen)
        if following is None:
            return Walk(path, chosen, tried)
        path.append(following)
        at = following


class TreeDrafter:
    """Drafts trees instead of chains for one sequence."""

    def __init__(self, chain: ChainDrafter, shape: TreeShape) -> None:
        """Draft with the model and the cache of a new `chain`."""
        self._chain = chain
        self._shape = shape
        self._levels = 0  # forward passes for levels below the first

    @property
    def passes(self) -> int:
        """Forward passes of the draft so far."""
        return self._chain.passes + self._levels

    @classmethod
    def of(cls, draft: Draft, head: TargetHead, shape: TreeShape) -> "TreeDrafter":
        """Start drafting one sequence.

        Raises:
            ConfigError: the draft does not continue from its own states.
        """
        chain = draft.drafter(head)
        if not isinstance(chain, ChainDrafter):
            raise ConfigError(
                "--tree-tokens: only drafts that continue from their own states token by token "
                f"(eagle, eagle3) can grow trees; a {draft.name} draft proposes several tokens at "
                "once, so leave --tree-tokens out"
            )
        return cls(chain, shape)

    def propose(self, tokens: Sequence[int], states: Tensor, depth: int) -> DraftTree:
        """Append verified positions and grow a tree after the last of them.

        Args:
            tokens, states: as for `protocol.Drafter.propose`.
            depth: number of levels at most, at least 1.
        """
        state, position = self._chain.extend(tokens, states)  # [1, 1, H], int64 [1, 1]
        draft, cache, device = self._chain.draft, self._chain.cache, state.device
        best, likelihood = self._expand(state[0], torch.zeros(1, device=device))  # [1, k]
        found, score = [best.flatten()], [likelihood.flatten()]  # candidates of every level
        parent = [torch.full_like(found[0], ROOT)]  # their parents, counted over all levels
        # m candidates of the newest level are expanded next; `start` is the number before the level
        start, frontier = 0, torch.arange(len(found[0]), device=device)
        carried = state.expand(-1, len(frontier), -1)  # [1, m, H], states of their parents
        above = torch.ones(len(frontier), cache.length, dtype=torch.bool, device=device)  # [m, T]
        for level in range(1, depth):
            own = torch.eye(len(frontier), dtype=torch.bool, device=device)
            seen = torch.cat([above, own], dim=1)  # [m, T + m]: ancestors and itself
            ids, positions = found[-1][frontier], position + level  # [m], [1, 1]
            output = draft.step(ids[None], carried, positions.expand_as(ids[None]), cache, seen)
            self._levels += 1
            best, likelihood = self._expand(output[0], score[-1][frontier])  # [m, k]
            parent.append((start + frontier).repeat_interleave(best.shape[1]))  # [m * k]
            start += len(score[-1])
            found.append(best.flatten())
            score.append(likelihood.flatten())
            frontier = self._likeliest(score[-1], self._shape.topk)  # indices into [m * k]
            parents = frontier // best.shape[1]  # among the m expanded ones
            carried, above = output[:, parents], seen[parents]
        return self._keep(torch.cat(found), torch.cat(score), torch.cat(parent))

    def _expand(self, states: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        """Find the likeliest children of nodes.

        Args:
            states: the draft's states of the nodes [m, H], in its dtype.
            score: log-likelihoods of the nodes, float32 [m].

        Returns:
            Target ids int64 [m, k] and log-likelihoods float32 [m, k] of the children.
        """
        logits = self._chain.draft.logits(states)  # [m, Vd]
        count = min(self._shape.topk, logits.shape[-1])
        top = torch.log_softmax(logits.float(), -1).topk(count, dim=-1)
        return self._chain.draft.draft_ids[top.indices], top.values + score[:, None]

    def _keep(self, found: Tensor, score: Tensor, parent: Tensor) -> DraftTree:
        """Make a tree of the likeliest of N candidates.

        Args:
            found: target ids, int64 [N]. score: log-likelihoods, float32 [N].
            parent: index of the parent candidate or ROOT, int64 [N].
        """
        kept = self._likeliest(score, self._shape.nodes).sort().values
        place = torch.full_like(found, ROOT)  # candidate -> node
        place[kept] = torch.arange(len(kept), device=kept.device)
        above = parent[kept]
        above = torch.where(above == ROOT, ROOT, place[above.clamp_min(0)])
        tokens, parents = torch.stack([found[kept], above]).tolist()
        return DraftTree(tokens, parents)

    @staticmethod
    def _likeliest(score: Tensor, count: int) -> Tensor:
        """Return the indices of the `count` largest scores, int64 [min(count, N)].

        Of equal scores the first wins, so a parent comes before its children.
        """
        order: Any = torch.sort(score, descending=True, stable=True)
        return order.indices[:count]
