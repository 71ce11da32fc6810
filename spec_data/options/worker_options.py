"""The options that say which process captures which units, and how a run is watched."""

import re
from typing import Any

from spec_data.options.option_values import SHARDS, at_least
from spec_data.shards.errors import ConfigError
from spec_data.terminal.config import option
from spec_data.terminal.paths import check_file_to_write


def workers_option() -> Any:
    """The option --workers."""
    return option(
        "0/1",
        help="I/N makes this process worker I of N, counted from 0. Run all N, on one machine or "
        "on several that share the directory; the one that finishes last seals it. auto reads I "
        "and N from the variables of torchrun, SLURM (srun or a job array) or a Kubernetes Job, "
        "and auto/N where they name no N",
        group=SHARDS,
        metavar="I/N|auto",
    )


def engine_option() -> Any:
    """The option --engine."""
    return option(
        "local",
        help="what starts the workers: local is you, or a launcher that --workers auto knows; "
        "torchrun reads its RANK, WORLD_SIZE and LOCAL_RANK, and takes the GPU of that number; "
        "ray starts --replicas of the target on a Ray cluster, or on this machine",
        group=SHARDS,
        choices=("local", "torchrun", "ray"),
    )


def ray_address_option() -> Any:
    """The option --ray-address."""
    return option(
        None,
        help="with --engine ray: the cluster, such as auto or ray://HOST:10001; not given: "
        "RAY_ADDRESS, and without it a cluster of this machine alone, which ends with the command",
        group=SHARDS,
        metavar="ADDRESS",
    )


def replicas_option() -> Any:
    """The option --replicas."""
    return option(
        0,
        help="with --engine ray: copies of the target that work side by side; 0 takes all GPUs of "
        "the cluster, or one copy per machine without GPUs",
        group=SHARDS,
        metavar="N",
    )


def gpus_per_replica_option() -> Any:
    """The option --gpus-per-replica."""
    return option(
        None,
        help="with --engine ray: GPUs of one copy; above 1 the target is spread over them as "
        "--device-map auto does. Not given: 1, or 0 if the cluster has no GPU",
        group=SHARDS,
        metavar="N",
    )


def retries_option() -> Any:
    """The option --retries."""
    return option(
        3,
        help="with --engine ray: how often a unit is tried again after its process was lost or "
        "failed unexpectedly",
        group=SHARDS,
        metavar="N",
    )


def metrics_option() -> Any:
    """The option --metrics."""
    return option(
        None,
        help="write progress, speed and failures of all workers to this file every ten seconds: "
        ".prom in the text format of Prometheus, .jsonl one JSON object per line",
        group=SHARDS,
        metavar="FILE",
    )


def parse_worker(text: str) -> tuple[int, int]:
    """Return (i, n) of --workers i/n.

    Raises:
        ConfigError: another text, or i is not below n.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise ConfigError(f"--workers {text!r}: expected i/n with i from 0 to n-1, or auto")
    return int(found[1]), int(found[2])


def names_no_worker(text: str) -> bool:
    """Tell whether --workers leaves it to the environment which worker a process is."""
    return re.fullmatch(r"auto(/[1-9]\d*)?", text) is not None


def check_workers(config: Any) -> None:
    """Check the options of this module in a config.

    Raises:
        ConfigError: a bad value, or options that contradict each other.
    """
    if not config.places_itself:
        _ = config.worker
    at_least(0, replicas=config.replicas, retries=config.retries)
    if config.gpus_per_replica is not None:
        at_least(0, gpus_per_replica=config.gpus_per_replica)
    given = [config.ray_address, config.replicas or None, config.gpus_per_replica]
    if config.engine != "ray" and any(value is not None for value in given):
        raise ConfigError(
            "--ray-address, --replicas and --gpus-per-replica go with --engine ray; add it"
        )
    if config.engine == "ray" and config.workers != "0/1":
        raise ConfigError(
            f"--workers {config.workers} with --engine ray: Ray shares out the units; give "
            "--replicas N instead"
        )
    if config.engine == "ray" and config.tp_plan:
        raise ConfigError("--tp-plan needs torchrun; with --engine ray give --gpus-per-replica N")
    if config.metrics is not None:
        if not config.metrics.endswith((".prom", ".jsonl")):
            raise ConfigError(f"--metrics {config.metrics}: the name must end in .prom or .jsonl")
        check_file_to_write("--metrics", config.metrics)
