"""What all parts share: rows, the budget, sizes, a clock and memory of the device."""

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROWS = "rows.json"


class Bench:
    """The rows so far, written after each one, and what the parts measured for each other."""

    def __init__(self, device: str, tiny: bool, out: Path, deadline: float) -> None:
        """Start without rows; `deadline` is a time of `time.monotonic`."""
        self.device, self.tiny, self.out = device, tiny, out
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}  # peak matmul FLOP/s, folders
        self._deadline = deadline

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device != "cpu"

    @property
    def peak(self) -> float:
        """The measured peak of bf16 matrix products, FLOP/s; 0 if it was not measured."""
        return self.facts.get("peak", 0.0)

    def left(self) -> float:
        """Return the seconds that are left of the budget."""
        return self._deadline - time.monotonic()

    def row(self, part: str, name: str, ok: bool | None, **figures: Any) -> None:
        """Add a row and write all of them. `ok`: True, False, or None for what only informs."""
        self.rows.append({"part": part, "name": name, "ok": ok, **figures})
        state = {"device": self.device, "tiny": self.tiny, "rows": self.rows}
        partial = self.out / f".{ROWS}"
        partial.write_text(json.dumps(state, indent=1, default=str))
        partial.replace(self.out / ROWS)
        print(_line(self.rows[-1]), flush=True)

    def skip(self, part: str, why: str) -> None:
        """Add a row that says why a part or case did not run."""
        self.row(part, "skipped", None, why=why)

    def fail(self, part: str, name: str, error: BaseException, trace: str) -> None:
        """Add the row of an exception; its traceback is in the file alone."""
        first = (str(error).splitlines() or [""])[0][:200]
        self.row(part, name, False, error=f"{type(error).__name__}: {first}", traceback=trace)
        if self.on_gpu:
            torch.cuda.empty_cache()

    def attempt(self, part: str, name: str, prove: Callable[[], tuple[bool | None, dict]]) -> None:
        """Add the row that `prove` returns, or the row of its exception."""
        if self.left() <= 0:
            self.row(part, name, None, why="the budget is used up")
            return
        try:
            ok, figures = prove()
        except Exception as error:
            self.fail(part, name, error, traceback.format_exc())
        else:
            self.row(part, name, ok, **figures)

    def synchronised(self) -> float:
        """Return the time, after all work of the device."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self, work: Callable[[], Any], rounds: int = 3) -> float:
        """Return the shortest time of `work` after an unmeasured call."""
        work()
        found = []
        for _ in range(rounds):
            start = self.synchronised()
            work()
            found.append(self.synchronised() - start)
        return min(found)

    def reset_memory(self) -> None:
        """Start a new peak of memory."""
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def memory_gb(self) -> float | None:
        """Return the peak of allocated memory since the reset; None on a CPU."""
        return round(torch.cuda.max_memory_allocated() / 2**30, 3) if self.on_gpu else None

    def share_of_peak(self, flops: float, seconds: float) -> float | None:
        """Return a rate as a share of the peak of bf16 matrix products."""
        return round(flops / seconds / self.peak, 4) if self.peak and seconds > 0 else None

    def environment(self) -> dict[str, str]:
        """Return the environment for a command of this project in a process of its own."""
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}

    def table(self) -> str:
        """Return all rows as text."""
        return "\n".join(map(_line, self.rows))


def _line(row: dict[str, Any]) -> str:
    mark = {True: "ok  ", False: "FAIL", None: "-   "}[row["ok"]]
    hidden = ("part", "name", "ok", "traceback")
    figures = ", ".join(f"{k} {_shown(v)}" for k, v in row.items() if k not in hidden)
    return f"{mark} {row['part']:<9} {row['name']:<34} {figures}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
