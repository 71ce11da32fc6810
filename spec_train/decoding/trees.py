"""Speculative decoding with draft trees: one verification forward per tree, with KV caches.

Shares the target's session and the counting with `chains`; a tree with one branch is a chain. After
a verification the target's cache keeps only the positions of the accepted path.

Shapes: n nodes of a tree, V target vocabulary, A captured layers times the target's hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_train.decoding.chains import (
    Generation,
    Request,
    Round,
    TargetSession,
    until_stop,
)
from spec_train.decoding.stopwatch import Stopwatch
from spec_train.decoding.tree_growth import EMPTY, DraftTree, TreeDrafter, walk
from spec_train.decoding.tree_masks import TreeMasks


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

    def keep(self, kept: Sequence[int]) -> None:
        """Keep only the entries `kept` of the last verification, ascending (0: the root).

        DynamicCache can only drop its last positions, so the layers' tensors are replaced.
        """
        for layer in self._cache.layers:
            if layer.is_initialized:  # in some models several layers share one cache
                places = torch.tensor(kept, device=layer.keys.device) + self._before  # [k]
                for name in ("keys", "values"):
                    cached = getattr(layer, name)  # [1, heads, T, head_dim]
                    first, last = cached[..., : self._before, :], cached.index_select(-2, places)
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
    """Decode with trees of up to `depth` levels.

    `drafter` must be new; `columns` are the states it reads, the draft's `state_columns`. Near the
    limit a round drafts no deeper than can still be emitted, which does not change the output. A
    `Round` counts drafted nodes; `tried` counts the depths that had a node to accept.
    """
    sampler, limit, stop = request.sampler, request.limit, request.stop
    times = Stopwatch(model.device)
    session = TreeSession(model, masks, columns)
    logits, states = session.forward(request.prompt, last_only=True)
    tokens = [sampler.first(logits[-1])]
    times.add("prefill")
    known = [
        *request.prompt[1:],
        tokens[0],
    ]  # known[i] is one position after states[:, i]
    rounds: list[Round] = []
    while tokens[-1] not in stop and len(tokens) < limit:
        times.begin()
        levels = min(depth, limit - len(tokens) - 1)
        tree = drafter.propose(known, states, levels) if levels else EMPTY
        times.add("draft")
        logits, states = session.verify(tokens[-1], tree)
        kept = walk(tree, logits, sampler)
        session.keep(kept.entries())
        times.add("verify")
        known = [*(tree.tokens[i] for i in kept.path), kept.chosen]
        states = states[:, kept.entries()]
        emitted = until_stop(known, stop)
        rounds.append(
            Round(
                drafted=len(tree.tokens),
                tried=min(kept.tried, len(emitted)),
                accepted=min(len(kept.path), len(emitted)),
                emitted=len(emitted),
                tokens=tuple(known[:-1]),
            )
        )
        tokens.extend(emitted)
    return Generation(
        tokens=tokens,
        rounds=rounds,
        draft_passes=drafter.passes,
        stopped=tokens[-1] in stop,
        **times.parts(),
    )
