"""Which documents make global batch k: a pure function of (seed, epoch, lengths), no I/O.

The order is planned, not drawn from a shuffle buffer. The dataset is cut into stretches of
neighbouring documents. The stretches are shuffled and joined to windows of about `window_tokens`.
Documents are shuffled inside a window, then packed in that order (see `fill`), so that a batch is
close to a random sample of the window. Batch k of an epoch is the same on any number of ranks and
after any resume, and a position in the order is two integers. Every usable document appears exactly
once per epoch. The last batch of an epoch may be short, because dropping it would drop documents.

Random numbers are splitmix64 hashes of (seed, epoch, purpose, index). The generators of numpy may
change between releases, but the order of a run must not.

Documents are shuffled and packed window by window when batches are requested, so the first batch of
a million documents does not wait until all others are packed.

N documents. A batch plan here is the order of batches; the generation plan is another thing.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from spec_data.shards.errors import ConfigError
from spec_data.shards.packing import fill_in_order

# Each document, in shuffled order, goes into the fullest open pack that has room for it. At most
# OPEN packs are open, so neighbouring packs hold documents that are neighbours in the shuffled
# order, and a batch is a random sample. Best-fit by decreasing length has slightly fuller packs,
# but each holds documents of nearly one length, so a batch holds few lengths, and few sources where
# the length depends on the source.

T = TypeVar("T")

Pack = list[int]
"""Numbers (dataset rows) of the documents of one pack, left to right."""

STRETCHES_PER_WINDOW = 16
"""A stretch has about a sixteenth of the tokens of a window."""
PACKING_GROUP = 4096
"""Most documents packed together: the first batch waits for no more."""

SPLIT_RULE, SPLIT_BY_TOKENS = "prompts-1", "tokens-1"
"""Names of the hashes behind `split_border`, which decide what a run holds out: all answers to a
prompt (see `shards.prompt_keys`), and in runs of earlier releases a document alone."""

_OF_TOKENS = 16  # bytes at the beginning of an id

STRETCH, _DOCUMENT, _SPLIT, PHASE = 1, 2, 4, 5  # purposes of random numbers
_HASHED_AT_ONCE = 1 << 13  # indices: their arrays stay in the cache


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply the splitmix64 finaliser to uint64 values [N]; returns a new array."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash_keys(indices: np.ndarray, *stream: int) -> np.ndarray:
    """Return a pseudo-random uint64 per index [N]; `stream` is e.g. (seed, epoch, purpose)."""
    base = hashlib.blake2b(repr(stream).encode(), digest_size=8).digest()
    start = np.frombuffer(base, dtype="<u8").astype(np.uint64)
    keys = np.empty(len(indices), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for i in range(0, len(keys), _HASHED_AT_ONCE):  # new memory costs more than arithmetic
            some = indices[i : i + _HASHED_AT_ONCE].astype(np.uint64) + 1
            keys[i : i + len(some)] = _mix(start + some * np.uint64(0x9E3779B97F4A7C15))
    return keys


def split_border(hashes: np.ndarray, fraction: float, least: int = 0) -> int:
    """Return the border below which a hash, uint64 [N], is held out for validation.

    About `fraction` of the documents are below it. Documents of equal hashes are on one side. A
    side depends on the hash alone, so growing or reordering a dataset moves no document to the
    other side. There are exceptions for small data and for hashes that many documents have: no side
    is empty if 0 < fraction and there are two hashes; with `least`, so many documents are held out,
    or a tenth of all if that is less; and of a border that holds out more than twice the fraction,
    a lower one is taken if it holds out enough.
    """
    values, counts = np.unique(hashes, return_counts=True)
    if not len(values) or fraction <= 0:
        return 0
    border = int(min(fraction, 1.0) * (2**64 - 2048))
    if len(values) == 1:
        return border
    # a border just after hash i holds out below[i] documents; after the last hash it cannot be
    below, end = np.cumsum(counts), len(values) - 2
    wanted = max(1, min(least, len(hashes) // 10))
    enough = min(int(np.searchsorted(below, wanted)), end)
    usual = min(int(np.searchsorted(values, np.uint64(border))) - 1, end)
    most = int(np.searchsorted(below, 2 * fraction * len(hashes), "right")) - 1
    if usual < enough:
        return int(values[enough]) + 1
    if max(enough, most) < usual:
        return int(values[max(enough, most)]) + 1
    return min(border, int(values[-1]))


def below_border(hashes: np.ndarray, border: int) -> np.ndarray:
    """Return which hashes, uint64 [N], are below `border`, bool [N]."""
    return hashes < np.uint64(border)


def hash_prompts(prompts: np.ndarray, seed: int) -> np.ndarray:
    """Return a pseudo-random uint64 per prompt, [N]; `prompts` are their numbers, uint64 [N]."""
    return _mix(hash_keys(np.zeros(1, np.uint64), seed, _SPLIT) ^ prompts)


def shared(ids: pa.StringArray, others: Sequence[pa.StringArray]) -> np.ndarray:
    """Return which documents are in any of the others, bool [N], by id, whatever the loss mask."""
    known = [np.zeros(0, np.uint64), *(hash_ids(other, 0) for other in others)]
    return np.isin(hash_ids(ids, 0), np.concatenate(known))


def hash_ids(doc_ids: Sequence[str] | pa.StringArray, seed: int) -> np.ndarray:
    """Return a pseudo-random uint64 per id, [N].

    The UTF-8 bytes of the part of an id that is of the tokens alone (`document_digest`),
    zero-padded to a multiple of 8, are mixed 8 bytes at a time. The work is done on the Arrow
    buffer: a million ids take a few hundredths of a second.
    """
    ids = doc_ids if isinstance(doc_ids, pa.StringArray) else pa.array(doc_ids, pa.string())
    _, places, data = ids.buffers()
    bounds = np.frombuffer(places, np.int32)[ids.offset : ids.offset + len(ids) + 1]
    text = np.frombuffer(data or b"", np.uint8)
    hashes = np.empty(len(ids), dtype=np.uint64)
    lengths = np.minimum(np.diff(bounds), _OF_TOKENS)
    for length in np.flatnonzero(np.bincount(lengths)).tolist():
        start = hash_keys(np.array([length]), seed, _SPLIT)
        rows = np.flatnonzero(lengths == length)
        from_each_byte = np.lib.stride_tricks.sliding_window_view(text, length)  # [bytes, length]
        for i in range(0, len(rows), _HASHED_AT_ONCE):
            some = rows[i : i + _HASHED_AT_ONCE]
            words = np.zeros((len(some), -(-length // 8)), dtype="<u8")  # [ids, 8-byte words]
            words.view(np.uint8)[:, :length] = from_each_byte[bounds[some]]
            value = np.repeat(start, len(some))
            for word in words.T:
                value = _mix(value ^ word.astype(np.uint64))
            hashes[some] = value
    return hashes


def _bins(lengths: np.ndarray, size: int) -> np.ndarray:
    """Return the bin of `size` tokens in which each document starts, int64 [N].

    Documents of `lengths` int64 [N] are laid one after another.
    """
    bins = np.cumsum(lengths)
    bins -= lengths
    bins //= size
    return bins


def _borders(bins: np.ndarray) -> np.ndarray:
    """Return the indices where a new bin begins, without index 0; `bins` [N] is sorted."""
    return np.flatnonzero(bins[1:] != bins[:-1]) + 1


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the integers of all ranges [start, start + size) one after another: int64 [sum]."""
    ends = np.cumsum(sizes)  # range r fills places ends[r] - sizes[r] to ends[r] of the result
    return np.arange(int(ends[-1])) + np.repeat(starts - (ends - sizes), sizes)


def shuffled_windows(
    lengths: np.ndarray, window_tokens: int, seed: int, epoch: int, *stream: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the windows of an epoch: number, and int64 indices into `lengths` (int64 [N]).

    Stretches of neighbouring documents are shuffled by the hashes of `stream`, then joined to
    windows of about `window_tokens`. One in which no document starts is left out.
    """
    stretch = _bins(lengths, max(1, window_tokens // STRETCHES_PER_WINDOW))  # [N], ascending
    starts = np.concatenate([[0], _borders(stretch)])  # [S], first document of each stretch
    sizes = np.diff(starts, append=len(stretch))  # [S], documents
    names = stretch[starts]  # [S]; stretches in which no document starts have no entry
    turn = np.lexsort((names, hash_keys(names, seed, epoch, *stream)))  # [S], shuffled order
    order = _ranges(starts[turn], sizes[turn])  # [N], documents stretch by stretch
    windows = _bins(lengths[order], window_tokens)  # [N], ascending
    borders = _borders(windows)
    numbers = windows[np.concatenate([[0], borders])].tolist()
    yield from zip(numbers, np.split(order, borders), strict=True)


class BatchPlan:
    """The order of a run: the global batches of every epoch over some documents."""

    def __init__(
        self,
        lengths: np.ndarray,
        rows: np.ndarray,
        *,
        seq_len: int,
        packs_per_batch: int,
        seed: int = 0,
        window_tokens: int = 1 << 22,
        fingerprint: str = "",
        first_pack: int = 0,
    ) -> None:
        """Plan over the documents `rows`, int64 [n] ascending, of N with `lengths` int64 [N].

        Documents longer than `seq_len` count as cut to it. `packs_per_batch` is the number of packs
        in a global batch. `fingerprint` identifies the dataset. `first_pack` is how many packs of
        other plans come before.
        """
        self.rows = rows
        self.lengths = np.minimum(lengths, seq_len).astype(np.int64, copy=False)
        self.seq_len = seq_len
        self.packs_per_batch = packs_per_batch
        self.seed = seed
        self.window_tokens = max(1, window_tokens)
        self._fingerprint = fingerprint
        self._first_pack = first_pack
        self._planned: tuple[int, list[list[Pack]]] | None = None

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return self._facts()

    def _facts(self) -> dict[str, Any]:
        """Return everything that the order depends on; needed to save or load a position."""
        digest = hashlib.sha256(self.rows.astype("<i8", copy=False).data)
        digest.update(self.lengths[self.rows].astype("<i8", copy=False).data)
        return {
            "fingerprint": self._fingerprint,
            "documents": digest.hexdigest()[:16],
            "seed": self.seed,
            "seq_len": self.seq_len,
            "rows_per_batch": self.packs_per_batch,  # the name in checkpoints
            "window_tokens": self.window_tokens,
        }

    def documents(self, epoch: int) -> int:
        """Return the number of documents of an epoch, counting each as often as it appears."""
        return len(self.rows)

    def repeats(self) -> np.ndarray:
        """Return how often each of `rows` appears per epoch, up to a common factor: int64 [n]."""
        return np.ones(len(self.rows), np.int64)

    def packs_before(self, batch: int) -> int:
        """Return how many packs of an epoch come before a batch."""
        return self._first_pack + batch * self.packs_per_batch

    def batches(self, epoch: int) -> list[list[Pack]]:
        """Return the global batches of an epoch, as lists of packs; the last may be short."""
        planned = self._planned
        if planned is None or planned[0] != epoch:
            planned = epoch, list(self.iter_batches(epoch))
            self._planned = planned
        return planned[1]

    def iter_batches(self, epoch: int) -> Iterator[list[Pack]]:
        """Yield the batches of `batches` one by one, planning one window at a time."""
        waiting: list[Pack] = []
        for window in self.windows(epoch):
            for i in range(0, len(window), PACKING_GROUP):
                group = window[i : i + PACKING_GROUP]
                packs = fill_in_order(self.lengths[group].tolist(), self.seq_len)
                waiting += [group[pack].tolist() for pack in packs]
                whole = len(waiting) - len(waiting) % self.packs_per_batch
                for first in range(0, whole, self.packs_per_batch):
                    yield waiting[first : first + self.packs_per_batch]
                del waiting[:whole]
        if waiting:
            yield waiting

    def count_batches(self, epoch: int) -> int:
        """Count the batches of an epoch; the whole epoch is packed for this, and not kept."""
        planned = self._planned
        if planned is not None and planned[0] == epoch:
            return len(planned[1])
        return sum(1 for _ in self.iter_batches(epoch))

    def windows(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the documents of each window in training order, int64 dataset rows."""
        if not len(self.rows):
            return
        lengths = self.lengths[self.rows]
        for _, places in shuffled_windows(lengths, self.window_tokens, self.seed, epoch, STRETCH):
            yield self.rows[self._shuffled(places, epoch)]

    def _shuffled(self, places: np.ndarray, epoch: int) -> np.ndarray:
        """Shuffle the documents of a window: int64 [n] to int64 [n]."""
        keys = hash_keys(places, self.seed, epoch, _DOCUMENT)
        return places[np.argsort(keys, kind="stable")]

    def state(self, epoch: int, batches_done: int) -> dict[str, Any]:
        """Return a position in the order, with everything that the order depends on."""
        return {**self._identity, "epoch": epoch, "batches_done": batches_done}

    def position(self, state: dict[str, Any]) -> tuple[int, int]:
        """Read `(epoch, batches_done)` from a state that a plan of the same order saved.

        Raises:
            ConfigError: the state belongs to another order; the message names both values.
        """
        differing = [
            f"{name} was {state.get(name)!r}, is {value!r}"
            for name, value in self._identity.items()
            if state.get(name) != value
        ]
        if differing:
            raise ConfigError(
                "the saved position belongs to another order of batches: "
                + "; ".join(differing)
                + ". Resume with the same dataset and settings, or start in another --out"
            )
        return int(state["epoch"]), int(state["batches_done"])


# -- following -------------------------------------------------------------------------------------


class FollowingPlan(BatchPlan):
    """The order of a run that follows a dataset while it is generated, unit by unit (shards).

    The first epoch trains on windows of consecutive units, of at least `window_tokens` each, and
    shuffles inside a window, so batch k needs no unit after the last one of its window. In later
    epochs all units are on disk, and the order is that of a BatchPlan. All of it follows from the
    generation plan, which is complete before the first unit.
    """

    def __init__(
        self, lengths: np.ndarray, rows: np.ndarray, units: np.ndarray, **options: Any
    ) -> None:
        """Plan over documents `rows`, int64 [n]; unit u has documents units[u] to units[u+1].

        `units` is int64 [U + 1]; other arguments as for BatchPlan.
        """
        super().__init__(lengths, rows, **options)
        self.units = units
        self.bounds = window_bounds(self.lengths, rows, units, self.window_tokens)

    def windows(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the documents of each window in training order, int64 dataset rows."""
        if epoch:
            yield from super().windows(epoch)
            return
        # int64 [W + 1]: window w has the documents rows[borders[w] : borders[w + 1]]
        borders = np.searchsorted(self.rows, self.units[self.bounds]).tolist()
        for first, last in itertools.pairwise(borders):
            if first < last:
                yield self.rows[self._shuffled(np.arange(first, last), 0)]

    def unit_spans(self) -> np.ndarray:
        """Return what the K batches of the first epoch need of the units, int64 [K + 1, 2].

        Row k says which units batch k may not begin without, if units are there in order: those up
        to [k, 1], not included. After k batches, none before [k, 0] is needed again; it is the
        start of a window, or what was needed before. The last row holds for the end.
        """
        batches = [list(itertools.chain(*batch)) for batch in self.iter_batches(0)]
        rows = np.array([[min(batch), max(batch)] for batch in batches], np.int64).reshape(-1, 2)
        units = np.searchsorted(self.units, rows, "right") - 1  # [K, 2]
        there = np.maximum.accumulate(np.append(units[:, 1], 0)) + 1
        later = np.minimum.accumulate(np.append(units[:, 0], len(self.units) - 1)[::-1])[::-1]
        window = self.bounds[np.searchsorted(self.bounds, later, "right") - 1]
        before = np.concatenate([[0], there[:-1]])
        return np.stack([np.minimum(window, before), there], 1)


def bytes_together(spans: np.ndarray, sizes: Sequence[int], kept: Sequence[int]) -> int:
    """Return the most bytes of units that a run needs at a time, if it deletes what it can.

    `spans` are those of `FollowingPlan.unit_spans`, `sizes` the bytes of each unit. The units
    `kept`, ascending, stay, and all up to the last of them are there before the first batch.
    """
    others = np.array(sizes, np.int64)
    at_first = int(others[: kept[-1] + 1].sum()) if kept else 0
    stay = int(others[list(kept)].sum())
    others[list(kept)] = 0
    total = np.concatenate([[0], np.cumsum(others)])
    return max(at_first, stay + int((total[spans[:, 1]] - total[spans[:, 0]]).max()))


def window_bounds(
    lengths: np.ndarray, rows: np.ndarray, units: np.ndarray, window_tokens: int
) -> np.ndarray:
    """Return the bounds of W windows of consecutive units, int64 [W + 1].

    A window ends with the unit in which its documents `rows` reach `window_tokens` tokens. For the
    arguments see `FollowingPlan`.
    """
    total = np.concatenate([[0], np.cumsum(lengths[rows])])  # [n + 1]
    per_unit = np.diff(total[np.searchsorted(rows, units)])  # [U], tokens of `rows`
    bounds, tokens = [0], 0
    for unit, count in enumerate(per_unit.tolist(), 1):
        tokens += count
        if tokens >= window_tokens:
            bounds.append(unit)
            tokens = 0
    if bounds[-1] < len(per_unit):
        bounds.append(len(per_unit))
    return np.array(bounds, np.int64)
