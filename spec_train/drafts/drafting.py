"""Drafting chains for one sequence: one row of the draft per verified token, one per drafted token.

In: verified tokens and the target's states. Out: a chain of drafted tokens. The row at position P
reads token[P+1] and the target's states[P]. The rows of a chain read the draft's own states
instead; after the verification they are dropped, and the accepted positions are computed again from
the target's states. So the cache never keeps a row that was computed from a draft.

B sequences, n new rows, H hidden size, A width of the target's states, h / g query / key-value
heads, d head size, Vd draft vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_train.attention.plain import attend_cached
from spec_train.sampling import Sampler


class DraftCache:
    """Keys and values [B, g, length, d] of the rows that a layer has processed, in order."""

    def __init__(self) -> None:
        """Start without rows."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of rows."""
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
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        seen: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Append rows and attend from them to all rows.

        Args:
            q: queries of the new rows [B, h, n, d].
            k, v: their keys and values [B, g, n, d]; g divides h.
            scale: factor on the attention scores.
            seen: whether a new row sees a row, bool [n, length]; None: causal.
            window: number of positions that a row of this layer sees; None: no limit.

        Returns:
            Heads [B, h, n, d].
        """
        k, v = self.append(k, v)
        return attend_cached(q, k, v, scale, seen, window)

    def crop(self, length: int) -> None:
        """Keep the first `length` rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


class LayerCaches:
    """One `DraftCache` per layer, for a draft with `count` layers."""

    def __init__(self, count: int) -> None:
        """Start without rows."""
        self.layers = [DraftCache() for _ in range(count)]

    @property
    def length(self) -> int:
        """Number of rows, the same in every layer."""
        return self.layers[0].length

    def crop(self, length: int) -> None:
        """Keep the first `length` rows."""
        for layer in self.layers:
            layer.crop(length)


class ChainDraft(Protocol):
    """What `ChainDrafter` requires of a draft that reads its own states."""

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 [Vd], ascending."""

    def project(self, aux: Tensor) -> Tensor:
        """Project the target's states [B, n, A] to features [B, n, H]."""

    def step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        position_ids: Tensor,
        cache: Any,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Append rows to the cache and return their states [B, n, H], the next `carried`.

        Args:
            token_ids: known tokens, int64 [B, n].
            carried: features, or the states of an earlier step, [B, n, H].
            position_ids: RoPE positions, int64 [B, n].
            cache: the rows processed so far.
            seen: whether a new row sees a row, bool [n, length]; None: causal.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Map states [..., H] to logits over the draft vocabulary [..., Vd]."""


class ChainDrafter:
    """A `protocol.Drafter`: one forward pass of the draft per drafted token."""

    def __init__(
        self, draft: ChainDraft, vocab_size: int, cache: DraftCache | LayerCaches | None = None
    ) -> None:
        """Start a sequence.

        Args:
            draft: the draft.
            vocab_size: of the target.
            cache: an empty cache that `draft.step` appends to; None: that of one layer.
        """
        self.passes = 0
        self.draft = draft
        self.cache = cache or DraftCache()
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
        self.cache.crop(self._rows)
        state = self.draft.step(ids, self.draft.project(states), positions, self.cache)[:, -1:]
        self._rows += len(tokens)
        self.passes += 1
        return state, positions[:, -1:]

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> tuple[Tensor, list[Any]]:
        """Append verified rows and draft a chain from the last one: ids int64 [count].

        See protocol.Drafter.propose; `states` are [1, n, A].
        """
        state, position = self.extend(tokens, states)
        drafted: list[Tensor] = []
        distributions: list[Any] = []
        for depth in range(count):
            if depth:
                token = drafted[-1].view(1, 1)
                state = self.draft.step(token, state, position + depth, self.cache)
            token, q = sampler.draft(
                self.draft.logits(state)[0, 0], self.draft.draft_ids, self._vocab_size
            )
            drafted.append(token)
            distributions.append(q)
        self.passes += count - 1
        return torch.stack(drafted), distributions
