"""Several sequences in one forward of a draft: caches side by side, padded on the left.

Every sequence keeps its own drafter with its own caches. For a forward the caches are copied into
one batch, where the rows of every sequence end at the last slot; new rows follow, padded on the
right. A mask hides the padding, and padded rows repeat the last position of their sequence, so that
each sequence computes what it computes alone. Afterwards every drafter takes its rows out again.

B sequences, T slots of the longest cache, n new rows, g key-value heads, d head size, A width of
the target's states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_train.drafts.draft_caches import DraftCache
from spec_train.drafts.protocol import Ask


def stacked(caches: Sequence[Sequence[DraftCache]]) -> list[DraftCache]:
    """Return one cache per layer, with keys and values [B, g, T, d], of the caches of B sequences.

    Args:
        caches: of each sequence one cache [1, g, rows, d] per layer; none is empty.
    """
    return [_stacked_layer(layer) for layer in zip(*caches, strict=True)]


def _stacked_layer(caches: Sequence[DraftCache]) -> DraftCache:
    found = DraftCache()
    found.keys = left_padded([cache.rows[0] for cache in caches])
    found.values = left_padded([cache.rows[1] for cache in caches])
    return found


def left_padded(parts: Sequence[Tensor]) -> Tensor:
    """Return [B, g, T, d], zero in padding, of tensors [1, g, rows, d] of different lengths."""
    width, first = max(part.shape[2] for part in parts), parts[0]
    joined = first.new_zeros(len(parts), first.shape[1], width, first.shape[3])
    for row, part in enumerate(parts):
        joined[row, :, width - part.shape[2] :] = part[0]
    return joined


def take(
    caches: Sequence[DraftCache], row: int, width: int, rows: int, new: int
) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values [1, g, rows + new, d] of a sequence, one pair per layer.

    Args:
        caches: of the batch, one per layer, after new rows were appended.
        row: the sequence.
        width: T, slots of the caches before that.
        rows: rows of the sequence before that.
        new: new rows to take.
    """
    part = slice(width - rows, width + new)
    pairs = (cache.rows for cache in caches)
    return [
        (keys[row : row + 1, :, part], values[row : row + 1, :, part]) for keys, values in pairs
    ]


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
    def of(cls, asks: Sequence[Ask], rows: Sequence[int], width: int) -> "NewRows":
        """Put the rows of `asks` side by side.

        `rows` are the rows that each sequence has already, `width` the slots T of the longest one.
        """
        device = asks[0].states.device
        counts = [len(ask.tokens) for ask in asks]
        longest = max(counts)
        ids = torch.zeros(len(asks), longest, dtype=torch.long)
        states = asks[0].states.new_zeros(len(asks), longest, asks[0].states.shape[-1])
        for row, ask in enumerate(asks):
            ids[row, : counts[row]] = torch.as_tensor(ask.tokens, dtype=torch.long)
            states[row, : counts[row]] = ask.states[0]
        lengths, held = torch.tensor(counts), torch.tensor(rows)
        chain = torch.ones(longest, longest, dtype=torch.bool).tril()
        seen = torch.cat(
            [
                real_slots(held, width)[:, None].expand(-1, longest, -1),
                chain.expand(len(asks), -1, -1),
            ],
            dim=-1,
        )
        return cls(
            ids=ids.to(device),
            states=states,
            positions=new_positions(held, lengths).to(device),
            lengths=lengths.to(device),
            seen=seen[:, None].to(device),
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

    def __init__(self, asks: Sequence[Ask], draft_ids: Tensor, vocab_size: int) -> None:
        """Start without tokens; `draft_ids` int64 [Vd] are the target's ids of the draft's."""
        self._asks, self._draft_ids, self._vocab_size = asks, draft_ids, vocab_size
        self.tokens: list[list[Tensor]] = [[] for _ in asks]  # int64 [] each
        self.distributions: list[list[Any]] = [[] for _ in asks]

    def draw(self, row: int, logits: Tensor) -> None:
        """Draw the next token of a sequence from the draft's logits [Vd]."""
        token, q = self._asks[row].sampler.draft(logits, self._draft_ids, self._vocab_size)
        self.tokens[row].append(token)
        self.distributions[row].append(q)

    def latest(self, before: Tensor) -> Tensor:
        """Return the newest token of each sequence, int64 [B], or that of `before` [B]."""
        newest = [tokens[-1] if tokens else before[row] for row, tokens in enumerate(self.tokens)]
        return torch.stack(newest)

    def found(self) -> list[tuple[Tensor, list[Any]]]:
        """Return what `Drafter.propose` returns, of each sequence."""
        empty = torch.empty(0, dtype=torch.long, device=self._draft_ids.device)
        return [
            (torch.stack(tokens) if tokens else empty, q)
            for tokens, q in zip(self.tokens, self.distributions, strict=True)
        ]
