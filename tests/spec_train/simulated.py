"""Simulated decoding of whole batches."""

import numpy as np
from torch import Tensor

from spec_data.shards.batch import DraftBatch
from spec_train.simulation.simulated_decoding import (
    SimulatedDocument,
    documents_of,
    figures,
    no_counts,
)


def simulate(batch: DraftBatch, chains: Tensor) -> np.ndarray:
    """The counts of all documents of a batch."""
    found = no_counts(chains.shape[-1])
    for _, arrays in documents_of(batch, chains):
        found += SimulatedDocument(arrays).counts()
    return found


def length(counts: np.ndarray) -> float:
    return figures(counts)["acceptance_length"]
