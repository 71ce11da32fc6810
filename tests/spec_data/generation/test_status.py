"""`spec-data status`: every figure is counted again from the files, by hand."""

import errno
import json
import signal
import time
from unittest.mock import Mock

import pytest

import spec_data
from spec_data.cli import main
from spec_data.generation import status
from spec_data.generation.plan import load_plan
from spec_data.generation.status import WorkerProgress, read_progress
from spec_data.shards.errors import MissingError, RunError
from tests.spec_data.runs import digests, fork_cli, options, run, write_corpus

SMALL = {"max_shard_size": "30KB", "batch_tokens": 64}


@pytest.fixture(scope="module")
def source(target, tmp_path_factory):
    return target, write_corpus(tmp_path_factory.mktemp("source") / "chats.jsonl", 40)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "data"
    run(*source, out, **SMALL)
    return out


def test_a_worker_is_seen_and_what_it_leaves_is_counted(
    source, whole, tmp_path, capsys, monkeypatch
):
    """One worker is done, one is in its third unit; then it is killed, and a third one fails."""
    out = tmp_path / "data"
    run(*source, out, workers="0/3", **SMALL)
    process = fork_cli(options(*source, out, workers="1/3", **SMALL), held=7)
    try:
        while not any(f.unit == 7 and f.units_done == 2 for f in read_progress(out)):
            assert process.poll() is None
            time.sleep(0.01)
        plan = load_plan(out / ".generate")
        done = [int(p.stem[5:]) for p in out.glob(".generate/unit-*.json")]
        found = spec_data.status(out)
        assert (found.sealed, found.units, found.units_done) == (False, len(plan.units), len(done))
        assert (found.tokens, found.tokens_done) == (plan.tokens, plan.unit_set_tokens(done))
        assert found.bytes == sum(p.stat().st_size for p in out.glob("shards/*.arrow"))
        first, second = found.workers
        assert (first.worker, first.state, first.units_done) == ("0/3", "done", 5)
        assert (second.worker, second.state, second.unit) == ("1/3", "capturing", 7)
        assert found.tokens_per_second == second.rate > 0
        left = (plan.tokens - found.tokens_done) / found.tokens_per_second
        assert found.eta_seconds == pytest.approx(left)
        assert main(["status", str(out)]) == 0 and "unit 7" in capsys.readouterr().out
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert [w.state for w in spec_data.status(out).workers] == ["done", "capturing"]
    monkeypatch.setattr(status, "SILENCE", 0.0)  # later
    found = spec_data.status(out)
    assert [w.state for w in found.workers] == ["done", "lost"] and found.eta_seconds is None
    for fault, state, error in (
        (OSError(28, "No space left on device"), "failed", "No space left"),
        (KeyboardInterrupt(), "stopped", ""),
    ):
        with monkeypatch.context() as patch, pytest.raises((RunError, KeyboardInterrupt)):
            patch.setattr("spec_data.generation.units.write_shard", Mock(side_effect=fault))
            run(*source, out, workers="2/3", **SMALL)
        ended = spec_data.status(out).workers[2]
        assert ended.state == state and error in ended.error and error in str(ended)
    run(*source, out, **SMALL)
    assert digests(out) == digests(whole)  # no trace of all this


def test_a_sealed_dataset_a_plan_and_nothing(source, whole, tmp_path, capsys):
    found = spec_data.status(whole)
    totals = json.loads((whole / "manifest.json").read_text())["totals"]
    assert found.sealed and found.tokens_done == found.tokens == totals["tokens"]
    assert main(["status", str(whole), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sealed"] is True
    with pytest.raises(MissingError, match="no such directory"):
        spec_data.status(tmp_path / "no")
    (tmp_path / "begun" / ".generate").mkdir(parents=True)
    assert "no plan yet" in str(spec_data.status(tmp_path / "begun"))


def test_a_user_who_may_only_read_sees_it_too(source, tmp_path, capsys, monkeypatch):
    """Tests may run as root, who may everything: the lock itself refuses."""
    out = tmp_path / "data"
    run(*source, out, workers="0/2", **SMALL)
    (out / ".generate" / "worker-1-of-2.lock").touch()
    refuse = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    assert main(["status", str(out)]) == 0 and "0/2" in capsys.readouterr().out
    assert refuse.called


def test_a_worker_that_failed_and_is_closed_has_failed(source, tmp_path):
    out = tmp_path / "data"
    run(*source, out, workers="0/2", **SMALL)
    file = status.ProgressFile(out, load_plan(out / ".generate"), "ray-0", "0/1")
    file.begin(0)
    file.end(ValueError("cursed"))
    file.end()
    (found,) = (p for p in read_progress(out) if p.worker == "ray-0")
    assert (found.state, found.error) == ("failed", "cursed")


def test_facts_that_cannot_be_written_or_read_stop_nothing(source, whole, tmp_path):
    out = tmp_path / "data"
    (out / ".generate").mkdir(parents=True)
    (out / ".generate" / "workers").write_text("a file where the folder should be")
    run(*source, out, **SMALL)
    assert digests(out) == digests(whole)
    folder = tmp_path / "odd" / ".generate" / "workers"
    folder.mkdir(parents=True)
    for number, text in enumerate(["{", "[]", '{"worker": "0/1"}', '{"worker": "a", "lock": "b"}']):
        (folder / f"{number}.json").write_text(text)
    assert read_progress(tmp_path / "odd") == [WorkerProgress(worker="a", lock="b")]
