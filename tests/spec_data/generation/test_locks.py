"""Locks of generate: one process per worker, and no plan is replaced under a running worker."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from filelock import FileLock
from transformers import PreTrainedModel

from spec_data.generation import setup
from spec_data.generation.setup import find_plan
from spec_data.generation.workers import running_workers, worker_lock
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.reader import HiddenStatesDataset
from tests.spec_data.runs import inputs_of, options, run

HOLDER = """
import os, sys, time
from pathlib import Path
from spec_data.generation.workers import worker_lock
with worker_lock(Path(sys.argv[1]), sys.argv[2]):
    if child := os.fork():
        print(child, flush=True)
    time.sleep(600)
"""


def test_a_worker_lock_holds_between_processes_and_ends_with_a_kill(target, corpus, tmp_path):
    """Also where a process that the worker forked lives on, such as one that renders."""
    out = tmp_path / "data"
    find_plan(*inputs_of(**options(target, corpus, out)), out)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out), "1/2"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        with (
            pytest.raises(RunError, match="another process is running worker 1/2"),
            worker_lock(out, "1/2"),
        ):
            pass
        with pytest.raises(ConfigError, match="other settings"):
            find_plan(*inputs_of(**options(target, corpus, out, layers="1,3")), out)
    finally:
        process.kill()  # SIGKILL: the process has no chance to release anything
        process.wait()
    try:
        find_plan(*inputs_of(**options(target, corpus, out, layers="1,3")), out)
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_workers_that_start_together_replace_a_plan_that_nothing_was_captured_with(
    target, corpus, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    # two threads that load models may leave transformers without it for good
    monkeypatch.setattr(PreTrainedModel, "tie_weights", PreTrainedModel.tie_weights)
    out, given = tmp_path / "data", {"layers": "1,3", "max_shard_size": "20KB"}
    find_plan(*inputs_of(**options(target, corpus, out)), out)
    ended, original = [], setup.make_plan
    other = threading.Thread(
        target=lambda: ended.append(run(target, corpus, out, workers="1/2", **given))
    )

    def together(*args):
        other.start()
        while "waiting for it" not in caplog.text:
            time.sleep(0.01)
        return original(*args)

    monkeypatch.setattr(setup, "make_plan", together)
    ended.append(run(target, corpus, out, workers="0/2", **given))
    other.join()
    assert len(ended) == 2 and any(ended) and HiddenStatesDataset(out).manifest.layers == (1, 3)


def test_running_workers_with_another_n_are_refused(target, corpus, tmp_path):
    """0/2 and 1/3 share units 4, 10, ..."""
    out = tmp_path / "data"
    (out / ".generate").mkdir(parents=True)
    with worker_lock(out, "0/2"):
        assert running_workers(out / ".generate") == ["0/2"]
        with pytest.raises(RunError, match=r"worker 0/2 here.*same n"), worker_lock(out, "1/3"):
            pass
        with worker_lock(out, "1/2"):
            pass
        with pytest.raises(RunError, match="worker 0/2 here"):
            run(target, corpus, out, workers="0/1")
    with worker_lock(out, "1/3"):  # one after the other: another n is harmless
        pass


def test_a_plan_that_another_command_replaced_meanwhile_is_not_captured(
    target, corpus, tmp_path, monkeypatch
):
    out = tmp_path / "data"

    def replaced(directory, worker):
        record = json.loads((directory / ".generate" / "plan.json").read_text())
        record["settings"]["layers"] = [1, 3]
        (directory / ".generate" / "plan.json").write_text(json.dumps(record))
        return worker_lock(directory, worker)

    monkeypatch.setattr("spec_data.generation.run.worker_lock", replaced)
    with pytest.raises(RunError, match="another command is making a plan"):
        run(target, corpus, out)
    assert not (out / "shards").exists()


def test_a_lock_that_is_only_looked_at_is_no_running_worker(tmp_path):
    """Workers that start together look at the lock files of an earlier n at the same moment."""
    (tmp_path / ".generate").mkdir()
    with worker_lock(tmp_path, "0/1"):
        pass
    looked_at = FileLock(tmp_path / ".generate" / "worker-0-of-1.lock", thread_local=False)
    looked_at.acquire()
    release = threading.Timer(0.2, looked_at.release)
    release.start()
    with worker_lock(tmp_path, "0/2"):
        assert not looked_at.is_locked
    release.join()
