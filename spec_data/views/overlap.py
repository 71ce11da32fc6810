"""Which documents of a dataset contain parts of prompts; the rule is `corpus/prompt_overlap.py`."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from spec_data.corpus.prompt_overlap import Grams
from spec_data.shards.schema import Column
from spec_data.terminal.progress import progress
from spec_data.views.stored_documents import StoredDocuments

_IDS = Column(name="input_ids", codec="int32")


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
