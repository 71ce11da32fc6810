"""fit, eval and export read remote datasets: the same bits as from a local directory."""

import json
import logging
import threading
from pathlib import Path

import pytest

from spec_data.shards.errors import ConfigError
from spec_data.shards.storage import Storage
from spec_train.cli import main
from spec_train.data.fetch_ahead import FetchAhead, is_remote
from spec_train.data.mixture import open_documents
from spec_train.evaluation.report import measure
from spec_train.evaluation.run_record import read_run
from spec_train.options.command_options import EvalConfig
from spec_train.options.data_option import parse_source, parse_sources
from spec_train.training.setup import log_bandwidth
from tests.remote_tools import forget_memory, put_in_memory
from tests.spec_train.training.tools import change, config, data, metrics, run

__all__ = ["config", "data"]
URL = "memory://bucket/set"


@pytest.fixture(scope="module")
def remote(data, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_DATA_CACHE", str(tmp_path_factory.mktemp("cache")))
        for module in ("block_cache", "ranged_shard", "mirror"):
            patch.setattr(f"spec_data.shards.{module}.BLOCK", 4096)
        put_in_memory(data, URL)
        yield URL
    forget_memory()


def test_a_run_on_remote_data_has_the_same_bits(remote, data, config, tmp_path, capsys):
    config = change(config, steps=4, eval_every=4, save_every=4)
    run(config)
    there = change(config, data=remote, out=str(tmp_path / "there"))
    run(there)
    assert metrics(config.out) == metrics(there.out)
    weights = [tmp_path / name / "last" / "model.safetensors" for name in ("run", "there")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert json.loads((tmp_path / "there" / "fit.json").read_text())["data"] == remote
    runs = [read_run(Path(out), Path(out) / "best") for out in (config.out, there.out)]
    assert runs[0]["identity"] and runs[0]["identity"] == runs[1]["identity"]
    figures = [
        measure(EvalConfig(draft=there.out, data=place, device="cpu", limit=6))["data"]
        for place in (str(data), remote)
    ]
    assert figures[0] | {"path": ""} == figures[1] | {"path": ""}
    assert figures[1]["path"] == remote
    words = ["--draft", there.out, "--format", "vllm", "--out", str(tmp_path / "smaller")]
    assert main(["export", *words, "--data", remote, "--draft-vocab-size", "20"]) == 0


def test_local_and_remote_datasets_are_mixed(remote, data):
    both = open_documents(parse_sources([str(data), f"{remote}:2"][1:]))
    assert len(both) == 60 and str(parse_source(f"{remote}:2")) == f"{remote}:2"
    assert is_remote(both) and not is_remote(open_documents(parse_sources(str(data))))
    assert both.shard_of(0) == f"{remote}/shards/unit-00000.arrow"


def test_requests_go_ahead_of_the_reader(remote, monkeypatch):
    dataset = open_documents(parse_sources(remote))
    asked, enough = [], threading.Event()
    monkeypatch.setattr(
        type(dataset),
        "fetch_ahead",
        lambda self, row, columns: (asked.append(row), row == 9 and enough.set()),
    )
    ahead = FetchAhead(dataset, ["input_ids"])
    ahead._limit = int(dataset.lengths[:9].sum()) * ahead._each
    steps = ahead.steps(range(60), lambda step: [step])
    assert next(steps) == 0 and enough.wait(10)
    assert sorted(asked) == list(range(10))  # one more than the limit
    steps.close()
    assert list(FetchAhead(dataset, ["input_ids"]).steps([3, 1], lambda step: [step])) == [3, 1]


def test_a_failure_ahead_is_met_by_the_reader_alone(remote, monkeypatch):
    dataset = open_documents(parse_sources(remote))

    def fails(self, row, columns):
        raise OSError("a request")

    monkeypatch.setattr(type(dataset), "fetch_ahead", fails)
    assert list(FetchAhead(dataset, ["input_ids"]).steps([1, 2], lambda step: [step])) == [1, 2]


def test_a_run_that_cannot_read_ends_with_an_error(remote, config, monkeypatch):
    whole = Storage.read_range

    def refused(self, name, start, stop):
        if "unit-00003" in name:
            raise ConfigError("access refused")
        return whole(self, name, start, stop)

    monkeypatch.setattr(Storage, "read_range", refused)
    put_in_memory(parse_source(config.data).path, "memory://bucket/other")
    with pytest.raises(ConfigError, match="access refused"):
        run(change(config, data="memory://bucket/other", steps=40))


def test_following_needs_a_local_directory(remote, config):
    with pytest.raises(ConfigError, match="can be trained on once it is sealed"):
        run(change(config, data=remote, follow=True))


@pytest.mark.parametrize("words", ["fit eagle3 --out o --data", "eval --draft d --data"])
def test_unknown_storage_is_refused_by_name(words, capsys):
    assert main([*words.split(), "ftp://host/data"]) == 2
    assert "--data ftp://host/data: ftp:// is not supported" in capsys.readouterr().err


def test_the_bandwidth_is_said_where_a_run_waits(data, caplog):
    manifest = open_documents(parse_sources(str(data))).manifest
    columns = ["input_ids", "hidden.L1"]  # 4 bytes, and 32 values in bf16
    lines = [{"data_wait": 0.9, "tokens_per_second": 1.0}]  # the first waits for the first data
    fast = {"data_wait": 0.01, "tokens_per_second": 1e6}
    with caplog.at_level(logging.INFO):
        log_bandwidth([*lines, fast], manifest, columns)
        assert not caplog.messages
        slow = {"data_wait": 0.5, "tokens_per_second": 1e6}
        log_bandwidth([*lines, slow, slow], manifest, columns)
    (said,) = caplog.messages
    assert "waited for 50.0 % of the time" in said
    assert "136.0 MB/s: 68 bytes per token at 2,000,000 tokens/s" in said
