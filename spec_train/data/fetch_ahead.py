"""Fetch the data of coming steps from remote storage while earlier steps are read.

One thread walks ahead of the reader and starts range requests; `block_cache` runs them. It stays a
fixed number of bytes ahead. A failure here is none of the run: the reader meets it again, and
raises it. Local datasets are read without any of this.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spec_data.shards.block_cache import size_limit
from spec_data.shards.errors import SpecDataError
from spec_data.shards.mirror import Mirror
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.mixture import Documents, Mixture

T = TypeVar("T")

AHEAD_BYTES = 1 << 30
"""How far requests go ahead of the reader, where a quarter of the cache is not less."""


def _mirrors(dataset: Documents) -> list[Mirror]:
    parts = dataset.datasets if isinstance(dataset, Mixture) else (dataset,)
    return [p.mirror for p in parts if isinstance(p, HiddenStatesDataset) and p.mirror is not None]


def is_remote(dataset: Documents) -> bool:
    """Return whether some of the documents are on remote storage."""
    return bool(_mirrors(dataset))


class FetchAhead:
    """Starts the requests for documents of one dataset, in the order in which they are asked."""

    def __init__(self, dataset: Documents, columns: Sequence[str]) -> None:
        """Fetch `columns` of `dataset`, some of which is remote."""
        self._dataset, self._columns = dataset, tuple(columns)
        self._each = sum(c.bytes_per_token for c in dataset.manifest.columns if c.name in columns)
        self._limit = min(AHEAD_BYTES, size_limit() // 4)

    def steps(self, steps: Iterable[T], rows: Callable[[T], Iterable[int]]) -> Iterator[T]:
        """Yield `steps`; the documents `rows(step)` of coming ones are fetched meanwhile."""
        waiting: deque[tuple[T, int]] = deque()
        ahead = 0
        with ThreadPoolExecutor(1, thread_name_prefix="fetch-ahead") as thread:
            try:
                for step in steps:
                    own = list(rows(step))
                    thread.submit(self._begin, own)
                    size = self._each * int(self._dataset.lengths[own].sum())
                    waiting.append((step, size))
                    ahead += size
                    while ahead > self._limit and waiting:
                        first, size = waiting.popleft()
                        yield first
                        ahead -= size
                for step, _ in waiting:
                    yield step
            finally:
                thread.shutdown(wait=False, cancel_futures=True)
                for mirror in _mirrors(self._dataset):
                    mirror.blocks.cancel()  # a run that is stopped must not wait for them

    def _begin(self, rows: Sequence[int]) -> None:
        for row in rows:
            with contextlib.suppress(SpecDataError, OSError):
                self._dataset.fetch_ahead(row, self._columns)
