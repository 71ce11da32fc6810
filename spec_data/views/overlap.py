"""Which documents of a dataset contain parts of a benchmark's prompts: n-grams of token ids.

Prompts are tokenised with the dataset's own tokenizer. Only the texts of user messages count: what
the chat template adds, and a system prompt, are in every document. A document overlaps if n token
ids in a row are those of a prompt. A shorter prompt counts as a whole, if it has 8 tokens or more.
The comparison is exact: hashes find candidates, and then the ids are compared.

Shapes: T tokens of a document, n tokens of an n-gram, K n-grams.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from spec_data.progress import progress
from spec_data.shards.schema import Column
from spec_data.views.stored_documents import StoredDocuments

LEAST_TOKENS = 8
"""Shorter prompts are too common to say anything."""
_IDS = Column(name="input_ids", codec="int32")


@dataclass
class Grams:
    """The n-grams of a benchmark's prompts.

    Attributes:
        size: n; shorter prompts are n-grams of their own length.
        prompts: how many prompts were added; short: those that were too short to compare.
    """

    size: int
    prompts: int = 0
    short: int = 0
    _owners: dict[bytes, set[int]] = field(default_factory=dict)
    _hashes: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, texts: Iterable[Sequence[int]]) -> None:
        """Add a prompt: the token ids of each of its texts."""
        number, self.prompts = self.prompts, self.prompts + 1
        added = False
        for ids in texts:
            own = np.asarray(ids, np.int32)
            if len(own) < min(LEAST_TOKENS, self.size):
                continue
            added = True
            for gram in windows(own, min(self.size, len(own))):
                self._owners.setdefault(gram.tobytes(), set()).add(number)
        self.short += not added
        self._hashes = {}

    def matches(self, ids: np.ndarray) -> set[int]:
        """Return the numbers of the prompts that a document, int32 [T], overlaps."""
        if not self._hashes:
            self._hashes = self._hashed()
        found: set[int] = set()
        for size, known in self._hashes.items():
            if len(ids) < size:
                continue
            grams = windows(ids, size)
            for place in np.flatnonzero(np.isin(hashes(grams), known)).tolist():
                found |= self._owners.get(grams[place].tobytes(), set())
        return found

    def _hashed(self) -> dict[int, np.ndarray]:
        """Return the hashes of all n-grams by their length, uint64 [K] each."""
        by_size: dict[int, list[bytes]] = {}
        for gram in self._owners:
            by_size.setdefault(len(gram) // 4, []).append(gram)
        return {
            size: np.unique(hashes(np.frombuffer(b"".join(grams), np.int32).reshape(-1, size)))
            for size, grams in by_size.items()
        }


def windows(ids: np.ndarray, size: int) -> np.ndarray:
    """Return all runs of `size` token ids, int32 [T - size + 1, size]; a view of `ids` [T]."""
    return np.lib.stride_tricks.sliding_window_view(ids, size)


def hashes(grams: np.ndarray) -> np.ndarray:
    """Return a hash of each n-gram int32 [K, n], uint64 [K]; equal n-grams have equal ones."""
    value = np.zeros(len(grams), np.uint64)
    with np.errstate(over="ignore"):
        for column in grams.T:
            value = (value ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            value ^= value >> np.uint64(29)
    return value


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What of a dataset is in a benchmark, and what of the benchmark is in the dataset.

    Attributes:
        documents: which of the documents overlap, bool [n].
        prompts: how many documents contain a part of each prompt, by its number.
    """

    documents: np.ndarray
    prompts: Counter[int]


def find_overlap(stored: StoredDocuments, documents: np.ndarray, grams: Grams) -> Overlap:
    """Compare `documents`, int64 [n], with a benchmark.

    Raises:
        DatasetError: damage.
    """
    found = np.zeros(len(documents), bool)
    prompts: Counter[int] = Counter()
    bar = progress(documents.tolist(), desc="overlap", unit="docs", leave=False)
    for number, document in enumerate(bar):
        place = stored.find(document)
        own = grams.matches(place.shard.values(_IDS, place.place))
        found[number] = bool(own)
        prompts.update(own)
    return Overlap(documents=found, prompts=prompts)
