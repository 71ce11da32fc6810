"""Rows of a lossy column: from stored arrays to states, escaped tokens in their place."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.lossy import LossyCodec, Tables, bf16_tensor


@dataclass(frozen=True)
class StoredRows:
    """What a shard holds of one document's column: views of the mapped file, never to be written.

    `values` [n, W] (or [n]); for lossy columns codes, with `scale` uint16 [n], the rows that
    escaped, int32 [k] ascending, and their bits uint16 [k, H].
    """

    values: np.ndarray
    scale: np.ndarray
    escape_index: np.ndarray
    escape: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def cut(self, start: int, stop: int) -> "StoredRows":
        """Rows [start, stop)."""
        if start == 0 and stop == len(self.values):
            return self
        a, b = np.searchsorted(self.escape_index, [start, stop]) if len(self.escape) else (0, 0)
        return StoredRows(
            self.values[start:stop],
            self.scale[start:stop],
            self.escape_index[a:b] - start,
            self.escape[a:b],
        )


def decode_rows(codec: LossyCodec, stored: StoredRows, tables: Tables, out: Tensor) -> None:
    """Write states into the CPU buffer `out` [n, H] (bf16, or float32 of the same values)."""
    codec.decode_into(stored.values, stored.scale, tables, out)
    if len(stored.escape_index):
        rows = torch.from_numpy(stored.escape_index.astype(np.int64))
        out[rows] = bf16_tensor(stored.escape).to(out.dtype)


def runs(kept: np.ndarray) -> list[tuple[int, int]]:
    """Stretches [start, stop) of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], kept.astype(np.int8), [0]])))
    return list(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))
