"""Rows of a lossy column: from stored arrays to states, escaped tokens in their place.

Either at once into a CPU buffer (`decode_rows`), or gathered as they are stored (`CodedRows`),
moved as a half or a quarter of the bytes and decoded on the training device: the same bits.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.lossy import LossyCodec, Tables, bf16_tensor
from spec_data.shards.schema import Column

DECODED_AT_ONCE = 1 << 24
"""States decoded together on a device: bounds what decoding takes beside its result."""


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


class CodedRows:
    """Stored rows of a lossy column for one micro-batch, gathered document by document.

    `codes` [N, W], `scale` bf16 [N] and `slots` int64 [N] (numbers of the slots that the rows are
    the states of) are made once, for N slots, and filled again and again; escaped tokens are few,
    and kept aside.
    """

    def __init__(self, column: Column, tables: Tables, slots: int, pin: bool) -> None:
        """Room for `slots` tokens of `column`; `tables` are on the device that decodes."""
        if column.lossy is None:
            raise ValueError(f"column {column.name} has nothing to decode")
        self.codec, self.tables, self.width = column.lossy, tables, column.width or 1
        kind = torch.int8 if self.codec.storage == np.int8 else torch.uint8
        size = (slots, column.stored_width or 1)
        self.codes = torch.zeros(size, dtype=kind, pin_memory=pin)
        self.scale = torch.zeros(slots, dtype=torch.bfloat16, pin_memory=pin)
        self.slots = torch.zeros(slots, dtype=torch.int64, pin_memory=pin)
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.count = 0
        self._first_slot = 0
        self._escaped: list[tuple[np.ndarray, np.ndarray]] = []

    def begin_pack(self, first_slot: int) -> None:
        """Begin a pack, whose slot 0 is slot `first_slot` of the micro-batch."""
        self._first_slot = first_slot

    def add(self, stored: StoredRows, tokens: np.ndarray) -> None:
        """Append rows, one for each of `tokens` (numbers of slots from `first_slot` on)."""
        rows = slice(self.count, self.count + len(stored))
        np.copyto(self.codes[rows].numpy(), stored.values)
        np.copyto(self.scale[rows].view(torch.uint16).numpy(), stored.scale)
        np.add(tokens, self._first_slot, out=self.slots[rows].numpy())
        if len(stored.escape_index):
            self._escaped.append((stored.escape_index + np.int64(self.count), stored.escape))
        self.count = rows.stop

    def states(
        self, slots: int, device: torch.device | str, dtype: torch.dtype, non_blocking: bool
    ) -> Tensor:
        """States [slots, H] on `device`, decoded there; zero where no row was added."""
        out = torch.zeros(slots, self.width, dtype=dtype, device=device)
        tables = self.tables.to(device)
        codes, scale, places = (
            values[: self.count].to(device, non_blocking=non_blocking)
            for values in (self.codes, self.scale, self.slots)
        )
        step = max(1, DECODED_AT_ONCE // self.width)
        for a in range(0, self.count, step):
            part = slice(a, a + step)
            out[places[part]] = self.codec.decode(codes[part], scale[part], tables).to(dtype)
        for rows, bits in self._escaped:
            where = places[torch.from_numpy(rows).to(device)]
            out[where] = bf16_tensor(bits).to(device).to(dtype)
        return out


def runs(kept: np.ndarray) -> list[tuple[int, int]]:
    """Stretches [start, stop) of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], kept.astype(np.int8), [0]])))
    return list(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))
