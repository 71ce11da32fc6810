"""--engine ray: units are tasks of Ray, and every replica of the target is one actor.

Ray places the actors and reports lost ones. The driver only hands each ready replica its next unit,
asks for a new actor instead of a lost one, and repeats a lost unit on any ready replica. Ray's own
restarts and retries (`max_restarts`, `max_task_retries`) are off: they would wait for one actor,
whose machine may be gone, while others are idle. A unit exists whole or not at all, so a repeated
one has the same bytes.

The driver makes the plan, holds the lock of worker 0/1, shows the bar and seals. It needs no GPU.
"""

import logging
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_data.generation.plan import Plan
from spec_data.generation.ray_replica import RayReplica
from spec_data.generation.setup import Setup
from spec_data.generation.status import read_facts
from spec_data.options.generate_options import GenerateConfig
from spec_data.shards.errors import ConfigError, RunError, SpecDataError
from spec_data.shards.reclaim import room_for
from spec_data.terminal.progress import Bar, progress, size

logger = logging.getLogger(__name__)

_POLL = 0.5  # seconds between two looks
_LOG_AGAIN = 60.0  # seconds between two log lines
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
    """Connect to a cluster or start one, and yield the config with replicas, GPUs and device set.

    A cluster that was started here ends with the block; a connection of the caller stays.

    Raises:
        ConfigError: there is no such cluster, Ray is missing, or the cluster has too few GPUs.
    """
    ray = import_ray()
    ours = not ray.is_initialized()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if ours:
            _connect(ray, config)
        yield _resolved(ray, config)
    finally:
        if ours:
            ray.shutdown()
            # Ray has installed a handler of its own, which would outlive the connection.
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)


def _connect(ray: Any, config: GenerateConfig) -> None:
    address = config.ray_address or os.environ.get("RAY_ADDRESS") or "local"
    given: dict[str, Any] = {"address": address, "log_to_driver": False}
    given |= {"logging_level": logging.ERROR, "configure_logging": False}
    if address == "local":
        cores = max(os.cpu_count() or 1, config.replicas)
        given |= {"num_cpus": cores, "include_dashboard": False}
    try:
        ray.init(**given)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--ray-address {address}: no connection to Ray ({reason})") from None
    logger.info("ray: %s", "a cluster of this machine" if address == "local" else address)


def _resolved(ray: Any, config: GenerateConfig) -> GenerateConfig:
    found = ray.cluster_resources()
    in_cluster = int(found.get("GPU", 0))
    gpus = config.gpus_per_replica
    if gpus is None:
        gpus = int(in_cluster > 0 and config.device in ("auto", "cuda"))
    machines = sum(node["Alive"] for node in ray.nodes())
    replicas = config.replicas or (in_cluster // gpus if gpus else machines)
    if gpus and in_cluster < gpus:
        raise ConfigError(
            f"--gpus-per-replica {gpus}: the cluster has {in_cluster} GPUs; give 0 to run on CPUs"
        )
    if gpus * replicas > in_cluster:
        logger.warning(
            "the cluster has %d GPUs now, and %d replicas need %d: work begins with those that fit",
            *(in_cluster, replicas, gpus * replicas),
        )
    changes: dict[str, Any] = {"replicas": max(1, replicas), "gpus_per_replica": gpus}
    if gpus == 1 and config.device_map is None:
        changes["device"] = "cuda"  # Ray shows each actor its own GPU only
    elif gpus > 1 and config.device_map is None:
        changes["device_map"] = "auto"
    return replace(config, **changes)


@dataclass
class _Actor:
    """A replica as the driver knows it."""

    number: int
    handle: Any
    ready: bool = False
    units: int = 0  # in its hands
    retired: bool = False  # another actor has its place
    lost: bool = False  # it died by itself


def capture_on_ray(setup: Setup, plan: Plan, out: Path, todo: list[int]) -> None:
    """Capture the units `todo` on the replicas of a cluster that is connected already.

    Raises:
        SpecDataError: what the proof of the target, or a unit, raised; at once.
        RunError: a unit failed or was lost more often than --retries, or every replica was.
    """
    total = plan.tokens
    done = total - plan.unit_set_tokens(todo)
    with progress(total=total, initial=done, desc="capture", unit="tok") as bar:
        driver = _Driver(setup, plan, out, todo, bar)
        try:
            driver.run()
        finally:
            driver.close()


class _Driver:
    """Hands units to replicas until all are finished or one cannot be."""

    def __init__(self, setup: Setup, plan: Plan, out: Path, todo: list[int], bar: Bar) -> None:
        self.ray = import_ray()
        self.config, self.plan, self.out, self.bar = setup.config, plan, out, bar
        self.waiting, self.total = deque(todo), len(todo)
        self.finished: list[int] = []
        self.attempts: Counter[int] = Counter()
        self.tasks: dict[Any, tuple[_Actor, int | None]] = {}  # None: the replica is prepared
        self.written, self.base = 0, plan.tokens - plan.unit_set_tokens(todo)
        self.losses: Counter[int] = Counter()  # by replica, before it was ready
        self.error: Exception | None = None
        self.said: set[str] = set()
        self.began = self.logged = self.shown = time.monotonic()
        self.actors = [self._start(number) for number in range(self.config.replicas)]

    def _start(self, number: int) -> _Actor:
        kind = self.ray.remote(
            num_gpus=self.config.gpus_per_replica or 0,
            num_cpus=1,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_AT_ONCE,
        )(RayReplica)
        options = asdict(self.config)
        handle = kind.remote(options, number, torch.get_num_threads())
        actor = _Actor(number, handle)
        # Until it is ready it gets no unit, so that none waits for an actor that Ray cannot place.
        self.tasks[handle.prepare.remote()] = (actor, None)
        return actor

    def _replace(self, actor: _Actor) -> None:
        """Ask Ray for a new actor in the place of one that is lost or broken."""
        if actor.retired or self.error is not None:
            return
        actor.ready, actor.retired = False, True
        with suppress(Exception):  # it may be dead already
            self.ray.kill(actor.handle)
        self.actors[self.actors.index(actor)] = self._start(actor.number)

    def run(self) -> None:
        """Return when every unit is finished; raise the first error that ends the run."""
        while self.waiting or any(unit is not None for _, unit in self.tasks.values()):
            if self.error is None:
                self._hand_out()
            elif all(unit is None for _, unit in self.tasks.values()):
                break
            self._wait()
            self._show()
        if self.error is not None:
            raise self.error

    def _wait(self) -> None:
        if not self.tasks:  # no room on the disk yet: --follow-keep
            time.sleep(_POLL)
            return
        done, _ = self.ray.wait(list(self.tasks), num_returns=1, timeout=_POLL)
        for task in done:
            self._take(task)

    def _hand_out(self) -> None:
        for most in range(1, _AT_ONCE + 1):  # a second one only if every replica has one
            for actor in self.actors:
                if not self.waiting or not room_for(self.out, self.waiting[0]):
                    return
                if actor.ready and actor.units < most:
                    unit = self.waiting.popleft()
                    actor.units += 1
                    self.tasks[actor.handle.capture.remote(unit)] = (actor, unit)

    def _take(self, task: Any) -> None:
        actor, unit = self.tasks.pop(task)
        if unit is not None:
            actor.units -= 1
        try:
            result = self.ray.get(task)
        except self.ray.exceptions.RayTaskError as error:
            self._failed(actor, unit, error.cause if error.cause is not None else error)
        except self.ray.exceptions.RayError as error:
            self._lost(actor, unit, error)
        else:
            if unit is None:
                actor.ready = True
                self._say(result)
            else:
                self.finished.append(unit)
                self.written += result

    def _say(self, lines: list[str]) -> None:
        for line in lines:  # the same from every replica
            if line not in self.said:
                self.said.add(line)
                logger.info("%s", line)

    def _failed(self, actor: _Actor, unit: int | None, cause: BaseException) -> None:
        """A task raised an error: one of ours ends the run, another one is tried again."""
        if isinstance(cause, SpecDataError):
            self.error = self.error or cause
            return
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        if unit is None:
            self._unprepared(actor, reason)
            return
        self._again(unit, f"failed ({reason})")
        self._replace(actor)  # an error of CUDA leaves its process unusable

    def _lost(self, actor: _Actor, unit: int | None, error: Exception) -> None:
        """A replica was lost with a task: any other one repeats its unit."""
        reason = str(error).strip().splitlines()[0]
        actor.lost |= not actor.retired
        if unit is None:
            self._unprepared(actor, reason)
            return
        if actor.retired and not actor.lost:  # the driver has ended it, because of another unit
            self.waiting.appendleft(unit)
        else:
            self._again(unit, f"was lost with replica ray-{actor.number} ({reason})")
        self._replace(actor)

    def _unprepared(self, actor: _Actor, reason: str) -> None:
        """A replica could not be loaded; after --retries the others go on without it."""
        self.losses[actor.number] += 1
        if self.losses[actor.number] <= self.config.retries:
            self._replace(actor)
            return
        text = f"replica ray-{actor.number} cannot load the target: {reason}"
        logger.warning("%s; the others go on without it", text)
        self.actors.remove(actor)
        if not self.actors:
            self.error = self.error or RunError(text)

    def _again(self, unit: int, what: str) -> None:
        self.attempts[unit] += 1
        if self.attempts[unit] > self.config.retries:
            self.error = self.error or RunError(
                f"unit {unit} {what}, {self.attempts[unit]} times; finished units are kept. Run "
                "the same command again to resume"
            )
            return
        logger.warning("unit %d %s; it is captured again", unit, what)
        self.waiting.appendleft(unit)  # --follow-keep: a later unit must not wait for this one

    def _show(self) -> None:
        now = time.monotonic()
        if not any(a.ready for a in self.actors) and now - self.logged > _LOG_AGAIN:
            self.logged = now
            logger.info("waiting for the first of %d replicas", len(self.actors))
        if now - self.shown < _POLL and self.waiting:
            return
        self.shown = now
        inside = {unit for _, unit in self.tasks.values() if unit is not None}
        parts = {f.unit: f.unit_done for f in read_facts(self.out) if f.unit in inside}
        self.bar.n = self.base + self.plan.unit_set_tokens(self.finished) + sum(parts.values())
        ready = sum(actor.ready for actor in self.actors)
        self.bar.set_postfix_str(
            f"shard {len(self.finished)}/{self.total}, {size(self.written)}, {ready} replicas"
        )

    def close(self) -> None:
        """End the actors."""
        ready = [actor.handle.close.remote() for actor in self.actors if actor.ready]
        with suppress(Exception):
            self.ray.wait(ready, num_returns=len(ready), timeout=5.0)
        for actor in self.actors:
            with suppress(Exception):
                self.ray.kill(actor.handle)
