"""What each worker process is doing, for people: OUT/.generate/workers/*.json.

Times, machines and rates may not stand in the records of units, because the sealed directory has
the same bytes on every machine. They stand here, in one file per process, which sealing removes.
Nothing is decided by these files: a run goes on if they cannot be written.
"""

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from spec_data.generation.plan import Plan
from spec_data.shards.files import temporary_name
from spec_data.shards.follow import WORK

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
