"""Which worker this process is, and no two running workers with a unit in common.

Worker i of n captures the units i, i + n, i + 2n, ... Changing n between runs is harmless, because
a unit has the same bytes from every worker and finished units are kept. --workers auto reads i and
n from the environment:

    launcher            index                   count
    torchrun            RANK                    WORLD_SIZE
    SLURM step (srun)   SLURM_PROCID            SLURM_STEP_NUM_TASKS, else SLURM_NTASKS
    SLURM job array     SLURM_ARRAY_TASK_ID     SLURM_ARRAY_TASK_COUNT
    Kubernetes Job      JOB_COMPLETION_INDEX    JOB_COMPLETIONS (set it to spec.completions)

torchrun decides where it runs inside one of the others, if its world spans all of their processes.
The steps of a job array are counted one after the other. Every other combination is refused: two
processes would take the same units, or none would take some.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.follow import WORK
from spec_data.shards.resumable import PATIENCE, process_lock

logger = logging.getLogger(__name__)

_ADVICE = "give --workers I/N instead"


@dataclass(frozen=True, kw_only=True)
class Worker:
    """This process is worker `index` of `count`, from 0, and runs its target on `device`."""

    index: int
    count: int
    device: str

    def __str__(self) -> str:
        """As --workers takes it."""
        return f"{self.index}/{self.count}"

    def units(self, units: int) -> list[int]:
        """Return which of so many units it captures."""
        return list(range(self.index, units, self.count))


def this_worker(workers: str, engine: str, device: str, *, one_device: bool = True) -> Worker:
    """Return which worker this process is, by --workers or by the environment.

    Args:
        workers: "i/n", "auto" or "auto/n".
        engine: of --engine; torchrun wants its variables.
        device: of --device.
        one_device: the target lies on one device, so that workers of a machine take one each.

    Raises:
        ConfigError: a bad value, or the environment contradicts itself or the options.
    """
    automatic = re.fullmatch(r"auto(/[1-9]\d*)?", workers) is not None
    if not automatic:
        index, count = parse_worker(workers)
        if engine != "torchrun":
            return Worker(index=index, count=count, device=device)
    rank = find_rank(workers if automatic else "auto", engine)
    if not automatic and workers not in ("0/1", str(rank)):
        raise ConfigError(f"--workers {workers}: {rank.reason}; leave --workers out")
    if one_device:
        device = device_of(rank, device, torch.cuda.device_count())
    elif rank.torchrun and rank.local:
        raise ConfigError(
            "--device-map under torchrun: each process would spread its target over all GPUs; "
            "start one process per machine"
        )
    logger.info("worker %s on device %s: %s", rank, device, rank.reason)
    return Worker(index=rank.index, count=rank.count, device=device)


def parse_worker(text: str) -> tuple[int, int]:
    """Return (i, n) of --workers i/n.

    Raises:
        ConfigError: another text, or i is not below n.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not int(match[1]) < int(match[2]):
        raise ConfigError(f"--workers {text!r}: expected i/n with i from 0 to n-1, or auto")
    return int(match[1]), int(match[2])


# -- the environment -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerRank:
    """Worker `index` of `count`, from 0.

    Attributes:
        local: its number among the workers of this machine, from 0; None if unknown.
        torchrun: torchrun has started it, so it sees the GPUs of the other local workers as well.
        reason: the variables that decided.
    """

    index: int
    count: int
    local: int | None = None
    torchrun: bool = False
    reason: str

    def __str__(self) -> str:
        """As --workers takes it."""
        return f"{self.index}/{self.count}"


def find_rank(
    workers: str, engine: str = "local", environ: Mapping[str, str] = os.environ
) -> WorkerRank:
    """Return the rank of a process that runs with --workers `workers` ("auto" or "auto/N").

    Raises:
        ConfigError: the variables are incomplete or contradict each other or N, or the engine is
            torchrun and its variables are missing.
    """
    asked = int(workers.partition("/")[2] or 0)
    torchrun = _pair(environ, "RANK", ("WORLD_SIZE",), 0)
    if engine == "torchrun" and (torchrun is None or "LOCAL_RANK" not in environ):
        raise ConfigError(
            "--engine torchrun: RANK, WORLD_SIZE and LOCAL_RANK are not set; start the command "
            "with `torchrun --nproc-per-node N --no-python spec-data generate ...`"
        )
    counts = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    outer = [
        _array(environ, asked),
        _pair(environ, "SLURM_PROCID", counts, 0),
        _pair(environ, "JOB_COMPLETION_INDEX", ("JOB_COMPLETIONS",), asked),
    ]
    several = [place for place in outer if place and place.count > 1]
    if torchrun is not None:
        for place in several:
            _check_spans(environ, torchrun, place)
        found = torchrun
    else:
        found = _combined(several) or next(filter(None, outer), None) or _nothing(asked)
    if asked and asked != found.count:
        raise ConfigError(f"--workers {workers}: {found.reason} says {found.count} workers")
    return found


def _nothing(asked: int) -> WorkerRank:
    if asked:
        raise ConfigError(
            f"--workers auto/{asked}: no launcher has set a rank (RANK, SLURM_PROCID, "
            f"SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX); {_ADVICE}"
        )
    return WorkerRank(index=0, count=1, reason="no launcher has set a rank: one worker")


def _combined(places: list[WorkerRank]) -> WorkerRank | None:
    """Return the rank in a job array of steps, or that of the only launcher."""
    if len(places) < 2:
        return places[0] if places else None
    array, step = places[0], places[1]
    if len(places) > 2 or "ARRAY" not in array.reason or "PROCID" not in step.reason:
        raise ConfigError(
            f"--workers auto: {' and '.join(p.reason for p in places)} contradict each other; "
            f"{_ADVICE}"
        )
    return WorkerRank(
        index=array.index * step.count + step.index,
        count=array.count * step.count,
        local=step.local,
        reason=f"{array.reason}, {step.reason}",
    )


def _check_spans(environ: Mapping[str, str], torchrun: WorkerRank, outer: WorkerRank) -> None:
    """Check that one torchrun world spans all processes of the launcher around it."""
    groups = _number(environ, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in environ else None
    if groups is None and torchrun.count % outer.count == 0:
        return
    if groups != outer.count:
        raise ConfigError(
            f"--workers auto: {torchrun.reason}, but {outer.reason}: each of these {outer.count} "
            "processes has started a torchrun of its own, and they would capture the same units. "
            f"Start torchrun with --nnodes {outer.count} and one --rdzv-endpoint, or without it"
        )


def _array(environ: Mapping[str, str], asked: int) -> WorkerRank | None:
    """Return the rank in a SLURM job array, which may begin at another number and have steps."""
    if "SLURM_ARRAY_TASK_ID" not in environ:
        return None
    number = _number(environ, "SLURM_ARRAY_TASK_ID")
    count = asked or _number(environ, "SLURM_ARRAY_TASK_COUNT")
    first = _number(environ, "SLURM_ARRAY_TASK_MIN") if "SLURM_ARRAY_TASK_MIN" in environ else 0
    last = (
        _number(environ, "SLURM_ARRAY_TASK_MAX")
        if "SLURM_ARRAY_TASK_MAX" in environ
        else first + count - 1
    )
    step = (last - first) // (count - 1) if count > 1 else 1
    even = step > 0 and first + step * (count - 1) == last and (number - first) % step == 0
    if not even or not first <= number <= last:
        raise ConfigError(
            f"--workers auto: SLURM_ARRAY_TASK_ID={number} of {count} numbers from {first} to "
            f"{last} is in no even series; submit with --array=0-{count - 1}"
        )
    return WorkerRank(
        index=(number - first) // step,
        count=count,
        reason=f"SLURM_ARRAY_TASK_ID={number} and SLURM_ARRAY_TASK_COUNT={count}",
    )


def _pair(
    environ: Mapping[str, str], index: str, counts: tuple[str, ...], asked: int
) -> WorkerRank | None:
    """Return the rank that a pair of variables names, None if the index is not set."""
    if index not in environ:
        return None
    name = next((c for c in counts if c in environ), None)
    if name is None and not asked:
        more = ", or --workers auto/N" if counts == ("JOB_COMPLETIONS",) else ""
        raise ConfigError(
            f"--workers auto: {index} is set, but {counts[-1]} is not; set it to the number of "
            f"workers{more}"
        )
    number = _number(environ, index)
    count = asked if name is None else _number(environ, name)
    reason = f"{index}={number} and {name or '--workers auto/N, N'}={count}"
    if number >= count:
        raise ConfigError(f"--workers auto: {reason} contradict each other; {_ADVICE}")
    local = {"RANK": "LOCAL_RANK", "SLURM_PROCID": "SLURM_LOCALID"}.get(index, "")
    return WorkerRank(
        index=number,
        count=count,
        local=_number(environ, local) if local in environ else None,
        torchrun=index == "RANK",
        reason=reason,
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise ConfigError(f"--workers auto: {name} is not set; {_ADVICE}")
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(f"--workers auto: {name}={text!r} is not a number from 0; {_ADVICE}")
    return int(text)


def device_of(rank: WorkerRank, device: str, gpus: int) -> str:
    """Return the --device of a worker: with several visible GPUs, the one of its local number.

    Args:
        device: --device.
        gpus: GPUs that this process sees; one, if the launcher gives each process its own.

    Raises:
        ConfigError: the machine has fewer GPUs than workers.
    """
    if rank.local is None or gpus == 0 or (gpus == 1 and not rank.torchrun):
        return device
    if device not in ("auto", "cuda"):
        if rank.torchrun and rank.local and device.startswith("cuda"):
            raise ConfigError(f"--device {device}: all workers of a machine would use it; leave it")
        return device
    if rank.local >= gpus:
        raise ConfigError(
            f"worker {rank} is number {rank.local} on this machine (from 0), but only "
            f"{gpus} GPUs are visible: start at most {gpus} workers per machine"
        )
    return f"cuda:{rank.local}"


# -- locks -----------------------------------------------------------------------------------------
# Two *running* workers with a unit in common are refused (0/2 and 1/3 share unit 4): each removes
# leftovers of its own units, and would remove what the other one is writing.
#
# A worker first takes its own lock and then looks at the locks of the others, so of two that start
# at the same moment at least one sees the other.


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
    file = out / WORK / f"worker-{workers.replace('/', '-of-')}.lock"
    busy = (
        f"{out}: another process is running worker {workers} here; wait for it, or start each "
        "process with its own --workers i/n"
    )
    with process_lock(file, busy):
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
