"""--engine ray: every replica of the target is an actor of Ray, and units are tasks of Ray's pool.

Ray places the actors, starts lost ones again and repeats their units. A unit exists whole or not
at all, so a repeated one has the same bytes. The driver makes the plan, holds the lock of worker
0/1, shows the bar and finalizes the dataset. It needs no GPU.
"""

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spec_data.generation.capture import CapturedUnit
from spec_data.generation.halving import UnitCapture
from spec_data.generation.options import CaptureOptions
from spec_data.generation.plan import Plan, load_plan
from spec_data.generation.proof import load_target
from spec_data.generation.setup import differences, set_up, settings
from spec_data.generation.status import FAILED, ProgressFile, read_progress
from spec_data.generation.units import explained_failures, finish_unit
from spec_data.shards.errors import ConfigError, RunError, SpecDataError
from spec_data.shards.follow import WORK
from spec_data.terminal.progress import progress

RETRIES = 3
"""How often Ray repeats a unit whose replica was lost."""
_AT_ONCE = 3  # units per replica: one is written, one captured, and one begins before it ends


@dataclass(frozen=True)
class Replicas:
    """How many replicas of a target share a cluster, with how many GPUs each; their --device."""

    target: str
    count: int
    gpus: int
    device: str


def import_ray() -> Any:
    """Return the module; raise ConfigError where Ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    # a failure ends the command with its own message; Ray would print those of other units, too
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        import ray
    except ImportError:
        raise ConfigError("--engine ray needs Ray: pip install 'ray[default]'") from None
    return ray


@contextmanager
def connected(target: str, replicas: int, options: CaptureOptions) -> Iterator[Replicas]:
    """Connect to the cluster of RAY_ADDRESS or start one; yield the replicas that fit it.

    A cluster that was started here ends with the block; a connection of the caller stays. With 0
    `replicas` there is one per free GPU, or one per machine without GPUs or with --device-map.

    Raises:
        ConfigError: there is no such cluster, it has too few GPUs, or Ray is missing.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield place_replicas(ray, target, replicas, options)
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    given: dict[str, Any] = {"logging_level": logging.ERROR, "configure_logging": False}
    if address == "local":
        given |= {"num_cpus": max(os.cpu_count() or 1, replicas), "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **given)
        yield place_replicas(ray, target, replicas, options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if ray.is_initialized():
            raise
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"RAY_ADDRESS={address}: no connection to Ray ({reason})") from None
    finally:
        ray.shutdown()
        # Ray has installed a handler of its own, which would outlive the connection.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def place_replicas(ray: Any, target: str, replicas: int, options: CaptureOptions) -> Replicas:
    """Return how many replicas share the cluster, with how many GPUs; see `connected`."""
    machines = sum(node["Alive"] for node in ray.nodes())
    free, every = ray.available_resources().get("GPU", 0), ray.cluster_resources().get("GPU", 0)
    if not every or options.device not in ("auto", "cuda"):
        return Replicas(target, replicas or machines, 0, options.device)
    alone = options.spread.device_map is None  # Ray shows each actor its own GPUs only
    replicas = replicas or max(1, int(free) if alone else machines)
    if replicas > every:
        raise ConfigError(f"--replicas {replicas}: the cluster has {every:.0f} GPUs")
    gpus, device = (1, "cuda") if alone else (int(every) // replicas, "auto")
    return Replicas(target, replicas, gpus, device)


def capture_on_ray(
    options: CaptureOptions, replicas: Replicas, plan: Plan, out: Path, todo: list[int]
) -> None:
    """Capture the units `todo` on the replicas of a cluster that is connected already.

    Raises:
        SpecDataError: what the proof of the target, or a unit, raised; at once.
        RunError: a unit was lost more often than `RETRIES`.
    """
    ray = import_ray()
    from ray.util import ActorPool

    actor = ray.remote(
        num_gpus=replicas.gpus,
        num_cpus=1,
        max_restarts=-1,
        max_task_retries=RETRIES,
        max_concurrency=_AT_ONCE,
    )(RayReplica)
    threads = torch.get_num_threads()
    given = (replicas.target, options, str(out))
    earlier = {(p.worker, p.host, p.started) for p in read_progress(out)}  # of other runs
    actors = [actor.remote(*given, n, threads) for n in range(replicas.count)]
    pool = ActorPool(actors * _AT_ONCE)
    left = plan.unit_set_tokens(todo)
    with progress(total=plan.tokens, initial=plan.tokens - left, desc="capture", unit="tok") as bar:
        try:
            for unit in pool.map_unordered(lambda a, unit: a.capture.remote(unit), todo):
                bar.update(plan.unit_set_tokens([unit]))
        except ray.exceptions.RayTaskError as error:
            raise error.cause if error.cause is not None else error from None
        except ray.exceptions.RayError as error:
            reasons = [
                f"unit {p.unit}: {p.error}"
                for p in read_progress(out)
                if p.state == FAILED and (p.worker, p.host, p.started) not in earlier
            ]
            reason = reasons[-1] if reasons else str(error).strip().splitlines()[0]
            raise RunError(
                f"a replica was lost {RETRIES + 1} times with the same unit ({reason}); finished "
                "units are kept. Run the same command again to resume"
            ) from None
        finally:
            with suppress(Exception):
                ray.wait([a.close.remote() for a in actors], num_returns=len(actors), timeout=5)
            for one in actors:
                ray.kill(one)


class RayReplica:
    """A copy of the target that captures units. This class does not need Ray itself.

    Its methods run in threads: the shard of one unit is written while the next one is captured, and
    the device starts with a unit that waits before the last results of the one before are stored.
    The target is loaded with the first unit: what fails there is an error of a task, which Ray
    counts and hands on.
    """

    def __init__(
        self, target: str, options: CaptureOptions, out: str, number: int, threads: int
    ) -> None:
        self.target, self.options, self.out, self.threads = target, options, Path(out), threads
        self.name = f"ray-{number}"
        self._capturing, self._writing = threading.Lock(), threading.Lock()
        self._loaded: UnitCapture | None = None
        self._waiting: deque[int] = deque()  # units that are not begun
        self._begun: list[int] = []
        self._stream: Iterator[tuple[int, CapturedUnit]] | None = None  # of what was begun
        self._captured: dict[int, CapturedUnit] = {}  # for the threads that asked for them
        self._progress: ProgressFile | None = None
        logging.basicConfig(format="%(message)s")  # Ray shows it at the driver
        logging.getLogger("spec_data").setLevel(logging.INFO)

    def _load(self) -> UnitCapture:
        torch.set_num_threads(self.threads)
        setup, plan = set_up(self.target, (), self.options), load_plan(self.out / WORK)
        here = settings(setup, []) | {"corpus": plan.settings["corpus"]}
        if changed := differences(here, plan.settings):
            raise ConfigError(
                f"the machine of replica {self.name} differs from that of the driver:\n  "
                + "\n  ".join(changed)
            )
        self._progress = ProgressFile(self.out, plan, self.name, "0/1")  # the driver's lock
        return UnitCapture(setup, plan, load_target(setup, plan), self.out)

    def capture(self, unit: int) -> int:
        """Capture a unit, write it and return it.

        Another error than one of this project ends the process, which an error of CUDA leaves
        unusable: Ray then starts another one and repeats the unit.

        Raises:
            SpecDataError: a failed proof, broken states, a full disk or a full device.
        """
        self._waiting.append(unit)
        try:
            with explained_failures(self.out):
                with self._capturing:
                    self._loaded = self._loaded or self._load()
                    captured = self._capture(unit, self._loaded)
                    self._writing.acquire()
                try:
                    finish_unit(self.out, unit, captured, self._loaded.settings.columns)
                    assert self._progress is not None
                    self._progress.finish(unit)
                finally:
                    self._writing.release()
        except SpecDataError as error:
            self.close(error)
            raise
        except Exception as error:
            while self._captured:  # other threads write what was captured before all end
                time.sleep(0.01)
            with self._capturing, self._writing:
                if self._progress is not None:
                    self._progress.begin(unit)  # the driver names the unit in work
                self.close(RunError(f"{type(error).__name__}: {error}"))
                os._exit(1)
        return unit

    def _capture(self, unit: int, capture: UnitCapture) -> CapturedUnit:
        """Go on with the units that were begun, and those that wait, until `unit` is captured."""
        assert self._progress is not None
        while unit not in self._captured:
            if self._stream is None:
                self._stream = capture.capture(self._begin(), self._progress.add)
            try:
                done = next(self._stream, None)
            except Exception:
                others = [other for other in self._begun if other != unit]
                self._stream, self._begun = None, []
                with suppress(ValueError):  # nobody would take it once this thread has failed
                    self._waiting.remove(unit)
                if not others:
                    raise
                # whose error it was shows when each is captured without the others
                self._waiting.extendleft(reversed(others))
                return next(capture.capture([unit], self._progress.add))[1]
            if done is None:
                self._stream = None
            else:
                self._begun.remove(done[0])
                self._captured[done[0]] = done[1]
        return self._captured.pop(unit)

    def _begin(self) -> Iterator[int]:
        assert self._progress is not None
        while self._waiting:
            unit = self._waiting.popleft()
            self._begun.append(unit)
            self._progress.begin(unit)
            yield unit

    def close(self, error: Exception | None = None) -> None:
        """Say in the file of this process that it ends, and why."""
        if self._progress is not None:
            self._progress.end(error)
