"""--workers auto: which worker of how many this process is, read from the environment.

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
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from spec_data.options.generate_options import GenerateConfig
from spec_data.shards.errors import ConfigError

logger = logging.getLogger(__name__)

_ADVICE = "give --workers I/N instead"


@dataclass(frozen=True, kw_only=True)
class Place:
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

    @property
    def workers(self) -> str:
        """Return the place as --workers takes it."""
        return f"{self.index}/{self.count}"


def placed(config: GenerateConfig) -> GenerateConfig:
    """Return the config with the worker and the device that the environment names, if it is asked.

    Raises:
        ConfigError: the environment contradicts itself or the options; see `find_place`.
    """
    if not config.places_itself:
        return config
    automatic = config.workers.startswith("auto")
    place = find_place(config.workers if automatic else "auto", config.engine)
    if not automatic and config.workers not in ("0/1", place.workers):
        raise ConfigError(f"--workers {config.workers}: {place.reason}; leave --workers out")
    device = config.device
    if config.device_map is None:
        device = device_of(place, device, torch.cuda.device_count())
    elif place.torchrun and place.local:
        raise ConfigError(
            "--device-map under torchrun: each process would spread its target over all GPUs; "
            "start one process per machine"
        )
    logger.info("worker %s on device %s: %s", place.workers, device, place.reason)
    return replace(config, workers=place.workers, engine="local", device=device)


def find_place(
    workers: str, engine: str = "local", environ: Mapping[str, str] = os.environ
) -> Place:
    """Return the place of a process that runs with --workers `workers` ("auto" or "auto/N").

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


def _nothing(asked: int) -> Place:
    if asked:
        raise ConfigError(
            f"--workers auto/{asked}: no launcher has set a rank (RANK, SLURM_PROCID, "
            f"SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX); {_ADVICE}"
        )
    return Place(index=0, count=1, reason="no launcher has set a rank: one worker")


def _combined(places: list[Place]) -> Place | None:
    """Return the place in a job array of steps, or that of the only launcher."""
    if len(places) < 2:
        return places[0] if places else None
    array, step = places[0], places[1]
    if len(places) > 2 or "ARRAY" not in array.reason or "PROCID" not in step.reason:
        raise ConfigError(
            f"--workers auto: {' and '.join(p.reason for p in places)} contradict each other; "
            f"{_ADVICE}"
        )
    return Place(
        index=array.index * step.count + step.index,
        count=array.count * step.count,
        local=step.local,
        reason=f"{array.reason}, {step.reason}",
    )


def _check_spans(environ: Mapping[str, str], torchrun: Place, outer: Place) -> None:
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


def _array(environ: Mapping[str, str], asked: int) -> Place | None:
    """Return the place in a SLURM job array, which may begin at another number and have steps."""
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
    return Place(
        index=(number - first) // step,
        count=count,
        reason=f"SLURM_ARRAY_TASK_ID={number} and SLURM_ARRAY_TASK_COUNT={count}",
    )


def _pair(
    environ: Mapping[str, str], index: str, counts: tuple[str, ...], asked: int
) -> Place | None:
    """Return the place that a pair of variables names, None if the index is not set."""
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
    return Place(
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


def device_of(place: Place, device: str, gpus: int) -> str:
    """Return the --device of a worker: with several visible GPUs, the one of its local number.

    Args:
        device: --device.
        gpus: GPUs that this process sees; one, if the launcher gives each process its own.

    Raises:
        ConfigError: the machine has fewer GPUs than workers.
    """
    if place.local is None or gpus == 0 or (gpus == 1 and not place.torchrun):
        return device
    if device not in ("auto", "cuda"):
        if place.torchrun and place.local and device.startswith("cuda"):
            raise ConfigError(f"--device {device}: all workers of a machine would use it; leave it")
        return device
    if place.local >= gpus:
        raise ConfigError(
            f"worker {place.workers} is number {place.local} on this machine (from 0), but only "
            f"{gpus} GPUs are visible: start at most {gpus} workers per machine"
        )
    return f"cuda:{place.local}"
