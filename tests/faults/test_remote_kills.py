"""SIGKILL in the middle of an upload to an S3 server; another machine resumes, byte for byte."""

import hashlib
import http.client
import threading

import pytest

from spec_data.shards.storage import Storage
from tests.object_store import object_store
from tests.spec_data.runs import digests, options, run, save_target, start_cli, write_corpus

URL = "s3://bucket/made"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    return save_target(folder / "target"), write_corpus(folder / "chats.jsonl", 24)


@pytest.fixture
def faults():
    with object_store() as (address, faults):
        connection = http.client.HTTPConnection(address.removeprefix("http://"))
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
        connection.close()
        yield faults


@pytest.mark.long
def test_killed_in_an_upload_and_resumed_elsewhere(source, faults, tmp_path, monkeypatch):
    """A process of its own is killed: a fork would have the parent's S3 client without its thread.

    Kills between any two writes are in tests/spec_data/generation/test_output.py.
    """
    there, killed = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "PUT" and "unit-00001.arrow" in path and not killed.is_set():
            there.set()
            killed.wait(60)

    faults.choose = hold
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "one"))
    process = start_cli(options(*source, URL, max_shard_size="60KB"))
    arrived = there.wait(120)
    process.kill()
    output = process.communicate()
    killed.set()
    assert arrived, output
    assert list((tmp_path / "one" / "staging").rglob("unit-00001.arrow"))  # it was not uploaded
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "two"))
    run(*source, URL, max_shard_size="60KB")
    run(*source, tmp_path / "whole", max_shard_size="60KB")
    expected = digests(tmp_path / "whole")
    store = Storage(URL)
    assert store.sizes().keys() == expected.keys()
    for name, digest in expected.items():
        assert hashlib.sha256(store.read(name)).hexdigest() == digest, name
