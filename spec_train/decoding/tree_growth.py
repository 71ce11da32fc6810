"""Dynamic draft trees (EAGLE-2, arXiv 2406.16858): how a tree is grown, and what of it is kept.

Growing. Every level expands its `topk` likeliest nodes, likelihood being the draft's product of
probabilities along the path, into `topk` children each; of all nodes the `nodes` likeliest are
kept. A node is never likelier than its parent, so that what is kept is a tree.

Keeping. From the root on, the target's next token is chosen as it would be without a draft (its
argmax, or a draw from its distribution), and the walk goes on at the child that proposed this very
token; without such a child the round ends with it. So the output is the target's own by
construction, whatever the tree: greedy is plain greedy, and sampling consumes one random number per
token exactly as plain sampling does. A child x survives with probability p(x): that is what the
multi-round rejection sampling of EAGLE-2 comes to, whose candidates are chosen, not drawn, so that
each is tried as a draft distribution that is certain of it: accept with p(x); else remove x from p,
normalise, and try the next. (Drawing children from the draft and then keeping the likeliest would
be another thing: keeping depends on what was drawn, and the rule for drawn candidates is wrong.)

Shapes: n nodes, k children per expanded node, V / Vd target / draft vocabulary, H hidden size.
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
    """How much a round drafts: `nodes` in all, `topk` expanded per level and children of each."""

    nodes: int
    topk: int


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens, parents before their children."""

    tokens: list[int]  # target ids [n]
    parents: list[int]  # index of a node, or ROOT [n]

    @property
    def depths(self) -> list[int]:
        """1 for children of the root."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return found

    def ancestry(self) -> Tensor:
        """Bool [1 + n, 1 + n]: whether a node (0: the root, i + 1: node i) has another, or itself,
        on its path from the root."""
        seen = torch.eye(1 + len(self.tokens), dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            seen[i + 1] |= seen[parent + 1]
        return seen


EMPTY = DraftTree([], [])


@dataclass(frozen=True)
class Walk:
    """What a verification keeps."""

    path: list[int]  # accepted nodes, from the root on
    chosen: int  # the target's own token after them
    tried: int  # nodes on the way, the root included, that had children

    def rows(self) -> list[int]:
        """Rows of the verification forward to keep: the root and the accepted nodes."""
        return [0, *(node + 1 for node in self.path)]


def walk(tree: DraftTree, logits: Tensor, sampler: Sampler) -> Walk:
    """Follow the target through the tree.

    Args:
        tree: n nodes.
        logits: the target's [1 + n, V]: after the root, then after every node.
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
    """One sequence in a draft that grows trees instead of chains."""

    def __init__(self, chain: ChainDrafter, shape: TreeShape) -> None:
        """Draft with the rows and the cache of a fresh `chain`."""
        self._chain = chain
        self._shape = shape

    @property
    def passes(self) -> int:
        """Forward passes of the draft so far."""
        return self._chain.passes

    @classmethod
    def of(cls, draft: Draft, head: TargetHead, shape: TreeShape) -> "TreeDrafter":
        """Start drafting one sequence.

        Raises:
            ConfigError: the draft does not go on from its own states.
        """
        chain = draft.drafter(head)
        if not isinstance(chain, ChainDrafter):
            raise ConfigError(
                f"--tree-tokens: trees are grown by drafts that go on from their own states token "
                f"by token (eagle, eagle3); this one ({draft.name}) drafts several at once"
            )
        return cls(chain, shape)

    def propose(self, tokens: Sequence[int], states: Tensor, depth: int) -> DraftTree:
        """Take in verified positions and grow a tree after the last of them.

        Args:
            tokens, states: as of `protocol.Drafter.propose`.
            depth: levels at most, at least 1.
        """
        state, position = self._chain.extend(tokens, states)
        draft, cache, device = self._chain.draft, self._chain.cache, state.device
        best, likelihood = self._expand(state[0], torch.zeros(1, device=device))
        found, score = [best.flatten()], [likelihood.flatten()]  # candidates of every level
        parent = [torch.full_like(found[0], ROOT)]
        start, frontier = 0, torch.arange(len(found[0]), device=device)  # nodes of the last level
        carried = state.expand(-1, len(frontier), -1)
        above = torch.ones(len(frontier), cache.length, dtype=torch.bool, device=device)
        for level in range(1, depth):
            own = torch.eye(len(frontier), dtype=torch.bool, device=device)
            seen = torch.cat([above, own], dim=1)
            ids, positions = found[-1][frontier], position + level
            output = draft.step(ids[None], carried, positions.expand_as(ids[None]), cache, seen)
            self._chain.passes += 1
            best, likelihood = self._expand(output[0], score[-1][frontier])
            parent.append((start + frontier).repeat_interleave(best.shape[1]))
            start += len(score[-1])
            found.append(best.flatten())
            score.append(likelihood.flatten())
            frontier = self._likeliest(score[-1], self._shape.topk)
            rows = frontier // best.shape[1]
            carried, above = output[:, rows], seen[rows]
        return self._keep(torch.cat(found), torch.cat(score), torch.cat(parent))

    def _expand(self, states: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        """Children of nodes with states [m, H] and log-likelihoods [m]: ids and theirs [m, k]."""
        logits = self._chain.draft.logits(states)
        count = min(self._shape.topk, logits.shape[-1])
        top = torch.log_softmax(logits.float(), -1).topk(count, dim=-1)
        return self._chain.draft.draft_ids[top.indices], top.values + score[:, None]

    def _keep(self, found: Tensor, score: Tensor, parent: Tensor) -> DraftTree:
        kept = self._likeliest(score, self._shape.nodes).sort().values
        place = torch.full_like(found, ROOT)
        place[kept] = torch.arange(len(kept), device=kept.device)
        above = parent[kept]
        above = torch.where(above == ROOT, ROOT, place[above.clamp_min(0)])
        tokens, parents = torch.stack([found[kept], above]).tolist()
        return DraftTree(tokens, parents)

    @staticmethod
    def _likeliest(score: Tensor, count: int) -> Tensor:
        """Indices of the `count` largest; of equal ones the first, so parents before children."""
        order: Any = torch.sort(score, descending=True, stable=True)
        return order.indices[:count]
