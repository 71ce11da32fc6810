"""A device with two queues, of computation and of copies, that works as late as it may.

It has a clock of its own, in seconds that nobody waits for: the host's time passes where a test
says so, and where it waits for the device. A copy reads its source and writes its buffer only when
the host waits for it: a buffer that is read before, or a source that is overwritten before, is
wrong.
"""

from collections import deque

import torch
from torch import Tensor

POISON = 0xAB


class LateDevice:
    """Stands for `transfers.CopyStream`; `compute` and `host` are what a test adds."""

    def __init__(self, copying: float = 0.2) -> None:
        """`copying`: seconds of a copy."""
        self.copying = copying
        self.queue: deque[tuple[float, Tensor, Tensor]] = deque()
        self.now = self.idle = 0.0  # the host's clock; how long no computation ran
        self.computed = self.copied = 0.0  # when all that is queued is done
        self.begun: float | None = None
        self.log: list[str] = []

    # -- what a test plays ------------------------------------------------------------------------

    def compute(self, seconds: float) -> None:
        """Queue a computation."""
        start = max(self.now, self.computed)
        if self.begun is None:
            self.begun = start
        else:
            self.idle += start - self.computed
        self.computed = start + seconds

    def host(self, seconds: float) -> None:
        """Let the host work."""
        self.now += seconds

    @property
    def idle_share(self) -> float:
        """The share of the time, from the first computation to the last, without computation."""
        assert self.begun is not None
        return self.idle / (self.computed - self.begun)

    # -- a stream of copies -----------------------------------------------------------------------

    def after_compute(self) -> None:
        self.log.append("after compute")
        self.copied = max(self.copied, self.computed)

    def copy(self, source: Tensor) -> Tensor:
        into = torch.empty_like(source)
        if source.numel():
            into.view(torch.uint8).fill_(POISON)
        self.copied = max(self.copied, self.now) + self.copying
        self.queue.append((self.copied, source, into))
        return into

    def rows(self, source: Tensor, index: Tensor) -> Tensor:
        self.host(self.copying)
        return source[index]

    def mark(self) -> "LateEvent":
        return LateEvent(self, self.copied)


class LateEvent:
    """Runs the copies that were queued before it was made."""

    def __init__(self, device: LateDevice, done: float) -> None:
        self.device, self.done = device, done

    def synchronize(self) -> None:
        device = self.device
        device.log.append("synchronize")
        device.now = max(device.now, self.done)
        while device.queue and device.queue[0][0] <= self.done:
            _, source, into = device.queue.popleft()
            into.copy_(source)
