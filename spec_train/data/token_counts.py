"""How often each token is a supervised token of documents. V target vocabulary."""

from collections.abc import Iterable

import numpy as np
import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.mixture import Documents


def count_tokens(
    dataset: Documents, documents: Iterable[tuple[int, int, int]], longest: int
) -> np.ndarray:
    """Count how often each token id is a supervised token, int64 [V].

    Only ids and masks are read, one document at a time.

    Args:
        dataset: what is read.
        documents: (row, tokens that are counted, times that each counts).
        longest: largest number of tokens.
    """
    counts = np.zeros(dataset.manifest.vocab_size, dtype=np.int64)
    ids = torch.zeros(longest, dtype=torch.int64)
    mask = torch.zeros(longest, dtype=torch.bool)
    out = {"input_ids": ids, "loss_mask": mask}
    for row, length, times in documents:
        tokens = dataset.read_into(row, out, 0, length)
        np.add.at(counts, ids[:tokens][mask[:tokens]].numpy(), times)
    return counts


def count_dataset(dataset: HiddenStatesDataset) -> np.ndarray:
    """Count the supervised tokens of all documents of a dataset, int64 [V]."""
    lengths = dataset.lengths.tolist()
    documents = ((row, length, 1) for row, length in enumerate(lengths))
    return count_tokens(dataset, documents, max(lengths, default=0))
