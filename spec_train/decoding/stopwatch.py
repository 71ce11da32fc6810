"""How long decoding takes, and what the time is spent on."""

import time
from typing import Any

import torch


def clock(device: torch.device) -> float:
    """Return a time in seconds, after all queued work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Stopwatch:
    """Measures a response and what its time is spent on: prefill, drafting, and verification."""

    def __init__(self, device: torch.device) -> None:
        """Start."""
        self._device = device
        self._seconds = dict.fromkeys(("prefill", "draft", "verify"), 0.0)
        self._started = self._last = clock(device)

    def begin(self) -> None:
        """Leave what was done since the last call out of the parts."""
        self._last = clock(self._device)

    def add(self, part: str) -> None:
        """Count the time since the last call to a part."""
        now = clock(self._device)
        self._seconds[part] += now - self._last
        self._last = now

    def parts(self) -> dict[str, Any]:
        """Return the seconds of all of it and of each part, as `Generation` has them."""
        found = {f"{part}_seconds": value for part, value in self._seconds.items()}
        return found | {"seconds": clock(self._device) - self._started}
