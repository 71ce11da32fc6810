"""Drafting chains for one sequence: a row of the draft per verified token, then one per draft.

The row at position P sees (token[P+1], target states[P]). After a verification the rows of the
chain, which held the draft's own states, are dropped; the accepted positions come again with the
target's.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_train.attention.plain import attend_cached
from spec_train.sampling import Sampler


class DraftCache:
    """Keys and values [B, g, length, d] of the rows a layer has processed, in order."""

    def __init__(self) -> None:
        """Start empty."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """Rows held."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows and give all of them."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None
    ) -> Tensor:
        """Add rows and attend from them to all rows.

        Args:
            q: queries of the new rows [B, h, n, d].
            k, v: their keys and values [B, g, n, d], g dividing h.
            scale: multiplies the scores.
            seen: whether a new row sees a row, bool [n, length]; None: causal.

        Returns:
            Heads [B, h, n, d].
        """
        k, v = self.append(k, v)
        return attend_cached(q, k, v, scale, seen)

    def crop(self, length: int) -> None:
        """Keep the first `length` rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


class LayerCaches:
    """One `DraftCache` per layer, of drafts with several."""

    def __init__(self, count: int) -> None:
        """Start empty."""
        self.layers = [DraftCache() for _ in range(count)]

    @property
    def length(self) -> int:
        """Rows held."""
        return self.layers[0].length

    def crop(self, length: int) -> None:
        """Keep the first `length` rows."""
        for layer in self.layers:
            layer.crop(length)


class ChainDraft(Protocol):
    """What drafting a chain asks of a draft that is fed its own states."""

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 [Vd] ascending."""

    def project(self, aux: Tensor) -> Tensor:
        """Features [B, T, H] of the target's states [B, T, A]."""

    def step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        position_ids: Tensor,
        cache: Any,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Append rows [B, T] to the cache and give their states [B, T, H], which are fed back.

        `seen` bool [T, length] says which rows of the cache a new row sees; None: causal.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..., Vd] of states [..., H]."""


class ChainDrafter:
    """A `Drafter` (see protocol): one pass of the draft per drafted token."""

    def __init__(
        self, draft: ChainDraft, vocab_size: int, cache: DraftCache | LayerCaches | None = None
    ) -> None:
        """Start empty. `vocab_size` is the target's; `cache` what `step` of the draft appends to,
        by default that of one layer."""
        self.passes = 0
        self.draft = draft
        self.cache = cache or DraftCache()
        self._vocab_size = vocab_size
        self._rows = 0  # rows computed from the target's own states

    def extend(self, tokens: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Append verified rows in the place of all that was drafted (see protocol.Drafter).

        Gives the state of the last row [1, 1, H] and its position, int64 [1, 1].
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
        """Append verified rows and draft a chain from the last of them (see protocol.Drafter)."""
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
