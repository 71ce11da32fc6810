"""An even sample: some of many documents, so that every part of a dataset or a corpus is seen."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def even_sample(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items: the middles of equal stretches, in order."""
    count, size = len(items), min(len(items), most)
    return [items[(2 * i + 1) * count // (2 * size)] for i in range(size)]


def sample_documents(lengths: np.ndarray, budget: int) -> list[int]:
    """Return indices of an even sample of documents with about `budget` tokens, one at least.

    `lengths` are the tokens per document, int64 [D].
    """
    count = len(lengths)
    return even_sample(range(count), max(1, budget * count // max(1, int(lengths.sum()))))
