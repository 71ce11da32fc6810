"""What all parts share: rows, the budget, sizes, a clock and memory of the device.

rows.json holds all rows, written after each one, and the parts that are done. A run that finds it
keeps those parts, rows of BY_ROW, and rows that broke CUDA, and does the others, if code, torch and
GPU are the same.
"""

import hashlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROWS = "rows.json"
BY_ROW = ("drafts", "speed")
"""Parts of many rows that take long to compile: the next run has those that hold."""
ROOT = Path(__file__).resolve().parents[2]


class Bench:
    """The rows so far, written after each one, and what the parts measured for each other."""

    def __init__(self, device: str, tiny: bool, out: Path, deadline: float) -> None:
        """Start without rows; `deadline` is a time of `time.monotonic`."""
        self.device, self.tiny, self.out = device, tiny, out
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}  # peak matmul FLOP/s, the target; numbers and texts
        self.done: list[str] = []
        self._deadline = deadline
        gpu = torch.cuda.get_device_name() if self.on_gpu else ""
        self._of = {"device": device, "tiny": tiny, "gpu": gpu, "torch": torch.__version__}
        self._of["code"] = _code()
        self._load()

    def _load(self) -> None:
        """Take over the finished parts of an earlier run of this kind."""
        path = self.out / ROWS
        state = json.loads(path.read_text()) if path.is_file() else {}
        if state.get("of") == self._of:
            self.done, self.facts = state["done"], state["facts"]
            for row in state["rows"]:
                held = row["part"] in BY_ROW and row["ok"] is not False and "why" not in row
                if row["part"] in self.done or held or "broke" in row:
                    self.rows.append(row)

    def has(self, part: str, name: str) -> bool:
        """Return whether an earlier run of this kind has the row, of a part of BY_ROW."""
        return any(row["part"] == part and row["name"] == name for row in self.rows)

    def broke(self, part: str, name: str) -> bool:
        """Return whether the row ended an earlier process of this run, see `fail`."""
        rows = (row for row in self.rows if "broke" in row)
        return any((row["part"], row["name"]) == (part, name) for row in rows)

    def end(self, part: str) -> None:
        """Note that a part is over; it is done unless a row of it failed or was left out."""
        rows = [row for row in self.rows if row["part"] == part]
        if not any(row["ok"] is False or "why" in row for row in rows):
            self.done.append(part)
            self._write()

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
        others = (row for row in self.rows if (row["part"], row["name"]) != (part, name))
        self.rows = [*others, {"part": part, "name": name, "ok": ok, **figures}]
        self._write()
        print(_line(self.rows[-1]), flush=True)

    def _write(self) -> None:
        state = {"of": self._of, "done": self.done, "facts": self.facts, "rows": self.rows}
        partial = self.out / f".{ROWS}"
        partial.write_text(json.dumps(state, indent=1, default=str))
        partial.replace(self.out / ROWS)

    def skip(self, part: str, why: str) -> None:
        """Add a row that says why a part did not run."""
        self.row(part, "left out", None, why=why)

    def fail(self, part: str, name: str, error: BaseException, trace: str) -> None:
        """Add the row of an exception; its traceback is in the file alone.

        An illegal access or a failed assertion of a kernel ends CUDA for the process, and all later
        rows would fail: the script then begins again, with what is left of the budget.
        """
        first = (str(error).splitlines() or [""])[0][:200]
        told = {"error": f"{type(error).__name__}: {first}", "traceback": trace}
        self.row(part, name, False, **told)
        try:
            self.synchronised()
        except Exception:
            self.row(part, name, False, broke="CUDA", **told)
            left = ["--budget-seconds", f"{max(0.0, self.left()):.0f}"]
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *left])

    def attempt(self, part: str, name: str, prove: Callable[[], tuple[bool | None, dict]]) -> None:
        """Add the row that `prove` returns, or the row of its exception."""
        if self.broke(part, name):
            return
        if self.left() <= 0:
            self.row(part, name, None, why="the budget is used up")
            return
        self._forget_graphs()
        try:
            ok, figures = prove()
        except Exception as error:
            self.fail(part, name, error, traceback.format_exc())
        else:
            self.row(part, name, ok, **figures)

    def _forget_graphs(self) -> None:
        """Let each row compile its own graphs, and fail where it has too many, instead of going on
        uncompiled.
        """
        if self.on_gpu or "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
            torch._dynamo.config.fail_on_recompile_limit_hit = True

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

    def fresh(self, name: str) -> Path:
        """Return the path of a directory that does not exist yet."""
        shutil.rmtree(self.out / name, ignore_errors=True)
        return self.out / name

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


def _code() -> str:
    """Return a hash of all code that is proven or proves."""
    sources = (p for d in ("spec_data", "spec_train", "scripts") for p in (ROOT / d).rglob("*.py"))
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(sources))).hexdigest()


def _line(row: dict[str, Any]) -> str:
    mark = {True: "ok  ", False: "FAIL", None: "-   "}[row["ok"]]
    hidden = ("part", "name", "ok", "traceback", "kernels")
    figures = ", ".join(f"{k} {_shown(v)}" for k, v in row.items() if k not in hidden)
    return f"{mark} {row['part']:<9} {row['name']:<34} {figures}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
