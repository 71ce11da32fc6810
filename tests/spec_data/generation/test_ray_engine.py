"""--engine ray on a cluster of this machine: lost and failing replicas; the bytes stay the same."""

import importlib.util
import os
import signal
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from spec_data.generation import capture, ray_engine
from spec_data.generation.options import CaptureOptions
from spec_data.generation.ray_engine import RayReplica
from spec_data.generation.status import WorkerProgress, read_progress
from spec_data.generation.workers import worker_lock
from spec_data.shards.errors import ConfigError, RunError
from tests.spec_data.runs import digests, options, prepared, run

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"
)
SMALL = {"max_shard_size": "40KB", "batch_tokens": 64}
ON_RAY = SMALL | {"engine": "ray"}


class Killed(RayReplica):
    """The first replica that writes unit 3 dies by SIGKILL when half of the shard is written."""

    def capture(self, unit):
        marker = self.out.parent / "killed"
        if unit == 3 and not marker.exists():
            from spec_data.generation import units as unit_records

            def half(path, *_):
                path.with_name(f".{path.name}.012345678901.tmp").write_bytes(b"half of a shard")
                marker.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)

            unit_records.write_shard = half
        return super().capture(unit)


class Failing(RayReplica):
    """Unit 2 always raises an error that nobody expects."""

    def capture(self, unit):
        from spec_data.generation import halving

        def failing(target, plan, units, *args):
            def cursed():
                for unit in units:
                    if unit == 2:
                        (self.out.parent / f"try-{os.getpid()}").touch()
                        raise ValueError("unit 2 is cursed")
                    yield unit

            return capture.capture_units(target, plan, cursed(), *args)

        halving.capture_units = failing
        return super().capture(unit)


class Full(RayReplica):
    """The disk is full from when unit 1 is begun."""

    def capture(self, unit):
        from spec_data.generation import units as unit_records

        def full(path, *_):
            with (self.out.parent / "tries").open("a") as file:
                file.write(f"{path.name} ")
            raise OSError(28, "No space left on device", str(path))

        if unit == 1:
            unit_records.write_shard = full
        return super().capture(unit)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "data"
    assert len(run(*source, out, **SMALL).shards) > 6
    return digests(out)


@pytest.fixture(scope="module")
def cluster():
    """One local Ray for all tests; each command finds it running, and leaves it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # 15: other tests would starve its workers
        handler = signal.getsignal(signal.SIGTERM)
        with ray_engine.connected("", 2, CaptureOptions()):
            yield
        assert signal.getsignal(signal.SIGTERM) == handler  # Ray replaces it


@needs_ray
@pytest.mark.long
def test_a_killed_replica_changes_no_byte(cluster, source, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "RayReplica", Killed)
    out = tmp_path / "data"
    manifest = run(*source, out, replicas=2, **ON_RAY)
    assert manifest is not None and digests(out) == whole
    assert (tmp_path / "killed").is_file()


@needs_ray
@pytest.mark.long
def test_a_unit_that_always_fails_ends_the_run_and_costs_no_other(
    cluster, source, whole, tmp_path, monkeypatch
):
    out = tmp_path / "data"
    with worker_lock(out, "0/1"), pytest.raises(RunError, match="running worker 0/1 here"):
        run(*source, out, replicas=1, **ON_RAY)  # a second driver
    monkeypatch.setattr(ray_engine, "RayReplica", Failing)
    monkeypatch.setattr(ray_engine, "RETRIES", 1)
    yesterday = out / ".generate" / "workers"
    yesterday.mkdir(parents=True)
    earlier = WorkerProgress(worker="ray-9", lock="0/1", state="failed", error="yesterday")
    (yesterday / "ray-9-x-1.json").write_bytes(msgspec.json.encode(earlier))
    with pytest.raises(RunError, match=r"unit 2: ValueError: unit 2 is cursed"):
        run(*source, out, replicas=1, **ON_RAY)
    assert len(list(tmp_path.glob("try-*"))) == 2
    # a process that was started for other units may come after them
    assert any("ValueError" in process.error for process in read_progress(out))
    kept = {p.name: p.read_bytes() for p in out.glob("shards/unit-*")}
    assert {"unit-00000.arrow", "unit-00001.arrow"} <= set(kept)
    assert "unit-00002.arrow" not in kept
    run(*source, out, **SMALL)  # without Ray: the same directory
    assert digests(out) == whole
    assert all((out / "shards" / name).read_bytes() == data for name, data in kept.items())


def test_a_process_ends_after_the_units_that_were_captured_with_one_that_fails(
    tmp_path, monkeypatch
):
    """The thread of unit 2 captures unit 1 first, for a thread that takes it later."""
    replica = RayReplica("target", CaptureOptions(), str(tmp_path), 0, 1)
    said, written, ends = [], [], []
    replica._loaded = SimpleNamespace(settings=SimpleNamespace(columns=()))
    replica._progress = SimpleNamespace(
        **dict.fromkeys(("begin", "finish", "end"), said.append), add=None
    )
    replica._waiting.append(1)

    def units(units, on_tokens):
        for unit in units:
            if unit == 2:
                raise ValueError("unit 2 is cursed")
            yield unit, f"unit {unit}"

    def finish(out, unit, captured, columns):
        time.sleep(0.05)
        written.append(captured)

    replica._loaded.capture = units
    monkeypatch.setattr(ray_engine, "finish_unit", finish)
    monkeypatch.setattr(os, "_exit", lambda code: ends.append(list(written)))
    failing = threading.Thread(target=replica.capture, args=[2])
    failing.start()
    while not replica._captured and not ends:
        time.sleep(0.001)
    assert replica.capture(1) == 1
    failing.join()
    assert ends == [["unit 1"]]
    assert said[-3:-1] == [1, 2] and "unit 2 is cursed" in str(said[-1])  # the driver reads the end


def test_a_unit_that_fails_before_it_is_begun_is_left_to_ray(tmp_path, monkeypatch):
    """Another thread that captured it would wait for somebody to take it."""
    replica = RayReplica("target", CaptureOptions(), str(tmp_path), 0, 1)
    replica._loaded = SimpleNamespace(settings=SimpleNamespace(columns=()))
    replica._progress = SimpleNamespace(
        **dict.fromkeys(("begin", "finish", "end"), lambda _: None), add=None
    )
    faults = [RunError("the device is full")]

    def units(units, on_tokens):
        if faults:
            raise faults.pop()
        yield from ((unit, f"unit {unit}") for unit in units)

    replica._loaded.capture = units
    monkeypatch.setattr(ray_engine, "finish_unit", lambda *_: None)
    with pytest.raises(RunError, match="device is full"):
        replica.capture(2)
    assert [replica.capture(unit) for unit in (1, 3)] == [1, 3]
    assert not replica._captured and not replica._waiting


@needs_ray
@pytest.mark.long
def test_a_full_disk_is_not_tried_again(cluster, source, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "RayReplica", Full)
    with pytest.raises(RunError, match="the disk is full"):
        run(*source, tmp_path / "data", replicas=1, **ON_RAY)
    tries = (tmp_path / "tries").read_text().split()
    assert tries and len(tries) == len(set(tries))


class Cluster:
    """What Ray tells about a cluster of two machines with eight GPUs, of which six are free."""

    nodes = staticmethod(lambda: [{"Alive": True}, {"Alive": True}, {"Alive": False}])
    cluster_resources = staticmethod(lambda: {"GPU": 8.0})
    available_resources = staticmethod(lambda: {"GPU": 6.0})


@pytest.mark.parametrize(
    ("given", "replicas", "gpus", "device"),
    [
        ({}, 6, 1, "cuda"),
        ({"replicas": 3}, 3, 1, "cuda"),
        ({"device_map": "auto"}, 2, 4, "auto"),
        ({"device_map": "auto", "replicas": 4}, 4, 2, "auto"),
        ({"device": "cpu"}, 2, 0, "cpu"),
    ],
)
def test_replicas_take_the_gpus_of_the_cluster(given, replicas, gpus, device):
    given = dict(given)
    count = given.pop("replicas", 0)
    placed = ray_engine.place_replicas(Cluster, "t", count, CaptureOptions(**given))
    assert placed == ray_engine.Replicas("t", replicas, gpus, device)


def test_what_ray_cannot_do_is_refused(source, tmp_path, monkeypatch):
    given = options(*source, tmp_path / "data")
    for change in ({"replicas": 2}, {"engine": "ray", "workers": "0/2"}):
        with pytest.raises(ConfigError, match="--engine ray"):
            prepared(**given | change)
    with pytest.raises(ConfigError, match="the cluster has 8 GPUs"):
        ray_engine.place_replicas(Cluster, "t", 9, CaptureOptions())
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'ray\[default\]'"):
        run(*source, tmp_path / "data", engine="ray")
