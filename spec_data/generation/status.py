"""How far a generation is: units, tokens, rates, workers. Reading changes nothing.

Finished units are counted by their records, which decide. Rates and names come from the files of
the workers, OUT/.generate/workers/*.json, which decide nothing: a run goes on if they cannot be
written. Times, machines and rates stand there and not in the records of units, because the finished
directory has the same bytes on every machine.
"""

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from spec_data.generation.plan import Plan, read_units
from spec_data.generation.units import finished_unit
from spec_data.generation.workers import running_workers
from spec_data.shards.errors import MissingError
from spec_data.shards.files import temporary_name
from spec_data.shards.follow import WORK
from spec_data.shards.passing import PASS_ON, Passed
from spec_data.shards.reader import MANIFEST
from spec_data.shards.schema import Manifest
from spec_data.terminal.command import Result
from spec_data.terminal.progress import size

logger = logging.getLogger(__name__)

WORKERS = "workers"
LOADING, CAPTURING, DONE, FAILED = "loading", "capturing", "done", "failed"
STOPPED, LOST = "stopped", "lost"  # by Ctrl-C or SIGTERM; killed
_EVERY = 5.0  # seconds between two writes about one unit
SILENCE = 60.0
"""Seconds after which a worker is taken for dead, if its lock is not held."""


class WorkerProgress(msgspec.Struct, kw_only=True):
    """What one process has done so far.

    Attributes:
        worker: its name, such as "0/4" or "ray-1"; lock: the "i/n" whose lock is held for it.
        started, updated: Unix times.
        plan_tokens: of the whole plan.
        unit: the unit in work; unit_tokens, unit_done: its tokens, and those captured.
        tokens, seconds: tokens captured here, and how long that took.
        error: why it failed.
    """

    worker: str
    lock: str
    host: str = ""
    started: float = 0.0
    updated: float = 0.0
    state: str = LOADING
    plan_tokens: int = 0
    unit: int | None = None
    unit_tokens: int = 0
    unit_done: int = 0
    units_done: int = 0
    tokens: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self.state in (LOADING, CAPTURING)

    @property
    def rate(self) -> float:
        """Tokens per second since the target was loaded; 0 before the first, and after the end."""
        return self.tokens / self.seconds if self.seconds > 0 and self.alive else 0.0

    def __str__(self) -> str:
        share = self.unit_done / max(self.unit_tokens, 1)
        unit = "" if self.unit is None else f" unit {self.unit} ({share:.0%})"
        return (
            f"{self.worker}  {self.host}  {self.state}{unit}, {self.units_done} units done, "
            f"{self.rate:,.0f} tokens/s{self.error and f': {self.error}'}"
        )


class ProgressFile:
    """Keeps the file of this process up to date; its methods may be called from several threads."""

    def __init__(self, out: Path, plan: Plan, worker: str, lock: str) -> None:
        self.progress = WorkerProgress(
            worker=worker,
            lock=lock,
            host=socket.gethostname(),
            started=time.time(),
            plan_tokens=plan.tokens,
        )
        self._plan, self._guard = plan, threading.Lock()
        self._capturing_since, self._written = 0.0, -_EVERY
        name = re.sub(r"[^\w.-]", "-", f"{worker}-{self.progress.host}-{os.getpid()}")
        self._file = out / WORK / WORKERS / f"{name}.json"
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
        self._write()

    def begin(self, unit: int) -> None:
        """A unit is captured from now on."""
        with self._guard:
            self._capturing_since = self._capturing_since or time.monotonic()
            self.progress.state, self.progress.unit, self.progress.unit_done = CAPTURING, unit, 0
            self.progress.unit_tokens = self._plan.unit_set_tokens([unit])
            self._write()

    def add(self, tokens: int) -> None:
        """So many tokens more of the unit were captured."""
        with self._guard:
            self.progress.tokens += tokens
            self.progress.unit_done += tokens
            self.progress.seconds = time.monotonic() - self._capturing_since
            if time.monotonic() - self._written >= _EVERY:
                self._write()

    def finish(self, unit: int) -> None:
        """A unit is finished: its shard and its record are on disk."""
        with self._guard:
            self.progress.units_done += 1
            if self.progress.unit == unit:
                self.progress.unit = None
            self._write()

    def end(self, error: BaseException | None = None) -> None:
        """The process captures nothing more: it is done, was stopped, or failed with `error`.

        One that has failed, and is closed afterwards, has not done its work.
        """
        with self._guard:
            if error is None and not self.progress.alive:
                return
            stopped = STOPPED if isinstance(error, KeyboardInterrupt) else FAILED
            self.progress.state = DONE if error is None else stopped
            if self.progress.state == FAILED:
                self.progress.error = " ".join(str(error).split()) or type(error).__name__
            self._write()

    @contextlib.contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Note how the body ends."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        self.end()

    def _write(self) -> None:
        self._written, self.progress.updated = time.monotonic(), time.time()
        temporary = temporary_name(self._file)
        try:
            temporary.write_bytes(msgspec.json.encode(self.progress))
            temporary.replace(self._file)
        except OSError as error:  # a full disk, or a directory that was just finalized
            logger.debug("%s: %s", self._file, error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def read_progress(out: Path) -> list[WorkerProgress]:
    """Return what every process that worked on `out` has written, in the order of their start."""
    processes = []
    for file in (out / WORK / WORKERS).glob("*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            processes.append(msgspec.json.decode(file.read_bytes(), type=WorkerProgress))
    return sorted(processes, key=lambda process: process.started)


@dataclass(frozen=True, kw_only=True)
class Status(Result):
    """How far a directory is; `tokens` is None before the first worker has begun."""

    path: Path
    sealed: bool
    units: int
    units_done: int
    tokens: int | None
    tokens_done: int
    bytes: int
    tokens_per_second: float = 0.0
    """Sum over the workers that capture now."""
    eta_seconds: float | None = None
    workers: tuple[WorkerProgress, ...] = ()
    """The newest process of each."""
    passed_on: int | None = None
    """With --pass-on: units that a trainer has used."""

    def facts(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        workers = [msgspec.to_builtins(w) | {"tokens_per_second": w.rate} for w in self.workers]
        return vars(self) | {"path": str(self.path), "workers": workers}

    @property
    def next_command(self) -> tuple[str, ...]:  # type: ignore[override]
        """Verify what is complete."""
        return ("spec-data", "verify", str(self.path)) if self.sealed else ()

    def __str__(self) -> str:
        if self.sealed:
            return (
                f"{self.path}: a sealed dataset: {self.units} shards, {self.tokens:,} tokens, "
                f"{size(self.bytes)}"
            )
        if any(worker.alive for worker in self.workers):
            activity = "generation is running"
        elif not self.units:
            activity = "no plan yet: the corpus is being read, or the run was stopped"
        elif self.units_done == self.units and self.passed_on is not None:
            activity = "every unit was captured; they are passed on, so this is never sealed"
        elif self.units_done == self.units:
            activity = "every unit is finished; run the same `spec-data generate` again to seal"
        else:
            activity = "no worker runs; the same `spec-data generate` resumes"
        total = "" if self.tokens is None else f" of {self.tokens:,}"
        left = "" if self.eta_seconds is None else f", about {self.eta_seconds / 60:,.1f} min left"
        lines = [
            f"{self.path}: {activity}",
            f"units       {self.units_done:,} of {self.units:,} are finished ({size(self.bytes)})",
            f"tokens      {self.tokens_done:,}{total}",
            f"speed       {self.tokens_per_second:,.0f} tokens/s{left}",
            *(f"worker      {worker}" for worker in self.workers),
        ]
        if self.passed_on is not None:
            lines.append(f"passed on   {self.passed_on:,} units; a trainer has used them")
        return "\n".join(lines)


def read_status(out: Path) -> Status:
    """Return how far a directory is now.

    Raises:
        MissingError: there is neither a dataset nor a plan, nor anybody who makes one.
        DatasetError: the plan or the manifest is damaged.
    """
    work = out / WORK
    if (out / MANIFEST).is_file():
        manifest = Manifest.read(out / MANIFEST)
        count, tokens = len(manifest.shards), manifest.totals.tokens
        return Status(
            path=out,
            sealed=True,
            units=count,
            units_done=count,
            tokens=tokens,
            tokens_done=tokens,
            bytes=manifest.totals.bytes,
            eta_seconds=0.0,
        )
    if not work.is_dir():
        raise MissingError(f"{out}: no dataset, and none is being generated there")
    running, processes = running_workers(work), read_progress(out)
    units = {unit: finished_unit(out, unit) for unit in range(len(read_units(work)))}
    finished = {unit: record.record for unit, record in units.items() if record is not None}
    workers = []
    for process in {process.worker: process for process in processes}.values():  # the newest
        # Some file systems hide the locks of other machines: a process there runs if it wrote
        # lately.
        silent = process.lock not in running and time.time() - process.updated >= SILENCE
        workers.append(replace(process, state=LOST) if process.alive and silent else process)
    done = sum(record.tokens for record in finished.values())
    done += sum(w.unit_done for w in workers if w.alive and w.unit not in {None, *finished})
    total = processes[-1].plan_tokens if processes else None
    rate = sum(worker.rate for worker in workers)
    return Status(
        path=out,
        sealed=False,
        units=len(units),
        units_done=len(finished),
        tokens=total,
        tokens_done=done,
        bytes=sum(record.bytes for record in finished.values()),
        tokens_per_second=rate,
        eta_seconds=(total - done) / rate if total is not None and rate > 0 else None,
        workers=tuple(sorted(workers, key=lambda worker: worker.worker)),
        passed_on=Passed.read(work).trained if (work / PASS_ON).is_file() else None,
    )
