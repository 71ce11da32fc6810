"""The inputs of one forward of the target, and the documents they hold."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass
class ForwardBatch:
    """The inputs of one forward, int64 [B, T] on the CPU, and the documents they hold.

    Attributes:
        input_ids: 0 in padding; document_ids: -1 in padding; position_ids: restart per document.
        documents: indices of the documents in the order of their tokens (row by row).
        lengths: tokens of each of them.
    """

    input_ids: Tensor
    document_ids: Tensor
    position_ids: Tensor
    documents: list[int]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        """The number of real tokens N."""
        return sum(self.lengths)

    def token_index(self, offsets: np.ndarray) -> np.ndarray:
        """Return, for each real token in the order of the batch, its index in the documents that
        the batch was made from, int64 [N]; `offsets` is int64 [D + 1].
        """
        return np.concatenate([np.arange(offsets[d], offsets[d + 1]) for d in self.documents])
