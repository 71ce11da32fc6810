"""The worker that finishes last seals the directory: at once, once, and under no running worker."""

import os
import threading
from pathlib import Path

import pytest

from spec_data.generation.units import finalize
from spec_data.generation.workers import worker_lock
from spec_data.shards.errors import DatasetError
from tests.spec_data.runs import digests, run


@pytest.fixture(scope="module")
def whole(reference):
    return digests(reference)


def captured(source, out):
    """Make a directory in which every unit is finished and nothing is sealed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_data.generation.output.finalize", lambda *_, **__: None)
        assert run(*source, out) is None
    assert not (out / "manifest.json").exists()
    return out


def test_a_lock_file_that_a_reader_makes_again_does_not_stop_sealing(
    source, whole, tmp_path, monkeypatch
):
    """`status` opens the locks of workers; the directory is then not empty when it is removed."""
    rmdir, left = os.rmdir, [2]

    def meanwhile(path, **options):
        if Path(path).name == ".generate" and left[0]:
            left[0] -= 1
            (Path(path) / "worker-0-of-1.lock").touch()
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", meanwhile)
    run(*source, tmp_path / "data")
    assert not left[0] and digests(tmp_path / "data") == whole


def test_two_that_finish_together_seal_once(source, whole, tmp_path):
    out = captured(source, tmp_path / "data")
    start, found = threading.Barrier(2), []

    def finish():
        start.wait()
        found.append(finalize(out, set(), others=True))

    threads = [threading.Thread(target=finish) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [manifest.fingerprint for manifest in found] == [found[0].fingerprint] * 2
    assert digests(out) == whole  # and no .generate, which the second lock would make again


def test_a_running_worker_seals_later(source, whole, tmp_path, caplog):
    caplog.set_level("INFO")
    out = captured(source, tmp_path / "data")
    with worker_lock(out, "1/2"):
        assert run(*source, out, workers="0/2") is None
    assert "units are left for other workers (running: 1/2)" in caplog.text
    assert run(*source, out, workers="1/2") is not None
    assert digests(out) == whole


@pytest.mark.parametrize("error", [DatasetError("not empty"), FileNotFoundError("plan.json")])
def test_a_directory_that_is_sealed_under_a_starting_worker_is_complete(
    source, whole, tmp_path, monkeypatch, error
):
    """The plan disappears between two looks of a worker that has nothing to do."""
    out = captured(source, tmp_path / "data")

    def gone(*_):
        assert finalize(out, set()) is not None
        raise error

    monkeypatch.setattr("spec_data.generation.output.find_plan", gone)
    assert run(*source, out, workers="0/2") is not None
    assert digests(out) == whole
