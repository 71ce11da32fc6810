"""Drafting for sequences: what the target has verified goes in, proposed tokens come out.

A `Drafter` drafts for one sequence and keeps the keys and values of its rows. Sequences that decode
side by side share forward passes: their caches are copied into one batch, where the rows of every
sequence end at the last slot, and new rows follow, padded on the right. A mask hides the padding,
and padded rows repeat the last position of their sequence, so each sequence computes what it
computes alone. Afterwards every drafter takes its rows out again.

B sequences, T slots of the longest cache, n new rows, H hidden size, A width of the target's
states, h / g query / key-value heads, d head size, Vd draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_train.attention.plain import attend_cached
from spec_train.losses.sampling import Sampler

Proposal = tuple[Tensor, list[Any]]
"""Drafted target ids, int64 [n], and their distributions (None per token for greedy decoding)."""


class KVCache:
    """Keys and values [B, g, length, d] of the rows that a layer has processed, in order."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        """Start with these rows; None: without rows."""
        self.keys, self.values = keys, values

    @property
    def length(self) -> int:
        """Number of rows."""
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows; there must be some."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

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
            seen: whether a new row sees a row, bool [n, length] or [B, 1, n, length]; None: causal.
            window: number of positions that a row of this layer sees; None: no limit.

        Returns:
            Heads [B, h, n, d].
        """
        return attend_cached(q, *self.append(k, v), scale, seen, window)

    def crop(self, length: int) -> None:
        """Keep the first `length` rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


@dataclass(frozen=True)
class DraftRequest:
    """What a sequence asks of its drafter."""

    tokens: Sequence[int]  # t known tokens; token i is at the position after states[:, i]
    states: Tensor  # the target's at the next t positions, `Draft.state_columns` joined [1, t, A]
    count: int  # drafted tokens wanted, at least 1
    sampler: Sampler  # chooses the tokens


class Drafter(ABC):
    """Drafting for one sequence: reads what the target has verified, proposes the next tokens."""

    passes: int = 0
    """Forward passes of the draft so far."""

    @abstractmethod
    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> Proposal:
        """Append verified positions and draft at most `count` tokens after the last of them.

        The arguments are the fields of `DraftRequest`.
        """

    @classmethod
    def propose_batch(
        cls, drafters: Sequence[Any], requests: Sequence[DraftRequest]
    ) -> list[Proposal]:
        """Answer one request per drafter, all of this class and of one draft, as `propose` would.

        A subclass does it in fewer forward passes; `passes` counts as if each was alone.
        """
        pairs = zip(drafters, requests, strict=True)
        return [d.propose(r.tokens, r.states, r.count, r.sampler) for d, r in pairs]


# -- several sequences in one forward pass ---------------------------------------------------------


def stacked(caches: Sequence[Sequence[KVCache]]) -> list[KVCache]:
    """Return one cache per layer, with keys and values [B, g, T, d], of the caches of B sequences.

    Args:
        caches: of each sequence one cache [1, g, rows, d] per layer; none is empty.
    """
    return [
        KVCache(*(left_padded(list(parts)) for parts in zip(*(c.rows for c in layer), strict=True)))
        for layer in zip(*caches, strict=True)
    ]


def left_padded(parts: Sequence[Tensor]) -> Tensor:
    """Return [B, g, T, d], zero in padding, of tensors [1, g, rows, d] of different lengths."""
    width, first = max(part.shape[2] for part in parts), parts[0]
    joined = first.new_zeros(len(parts), first.shape[1], width, first.shape[3])
    for row, part in enumerate(parts):
        joined[row, :, width - part.shape[2] :] = part[0]
    return joined


def unstack(
    batch: Sequence[KVCache], row: int, width: int, caches: Sequence[KVCache], new: int
) -> None:
    """Give a sequence its rows of a batch, to which new rows were appended.

    Args:
        batch: one cache per layer, of all sequences.
        row: the sequence.
        width: T, slots of the caches before the new rows.
        caches: of the sequence, cropped to the rows that it had before.
        new: new rows to take.
    """
    for cache, of_all in zip(caches, batch, strict=True):
        part = slice(width - cache.length, width + new)
        keys, values = of_all.rows
        cache.keys, cache.values = keys[row : row + 1, :, part], values[row : row + 1, :, part]


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """The verified rows that B sequences append, side by side.

    Attributes:
        ids: int64 [B, n], 0 in padding. states: [B, n, A]. positions: int64 [B, n].
        lengths: rows of each sequence, int64 [B].
        seen: which rows a new row sees, bool [B, 1, n, T + n].
    """

    ids: Tensor
    states: Tensor
    positions: Tensor
    lengths: Tensor
    seen: Tensor

    @classmethod
    def of(cls, requests: Sequence[DraftRequest], rows: Sequence[int], width: int) -> "NewRows":
        """Put the rows of `requests` side by side.

        `rows` are the rows that each sequence has already, `width` the slots T of the longest one.
        """
        first, batch = requests[0].states, len(requests)
        counts = [len(request.tokens) for request in requests]
        longest = max(counts)
        ids = torch.zeros(batch, longest, dtype=torch.long)
        states = first.new_zeros(batch, longest, first.shape[-1])
        for row, request in enumerate(requests):
            ids[row, : counts[row]] = torch.as_tensor(request.tokens, dtype=torch.long)
            states[row, : counts[row]] = request.states[0]
        lengths, held = torch.tensor(counts), torch.tensor(rows)
        causal = torch.ones(longest, longest, dtype=torch.bool).tril().expand(batch, -1, -1)
        old = real_slots(held, width)[:, None].expand(-1, longest, -1)
        return cls(
            ids=ids.to(first.device),
            states=states,
            positions=new_positions(held, lengths).to(first.device),
            lengths=lengths.to(first.device),
            seen=torch.cat([old, causal], dim=-1)[:, None].to(first.device),
        )

    def last(self, values: Tensor) -> Tensor:
        """Return the value [B, 1, ...] of each sequence's last new row, of values [B, n, ...]."""
        every = torch.arange(len(values), device=values.device)
        return values[every, self.lengths - 1][:, None]


def new_positions(held: Tensor, lengths: Tensor) -> Tensor:
    """Return the positions of new rows side by side, int64 [B, n], of `held` and `lengths` [B].

    A padded row repeats the last position of its sequence: longrope looks at the largest one, and
    a model with learned positions has no more of them.
    """
    every = torch.arange(int(lengths.max()), device=held.device)
    return held[:, None] + torch.minimum(every, lengths[:, None] - 1)


def real_slots(rows: Tensor, width: int) -> Tensor:
    """Return which of the T slots hold a row, bool [B, T]; `rows` int64 [B], `width` is T."""
    slots = torch.arange(width, device=rows.device)
    return slots >= width - rows[:, None]


class Draws:
    """The tokens that the samplers of B sequences draw, depth by depth."""

    def __init__(
        self, requests: Sequence[DraftRequest], draft_ids: Tensor, vocab_size: int
    ) -> None:
        """Start without tokens; `draft_ids` int64 [Vd] are the target's ids of the draft's."""
        self._requests, self._draft_ids, self._vocab_size = requests, draft_ids, vocab_size
        self._tokens: list[list[Tensor]] = [[] for _ in requests]  # int64 [] each
        self._distributions: list[list[Any]] = [[] for _ in requests]

    def draw(self, row: int, logits: Tensor) -> None:
        """Draw the next token of a sequence from the draft's logits [Vd]."""
        token, q = self._requests[row].sampler.draft(logits, self._draft_ids, self._vocab_size)
        self._tokens[row].append(token)
        self._distributions[row].append(q)

    def latest(self, before: Tensor) -> Tensor:
        """Return the newest token of each sequence, int64 [B], or that of `before` [B]."""
        newest = [tokens[-1] if tokens else before[row] for row, tokens in enumerate(self._tokens)]
        return torch.stack(newest)

    def proposals(self) -> list[Proposal]:
        """Return what was drawn, of each sequence."""
        empty = torch.empty(0, dtype=torch.long, device=self._draft_ids.device)
        return [
            (torch.stack(tokens) if tokens else empty, q)
            for tokens, q in zip(self._tokens, self._distributions, strict=True)
        ]


# -- chains ----------------------------------------------------------------------------------------
# Drafts that read their own states, one row per verified token and one per drafted token. The row
# at position P reads token[P+1] and the target's states[P]. The rows of a chain read the draft's
# own states instead; after the verification they are dropped, and the accepted positions are
# computed again from the target's states. So the cache never keeps a row that was computed from a
# draft.


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
        caches: Any,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Append rows to the caches and return their states [B, n, H], the next `carried`.

        Args:
            token_ids: known tokens, int64 [B, n].
            carried: features, or the states of an earlier step, [B, n, H].
            position_ids: RoPE positions, int64 [B, n].
            caches: the rows processed so far, a `KVCache` per layer.
            seen: whether a new row sees a row, bool [n, length] or [B, 1, n, length]; None: causal.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Map states [..., H] to logits over the draft vocabulary [..., Vd]."""


class ChainDrafter(Drafter):
    """Drafts with one forward pass per token."""

    def __init__(
        self, draft: ChainDraft, vocab_size: int, caches: Sequence[KVCache] | None = None
    ) -> None:
        """Start a sequence.

        Args:
            draft: the draft.
            vocab_size: of the target.
            caches: empty, one per layer; None: the draft has one layer.
        """
        self.draft = draft
        self.caches = caches or [KVCache()]
        self._vocab_size = vocab_size
        self._rows = 0  # rows computed from the target's own states

    def extend(self, tokens: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Drop the drafted rows and append verified ones (arguments: see `DraftRequest`).

        Returns:
            The state of the last row [1, 1, H] and its position, int64 [1, 1].
        """
        device = states.device
        ids = torch.as_tensor(tokens, dtype=torch.long, device=device)[None]
        positions = torch.arange(self._rows, self._rows + len(tokens), device=device)[None]
        self._crop()
        state = self.draft.step(ids, self.draft.project(states), positions, self.caches)[:, -1:]
        self._rows += len(tokens)
        self.passes += 1
        return state, positions[:, -1:]

    def _crop(self) -> None:
        """Drop the drafted rows."""
        for cache in self.caches:
            cache.crop(self._rows)

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

    @classmethod
    def propose_batch(
        cls, drafters: Sequence["ChainDrafter"], requests: Sequence[DraftRequest]
    ) -> list[Proposal]:
        """Answer several sequences: one pass per drafted depth."""
        state, position = cls._extend_batch(drafters, requests)
        draft = drafters[0].draft
        draws = Draws(requests, draft.draft_ids, drafters[0]._vocab_size)
        caches = stacked([d.caches for d in drafters])
        rows = torch.tensor([d._rows for d in drafters], device=state.device)
        for depth in range(max(request.count for request in requests)):
            if depth:  # a sequence that wants fewer tokens goes on with its last one
                token = draws.latest(torch.zeros_like(position[:, 0]))[:, None]
                seen = real_slots(rows + depth, caches[0].length + 1)[:, None, None]
                state = draft.step(token, state, position + depth, caches, seen)
            logits = draft.logits(state)[:, 0]  # [B, Vd]
            for row, request in enumerate(requests):
                if depth < request.count:
                    draws.draw(row, logits[row])
        for drafter, request in zip(drafters, requests, strict=True):
            drafter.passes += request.count - 1
        return draws.proposals()

    @staticmethod
    def _extend_batch(
        drafters: Sequence["ChainDrafter"], requests: Sequence[DraftRequest]
    ) -> tuple[Tensor, Tensor]:
        """Let every drafter append its verified rows; return states [B, 1, H], positions [B, 1].

        Prompts are appended one by one: they are much longer than what a round adds.
        """
        ends: dict[int, tuple[Tensor, Tensor]] = {}
        later = [row for row, drafter in enumerate(drafters) if drafter._rows]
        for row in set(range(len(drafters))) - set(later):
            ends[row] = drafters[row].extend(requests[row].tokens, requests[row].states)
        if later:
            old, asked = [drafters[row] for row in later], [requests[row] for row in later]
            parts = zip(*(x.split(1) for x in _append_rows(old, asked)), strict=True)
            ends |= zip(later, parts, strict=True)
        states, positions = zip(*(ends[row] for row in range(len(drafters))), strict=True)
        return torch.cat(states), torch.cat(positions)


def _append_rows(
    drafters: Sequence[ChainDrafter], requests: Sequence[DraftRequest]
) -> tuple[Tensor, Tensor]:
    """Append the rows of a round in one pass; return states [B, 1, H] and positions [B, 1]."""
    draft = drafters[0].draft
    for drafter in drafters:
        drafter._crop()
    caches = stacked([d.caches for d in drafters])
    width = caches[0].length
    new = NewRows.of(requests, [d._rows for d in drafters], width)
    out = draft.step(new.ids, draft.project(new.states), new.positions, caches, new.seen)
    for row, (drafter, request) in enumerate(zip(drafters, requests, strict=True)):
        unstack(caches, row, width, drafter.caches, len(request.tokens))
        drafter._rows += len(request.tokens)
        drafter.passes += 1
    return new.last(out), new.last(new.positions)
