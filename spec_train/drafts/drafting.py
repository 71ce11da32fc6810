"""Drafting for sequences: what the target has verified goes in, proposed tokens come out.

A `Drafter` drafts for one sequence and keeps the keys and values of its rows.

B sequences, n new rows, H hidden size, A width of the target's states, h / g query / key-value
heads, d head size, Vd draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_train.attention.plain import attend_cached
from spec_train.losses.sampling import Sampler

Proposal = tuple[Tensor, list[Any]]
"""Drafted target ids, int64 [n], and their distributions (None per token for greedy decoding)."""


class KVCache:
    """Keys and values [B, g, length, d] of the rows that a layer has processed, in order."""

    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append rows [B, g, n, d]; return all rows, [B, g, length, d]."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values

    def attend(
        self,
        q: Tensor,  # queries of the new rows [B, h, n, d]
        k: Tensor,  # their keys and values [B, g, n, d]; g divides h
        v: Tensor,
        scale: float,  # factor on the attention scores
        seen: Tensor | None = None,  # whether a new row sees a row, bool [n, length]; None: causal
        # number of positions that a row of this layer sees; None: no limit
        window: int | None = None,
    ) -> Tensor:
        """Append rows and attend from them to all rows.

        Returns:
            Heads [B, h, n, d].
        """
        return attend_cached(q, *self.append(k, v), scale, seen, window)

    def crop(self, length: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


class Drafter(ABC):
    """Drafting for one sequence: reads what the target has verified, proposes the next tokens."""

    passes: int = 0
    """Forward passes of the draft so far."""
    threshold: float = 0.0
    """A draft that forecasts it ends a path before the first token of less confidence."""

    @abstractmethod
    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> Proposal:
        """Append verified positions and draft at most `count` tokens after the last of them.

        Args:
            tokens: t known tokens; token i is at the position after states[:, i].
            states: the target's at the next t positions, `Draft.state_columns` joined [1, t, A].
            count: drafted tokens wanted, at least 1.
            sampler: chooses the tokens.
        """


# -- chains ----------------------------------------------------------------------------------------
# Drafts that read their own states, one row per verified token and one per drafted token. The row
# at position P reads token[P+1] and the target's states[P]. The rows of a chain read the draft's
# own states instead; after the verification they are dropped, and the accepted positions are
# computed again from the target's states. So the cache never keeps a row that was computed from a
# draft.


class ChainDrafter(Drafter):
    """Drafts with one forward pass per token."""

    def __init__(
        self, draft: Any, vocab_size: int, caches: Sequence[KVCache] | None = None
    ) -> None:
        """Start a sequence.

        Args:
            draft: has `project` and `step` of `unroll.AutoregressiveDraft`, `logits` of carried
                states [..., H] -> [..., Vd], and `draft_ids`.
            vocab_size: of the target.
            caches: empty, one per layer; None: the draft has one layer.
        """
        self.draft = draft
        self.caches = caches or [KVCache()]
        self._vocab_size = vocab_size
        self._rows = 0  # rows computed from the target's own states

    def extend(self, tokens: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Drop the drafted rows and append verified ones (arguments: see `Drafter.propose`).

        Returns:
            The state of the last row [1, 1, H] and its position, int64 [1, 1].
        """
        device = states.device
        ids = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]
        positions = torch.arange(self._rows, self._rows + len(tokens), device=device)[None]
        for cache in self.caches:
            cache.crop(self._rows)
        state = self.draft.step(ids, self.draft.project(states), positions, self.caches)[:, -1:]
        self._rows += len(tokens)
        self.passes += 1
        return state, positions[:, -1:]

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> Proposal:
        """Append verified rows and draft a chain from the last one: ids int64 [count]."""
        state, position = self.extend(tokens, states)
        drafted: list[Tensor] = []
        distributions: list[Any] = []
        for depth in range(count):
            if depth:
                token = drafted[-1].view(1, 1)
                state = self.draft.step(token, state, position + depth, self.caches)
            token, q = sampler.draft(
                self.draft.logits(state)[0, 0], self.draft.draft_ids, self._vocab_size
            )
            drafted.append(token)
            distributions.append(q)
        self.passes += count - 1
        return torch.stack(drafted), distributions

    def branches(self, tokens: Sequence[int], states: Tensor) -> "ChainBranches":
        """Append verified rows and start to grow a tree from the last one."""
        return ChainBranches(self, *self.extend(tokens, states))


class ChainBranches:
    """The ends of m paths after the last known token; a level is a forward over all of them.

    A row of a path sees the rows that were there before, and those of its own path.
    """

    def __init__(self, chain: ChainDrafter, state: Tensor, position: Tensor) -> None:
        """Start with one path, which is empty, from what `ChainDrafter.extend` returns."""
        self._chain, self._states, self._position = chain, state, position  # [1, m, H]
        rows = chain.caches[0].length
        self._seen = torch.ones(1, rows, dtype=torch.bool, device=state.device)  # [m, rows]
        self._level = 0

    def pick(self, paths: Tensor) -> None:
        """Go on with these of the paths, perhaps with one several times: indices, int64 [m]."""
        self._states, self._seen = self._states[:, paths], self._seen[paths]

    def advance(self, previous: Tensor) -> tuple[Tensor, None, None]:
        """Return the logits [m, Vd] of what follows; see `block.draft.Walk.advance`.

        `previous` int64 [m] is the last token of each path.
        """
        if self._level:  # the row of the last known token is there already
            itself = torch.eye(len(previous), dtype=torch.bool, device=previous.device)
            self._seen = torch.cat([self._seen, itself], dim=1)
            positions = (self._position + self._level).expand(1, len(previous))
            given = previous[None], self._states, positions, self._chain.caches, self._seen
            self._states = self._chain.draft.step(*given)
            self._chain.passes += 1
        self._level += 1
        return self._chain.draft.logits(self._states[0]), None, None
