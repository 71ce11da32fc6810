"""Plans over several datasets: how often each document of each of them appears, and in what order.

A dataset of weight w gives every document of its training split w times per epoch. A weight that
is not whole gives it floor(w) or ceil(w) times, chosen so that the epochs even out: documents get
evenly spaced phases u in (0, 1), in an order drawn from the seed, and after k epochs document d
has appeared floor(u_d + k * w) times. So any k epochs together show a document k * w times, up to
one, and every epoch shows the same share of a dataset, up to one document.

Windows hold all datasets in proportion to their tokens: each dataset is strung into windows of its
own share, and the k-th windows of all of them are shuffled as one. A small dataset is therefore
spread over the whole epoch, not met in a corner of it. Repeats of a document lie as far apart as
the blocks of an epoch are shuffled.

All of it is a function of (seed, epoch, lengths, weights); one dataset of weight 1 is a BatchPlan.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from spec_data.shards.errors import ConfigError
from spec_train.data.order import BLOCK, PHASE, BatchPlan, Pack, hash_keys, string_blocks

FINEST_WEIGHT = 1000
"""Weights are multiples of one over this: their arithmetic stays within 64 bits."""

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The rows [first, last) of one dataset among those of all, and how often they appear."""

    name: str
    first: int
    last: int
    weight: Fraction
    fingerprint: str

    def __post_init__(self) -> None:
        """Refuse weights that cannot be counted with."""
        if self.weight <= 0 or self.weight.denominator > FINEST_WEIGHT:
            raise ConfigError(
                f"weight {float(self.weight):g} of {self.name}: above 0, with at most 3 decimals"
            )


def copies(count: int, weight: Fraction, epoch: int, *stream: int) -> np.ndarray:
    """How often each of `count` documents appears in `epoch`, int64 [count].

    The integers of `stream` (a seed among them) decide who is shown when.
    """
    whole, rest = divmod(weight, 1)
    if not rest:
        return np.full(count, int(whole), np.int64)
    order = np.argsort(hash_keys(np.arange(count), *stream), kind="stable")
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)

    def shown(epochs: int) -> np.ndarray:  # floor(u + epochs * rest), u = (2 rank + 1) / (2 count)
        turns, part = divmod(epochs * rest.numerator, rest.denominator)
        steps = (2 * rank + 1) * rest.denominator + 2 * count * part
        return turns + steps // (2 * count * rest.denominator)

    return int(whole) + shown(epoch + 1) - shown(epoch)


class MixedPlan(BatchPlan):
    """The global batches of every epoch over several datasets, whose rows are numbered in a row."""

    def __init__(
        self, lengths: np.ndarray, usable: np.ndarray, shares: Sequence[Share], **options: Any
    ) -> None:
        """Plan over `lengths` int64 [N] of all datasets; `options` are those of BatchPlan."""
        super().__init__(lengths, usable, **options)
        self.shares = tuple(shares)
        self._drawn: tuple[int, list[np.ndarray]] | None = None

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {
            "fingerprint": [share.fingerprint for share in self.shares],
            "weights": [str(share.weight) for share in self.shares],
        }

    def draw(self, epoch: int) -> list[np.ndarray]:
        """Rows of each dataset in an epoch: all that appear, then those that do so twice, ..."""
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, [self._draw(i, epoch) for i in range(len(self.shares))]
        return self._drawn[1]

    def _draw(self, index: int, epoch: int) -> np.ndarray:
        share = self.shares[index]
        rows = self.rows[(self.rows >= share.first) & (self.rows < share.last)]
        times = copies(len(rows), share.weight, epoch, self.seed, PHASE, index)
        passes = [rows[times > done] for done in range(int(times.max(initial=0)))]
        return np.concatenate([_NONE, *passes])

    @property
    def tokens(self) -> int:
        """Tokens of the first epoch, after the cut."""
        return sum(int(self.lengths[rows].sum()) for rows in self.draw(0))

    def documents(self, epoch: int) -> int:
        """Documents of an epoch, each as often as it appears."""
        return sum(map(len, self.draw(epoch)))

    def repeats(self) -> np.ndarray:
        """How often each of `rows` appears in an epoch on average, up to a common factor."""
        common = math.lcm(*(share.weight.denominator for share in self.shares))
        times = np.zeros(len(self.rows), np.int64)
        for share in self.shares:
            own = (self.rows >= share.first) & (self.rows < share.last)
            times[own] = int(share.weight * common)
        return times

    def windows(self, epoch: int) -> Iterator[np.ndarray]:
        """The rows of each window, in training order: a window of every dataset, shuffled."""
        drawn = self.draw(epoch)
        rows = np.concatenate(drawn)
        sizes = [int(self.lengths[part].sum()) for part in drawn]
        first = np.cumsum([0, *map(len, drawn)]).tolist()
        windows = [self.window_tokens * size // sum(sizes) for size in sizes]
        strings = [
            self._string(i, first[i], drawn[i], max(1, windows[i]), epoch)
            for i in range(len(drawn))
            if len(drawn[i])
        ]
        for parts in itertools.zip_longest(*strings, fillvalue=_NONE):
            yield rows[self._shuffled(np.concatenate(parts), epoch)]

    def _string(
        self, index: int, first: int, rows: np.ndarray, window_tokens: int, epoch: int
    ) -> Iterator[np.ndarray]:
        """Places of one dataset's windows among the rows of all datasets."""
        lengths = self.lengths[rows]
        for places in string_blocks(lengths, window_tokens, self.seed, epoch, BLOCK, index):
            yield first + places


class PartsPlan(BatchPlan):
    """Several plans over the same documents, one after another: each is measured by itself too."""

    def __init__(self, parts: dict[str, BatchPlan]) -> None:
        """Take named plans of one pack length and batch size."""
        plans = list(parts.values())
        self.parts = parts
        self.rows = np.concatenate([plan.rows for plan in plans])
        self.lengths, self.seq_len = plans[0].lengths, plans[0].seq_len
        self.rows_per_batch, self.seed = plans[0].rows_per_batch, plans[0].seed
        self.window_tokens = plans[0].window_tokens
        self._planned = None

    def _facts(self) -> dict[str, Any]:
        return {"parts": {name: plan.state(0, 0) for name, plan in self.parts.items()}}

    def iter_batches(self, epoch: int) -> Iterator[list[Pack]]:
        """The batches of the first plan, then those of the next; none holds two of them."""
        for plan in self.parts.values():
            yield from plan.iter_batches(epoch)

    def packs_before(self, batch: int) -> int:
        """The same on any number of ranks: the last batch of a part may be short."""
        return sum(map(len, self.batches(0)[:batch]))

    def part_of(self, batch: int) -> str:
        """The plan that a batch comes from."""
        for name, plan in self.parts.items():
            batch -= len(plan.batches(0))
            if batch < 0:
                return name
        raise IndexError(f"batch {batch} beyond the last of all plans")
