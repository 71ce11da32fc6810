"""Speculative decoding with draft trees: one verification forward per tree, KV caches.

As `decode`, of which it shares the target's session and the counting; a tree of one branch is its
chain. After a verification the target's cache keeps the rows of the accepted path alone.

Shapes: n nodes of a tree, V target vocabulary, A captured layers times the target's hidden size.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_train.decoding.chains import Generation, Round, TargetSession, clock, until_stop
from spec_train.decoding.tree_growth import EMPTY, DraftTree, TreeDrafter, walk
from spec_train.decoding.tree_masks import TreeMasks
from spec_train.sampling import Sampler


class TreeSession(TargetSession):
    """A sequence in the target that can try the branches of a tree at once."""

    def __init__(self, model: Any, masks: TreeMasks, columns: Sequence[str] = ()) -> None:
        """Start empty; see TargetSession."""
        super().__init__(model, columns)
        self._masks = masks
        self._before = 0  # tokens cached before the last verification

    def verify(self, root: int, tree: DraftTree) -> tuple[Tensor, Any]:
        """Append the root token and the nodes: logits [1 + n, V] and states [1, 1 + n, A]."""
        self._before = self._cache.get_seq_length()
        tokens = [root, *tree.tokens]
        return self.forward(tokens, **self._masks.layout(tree, self._before))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last verification, ascending, and drop its others."""
        for layer in self._cache.layers:
            if layer.is_initialized:  # some models' layers share the cache of others
                kept = torch.tensor(rows, device=layer.keys.device) + self._before
                for name in ("keys", "values"):
                    whole = getattr(layer, name)
                    first, last = whole[..., : self._before, :], whole.index_select(-2, kept)
                    setattr(layer, name, torch.cat([first, last], dim=-2))


@torch.inference_mode()
def decode_tree(
    model: Any,
    masks: TreeMasks,
    drafter: TreeDrafter,
    columns: Sequence[str],
    prompt: Sequence[int],
    sampler: Sampler,
    limit: int,
    depth: int,
    stop: Collection[int] = (),
) -> Generation:
    """Decode up to `limit` tokens with trees of up to `depth` levels.

    `drafter` is fresh; `columns` are the states it reads, the draft's `state_columns`. A round near
    the limit drafts no deeper than could still be emitted, which changes no output. A `Round`
    counts drafted nodes; its `tried` depths are those where some node was there to be accepted.
    """
    started = clock(model.device)
    session = TreeSession(model, masks, columns)
    logits, states = session.forward(prompt, last_only=True)
    tokens = [sampler.first(logits[-1])]
    known = [*prompt[1:], tokens[0]]  # tokens one position after each of the states
    rounds: list[Round] = []
    while tokens[-1] not in stop and len(tokens) < limit:
        levels = min(depth, limit - len(tokens) - 1)
        tree = drafter.propose(known, states, levels) if levels else EMPTY
        logits, states = session.verify(tokens[-1], tree)
        kept = walk(tree, logits, sampler)
        session.keep(kept.rows())
        known, states = [*(tree.tokens[i] for i in kept.path), kept.chosen], states[:, kept.rows()]
        emitted = until_stop(known, stop)
        rounds.append(
            Round(
                drafted=len(tree.tokens),
                tried=min(kept.tried, len(emitted)),
                accepted=min(len(kept.path), len(emitted)),
                emitted=len(emitted),
            )
        )
        tokens.extend(emitted)
    seconds = clock(model.device) - started
    return Generation(
        tokens=tokens,
        rounds=rounds,
        draft_passes=drafter.passes,
        seconds=seconds,
        stopped=tokens[-1] in stop,
    )
