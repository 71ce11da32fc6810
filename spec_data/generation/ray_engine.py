"""--engine ray: every replica of the target is an actor of Ray, and units are tasks of Ray's pool.

Ray places the actors, starts lost ones again and repeats their units. A unit exists whole or not
at all, so a repeated one has the same bytes. The driver makes the plan, holds the lock of worker
0/1, shows the bar and finalizes the dataset. It needs no GPU.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spec_data.generation.explained_failures import explained_failures
from spec_data.generation.plan import Plan, load_plan
from spec_data.generation.replica import Replica
from spec_data.generation.setup import Setup, data_settings, set_up, settings
from spec_data.generation.status import FAILED, FactsWriter, read_facts
from spec_data.options.generate_options import GenerateConfig
from spec_data.shards.errors import ConfigError, RunError, SpecDataError
from spec_data.shards.follow import WORK
from spec_data.shards.reclaim import wait_for_room
from spec_data.shards.resumable import differing_settings
from spec_data.terminal.progress import progress, size

logger = logging.getLogger(__name__)

RETRIES = 3
"""How often Ray repeats a unit whose replica was lost."""
_POLL = 0.5  # seconds between two looks at the progress of the replicas
_AT_ONCE = 2  # units per replica: one is captured while the other is written


def import_ray() -> Any:
    """Return the module.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
        import ray
    except ImportError:
        raise ConfigError("--engine ray needs Ray: pip install 'ray[default]'") from None
    return ray


@contextmanager
def connected(config: GenerateConfig) -> Iterator[GenerateConfig]:
    """Connect to the cluster of RAY_ADDRESS or start one; yield the config with --replicas set.

    A cluster that was started here ends with the block; a connection of the caller stays.

    Raises:
        ConfigError: there is no such cluster, it has too few GPUs, or Ray is missing.
    """
    ray = import_ray()
    ours = not ray.is_initialized()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if ours:
            _connect(ray, config.replicas)
        yield _with_replicas(ray, config)
    finally:
        if ours:
            ray.shutdown()
            # Ray has installed a handler of its own, which would outlive the connection.
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)


def _connect(ray: Any, replicas: int) -> None:
    address = os.environ.get("RAY_ADDRESS") or "local"
    given: dict[str, Any] = {"address": address, "log_to_driver": False}
    given |= {"logging_level": logging.ERROR, "configure_logging": False}
    if address == "local":
        cores = max(os.cpu_count() or 1, replicas)
        given |= {"num_cpus": cores, "include_dashboard": False}
    try:
        ray.init(**given)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"RAY_ADDRESS={address}: no connection to Ray ({reason})") from None
    logger.info("ray: %s", "a cluster of this machine" if address == "local" else address)


def _with_replicas(ray: Any, config: GenerateConfig) -> GenerateConfig:
    """Set --replicas: one per free GPU; one per machine without GPUs, or with --device-map."""
    machines = sum(node["Alive"] for node in ray.nodes())
    free, every = ray.available_resources().get("GPU", 0), ray.cluster_resources().get("GPU", 0)
    if not every or config.device not in ("auto", "cuda"):
        return replace(config, replicas=config.replicas or machines)
    alone = config.device_map is None  # Ray shows each actor its own GPUs only
    replicas = config.replicas or max(1, int(free) if alone else machines)
    if replicas > every:
        raise ConfigError(f"--replicas {replicas}: the cluster has {every:.0f} GPUs")
    return replace(config, replicas=replicas, device="cuda" if alone else config.device)


def _gpus_of_a_replica(ray: Any, config: GenerateConfig) -> int:
    gpus = int(ray.cluster_resources().get("GPU", 0)) if config.device in ("auto", "cuda") else 0
    return min(1, gpus) if config.device_map is None else gpus // config.replicas


def capture_on_ray(setup: Setup, plan: Plan, out: Path, todo: list[int]) -> None:
    """Capture the units `todo` on the replicas of a cluster that is connected already.

    Raises:
        SpecDataError: what the proof of the target, or a unit, raised; at once.
        RunError: a unit was lost more often than `RETRIES`.
    """
    ray = import_ray()
    from ray.util import ActorPool

    config = setup.config
    actor = ray.remote(
        num_gpus=_gpus_of_a_replica(ray, config),
        num_cpus=1,
        max_restarts=-1,
        max_task_retries=RETRIES,
        max_concurrency=_AT_ONCE,
    )(RayReplica)
    threads = torch.get_num_threads()
    replicas = [actor.remote(config, number, threads) for number in range(config.replicas)]
    pool = ActorPool(replicas * _AT_ONCE)
    for unit in todo:
        pool.submit(lambda replica, unit: replica.capture.remote(unit), unit)
    left = plan.unit_set_tokens(todo)
    finished, written, lines = set[int](), 0, dict[str, None]()
    with progress(total=plan.tokens, initial=plan.tokens - left, desc="capture", unit="tok") as bar:
        try:
            while pool.has_next():
                if (result := _next(ray, pool, out)) is not None:
                    unit, size_on_disk, logged = result
                    finished.add(unit)
                    written += size_on_disk
                    for line in logged:  # the same from every replica
                        if line not in lines:
                            logger.info("%s", line)
                        lines[line] = None
                working = {f.unit: f.unit_done for f in read_facts(out) if f.unit in set(todo)}
                done = plan.unit_set_tokens(finished)
                done += sum(n for unit, n in working.items() if unit not in finished)
                bar.n = plan.tokens - left + done
                bar.set_postfix_str(f"shard {len(finished)}/{len(todo)}, {size(written)}")
        finally:
            with suppress(Exception):
                ray.wait([r.close.remote() for r in replicas], num_returns=len(replicas), timeout=5)
            for replica in replicas:
                ray.kill(replica)


def _next(ray: Any, pool: Any, out: Path) -> tuple[int, int, list[str]] | None:
    """Return what `RayReplica.capture` returned for the next unit; None if that takes longer."""
    try:
        return pool.get_next_unordered(timeout=_POLL)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if error.cause is not None else error from None
    except ray.exceptions.RayError as error:
        reasons = [f"unit {f.unit}: {f.error}" for f in read_facts(out) if f.phase == FAILED]
        reason = reasons[-1] if reasons else str(error).strip().splitlines()[0]
        raise RunError(
            f"a replica was lost {RETRIES + 1} times with the same unit ({reason}); finished units "
            "are kept. Run the same command again to resume"
        ) from None
    except TimeoutError:
        return None


class RayReplica:
    """A copy of the target that captures units. This class does not need Ray itself.

    Its methods run in threads: the shard of one unit is written while the next one is captured.
    """

    def __init__(self, config: GenerateConfig, number: int, threads: int) -> None:
        """Take the options of the run; the target is loaded with the first unit.

        So whatever fails there is an error of a task, which Ray counts and hands on.
        """
        self.config, self.out, self.threads = config, Path(config.out), threads
        self.name = f"ray-{number}"
        self._capturing, self._writing = threading.Lock(), threading.Lock()
        self._loaded: tuple[Replica, FactsWriter] | None = None
        self._lines: list[str] = []

    def _load(self) -> tuple[Replica, FactsWriter]:
        """Load the target and prove it, once.

        Raises:
            SpecDataError: as `Replica`; or this machine has another target or other versions.
        """
        if self._loaded is not None:
            return self._loaded
        torch.set_num_threads(self.threads)
        with _collected(self._lines):
            setup, plan = set_up(self.config), load_plan(self.out / WORK)
            of_the_plan = {name: plan.settings[name] for name in ("corpus", "max_shard_size")}
            here = settings(setup, []) | of_the_plan
            changed = differing_settings(data_settings(plan.settings), data_settings(here))
            if changed:
                raise ConfigError(
                    f"the machine of replica {self.name} differs from that of the driver:\n  "
                    + "\n  ".join(changed)
                )
            facts = FactsWriter(self.out, plan, self.name, "0/1")  # the driver holds this lock
            try:
                self._loaded = Replica(setup, plan, self.out), facts
            except BaseException as error:
                facts.end(error)
                raise
        return self._loaded

    def capture(self, unit: int) -> tuple[int, int, list[str]]:
        """Capture a unit and write it; return it, its bytes, and what was logged while loading.

        Another error than one of this project ends the process, which an error of CUDA leaves
        unusable: Ray then starts another one and repeats the unit.

        Raises:
            SpecDataError: a failed proof, broken states, a full disk or a full device.
        """
        wait_for_room(self.out, unit)
        try:
            with explained_failures(self.out):
                with self._capturing:
                    replica, facts = self._load()
                    facts.begin(unit)
                    captured = replica.capture(unit, facts.add)
                    self._writing.acquire()
                try:
                    written = replica.finish(unit, captured)
                    facts.finish(unit, written)
                finally:
                    self._writing.release()
        except SpecDataError:
            raise
        except Exception as error:
            if self._loaded is not None:
                self._loaded[1].end(RunError(f"{type(error).__name__}: {error}"))
            with self._writing:  # the unit before this one is not lost
                os._exit(1)
        return unit, written, self._lines

    def close(self) -> None:
        """Say in the file of this process that it ends."""
        if self._loaded is not None:
            self._loaded[1].end()


@contextmanager
def _collected(lines: list[str]) -> Iterator[None]:
    """Collect the log lines of this project in a list."""
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("spec_data")
    before = ours.level
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before)
