"""The options that say which process captures which units."""

import re
from typing import Any

from spec_data.options.option_values import SHARDS, at_least
from spec_data.shards.errors import ConfigError
from spec_data.terminal.config import option


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
        "ray starts --replicas of the target on the Ray cluster of RAY_ADDRESS, or on this machine",
        group=SHARDS,
        choices=("local", "torchrun", "ray"),
    )


def replicas_option() -> Any:
    """The option --replicas."""
    return option(
        0,
        help="with --engine ray: copies of the target that work side by side; 0 takes one per free "
        "GPU of the cluster, or one per machine without GPUs or with --device-map, which spreads "
        "each copy over its share of the GPUs",
        group=SHARDS,
        metavar="N",
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
    at_least(0, replicas=config.replicas)
    if config.engine != "ray" and config.replicas:
        raise ConfigError("--replicas goes with --engine ray; add it")
    if config.engine == "ray" and config.workers != "0/1":
        raise ConfigError(
            f"--workers {config.workers} with --engine ray: Ray shares out the units; give "
            "--replicas N instead"
        )
    if config.engine == "ray" and config.tp_plan:
        raise ConfigError("--tp-plan needs torchrun; with --engine ray give --device-map auto")
