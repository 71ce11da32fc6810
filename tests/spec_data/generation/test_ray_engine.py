"""--engine ray on a cluster of this machine: lost and failing replicas; the bytes stay the same."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from spec_data.generation import ray_engine
from spec_data.generation import status as metrics_file
from spec_data.generation.ray_replica import RayReplica
from spec_data.generation.worker_locks import worker_lock
from spec_data.options.generate_options import GenerateConfig
from spec_data.shards.errors import ConfigError, RunError
from tests.spec_data.runs import digests, options, run, save_target, write_corpus

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"
)
SMALL = {"max_shard_size": "40KB", "batch_tokens": 64}
ON_RAY = SMALL | {"engine": "ray"}


class Killed(RayReplica):
    """The first replica that writes unit 3 dies by SIGKILL when half of the shard is written."""

    def capture(self, unit):
        marker = Path(self.config.out).parent / "killed"
        if unit == 3 and not marker.exists():
            from spec_data.generation import sealing as unit_records

            def half(path, *_):
                path.with_name(f".{path.name}.012345678901.tmp").write_bytes(b"half of a shard")
                marker.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)

            unit_records.write_shard = half
        return super().capture(unit)


class Failing(RayReplica):
    """Unit 2 always raises an error that nobody expects."""

    def capture(self, unit):
        if unit == 2:
            with (Path(self.config.out).parent / "tries").open("a") as file:
                file.write("x")
            raise ValueError("unit 2 is cursed")
        return super().capture(unit)


class Full(RayReplica):
    """The disk is full when unit 1 is written."""

    def capture(self, unit):
        from spec_data.generation import sealing as unit_records

        def full(path, *_):
            with (Path(self.config.out).parent / "tries").open("a") as file:
                file.write(f"{path.name} ")
            raise OSError(28, "No space left on device", str(path))

        if unit == 1:
            unit_records.write_shard = full
        return super().capture(unit)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    return save_target(folder / "target"), write_corpus(folder / "chats.jsonl", 30)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "data"
    assert len(run(*source, out, **SMALL).raw["shards"]) > 6
    return digests(out)


@pytest.fixture(scope="module")
def cluster():
    """One local Ray for all tests; each command finds it running, and leaves it."""
    config = GenerateConfig(target="t", corpus=("c",), out="o", engine="ray", replicas=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # 15: other tests would starve its workers
        handler = signal.getsignal(signal.SIGTERM)
        with ray_engine.connected(config):
            yield
        assert signal.getsignal(signal.SIGTERM) == handler  # Ray replaces it


@needs_ray
def test_a_killed_replica_changes_no_byte(cluster, source, whole, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(metrics_file, "METRICS_SECONDS", 0.05)
    monkeypatch.setattr(ray_engine, "RayReplica", Killed)
    out = tmp_path / "data"
    manifest = run(*source, out, replicas=2, metrics=str(tmp_path / "m.jsonl"), **ON_RAY)
    assert manifest is not None and digests(out) == whole
    dead = (tmp_path / "killed").read_text()
    assert "unit 3 was lost with replica ray-" in caplog.text
    assert "it is captured again" in caplog.text
    assert caplog.text.count("packing: ") == 1  # what both replicas log is said once
    assert f"process {dead}) was killed or lost" in (tmp_path / "m.jsonl").read_text()


@needs_ray
def test_a_unit_that_always_fails_ends_the_run_and_costs_no_other(
    cluster, source, whole, tmp_path, monkeypatch
):
    out = tmp_path / "data"
    with worker_lock(out, "0/1", 9), pytest.raises(RunError, match="running worker 0/1 here"):
        run(*source, out, replicas=1, **ON_RAY)  # a second driver
    monkeypatch.setattr(ray_engine, "RayReplica", Failing)
    with pytest.raises(RunError, match=r"unit 2 failed \(ValueError: unit 2 is cursed\), 2 times"):
        run(*source, out, replicas=1, retries=1, **ON_RAY)
    assert (tmp_path / "tries").read_text() == "xx"
    kept = {p.name: p.read_bytes() for p in out.glob("shards/unit-*")}
    assert {"unit-00000.arrow", "unit-00001.arrow"} <= set(kept)
    assert "unit-00002.arrow" not in kept
    run(*source, out, **SMALL)  # without Ray: the same directory
    assert digests(out) == whole
    assert all((out / "shards" / name).read_bytes() == data for name, data in kept.items())


@needs_ray
def test_a_full_disk_is_not_tried_again(cluster, source, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "RayReplica", Full)
    with pytest.raises(RunError, match="the disk is full"):
        run(*source, tmp_path / "data", replicas=1, **ON_RAY)
    assert (tmp_path / "tries").read_text().split().count("unit-00001.arrow") == 1


@needs_ray
def test_what_the_cluster_does_not_have_is_refused(cluster, source, tmp_path):
    with pytest.raises(ConfigError, match="the cluster has 0 GPUs; give 0 to run on CPUs"):
        run(*source, tmp_path / "data", gpus_per_replica=1, **ON_RAY)


def test_options_without_ray_are_refused(source, tmp_path, monkeypatch):
    given = options(*source, tmp_path / "data")
    for change, message in [
        ({"replicas": 2}, "go with --engine ray"),
        ({"engine": "ray", "workers": "0/2"}, "give --replicas N instead"),
        ({"engine": "ray", "retries": -1}, "--retries -1"),
        ({"engine": "ray", "gpus_per_replica": -1}, "--gpus-per-replica -1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            GenerateConfig(**given | change)
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'ray\[default\]'"):
        run(*source, tmp_path / "data", engine="ray")
