"""Download the shards of coming steps from remote storage while earlier steps are read.

A failure here is none of the run: the reader meets it again, and raises it. Local datasets are read
without any of this.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.remote import SIZE_VARIABLE
from spec_train.data.mixture import Documents, Mixture
from spec_train.data.order import STRETCHES_PER_WINDOW

logger = logging.getLogger(__name__)

T = TypeVar("T")

STEPS = 64
"""How many steps are looked ahead, where their shards are less than a quarter of the cache."""


def remote_parts(dataset: Documents) -> list[HiddenStatesDataset]:
    """Return the datasets among the documents that are on remote storage."""
    parts = dataset.datasets if isinstance(dataset, Mixture) else (dataset,)
    stored = (s for p in parts if isinstance(p, HiddenStatesDataset) for s in p.sources)
    return [source for source in stored if source.mirror is not None]


def fetched_ahead(
    dataset: Documents, steps: Iterable[T], rows: Callable[[T], Iterable[int]]
) -> Iterator[T]:
    """Yield `steps`; shards of the documents `rows(step)` of coming ones are downloaded."""
    mirrors = [part.mirror for part in remote_parts(dataset) if part.mirror]
    limit = min(mirror.limit for mirror in mirrors) // 4
    waiting: deque[tuple[T, int]] = deque()
    ahead = 0
    try:
        for step in steps:
            size = dataset.fetch_ahead(rows(step))
            waiting.append((step, size))
            ahead += size
            while waiting and (ahead > limit or len(waiting) > STEPS):
                first, size = waiting.popleft()
                yield first
                ahead -= size
        for step, _ in waiting:
            yield step
    finally:
        for mirror in mirrors:
            mirror.stop()  # a run that is stopped must not wait for them


def warn_of_small_cache(dataset: Documents, window_tokens: int) -> None:
    """Warn where the shards of a window of the order exceed the cache: each is fetched often."""
    needed, limit = 0, 0
    for part in remote_parts(dataset):
        assert part.mirror is not None
        totals, limit = part.manifest.totals, part.mirror.limit
        largest = max((record.bytes for record in part.manifest.shards), default=0)
        window = window_tokens * totals.bytes // max(1, totals.tokens)
        needed += min(totals.bytes, window + STRETCHES_PER_WINDOW * largest)
    if needed > limit:
        logger.warning(
            "warning: a window of --window-tokens %s may touch %.1f GB of shards, but the local "
            "cache holds %.1f GB: shards will be downloaded again and again. Set %s to more, or "
            "lower --window-tokens",
            *(f"{window_tokens:,}", needed / 1e9, limit / 1e9, SIZE_VARIABLE),
        )
