"""fit and eval read remote datasets: the same bits as from a local directory."""

import json
import threading
from pathlib import Path

import pytest

from spec_data.shards.errors import ConfigError
from spec_data.shards.storage import Storage
from spec_train.data.mixture import open_documents
from spec_train.data.stream import fetched_ahead
from spec_train.evaluation.evaluate import Documents, measure
from spec_train.evaluation.run_record import read_run
from spec_train.options.data_option import parse_sources
from tests.remote_tools import forget_memory, put_in_memory, web_server
from tests.spec_train.training.tools import change, config, data, metrics, run

__all__ = ["config", "data"]
URL = "memory://bucket/set"


@pytest.fixture(scope="module")
def remote(data, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_DATA_CACHE", str(tmp_path_factory.mktemp("cache")))
        put_in_memory(data, URL)
        yield URL
    forget_memory()


def test_a_run_on_remote_data_has_the_same_bits(remote, data, config, tmp_path):
    config = change(config, steps=4, eval_every=4, save_every=4)
    run(config)
    there = change(config, data=remote, out=str(tmp_path / "there"))
    run(there)
    assert metrics(config.out) == metrics(there.out)
    weights = [tmp_path / name / "last" / "model.safetensors" for name in ("run", "there")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert json.loads((tmp_path / "there" / "fit.json").read_text())["data"] == remote
    runs = [read_run(Path(out), Path(out) / "best") for out in (config.out, there.out)]
    assert runs[0].identity and runs[0].identity == runs[1].identity
    figures = [
        measure(there.out, Documents(data=place), None, draft_tokens=[0], device="cpu", limit=6)[
            "data"
        ]
        for place in (str(data), remote)
    ]
    assert figures[0] | {"path": ""} == figures[1] | {"path": ""}
    assert figures[1]["path"] == remote


def test_a_run_on_a_web_server_has_the_same_bits(data, config, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    config = change(config, steps=2, eval_every=2, save_every=2)
    run(config)
    with web_server(data.parent) as url:
        there = change(config, data=f"{url}/{data.name}", out=str(tmp_path / "there"))
        run(there)
    assert metrics(config.out) == metrics(there.out)
    weights = [tmp_path / name / "last" / "model.safetensors" for name in ("run", "there")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("missing", [1, 0])
def test_a_cache_that_is_smaller_than_a_window_is_said(
    remote, data, config, tmp_path, monkeypatch, caplog, missing
):
    """The run is the same; it only downloads shards again."""
    total = open_documents(parse_sources(str(data))).manifest.totals.bytes
    monkeypatch.setenv("SPEC_DATA_REMOTE_SIZE", str(total - missing))
    run(change(config, data=remote, steps=2, eval_every=2, save_every=2))
    assert ("warning[cache]: a window of" in caplog.text) == bool(missing)


def test_shards_of_coming_steps_are_asked_for(remote, monkeypatch):
    dataset = open_documents(parse_sources(remote))
    cache, asked = dataset.mirror, []
    monkeypatch.setattr(cache, "fetch_ahead", lambda record: (asked.append(record.file), 10)[1])
    monkeypatch.setattr(cache, "limit", 4 * 39)
    steps = fetched_ahead(dataset, range(60), lambda step: [step])
    assert next(steps) == 0 and len(asked) == 4 and not list(dataset._shards)
    assert next(steps) == 1 and len(asked) == 5
    stopped = []
    monkeypatch.setattr(cache, "stop", lambda: stopped.append(1))
    steps.close()
    assert stopped
    assert list(fetched_ahead(dataset, [3, 1], lambda step: [step])) == [3, 1]


def test_a_failure_ahead_is_met_by_the_reader(remote, monkeypatch, tmp_path):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path))
    dataset = open_documents(parse_sources(remote))
    whole, failed = Storage.download, threading.Event()

    def fails(self, name, *more):
        if not failed.is_set():
            failed.set()
            raise OSError("a request")
        whole(self, name, *more)

    monkeypatch.setattr(Storage, "download", fails)
    for step in fetched_ahead(dataset, [1, 2], lambda step: [step]):
        assert failed.wait(60)  # nothing was read here yet
        assert dataset[step]["doc_id"]


def test_following_needs_a_local_directory(remote, config):
    with pytest.raises(ConfigError, match="can be trained on once it is sealed"):
        run(change(config, data=remote, follow=True))
