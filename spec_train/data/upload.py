"""Micro-batches on their way to the device, at most two at a time: one in use, one arriving.

On CUDA a stream of its own copies, and decodes, beside the computation. Ids and masks are copied
once, for the slot counts of a step and for its losses. Elsewhere nothing is moved ahead.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from spec_data.shards.batch import DraftBatch
from spec_train.data.stream import Step


@dataclasses.dataclass
class _Arriving:
    """A batch of the host, and what of it is on the device or was queued to it."""

    host: DraftBatch  # stays alive, so that no other batch gets its id
    batch: DraftBatch
    queued: Any = None  # CUDA event: after the copies
    complete: bool = False  # with states


class Uploads:
    """The batches of a stream on `device`, with hidden states in `dtype`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Start with nothing under way."""
        self.device, self.dtype = device, dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arriving: dict[int, _Arriving] = {}

    def without_hidden(self, host: DraftBatch) -> DraftBatch:
        """Return the batch without states, which is enough to count its supervised slots."""
        return self._awaited(self._begin(host)).without_hidden()

    def batches(self, step: Step, following: Callable[[], Step | None]) -> Iterator[DraftBatch]:
        """Yield the micro-batches of a step; the next one, perhaps of the next step, is on its way.

        `following` returns the next step if it has been read.
        """
        for i, host in enumerate(step.batches):
            self._complete(host)
            if self._stream is not None:
                more = step.batches[i + 1 :] or getattr(following(), "batches", [])
                for ahead in more[:1]:
                    self._complete(ahead)
            yield self._awaited(self._arriving.pop(id(host)))  # a name would keep it in memory

    def _begin(self, host: DraftBatch) -> _Arriving:
        if id(host) not in self._arriving:
            arriving = self._arriving[id(host)] = _Arriving(host, host)
            with self._queueing(arriving):
                arriving.batch = host.without_hidden().to(self.device, non_blocking=True)
        return self._arriving[id(host)]

    def _complete(self, host: DraftBatch) -> None:
        arriving = self._begin(host)
        if not arriving.complete:
            with self._queueing(arriving):
                hidden = host.hidden_on(self.device, self.dtype, non_blocking=True)
            arriving.batch = dataclasses.replace(arriving.batch, hidden=hidden)
            arriving.complete = True

    @contextlib.contextmanager
    def _queueing(self, arriving: _Arriving) -> Iterator[None]:
        """Queue copies beside the computation."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        arriving.queued = torch.cuda.Event()
        arriving.queued.record(self._stream)

    def _awaited(self, arriving: _Arriving) -> DraftBatch:
        """Return the batch, for computation that is queued from now on."""
        batch = arriving.batch
        if self._stream is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(arriving.queued)
            for values in (*batch.plain().values(), *batch.hidden.values()):
                values.record_stream(computing)
        return batch
