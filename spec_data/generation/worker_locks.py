"""One process per worker, and no two running workers with a unit in common.

Worker i of n captures the units i, i + n, i + 2n, ... Changing n between runs is harmless, because
a unit has the same bytes from every worker and finished units are kept. Two *running* workers with
a unit in common are refused (0/2 and 1/3 share unit 4): each removes leftovers of its own units,
and would remove what the other one is writing.

A worker first takes its own lock and then looks at the locks of the others, so of two that start at
the same moment at least one sees the other.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from spec_data.shards.errors import RunError
from spec_data.shards.follow import WORK

PATIENCE = 0.5  # seconds; another process may hold a lock for an instant, to see whether it can


@contextmanager
def worker_lock(out: Path, workers: str, units: int) -> Iterator[None]:
    """Hold the lock of worker `workers` ("i/n") in `out`; it is released even if the process dies.

    Args:
        units: the number of units of the plan.

    Raises:
        RunError: another process holds this worker's lock, or that of a worker with another n that
            captures some of the same units.
    """
    workers = "/".join(str(int(number)) for number in workers.split("/"))  # 00/2 is 0/2
    lock = FileLock(out / WORK / f"worker-{workers.replace('/', '-of-')}.lock")
    try:
        held = lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise RunError(
            f"{out}: another process is running worker {workers} here; wait for it, or start each "
            "process with its own --workers i/n"
        ) from None
    with held:
        _refuse_overlap(out, workers, units)
        yield


def _refuse_overlap(out: Path, workers: str, units: int) -> None:
    own = _units(workers, units)
    for other, file in _held(out / WORK):
        shared = own & _units(other, units)
        if other != workers and shared and not _free(file, PATIENCE):
            raise RunError(
                f"{out}: another process is running worker {other} here, and {len(shared)} of the "
                f"units of worker {workers} are its own (first: {min(shared)}). Start all "
                "processes with the same n in --workers i/n, or wait for that worker"
            )


def _units(workers: str, units: int) -> set[int]:
    index, count = map(int, workers.split("/"))
    return set(range(index, units, count))


def running_workers(work: Path, patience: float = 0.0) -> list[str]:
    """Return the workers ("i/n") whose lock in `work` (OUT/.generate) a process holds now.

    The caller's own is among them if it holds one. A lock that is released within `patience`
    seconds does not count: another process may hold it only to look at it.
    """
    return [worker for worker, file in _held(work) if not patience or not _free(file, patience)]


def _held(work: Path) -> list[tuple[str, Path]]:
    """Return the workers whose lock a process holds now, each with the file of its lock."""
    files = sorted(work.glob("worker-*.lock"))
    names = [(file, re.fullmatch(r"worker-(\d+)-of-(\d+)", file.stem)) for file in files]
    return [(f"{name[1]}/{name[2]}", file) for file, name in names if name and not _free(file, 0)]


def _free(file: Path, seconds: float) -> bool:
    """Return whether no process holds the lock `file`, or whether it is released in `seconds`."""
    try:
        with FileLock(file, timeout=seconds):
            return True
    except Timeout:
        return False
