"""From the columns of a forward to the arrays of a unit: encoded on the device, copied, stored.

On a CPU nothing moves: arrays are views of the tensors. On CUDA a stream of its own copies into
page-locked buffers that are made once and reused, beside the next forward. The arrays of a batch
are read after the next forward was started, so the device never waits for the host. Two batches of
stored bytes are in memory, whatever the size of the dataset. Full logits are copied at once: two
batches of them would fill the memory of the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spec_data.capture.backend import ForwardBatch
from spec_data.shards.codecs import Tables, bf16_bits
from spec_data.shards.schema import Column
from spec_data.shards.writer import UnitData

_ALIGNED = 64  # bytes; every tensor of a buffer begins at a multiple


class Streams(Protocol):
    """The queue of copies of a device, beside the queue of its computation."""

    def pinned(self, size: int) -> Tensor:
        """Return page-locked memory of the host, uint8 [size]."""

    def after_compute(self) -> None:
        """Let copies that are queued from now on wait for all computation queued so far."""

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Queue a copy; the memory of `source` stays valid until it is done."""

    def select(self, source: Tensor, index: Tensor) -> Tensor:
        """Queue the selection of rows of `source`; return them on the device."""

    def mark(self) -> Any:
        """Return an event, whose `synchronize` waits for all copies queued so far."""


class CudaStreams:
    """The copy stream of a CUDA device, see `Streams`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def after_compute(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, source: Tensor, into: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def select(self, source: Tensor, index: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            rows = source.index_select(0, index.to(source.device))
        source.record_stream(self._stream)
        return rows

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


@dataclass
class _Buffer:
    """Page-locked memory of one batch."""

    memory: Tensor
    busy: bool = False


class Transfers:
    """Moves the tensors of a batch to the host: at once, or by a queue of copies, one batch late.

    Attributes:
        late: how many batches may be on their way at a time.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        """Use the queue `streams`; its memory is allocated at first use and grows with the batches.

        None moves tensors at once.
        """
        self._streams, self.late, self._turn = streams, int(streams is not None), 0
        count = self.late + 1 if streams else 0
        self._buffers = [_Buffer(torch.empty(0, dtype=torch.uint8)) for _ in range(count)]

    def start(self, tensors: Mapping[str, Tensor]) -> "Arrival":
        """Start to move tensors that are computed, or whose computation was queued.

        Raises:
            RuntimeError: the arrival before the last one was not released.
        """
        if self._streams is None:
            return Arrival({name: value.cpu() for name, value in tensors.items()})
        buffer = self._buffers[self._turn]
        if buffer.busy:
            raise RuntimeError("an arrival was not released before its memory was needed again")
        buffer.busy = True
        self._turn = (self._turn + 1) % len(self._buffers)
        sources = {name: value.contiguous() for name, value in tensors.items()}
        ends = np.cumsum([-(-v.nbytes // _ALIGNED) * _ALIGNED for v in sources.values()])
        if len(ends) and ends[-1] > len(buffer.memory):
            buffer.memory = self._streams.pinned(int(ends[-1]))
        self._streams.after_compute()
        views = {}
        for (name, value), start in zip(sources.items(), [0, *ends[:-1].tolist()], strict=True):
            flat = buffer.memory[start : start + value.nbytes].view(value.dtype)
            views[name] = flat.view(value.shape)
            self._streams.copy(value, views[name])
        return Arrival(views, self._streams, buffer)


class Arrival:
    """The tensors of one batch, on their way to the host."""

    def __init__(
        self,
        views: dict[str, Tensor],
        streams: Streams | None = None,
        buffer: _Buffer | None = None,
    ) -> None:
        self._views, self._streams, self._buffer = views, streams, buffer
        self._event = streams.mark() if streams else None

    def arrays(self) -> dict[str, np.ndarray]:
        """Wait for the tensors and return them; they are overwritten after `release`."""
        if self._event is not None:
            self._event.synchronize()
        return {name: view.numpy() for name, view in self._views.items()}

    def rows(self, values: Tensor, index: np.ndarray) -> Tensor:
        """Return some rows, on the host, of a tensor that was computed when the copies began.

        Nothing may be computed from it first: that would wait for the next forward.
        """
        chosen = torch.from_numpy(index)
        if self._streams is None or self._event is None:
            return values[chosen.to(values.device)].cpu()
        self._event.synchronize()
        rows = self._streams.select(values, chosen)
        out = torch.empty(rows.shape, dtype=rows.dtype)
        self._streams.copy(rows, out)
        self._streams.mark().synchronize()
        return out

    def release(self) -> None:
        """Let the next batches use the memory of the arrays."""
        self._views = {}
        if self._buffer is not None:
            self._buffer.busy = False


def transfers_for(device: torch.device, columns: Sequence[str]) -> Transfers:
    """Return how states of `device` come to the host; `columns` are those that are stored."""
    if device.type != "cuda" or "logits" in columns:
        return Transfers()
    return Transfers(CudaStreams(device))


# -- encoding --------------------------------------------------------------------------------------
# `encode_columns` runs on the device of the target and only queues work there; `store` runs on the
# host, when the result has arrived. No step in between asks the device for a number.
#
# Shapes: n tokens of a batch that a column stores, W values of a token, D documents of the batch.


_NON_FINITE, _CONSTANT = 1, 2  # what makes the vector of a token unusable
_UNUSABLE, _AWAY = ".unusable", ".away"  # added to the name of a column


def encode_columns(
    values: Mapping[str, Tensor], columns: Sequence[Column], tables: Mapping[str, Tables]
) -> dict[str, Tensor]:
    """Return what is moved to the host, on the device of `values`.

    Args:
        values: the columns [n] or [n, W] of `forward_columns`.
        columns: the columns to store; the loss mask is stored already.
        tables: of the lossy columns.

    Returns:
        Each part of each column as it is stored; and for columns of floating point, which tokens
        are unusable, uint8 [n], and which escape a lossy codec, bool [n].
    """
    out = {}
    for column in columns:
        if column.name == "loss_mask":
            continue
        value = values[column.name]
        if value.is_floating_point():
            out[column.name + _UNUSABLE] = _unusable(value)
        if column.lossy is None:
            out[column.name] = column.coder.encode_tensor(value)
        else:
            codes, scale, away = column.lossy.encode_tensors(value, tables[column.name])
            out |= {column.name: codes, column.scale_part.name: scale, column.name + _AWAY: away}
    return out


def _unusable(value: Tensor) -> Tensor:
    """Return why the vector of each token [n] or [n, W] is unusable, uint8 [n]; 0: it is not.

    An all-zero vector is constant.
    """
    # Smallest and largest value of each token, [n]; both propagate NaN.
    low, high = (value, value) if value.ndim == 1 else (value.amin(-1), value.amax(-1))
    finite = torch.isfinite(low) & torch.isfinite(high)
    found = (~finite).to(torch.uint8) * _NON_FINITE
    if value.ndim == 2 and value.shape[1] > 1:
        found += (finite & (low == high)).to(torch.uint8) * _CONSTANT
    return found


def store(
    arrival: Arrival,
    values: Mapping[str, Tensor],
    batch: ForwardBatch,
    columns: Sequence[Column],
    data: UnitData,
    broken: dict[int, str],
) -> None:
    """Copy what has arrived to the documents of a unit, and note those with unusable states.

    Args:
        arrival: of the result of `encode_columns`.
        values: the columns that it was made from; tokens that escape a codec are read from them.
        batch: whose documents these are.
        columns: the columns to store.
        data: of the unit.
        broken: receives the reason by document.
    """
    arrays = arrival.arrays()
    for column in columns:
        if column.name == "loss_mask":
            continue
        # Where the tokens of each document of the batch are stored in the unit.
        bounds = data.row_offsets(column)
        places = [slice(int(bounds[d]), int(bounds[d + 1])) for d in batch.documents]
        if column.name + _UNUSABLE in arrays:
            _find_broken(column.name, arrays[column.name + _UNUSABLE], batch, places, broken)
        parts = {p.name: arrays[p.name].view(p.storage) for p in column.parts}
        start = 0
        for place in places:
            stop = start + place.stop - place.start
            for name, array in parts.items():
                data.tokens[name][place] = array[start:stop]
            start = stop
        if column.lossy is not None and len(rows := np.flatnonzero(arrays[column.name + _AWAY])):
            # Index in the batch -> index in the unit, for the tokens that escape the codec.
            index = np.concatenate([np.arange(p.start, p.stop) for p in places])
            states = arrival.rows(values[column.name], rows)
            data.escapes[column.name].add(index[rows], bf16_bits(states))


def _find_broken(
    name: str, codes: np.ndarray, batch: ForwardBatch, places: list[slice], broken: dict[int, str]
) -> None:
    """Add the documents in which a token is unusable (uint8 [n]) to `broken`, with the reason."""
    if not codes.any():
        return
    start = 0
    for d, place in zip(batch.documents, places, strict=True):
        own = codes[start : start + place.stop - place.start]
        if (own == _NON_FINITE).any():
            broken[d] = f"non-finite-{name}"
        elif own.any():
            broken.setdefault(d, f"constant-{name}")
        start += len(own)
