"""The order over several datasets: how often each document appears, and when.

With weight w, every training document of a dataset appears w times per epoch. If w is not whole, a
document appears floor(w) or ceil(w) times, chosen so that epochs even out: documents get evenly
spaced phases u in (0, 1), in an order drawn from the seed, and document d has appeared
floor(u_d + k * w) times after k epochs. So k epochs together show a document k * w times, to within
one, and every epoch shows the same share of a dataset, to within one document.

A window has all datasets in proportion to their tokens: each dataset is cut into windows of its own
share, and the k-th windows of all datasets are shuffled together. So a small dataset is spread over
the whole epoch. The copies of a document are as far apart as the shuffle of stretches puts them.

The order is a function of (seed, epoch, lengths, weights). One dataset of weight 1 needs only a
BatchPlan.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from spec_data.shards.errors import ConfigError
from spec_train.data.order import PHASE, STRETCH, BatchPlan, Pack, hash_keys, shuffled_windows

FINEST_WEIGHT = 1000
"""Weights are multiples of 1 / FINEST_WEIGHT, so that their arithmetic fits in 64 bits."""

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One dataset of several: its documents [first, last) among all, and their weight."""

    name: str
    first: int
    last: int
    weight: Fraction
    fingerprint: str

    def __post_init__(self) -> None:
        """Refuse weights that are not positive, or have too many decimals."""
        if self.weight <= 0 or self.weight.denominator > FINEST_WEIGHT:
            raise ConfigError(
                f"weight {float(self.weight):g} of {self.name}: above 0, with at most 3 decimals"
            )


def copies(count: int, weight: Fraction, epoch: int, *stream: int) -> np.ndarray:
    """Return how often each of `count` documents appears in `epoch`, int64 [count].

    The integers of `stream` (the seed is one of them) decide in which epochs a document appears.
    """
    whole, rest = divmod(weight, 1)
    if not rest:
        return np.full(count, int(whole), np.int64)
    order = np.argsort(hash_keys(np.arange(count), *stream), kind="stable")
    rank = np.empty(count, np.int64)  # [count], place of each document in the drawn order
    rank[order] = np.arange(count)

    def shown(epochs: int) -> np.ndarray:  # floor(u + epochs * rest), u = (2 rank + 1) / (2 count)
        turns, part = divmod(epochs * rest.numerator, rest.denominator)
        steps = (2 * rank + 1) * rest.denominator + 2 * count * part
        return turns + steps // (2 * count * rest.denominator)

    return int(whole) + shown(epoch + 1) - shown(epoch)


class MixedPlan(BatchPlan):
    """The global batches of every epoch over several datasets, numbered one after another."""

    def __init__(
        self, lengths: np.ndarray, usable: np.ndarray, shares: Sequence[Share], **options: Any
    ) -> None:
        """Plan over the N documents of all datasets: `lengths` int64 [N], `usable` bool [N].

        `options` are those of BatchPlan.
        """
        super().__init__(lengths, usable, **options)
        self.shares = tuple(shares)
        self._drawn: tuple[int, list[np.ndarray]] | None = None

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {
            "fingerprint": [share.fingerprint for share in self.shares],
            "weights": [str(share.weight) for share in self.shares],
        }

    def draw(self, epoch: int) -> list[np.ndarray]:
        """Return each dataset's documents of an epoch, int64: all that appear, then the repeats."""
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, [self._draw(i, epoch) for i in range(len(self.shares))]
        return self._drawn[1]

    def _draw(self, index: int, epoch: int) -> np.ndarray:
        """Return the documents of dataset `index` in an epoch, int64, repeats after all firsts."""
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
        """Return the number of documents of an epoch, counting each as often as it appears."""
        return sum(map(len, self.draw(epoch)))

    def repeats(self) -> np.ndarray:
        """Return how often each of `rows` appears per epoch on average, scaled: int64 [n]."""
        common = math.lcm(*(share.weight.denominator for share in self.shares))
        times = np.zeros(len(self.rows), np.int64)
        for share in self.shares:
            own = (self.rows >= share.first) & (self.rows < share.last)
            times[own] = int(share.weight * common)
        return times

    def windows(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the documents of each window in training order: a part of every dataset."""
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
        """Yield one dataset's windows, as indices into the documents drawn from all datasets."""
        lengths = self.lengths[rows]
        for places in shuffled_windows(lengths, window_tokens, self.seed, epoch, STRETCH, index):
            yield first + places


class PartsPlan(BatchPlan):
    """Several plans over the same documents in sequence; each is also measured separately."""

    def __init__(self, parts: dict[str, BatchPlan]) -> None:
        """Join named plans, which have the same pack length and batch size."""
        plans = list(parts.values())
        self.parts = parts
        self.rows = np.concatenate([plan.rows for plan in plans])
        self.lengths, self.seq_len = plans[0].lengths, plans[0].seq_len
        self.packs_per_batch, self.seed = plans[0].packs_per_batch, plans[0].seed
        self.window_tokens, self.order = plans[0].window_tokens, plans[0].order
        self._planned = None

    def _facts(self) -> dict[str, Any]:
        return {"parts": {name: plan.state(0, 0) for name, plan in self.parts.items()}}

    def iter_batches(self, epoch: int) -> Iterator[list[Pack]]:
        """Yield the batches of the first plan, then those of the next; no batch mixes two plans."""
        for plan in self.parts.values():
            yield from plan.iter_batches(epoch)

    def packs_before(self, batch: int) -> int:
        """Return how many packs come before a batch; the last batch of a part may be short."""
        return sum(map(len, self.batches(0)[:batch]))

    def part_of(self, batch: int) -> str:
        """Return the name of the plan that a batch comes from."""
        for name, plan in self.parts.items():
            batch -= len(plan.batches(0))
            if batch < 0:
                return name
        raise IndexError(f"batch {batch} beyond the last of all plans")
