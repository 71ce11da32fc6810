"""Which worker this process is, and no two running workers with a unit in common.

Worker i of n captures the units i, i + n, i + 2n, ... Changing n between runs is harmless, because
a unit has the same bytes from every worker and finished units are kept. --workers auto reads i and
n from the variables of a launcher, see `_LAUNCHERS`.
"""

import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.file_system import lock
from spec_data.shards.follow import WORK
from spec_data.shards.resumable import PATIENCE, process_lock
from spec_data.terminal.paths import make_directory

logger = logging.getLogger(__name__)

_ADVICE = "give --workers I/N instead"
# Variables: index; count, the first that is set; index on this machine.
_LAUNCHERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("RANK", ("WORLD_SIZE",), "LOCAL_RANK"),  # torchrun
    ("SLURM_ARRAY_TASK_ID", ("SLURM_ARRAY_TASK_COUNT",), ""),
    ("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    ("JOB_COMPLETION_INDEX", ("JOB_COMPLETIONS",), ""),  # Kubernetes; set it to spec.completions
)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Worker `index` of `count`, from 0, which runs its target on `device`.

    Attributes:
        local: its number among the workers of this machine, from 0; None if unknown.
        torchrun: torchrun has started it, so it sees the GPUs of the other local workers as well.
        reason: the variables that decided.
    """

    index: int = 0
    count: int = 1
    device: str = "auto"
    local: int | None = None
    torchrun: bool = False
    reason: str = ""

    def __str__(self) -> str:
        """As --workers takes it."""
        return f"{self.index}/{self.count}"

    def units(self, units: int) -> list[int]:
        """Return which of so many units it captures."""
        return list(range(self.index, units, self.count))


def this_worker(workers: str, device: str, *, one_device: bool = True) -> Worker:
    """Return which worker this process is, by --workers or by the environment.

    With `one_device`, the target lies on one device, and workers of a machine take one each.

    Raises:
        ConfigError: a bad value, or the environment contradicts itself or the options.
    """
    if not re.fullmatch(r"auto(/[1-9]\d*)?", workers):
        match = re.fullmatch(r"(\d+)/(\d+)", workers)
        if not match or not int(match[1]) < int(match[2]):
            raise ConfigError(f"--workers {workers!r}: expected i/n with i from 0 to n-1, or auto")
        return Worker(index=int(match[1]), count=int(match[2]), device=device)
    worker = launched_worker(workers)
    if one_device:
        device = device_of(worker, device, torch.cuda.device_count())
    elif worker.torchrun and worker.local:
        raise ConfigError(
            "--device-map under torchrun: each process would spread its target over all GPUs; "
            "start one process per machine"
        )
    logger.info("worker %s on device %s: %s", worker, device, worker.reason)
    return replace(worker, device=device)


def launched_worker(workers: str, environ: Mapping[str, str] = os.environ) -> Worker:
    """Return the worker that a process with --workers `workers` ("auto" or "auto/N") is.

    torchrun decides where it runs inside another launcher.

    Raises:
        ConfigError: the variables are incomplete or contradict each other or N.
    """
    asked = int(workers.partition("/")[2] or 0)
    launched = [_launched_by(*names, environ, asked) for names in _LAUNCHERS if names[0] in environ]
    if asked and not launched:
        names = ", ".join(index for index, _, _ in _LAUNCHERS)
        raise ConfigError(f"--workers {workers}: no launcher has set a rank ({names}); {_ADVICE}")
    torchrun = [w for w in launched if w.torchrun]
    others = [w for w in launched if w.count > 1 and not w.torchrun]
    for outer in others if torchrun else []:
        if environ.get("GROUP_WORLD_SIZE", str(outer.count)) != str(outer.count):
            raise ConfigError(
                f"--workers auto: {torchrun[0].reason}, but {outer.reason}: each of these "
                f"{outer.count} processes has started a torchrun of its own. Start torchrun with "
                f"--nnodes {outer.count} and one --rdzv-endpoint, or without it"
            )
    several = torchrun or _distinct(others)
    if len(several) > 1:
        reasons = " and ".join(w.reason for w in several)
        raise ConfigError(f"--workers auto: {reasons} contradict each other; {_ADVICE}")
    worker = [*several, *launched, Worker(reason="no launcher has set a rank: one worker")][0]
    if asked and asked != worker.count:
        raise ConfigError(f"--workers {workers}: {worker.reason} says {worker.count} workers")
    return worker


def _launched_by(
    index: str, counts: tuple[str, ...], local: str, environ: Mapping[str, str], asked: int
) -> Worker:
    """Return the worker that the variables of a launcher name; `asked` is the N of auto/N."""
    name = next((c for c in counts if c in environ), None)
    if name is None and not asked:
        raise ConfigError(
            f"--workers auto: {index} is set, but {counts[-1]} is not; set it to the number of "
            "workers, or give --workers auto/N"
        )
    number = _number(environ, index)
    count = asked if name is None else _number(environ, name)
    reason = f"{index}={number} and {name or '--workers auto/N, N'}={count}"
    if "ARRAY" in index and name is not None:
        number = _place_in_array(environ, number, count)
    if number >= count:
        raise ConfigError(
            f"--workers auto: {reason} contradict each other; number the workers from 0"
        )
    return Worker(
        index=number,
        count=count,
        local=_number(environ, local) if local in environ else None,
        torchrun=index == "RANK",
        reason=reason,
    )


def _distinct(workers: list[Worker]) -> list[Worker]:
    """Return the workers without those that a second launcher names in the same words."""
    return list({str(worker): worker for worker in reversed(workers)}.values())[::-1]


def _place_in_array(environ: Mapping[str, str], task: int, count: int) -> int:
    """Return the place, from 0, of a task in a job array of `count` tasks at equal distances.

    --array=0-14:2 has the tasks 0, 2, ..., 14: the places 0 to 7.

    Raises:
        ConfigError: the tasks have other distances, so that their places are not known.
    """
    first = _number(environ, "SLURM_ARRAY_TASK_MIN")
    step = max(1, _number(environ, "SLURM_ARRAY_TASK_STEP", "1"))
    last = _number(environ, "SLURM_ARRAY_TASK_MAX", str(first + step * (count - 1)))
    if count > 1 and "SLURM_ARRAY_TASK_STEP" not in environ:
        step = max(1, (last - first) // (count - 1))
    place, rest = divmod(task - first, step)
    if rest or place < 0 or last != first + step * (count - 1):
        raise ConfigError(
            f"--workers auto: SLURM_ARRAY_TASK_ID={task} of {count} tasks from {first} to {last}: "
            "which place it has is known only of tasks at equal distances, as of --array=0-7 or "
            f"--array=0-14:2; submit such an array, or {_ADVICE}"
        )
    return place


def _number(environ: Mapping[str, str], name: str, default: str = "0") -> int:
    text = environ.get(name, default)
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(f"--workers auto: {name}={text!r} is not a number from 0; {_ADVICE}")
    return int(text)


def device_of(worker: Worker, device: str, gpus: int) -> str:
    """Return the --device of a worker: of several visible GPUs, the one of its local number.

    This process sees `gpus`: one, if the launcher gives each process its own.

    Raises:
        ConfigError: the machine has fewer GPUs than workers, or `device` names one for all of them.
    """
    alone = gpus == 0 or (gpus == 1 and not worker.torchrun)
    if worker.local is None or alone or device not in ("auto", "cuda"):
        if worker.torchrun and worker.local and device.startswith("cuda:"):
            raise ConfigError(
                f"--device {device}: all workers of this machine would load their target there; "
                "leave it out, and each takes a GPU of its own"
            )
        return device
    if worker.local >= gpus:
        raise ConfigError(
            f"worker {worker} is number {worker.local} on this machine (from 0), but only "
            f"{gpus} GPUs are visible: start at most {gpus} workers per machine"
        )
    return f"cuda:{worker.local}"


# -- locks -----------------------------------------------------------------------------------------
# Two *running* workers with different n are refused (0/2 and 1/3 share unit 4): each removes
# leftovers of its own units, and would remove what the other one is writing.
#
# A worker first takes its own lock and then looks at the locks of the others, so of two that start
# at the same moment at least one sees the other.


@contextmanager
def planning_lock(out: Path) -> Iterator[None]:
    """Hold the lock of the plan of `out`, which is made if it does not exist; wait for it."""
    make_directory("--out", out / WORK)
    file = out / WORK / "plan.lock"
    with ExitStack() as held:
        try:
            held.enter_context(lock(file, 0))
        except TimeoutError:
            logger.info("%s: another process is making the plan; waiting for it", out)
            held.enter_context(lock(file))
        yield


@contextmanager
def worker_lock(out: Path, worker: str) -> Iterator[None]:
    """Hold the lock of worker "i/n" in `out`; it is released even if the process dies.

    Raises:
        RunError: another process holds this worker's lock, or that of a worker with another n.
    """
    (out / WORK).mkdir(parents=True, exist_ok=True)
    file = out / WORK / f"worker-{worker.replace('/', '-of-')}.lock"
    busy = (
        f"{out}: another process is running worker {worker} here; wait for it, or start each "
        "process with its own --workers i/n"
    )
    with process_lock(file, busy):
        for other, held in _held(out / WORK):
            if other.partition("/")[2] != worker.partition("/")[2] and not _free(held, PATIENCE):
                raise RunError(
                    f"{out}: another process is running worker {other} here. Start all processes "
                    "with the same n in --workers i/n, or wait for that worker"
                )
        yield


def running_workers(work: Path, patience: float = 0.0) -> list[str]:
    """Return the workers ("i/n") whose lock in `work` (OUT/.generate) a process holds now.

    A lock that is released within `patience` seconds does not count: another process may hold it
    only to look at it.
    """
    return [worker for worker, file in _held(work) if not patience or not _free(file, patience)]


def _held(work: Path) -> list[tuple[str, Path]]:
    """Return the workers whose lock a process holds now, each with the file of its lock."""
    files = sorted(work.glob("worker-*.lock"))
    names = [(file, re.fullmatch(r"worker-(\d+)-of-(\d+)", file.stem)) for file in files]
    return [(f"{name[1]}/{name[2]}", file) for file, name in names if name and not _free(file, 0)]


def _free(file: Path, seconds: float) -> bool:
    """Return whether no process holds the lock `file`, or whether it is released in `seconds`.

    A user who may only read does not know it: to him it is free.
    """
    try:
        with lock(file, seconds):
            return True
    except TimeoutError:
        return False
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return True
