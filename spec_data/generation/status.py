"""How far a generation is: units, tokens, rates, workers, failures. Reading changes nothing.

Finished units are counted by their records, which decide; rates and names come from the files of
the workers (`worker_facts`), which decide nothing.
"""

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from spec_data.generation.plan import Plan, read_units
from spec_data.generation.worker_locks import running_workers
from spec_data.shards.errors import MissingError
from spec_data.shards.files import temporary_name, unit_name
from spec_data.shards.follow import WORK
from spec_data.shards.reader import MANIFEST
from spec_data.shards.schema import Manifest
from spec_data.terminal.progress import size

# -- worker facts ----------------------------------------------------------------------------------
# What each worker process is doing, for people: OUT/.generate/workers/*.json.
#
# Times, machines and rates may not stand in the records of units, because the sealed directory has
# the same bytes on every machine. They stand here, in one file per process, which sealing removes.
# Nothing is decided by these files: a run goes on if they cannot be written.


logger = logging.getLogger(__name__)

WORKERS = "workers"
LOADING, CAPTURING, DONE, FAILED = "loading", "capturing", "done", "failed"
STOPPED = "stopped"  # by Ctrl-C or SIGTERM
_EVERY = 5.0  # seconds between two writes about one unit


@dataclass(kw_only=True)
class WorkerFacts:
    """What one process has done so far.

    Attributes:
        worker: its name, such as "0/4" or "ray-1"; lock: the "i/n" whose lock is held for it.
        host, pid: the process; started, updated: Unix times.
        phase: "loading", "capturing", "done", "failed" or "stopped".
        plan_units, plan_tokens: of the whole plan.
        unit: the unit in work; unit_tokens, unit_done: its tokens, and those captured.
        units: tokens of each unit that this process finished.
        tokens, seconds: tokens captured here, and how long that took; bytes: of finished shards.
        error: why it failed.
    """

    worker: str
    lock: str
    host: str = ""
    pid: int = 0
    started: float = 0.0
    updated: float = 0.0
    phase: str = LOADING
    plan_units: int = 0
    plan_tokens: int = 0
    unit: int | None = None
    unit_tokens: int = 0
    unit_done: int = 0
    units: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    bytes: int = 0
    error: str = ""

    @property
    def rate(self) -> float:
        """Tokens per second since the target was loaded; 0 before the first."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class FactsWriter:
    """Keeps the file of this process up to date; its methods may be called from several threads."""

    def __init__(self, out: Path, plan: Plan, worker: str, lock: str) -> None:
        """Make the file of a process that begins to load its target; see `WorkerFacts`."""
        host = socket.gethostname()
        self.facts = WorkerFacts(
            worker=worker,
            lock=lock,
            host=host,
            pid=os.getpid(),
            started=time.time(),
            plan_units=len(plan.units),
            plan_tokens=plan.tokens,
        )
        self._plan, self._guard = plan, threading.Lock()
        self._capturing_since, self._written = 0.0, -_EVERY
        name = re.sub(r"[^\w.-]", "-", f"{worker}-{host}-{os.getpid()}")
        self._file = out / WORK / WORKERS / f"{name}.json"
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
        self._write()

    def begin(self, unit: int) -> None:
        """A unit is captured from now on."""
        with self._guard:
            self._capturing_since = self._capturing_since or time.monotonic()
            self.facts.phase, self.facts.unit, self.facts.unit_done = CAPTURING, unit, 0
            self.facts.unit_tokens = self._plan.unit_set_tokens([unit])
            self._write()

    def add(self, tokens: int) -> None:
        """So many tokens more of the unit were captured."""
        with self._guard:
            self.facts.tokens += tokens
            self.facts.unit_done += tokens
            self.facts.seconds = time.monotonic() - self._capturing_since
            if time.monotonic() - self._written >= _EVERY:
                self._write()

    def finish(self, unit: int, written: int) -> None:
        """A unit is finished: its shard of `written` bytes and its record are on disk."""
        with self._guard:
            self.facts.units[unit] = self._plan.unit_set_tokens([unit])
            self.facts.bytes += written
            if self.facts.unit == unit:
                self.facts.unit, self.facts.unit_tokens, self.facts.unit_done = None, 0, 0
            self._write()

    def end(self, error: BaseException | None = None) -> None:
        """The process captures nothing more: it is done, was stopped, or failed with `error`."""
        stopped = isinstance(error, KeyboardInterrupt)
        with self._guard:
            self.facts.phase = STOPPED if stopped else FAILED if error else DONE
            if error is not None and not stopped:
                self.facts.error = " ".join(str(error).split()) or type(error).__name__
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
        self._written, self.facts.updated = time.monotonic(), time.time()
        temporary = temporary_name(self._file)
        try:
            temporary.write_text(json.dumps(asdict(self.facts)), encoding="utf-8")
            temporary.replace(self._file)
        except OSError as error:  # a full disk, or a directory that was just sealed
            logger.debug("%s: %s", self._file, error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def read_facts(out: Path) -> list[WorkerFacts]:
    """Return the facts of every process that worked on `out`, in the order in which they began.

    Files that cannot be read are left out.
    """
    known, found = {f.name for f in fields(WorkerFacts)}, []
    for file in (out / WORK / WORKERS).glob("*.json"):
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            facts = WorkerFacts(**{name: value for name, value in raw.items() if name in known})
            facts.units = {int(unit): int(tokens) for unit, tokens in facts.units.items()}
            found.append(facts)
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return sorted(found, key=lambda facts: facts.started)


# -- status ----------------------------------------------------------------------------------------


_ENDED = (DONE, FAILED, STOPPED)
SILENCE = 60.0
"""Seconds after which a worker of another machine is taken for dead, if its lock is not held."""


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One worker: its newest process, and the units of all its processes.

    `state` is "loading", "capturing", "done", "failed", "stopped" (by Ctrl-C or SIGTERM), or "lost"
    if the process was killed.
    `unit` is the unit in work, `silent_seconds` the time since the process last wrote.
    """

    worker: str
    host: str
    pid: int
    state: str
    units_done: int
    unit: int | None
    unit_done: float
    tokens_per_second: float
    silent_seconds: float


@dataclass(frozen=True, kw_only=True)
class Status:
    """How far a directory is.

    `tokens` and the figures made from it are None before the first worker has begun. Figures of a
    sealed dataset are those of its manifest, which has no workers.
    """

    path: Path
    sealed: bool
    running: tuple[str, ...]
    """Workers ("i/n") that run now, as far as their locks can be seen from this machine."""
    units: int
    units_done: int
    tokens: int | None
    tokens_done: int
    bytes: int
    tokens_per_second: float
    """Sum over the workers that capture now."""
    eta_seconds: float | None
    workers: tuple[WorkerStatus, ...]
    failures: tuple[str, ...]
    """What failed or was killed so far, in words; a later run may have made up for it."""

    def facts(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self) | {"path": str(self.path)}

    def __str__(self) -> str:
        return status_text(self)


class StatusReader:
    """Reads the status of a directory again and again; finished units are read once."""

    def __init__(self, out: Path) -> None:
        """Watch `out`."""
        self.out = out
        self._records: dict[int, tuple[int, int]] = {}  # unit -> tokens, bytes

    def read(self) -> Status:
        """Return the status now.

        Raises:
            MissingError: there is neither a dataset nor a plan, nor anybody who makes one.
            DatasetError: the plan or the manifest is damaged.
        """
        work = self.out / WORK
        if (self.out / MANIFEST).is_file():
            return _sealed(self.out)
        if not work.is_dir():
            raise MissingError(f"{self.out}: no dataset, and none is being generated there")
        units = len(read_units(work)) if (work / "plan.json").is_file() else 0
        running = running_workers(work)
        processes = read_facts(self.out)
        self._read_records(units)
        done = sum(tokens for tokens, _ in self._records.values())
        alive = [p for p in processes if _alive(p, processes, running)]
        rate = sum(p.rate for p in alive)
        total = processes[-1].plan_tokens if processes else None
        part = sum(p.unit_done for p in alive if p.unit not in self._records)
        return Status(
            path=self.out,
            sealed=False,
            running=tuple(running),
            units=units,
            units_done=len(self._records),
            tokens=total,
            tokens_done=done + part,
            bytes=sum(written for _, written in self._records.values()),
            tokens_per_second=rate,
            eta_seconds=(total - done - part) / rate if total is not None and rate > 0 else None,
            workers=tuple(_workers(processes, alive)),
            failures=tuple(_failures(processes, alive)),
        )

    def _read_records(self, units: int) -> None:
        for unit in set(range(units)) - set(self._records):
            file = self.out / WORK / f"{unit_name(unit)}.json"
            try:
                record = json.loads(file.read_text(encoding="utf-8"))["record"]
                self._records[unit] = (int(record["tokens"]), int(record["bytes"]))
            except (OSError, ValueError, TypeError, KeyError):
                continue  # not finished, or damaged: `generate` makes it again


def read_status(out: Path) -> Status:
    """Return how far a directory is; see `StatusReader.read`."""
    return StatusReader(out).read()


def _sealed(out: Path) -> Status:
    manifest = Manifest.read(out / MANIFEST)
    totals = manifest.totals
    return Status(
        path=out,
        sealed=True,
        running=(),
        units=len(manifest.shards),
        units_done=len(manifest.shards),
        tokens=totals.tokens,
        tokens_done=totals.tokens,
        bytes=totals.bytes,
        tokens_per_second=0.0,
        eta_seconds=0.0,
        workers=(),
        failures=(),
    )


def _alive(process: WorkerFacts, processes: list[WorkerFacts], running: list[str]) -> bool:
    """Tell whether a process runs: it is the newest of its name, and its lock is held.

    Some file systems hide the locks of other machines; a process there runs if it wrote lately.
    """
    newest = [p for p in processes if p.worker == process.worker][-1]
    if newest is not process or process.phase in _ENDED:
        return False
    if process.host != socket.gethostname():
        return process.lock in running or time.time() - process.updated < SILENCE
    return process.lock in running and _exists(process.pid)


def _exists(pid: int) -> bool:
    """Tell whether this machine has a process `pid`; a replica of Ray dies without its lock."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def _workers(processes: list[WorkerFacts], alive: list[WorkerFacts]) -> list[WorkerStatus]:
    units: Counter[str] = Counter()
    for process in processes:
        units[process.worker] += len(process.units)
    newest = {p.worker: p for p in processes}
    found = []
    for name, process in sorted(newest.items()):
        runs = process in alive
        ended = process.phase in _ENDED
        found.append(
            WorkerStatus(
                worker=name,
                host=process.host,
                pid=process.pid,
                state=process.phase if runs or ended else "lost",
                units_done=units[name],
                unit=process.unit if runs else None,
                unit_done=process.unit_done / process.unit_tokens if process.unit_tokens else 0.0,
                tokens_per_second=process.rate if runs and process.phase == CAPTURING else 0.0,
                silent_seconds=max(0.0, time.time() - process.updated),
            )
        )
    return found


def _failures(processes: list[WorkerFacts], alive: list[WorkerFacts]) -> list[str]:
    found = []
    for process in processes:
        where = f"worker {process.worker} ({process.host}, process {process.pid})"
        unit = "" if process.unit is None else f" in unit {process.unit}"
        if process.phase == FAILED:
            found.append(f"{where} failed{unit}: {process.error}")
        elif process.phase not in _ENDED and process not in alive:
            found.append(f"{where} was killed or lost{unit}")
    return found


def status_text(status: Status) -> str:
    """Return the status as the command prints it."""
    if status.sealed:
        return (
            f"{status.path}: a sealed dataset: {status.units} shards, {status.tokens:,} tokens, "
            f"{size(status.bytes)}"
        )
    total = "" if status.tokens is None else f" of {status.tokens:,}"
    lines = [
        f"{status.path}: {_activity(status)}",
        f"units       {status.units_done:,} of {status.units:,} are finished "
        f"({size(status.bytes)})",
        f"tokens      {status.tokens_done:,}{total}",
        f"speed       {status.tokens_per_second:,.0f} tokens/s{_left(status)}",
    ]
    for worker in status.workers:
        lines.append(f"worker      {_worker_text(worker)}")
    lines += [f"failure     {text}" for text in status.failures]
    return "\n".join(lines)


def _activity(status: Status) -> str:
    if any(worker.state in ("loading", CAPTURING) for worker in status.workers):
        return "generation is running"
    if not status.units:
        return "no plan yet: the corpus is being read, or the run was stopped"
    if status.running:
        return "generation is running"
    if status.units_done == status.units:
        return "every unit is finished; run the same `spec-data generate` again to seal"
    return "no worker runs; the same `spec-data generate` resumes"


def _left(status: Status) -> str:
    if status.eta_seconds is None:
        return ""
    minutes = status.eta_seconds / 60
    return (
        f", about {minutes / 60:,.1f} hours left"
        if minutes >= 120
        else (f", about {minutes:,.1f} minutes left")
    )


def _worker_text(worker: WorkerStatus) -> str:
    doing = worker.state
    if worker.unit is not None:
        doing += f" unit {worker.unit} ({worker.unit_done:.0%})"
    silent = worker.silent_seconds > SILENCE and worker.state in ("loading", CAPTURING)
    return (
        f"{worker.worker}  {worker.host}  {doing}, {worker.units_done} units done, "
        f"{worker.tokens_per_second:,.0f} tokens/s"
        + (f", silent for {worker.silent_seconds:,.0f} s" if silent else "")
    )
