"""Copies from the device of the target to the host, beside its next forward.

On a CPU nothing moves: arrays are views of the tensors. On CUDA a stream of its own copies into
page-locked buffers that are made once and reused. The arrays of a batch are read after the next
forward was started, so the device never waits for the host. Two batches of stored bytes are in
memory, whatever the size of the dataset.

What still makes the host wait for CUDA, by batch, and why:

- `Arrival.arrays`: for the copies of the batch before, which are done while the forward runs;
- `Arrival.rows`: tokens that escape a lossy codec are known only then; they are few, and the copy
  stream does not wait for the forward;
- full logits (`--supervision logits`) are copied at once: two batches of them would fill the memory
  of the host;
- the check of the first long document of a process (`long_rows`), and all checks before capture.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 64  # bytes; every tensor of a buffer begins at a multiple


class Arrival(Protocol):
    """The tensors of one batch, on their way to the host."""

    def arrays(self) -> Mapping[str, np.ndarray]:
        """Wait for the tensors and return them; they are overwritten after `release`."""

    def rows(self, values: Tensor, index: np.ndarray) -> Tensor:
        """Return some rows, on the host, of a tensor that was computed when the copies began.

        Nothing may be computed from it first: that would wait for the next forward.
        """

    def release(self) -> None:
        """Let the next batches use the memory of the arrays."""


class Transfers(Protocol):
    """Moves tensors to the host; `late` is how many batches may be on their way at a time."""

    late: int

    def start(self, tensors: Mapping[str, Tensor]) -> Arrival:
        """Start to move tensors that are computed, or whose computation was queued."""


class PlainTransfers:
    """Moves tensors at once; on a CPU, arrays are the tensors."""

    late = 0

    def start(self, tensors: Mapping[str, Tensor]) -> Arrival:
        """Move the tensors."""
        return _Arrived({name: value.cpu().numpy() for name, value in tensors.items()})


class _Arrived:
    def __init__(self, found: dict[str, np.ndarray]) -> None:
        self._found = found

    def arrays(self) -> Mapping[str, np.ndarray]:
        return self._found

    def rows(self, values: Tensor, index: np.ndarray) -> Tensor:
        return values[torch.from_numpy(index).to(values.device)].cpu()

    def release(self) -> None:
        self._found = {}


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


class StreamTransfers:
    """Moves tensors by a queue of copies, one batch late."""

    late = 1

    def __init__(self, streams: Streams) -> None:
        """Use the queue `streams`; memory is allocated at first use, and grows with the batches."""
        self._streams = streams
        self._slots = [_Slot(streams.pinned(0)) for _ in range(self.late + 1)]
        self._turn = 0

    def start(self, tensors: Mapping[str, Tensor]) -> Arrival:
        """Queue the copies of tensors, and return at once.

        Raises:
            RuntimeError: the arrival before the last one was not released.
        """
        slot = self._slots[self._turn]
        if slot.busy:
            raise RuntimeError("an arrival was not released before its memory was needed again")
        slot.busy = True
        self._turn = (self._turn + 1) % len(self._slots)
        sources = {name: value.contiguous() for name, value in tensors.items()}
        ends = np.cumsum([-(-v.nbytes // _ALIGNED) * _ALIGNED for v in sources.values()])
        if len(ends) and ends[-1] > len(slot.memory):
            slot.memory = self._streams.pinned(int(ends[-1]))
        self._streams.after_compute()
        views = {}
        for (name, value), start in zip(sources.items(), [0, *ends[:-1].tolist()], strict=True):
            flat = slot.memory[start : start + value.nbytes].view(value.dtype)
            views[name] = flat.view(value.shape)
            self._streams.copy(value, views[name])
        return _Coming(views, self._streams, slot)


class _Slot:
    """Page-locked memory of one batch."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.busy = memory, False


class _Coming:
    def __init__(self, views: dict[str, Tensor], streams: Streams, slot: _Slot) -> None:
        self._views, self._streams, self._slot = views, streams, slot
        self._event = streams.mark()

    def arrays(self) -> Mapping[str, np.ndarray]:
        self._event.synchronize()
        return {name: view.numpy() for name, view in self._views.items()}

    def rows(self, values: Tensor, index: np.ndarray) -> Tensor:
        self._event.synchronize()
        chosen = self._streams.select(values, torch.from_numpy(index))
        out = torch.empty(chosen.shape, dtype=chosen.dtype)
        self._streams.copy(chosen, out)
        self._streams.mark().synchronize()
        return out

    def release(self) -> None:
        self._views = {}
        self._slot.busy = False


class CudaStreams:
    """The copy stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, size: int) -> Tensor:
        """Return page-locked memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def after_compute(self) -> None:
        """Let the copy stream wait for the stream of the forward."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Queue a copy in the copy stream."""
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def select(self, source: Tensor, index: Tensor) -> Tensor:
        """Select rows in the copy stream, which does not wait for the next forward."""
        with torch.cuda.stream(self._stream):
            rows = source.index_select(0, index.to(source.device))
        source.record_stream(self._stream)
        return rows

    def mark(self) -> torch.cuda.Event:
        """Return an event at the end of the copy stream."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


def transfers_for(device: torch.device, columns: Sequence[str]) -> Transfers:
    """Return how states of `device` come to the host; `columns` are those that are stored."""
    if device.type != "cuda" or "logits" in columns:
        return PlainTransfers()
    return StreamTransfers(CudaStreams(device))
