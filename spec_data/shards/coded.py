"""Decode stored tokens of a lossy column to states, and put escaped tokens in their places.

There are two ways, with bit-identical results. `decode_rows` decodes at once into a CPU buffer.
`CodedRows` gathers the codes of a micro-batch, moves them to the training device as a half or a
quarter of the bytes, and decodes them there.

A row here is one stored token of the column. Shapes: n, N rows, W code bytes per row, H channels.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.lossy import LossyCodec, Tables, bf16_tensor
from spec_data.shards.schema import Column

DECODED_AT_ONCE = 1 << 24
"""Elements decoded together on a device: bounds the extra memory of decoding."""


@dataclass(frozen=True)
class StoredRows:
    """One document's part of a column: views of the mapped file, which must not be written to.

    `values` is [n, W] (or [n]). In a lossy column these are codes, with `scale` uint16 [n];
    `escape_index` int32 [k] lists the rows that escaped, ascending, and `escape` uint16 [k, H] has
    the bits of their bfloat16 states.
    """

    values: np.ndarray
    scale: np.ndarray
    escape_index: np.ndarray
    escape: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def cut(self, start: int, stop: int) -> "StoredRows":
        """Return rows [start, stop), with their escaped tokens numbered from `start`."""
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
    """Decode `stored` (n rows) into the CPU tensor `out` [n, H], bfloat16 or float32."""
    codec.decode_into(stored.values, stored.scale, tables, out)
    if len(stored.escape_index):
        rows = torch.from_numpy(stored.escape_index.astype(np.int64))
        out[rows] = bf16_tensor(stored.escape).to(out.dtype)


class CodedRows:
    """The stored rows of a lossy column for one micro-batch, gathered document by document.

    `codes` [N, W], `scale` bf16 [N] and `slots` int64 [N] are allocated once for N slots and reused
    for every micro-batch. `slots` says to which slot of the micro-batch a row belongs. Escaped
    tokens are few and are kept apart.
    """

    def __init__(self, column: Column, tables: Tables, slots: int, pin: bool) -> None:
        """Allocate for `slots` tokens of `column`; `tables` are on the device that decodes.

        Raises:
            ValueError: the column is not lossy.
        """
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
        """Drop all rows."""
        self.count = 0
        self._first_slot = 0
        self._escaped: list[tuple[np.ndarray, np.ndarray]] = []

    def begin_pack(self, first_slot: int) -> None:
        """Begin a pack, whose slot 0 is slot `first_slot` of the micro-batch."""
        self._first_slot = first_slot

    def add(self, stored: StoredRows, tokens: np.ndarray) -> None:
        """Append rows; `tokens` int64 [n] has the slot of each, counted within the current pack."""
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
        """Decode on `device` to states [slots, H] of `dtype`; zero where no row was added."""
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
            where = places[torch.from_numpy(rows).to(device, non_blocking=non_blocking)]
            out[where] = bf16_tensor(bits).to(device, non_blocking=non_blocking).to(dtype)
        return out


def runs(kept: np.ndarray) -> list[tuple[int, int]]:
    """Return the stretches [start, stop) of consecutive True in `kept`, bool [n]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], kept.astype(np.int8), [0]])))
    return list(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))
