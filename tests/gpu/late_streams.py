"""CUDA streams whose copies run as late as they may, for the tensors of `fake_cuda`.

A copy that does not block the host reads its source, and writes its result, only when something
waits for it: the next operation of its own stream, an event, or a stream that waits for an event.
Until then its result is poison. So a result that is used without waiting, and a page-locked buffer
that is read or filled again too early, give other numbers.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

POISON = 0xAB


class LateStream:
    """A queue of copies and waits."""

    def __init__(self, *_: Any) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()
        self.added = self.done = 0

    def add(self, work: Callable[[], object]) -> None:
        """Queue work."""
        self._waiting.append(work)
        self.added += 1

    def run(self, count: int | None = None) -> None:
        """Run the queue, or the first `count` pieces of work of its life."""
        with self._lock:
            while self.done < (self.added if count is None else count):
                self._waiting.popleft()()
                self.done += 1

    def wait_event(self, event: "LateEvent") -> None:
        """Let work that is queued from now on follow an event."""
        self.add(event.synchronize)

    def wait_stream(self, stream: "LateStream") -> None:
        """Let work that is queued from now on follow all work of a stream so far."""
        self.wait_event(LateEvent().record(stream))

    synchronize = run


class LateEvent:
    """A point in the queue of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._stream, self._count = COMPUTING, 0

    def record(self, stream: LateStream | None = None) -> "LateEvent":
        """Be the point after what the stream has now."""
        self._stream = stream or current()
        self._count = self._stream.added
        return self

    def synchronize(self) -> None:
        """Run what comes before this point."""
        self._stream.run(self._count)


COMPUTING = LateStream()
"""The stream on which everything is computed at once."""
_here = threading.local()


def current(*_: Any) -> LateStream:
    """Return the stream of this thread."""
    return getattr(_here, "stream", COMPUTING)


@contextmanager
def using(stream: LateStream | None) -> Iterator[None]:
    """Do as `torch.cuda.stream`."""
    before, _here.stream = current(), stream or current()
    try:
        yield
    finally:
        _here.stream = before


def copied_late(into: Tensor, source: Callable[[], Tensor]) -> None:
    """Queue a copy; both lie on the CPU here."""
    if into.numel():
        into.fill_(torch.tensor(POISON).to(into.dtype))
    current().add(lambda: into.copy_(source()))


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace the streams and events of CUDA."""
    streams = [COMPUTING]

    def new(*_: Any) -> LateStream:
        streams.append(LateStream())
        return streams[-1]

    def synchronize(*_: Any) -> None:
        for stream in streams:
            stream.run()

    fakes = {"Stream": new, "Event": LateEvent, "stream": using, "current_stream": current}
    for name, fake in (fakes | {"synchronize": synchronize}).items():
        patch.setattr(torch.cuda, name, fake)
