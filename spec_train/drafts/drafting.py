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

from spec_train.drafts.draft_caches import DraftCache, LayerCaches
from spec_train.drafts.protocol import Ask
from spec_train.drafts.together import Draws, NewRows, real_slots, stacked, take
from spec_train.losses.sampling import Sampler


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
            seen: whether a new row sees a row, bool [n, length] or [B, 1, n, length]; None: causal.
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

    @staticmethod
    def propose_together(
        drafters: Sequence["ChainDrafter"], asks: Sequence[Ask]
    ) -> list[tuple[Tensor, list[Any]]]:
        """Answer several sequences (see `protocol.Drafter`): one pass per drafted depth."""
        state, position = _extend_together(drafters, asks)
        draft = drafters[0].draft
        draws = Draws(asks, draft.draft_ids, drafters[0]._vocab_size)
        cache = stacked([d._layers for d in drafters])
        held = LayerCaches.of(cache)
        rows = torch.tensor([d._rows for d in drafters], device=state.device)
        for depth in range(max(ask.count for ask in asks)):
            if depth:  # a sequence that wants fewer tokens goes on with its last one
                token = draws.latest(torch.zeros_like(position[:, 0]))[:, None]
                seen = real_slots(rows + depth, held.length + 1)[:, None, None]
                state = draft.step(token, state, position + depth, held, seen)
            logits = draft.logits(state)[:, 0]  # [B, Vd]
            for row, ask in enumerate(asks):
                if depth < ask.count:
                    draws.draw(row, logits[row])
        for drafter, ask in zip(drafters, asks, strict=True):
            drafter.passes += ask.count - 1
        return draws.found()

    @property
    def _layers(self) -> list[DraftCache]:
        return self.cache.layers if isinstance(self.cache, LayerCaches) else [self.cache]

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


def _extend_together(
    drafters: Sequence[ChainDrafter], asks: Sequence[Ask]
) -> tuple[Tensor, Tensor]:
    """Let every drafter append its verified rows; return `extend`'s results, [B, 1, H] and [B, 1].

    Prompts are appended one by one: they are much longer than what a round adds.
    """
    states: dict[int, Tensor] = {}
    positions: dict[int, Tensor] = {}
    later = [row for row, drafter in enumerate(drafters) if drafter._rows]
    for row in set(range(len(drafters))) - set(later):
        states[row], positions[row] = drafters[row].extend(asks[row].tokens, asks[row].states)
    if later:
        old = [drafters[row] for row in later]
        found, places = _append_rounds(old, [asks[row] for row in later])
        states |= zip(later, found.split(1), strict=True)
        positions |= zip(later, places.split(1), strict=True)
    every = range(len(drafters))
    return torch.cat([states[row] for row in every]), torch.cat([positions[row] for row in every])


def _append_rounds(drafters: Sequence[ChainDrafter], asks: Sequence[Ask]) -> tuple[Tensor, Tensor]:
    """Append the rows of a round in one pass; return states [B, 1, H] and positions [B, 1]."""
    draft = drafters[0].draft
    for drafter in drafters:
        drafter.cache.crop(drafter._rows)
    held = LayerCaches.of(stacked([d._layers for d in drafters]))
    width = held.length
    new = NewRows.of(asks, [d._rows for d in drafters], width)
    out = draft.step(new.ids, draft.project(new.states), new.positions, held, new.seen)
    for row, (drafter, ask) in enumerate(zip(drafters, asks, strict=True)):
        taken = take(held.layers, row, width, drafter._rows, len(ask.tokens))
        for layer, pair in zip(drafter._layers, taken, strict=True):
            layer.keys, layer.values = pair
        drafter._rows += len(ask.tokens)
        drafter.passes += 1
    return new.last(out), new.last(new.positions)
