"""Which documents make global batch k: a pure function of (seed, epoch, lengths), no I/O.

Order is planned, not drawn from a buffer: contiguous blocks of documents are shuffled, strung
into windows of about `window_tokens`, documents are shuffled inside a window, and packed on their
lengths. Batch k of an epoch is therefore the same on any number of ranks and after any resume,
and the whole state of a stream is two integers. Every usable document appears exactly once an
epoch; the last batch of an epoch may be short, because dropping it would drop documents.

Random numbers are splitmix64 hashes of (seed, epoch, what, index), since numpy's generators may
change between releases and an order may not.

Only the shuffle of blocks is over the whole epoch, and it is array arithmetic; documents are
shuffled and packed window by window as batches are asked for, so that the first batch of a
million documents does not wait for the packing of the others.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from spec_data.shards.errors import ConfigError
from spec_data.shards.packing import pack_documents

T = TypeVar("T")

Pack = list[int]
"""Dataset rows of the documents of one pack."""

BLOCKS_PER_WINDOW = 16
PACKING_GROUP = 4096
"""Documents packed together at most: best-fit gains nothing from more, and stays fast."""

SPLIT_RULE = "words-1"
"""Name of the function behind `split_documents`: a run's held-out documents follow from it too."""

BLOCK, _DOCUMENT, _PACK, _SPLIT, PHASE = 1, 2, 3, 4, 5
_HASHED_AT_ONCE = 1 << 13


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64 finaliser of uint64 values."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash_keys(indices: np.ndarray, *stream: int) -> np.ndarray:
    """One pseudo-random uint64 per index, for the given stream of integers."""
    base = hashlib.blake2b(repr(stream).encode(), digest_size=8).digest()
    start = np.frombuffer(base, dtype="<u8").astype(np.uint64)
    keys = np.empty(len(indices), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for i in range(0, len(keys), _HASHED_AT_ONCE):  # fresh pages cost more than the maths
            some = indices[i : i + _HASHED_AT_ONCE].astype(np.uint64) + 1
            keys[i : i + len(some)] = _mix(start + some * np.uint64(0x9E3779B97F4A7C15))
    return keys


def _order(keys: np.ndarray) -> np.ndarray:
    """The stable argsort of hashes, some times as fast: they are as good as never equal."""
    order = np.argsort(keys)
    found = keys[order]
    return np.argsort(keys, kind="stable") if (found[1:] == found[:-1]).any() else order


def split_documents(
    doc_ids: Sequence[str] | pa.StringArray,
    fraction: float,
    seed: int,
    among: np.ndarray | None = None,
) -> np.ndarray:
    """Boolean [N], True for validation documents: those whose hashed id falls below `fraction`.

    `among` int64 [N] picks the documents to split by their numbers; without it, all of them.
    A document's side depends on its id and the seed alone, so growing or reordering a dataset
    moves no document, and copies of a document (equal ids) are never on both sides. One exception
    keeps small data usable: where the hash would leave a side empty although 0 < fraction and
    there are two distinct documents, the document nearest the border crosses it.
    """
    border = split_border(doc_ids, fraction, seed, among)
    return below_border(doc_ids, border, seed, among)


def split_border(
    doc_ids: Sequence[str] | pa.StringArray,
    fraction: float,
    seed: int,
    among: np.ndarray | None = None,
) -> int:
    """The border of `split_documents`: documents whose hashed id is below it are held out.

    Applied to a part of the documents, it gives the side that they have in the whole.
    """
    hashes = _hashes(doc_ids, seed, among) if fraction > 0 else np.zeros(0, np.uint64)
    if not len(hashes):
        return 0
    border = int(min(fraction, 1.0) * (2**64 - 2048))
    low, high = int(hashes.min()), int(hashes.max())
    if low != high and border <= low:
        border = low + 1
    if low != high and border > high:
        border = high
    return border


def below_border(
    doc_ids: Sequence[str] | pa.StringArray, border: int, seed: int, among: np.ndarray | None = None
) -> np.ndarray:
    """Boolean [N], True where the hashed id is below `border`, of all documents or of `among`."""
    return _hashes(doc_ids, seed, among) < np.uint64(border)


def _hashes(
    doc_ids: Sequence[str] | pa.StringArray, seed: int, among: np.ndarray | None
) -> np.ndarray:
    hashes = _hash_ids(doc_ids, seed)
    return hashes if among is None else hashes[among]


def _hash_ids(doc_ids: Sequence[str] | pa.StringArray, seed: int) -> np.ndarray:
    """A pseudo-random uint64 per id, [N]: its UTF-8 bytes, zero-padded to 8, mixed word by word.

    Works on the bytes of the Arrow buffer; a million ids take some hundredths of a second.
    """
    ids = doc_ids if isinstance(doc_ids, pa.StringArray) else pa.array(doc_ids, pa.string())
    _, places, data = ids.buffers()
    bounds = np.frombuffer(places, np.int32)[ids.offset : ids.offset + len(ids) + 1]
    text = np.frombuffer(data or b"", np.uint8)
    hashes = np.empty(len(ids), dtype=np.uint64)
    lengths = np.diff(bounds)
    for length in np.flatnonzero(np.bincount(lengths)).tolist():
        start = hash_keys(np.array([length]), seed, _SPLIT)
        rows = np.flatnonzero(lengths == length)
        for i in range(0, len(rows), _HASHED_AT_ONCE):
            some = rows[i : i + _HASHED_AT_ONCE]
            words = np.zeros((len(some), -(-length // 8)), dtype="<u8")
            first, last = int(some[0]), int(some[-1])
            if last - first + 1 == len(some):  # neighbours: no need to gather
                letters = text[bounds[first] : bounds[last + 1]].reshape(len(some), length)
            else:
                letters = text[bounds[some][:, None] + np.arange(length)]
            words.view(np.uint8)[:, :length] = letters
            value = np.repeat(start, len(some))
            for word in words.T:
                value = _mix(value ^ word.astype(np.uint64))
            hashes[some] = value
    return hashes


def _bins(lengths: np.ndarray, size: int) -> np.ndarray:
    """Which bin of `size` tokens each document starts in, when they stand in a row."""
    bins = np.cumsum(lengths)
    bins -= lengths
    bins //= size
    return bins


def _borders(bins: np.ndarray) -> np.ndarray:
    """Where another bin begins, the first one apart."""
    return np.flatnonzero(bins[1:] != bins[:-1]) + 1


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The integers of all ranges [start, start + size) in a row; int64 [sum of sizes]."""
    ends = np.cumsum(sizes)
    return np.arange(int(ends[-1])) + np.repeat(starts - (ends - sizes), sizes)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which documents a trainer can use at one pack length, and what happened to the others."""

    usable: np.ndarray  # bool [N]
    cut: int  # usable documents cut to the pack length
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> documents


def select_documents(
    lengths: np.ndarray, supervised: np.ndarray, first_supervised: np.ndarray, seq_len: int
) -> Selection:
    """Leave out documents that cannot supervise anything once cut to `seq_len`, by reason."""
    nothing = supervised == 0
    beyond = ~nothing & (first_supervised >= seq_len)
    usable = ~(nothing | beyond)
    reasons = {
        "no supervised token": int(nothing.sum()),
        f"first supervised token past --seq-len {seq_len}": int(beyond.sum()),
    }
    return Selection(
        usable=usable,
        cut=int((usable & (lengths > seq_len)).sum()),
        left_out={reason: count for reason, count in reasons.items() if count},
    )


def string_blocks(
    lengths: np.ndarray, window_tokens: int, seed: int, epoch: int, *stream: int
) -> Iterator[np.ndarray]:
    """Places in `lengths` of each window of an epoch: contiguous blocks, shuffled by the hashes
    of `stream`, strung into windows of about `window_tokens`."""
    block = _bins(lengths, max(1, window_tokens // BLOCKS_PER_WINDOW))
    starts = np.concatenate([[0], _borders(block)])  # of the blocks that hold a document
    sizes = np.diff(starts, append=len(block))
    names = block[starts]
    turn = np.lexsort((names, hash_keys(names, seed, epoch, *stream)))
    by_block = _ranges(starts[turn], sizes[turn])
    yield from np.split(by_block, _borders(_bins(lengths[by_block], window_tokens)))


class BatchPlan:
    """The global batches of every epoch over the documents where `usable` is True."""

    def __init__(
        self,
        lengths: np.ndarray,
        usable: np.ndarray,
        *,
        seq_len: int,
        rows_per_batch: int,
        seed: int = 0,
        window_tokens: int = 1 << 22,
        fingerprint: str = "",
    ) -> None:
        """Plan over `lengths` int64 [N]; documents longer than `seq_len` count as cut to it.

        `rows_per_batch` is the number of packs in a global batch; `fingerprint` names the dataset.
        """
        for name, value in (("seq_len", seq_len), ("rows_per_batch", rows_per_batch)):
            if value < 1:
                raise ConfigError(f"{name} is {value}: expected at least 1")
        self.rows = np.flatnonzero(usable)
        self.lengths = np.minimum(lengths, seq_len).astype(np.int64, copy=False)
        self.seq_len = seq_len
        self.rows_per_batch = rows_per_batch
        self.seed = seed
        self.window_tokens = max(1, window_tokens)
        self._fingerprint = fingerprint
        self._planned: tuple[int, list[list[Pack]]] | None = None

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return self._facts()

    def _facts(self) -> dict[str, Any]:
        """Everything the order depends on; made when a position is saved or taken up."""
        digest = hashlib.sha256(self.rows.astype("<i8", copy=False).data)
        digest.update(self.lengths[self.rows].astype("<i8", copy=False).data)
        return {
            "fingerprint": self._fingerprint,
            "documents": digest.hexdigest()[:16],
            "seed": self.seed,
            "seq_len": self.seq_len,
            "rows_per_batch": self.rows_per_batch,
            "window_tokens": self.window_tokens,
        }

    @property
    def tokens(self) -> int:
        """Tokens of one epoch, after the cut."""
        return int(self.lengths[self.rows].sum())

    def documents(self, epoch: int) -> int:
        """Documents of an epoch, each as often as it appears."""
        return len(self.rows)

    def repeats(self) -> np.ndarray:
        """How often each of `rows` appears in an epoch on average, up to a common factor."""
        return np.ones(len(self.rows), np.int64)

    def part_of(self, batch: int) -> str:
        """The name under which a batch is also measured by itself; "" for none."""
        return ""

    def packs_before(self, batch: int) -> int:
        """How many packs of an epoch come before a batch of it."""
        return batch * self.rows_per_batch

    def batches(self, epoch: int) -> list[list[Pack]]:
        """Global batches of an epoch: batch -> packs -> dataset rows. The last may be short."""
        planned = self._planned
        if planned is None or planned[0] != epoch:
            planned = epoch, list(self.iter_batches(epoch))
            self._planned = planned
        return planned[1]

    def iter_batches(self, epoch: int) -> Iterator[list[Pack]]:
        """The same batches one by one, planning no further than the window they come from."""
        waiting: list[Pack] = []
        for window in self.windows(epoch):
            for i in range(0, len(window), PACKING_GROUP):
                waiting += self._packs(window[i : i + PACKING_GROUP], epoch)
                whole = len(waiting) - len(waiting) % self.rows_per_batch
                for first in range(0, whole, self.rows_per_batch):
                    yield waiting[first : first + self.rows_per_batch]
                del waiting[:whole]
        if waiting:
            yield waiting

    def count_batches(self, epoch: int) -> int:
        """How many batches an epoch has: all of it is packed, and nothing of it kept."""
        planned = self._planned
        if planned is not None and planned[0] == epoch:
            return len(planned[1])
        return sum(1 for _ in self.iter_batches(epoch))

    def windows(self, epoch: int) -> Iterator[np.ndarray]:
        """The dataset rows of each window, in training order: whole shuffled blocks."""
        if not len(self.rows):
            return
        lengths = self.lengths[self.rows]
        for places in string_blocks(lengths, self.window_tokens, self.seed, epoch, BLOCK):
            yield self.rows[self._shuffled(places, epoch)]

    def _shuffled(self, places: np.ndarray, epoch: int) -> np.ndarray:
        """The places of a window in their order inside it."""
        return places[_order(hash_keys(places, self.seed, epoch, _DOCUMENT))]

    def _packs(self, group: np.ndarray, epoch: int) -> list[Pack]:
        """Pack a shuffled group; the packs are shuffled again, as best-fit sorts them by size."""
        rows = group.tolist()
        packs = pack_documents(self.lengths[group].tolist(), self.seq_len)
        first = np.array([rows[pack[0]] for pack in packs])
        order = np.argsort(hash_keys(first, self.seed, epoch, _PACK), kind="stable").tolist()
        return [[rows[i] for i in packs[p]] for p in order]

    def state(self, epoch: int, batches_done: int) -> dict[str, Any]:
        """A position in the order, with everything the order depends on."""
        return {**self._identity, "epoch": epoch, "batches_done": batches_done}

    def position(self, state: dict[str, Any]) -> tuple[int, int]:
        """`(epoch, batches_done)` of a state that this very plan made.

        Raises:
            ConfigError: the state belongs to another order; the message has both values.
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
                + ". Go on with the same dataset and settings, or start in another --out"
            )
        return int(state["epoch"]), int(state["batches_done"])


def rank_slice(batch: Sequence[T], rank: int, world_size: int) -> list[T]:
    """The packs (or micro-batches) of a global batch that one rank reads; empty where a short
    batch runs out.

    Strided, so that ranks differ by one at most; over all ranks everything appears once.
    """
    return list(batch[rank::world_size])
