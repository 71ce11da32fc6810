"""The same through s3fs and a real S3 server, with failures between the two."""

import threading

import pytest
import torch
from fsspec.core import url_to_fs

from spec_data.shards import storage
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.storage import Storage
from tests.factory import tiny_dataset
from tests.object_store import object_store

URL = "s3://bucket/data"


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return tiny_dataset(tmp_path_factory.mktemp("local") / "data", n_docs=12, docs_per_shard=6)


@pytest.fixture(scope="module")
def store(local):
    with pytest.MonkeyPatch.context() as patch, object_store() as (_, faults):
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # tries of the libraries would hide ours
        patch.setattr(storage, "PAUSES", (0.01, 0.01, 0.01))
        system, _ = url_to_fs(URL, use_listings_cache=False)
        system.mkdir("bucket")
        system.retries = 1
        target = Storage(URL, write=True)
        for file in local.rglob("*"):
            if file.is_file():
                target.write(str(file.relative_to(local)), file)
        yield faults


@pytest.fixture
def faults(store, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path))
    store.choose = lambda method, path: None
    store.requests.clear()
    yield store
    store.choose = lambda method, path: None


def read_all(dataset, local) -> None:
    here = HiddenStatesDataset(local)
    for index in range(len(here)):
        assert torch.equal(here[index]["hidden.L1"], dataset[index]["hidden.L1"])


def test_it_is_read_and_opening_takes_two_requests(faults, local):
    dataset = HiddenStatesDataset(URL)
    assert [method for method, _ in faults.requests] == ["GET", "GET"], faults.requests
    read_all(dataset, local)


@pytest.mark.parametrize("fault", ["500", "cut"])
def test_failures_that_pass(faults, local, fault):
    faults.first(2, fault)
    dataset = HiddenStatesDataset(URL)
    faults.first(2, fault, part="unit-00000")
    read_all(dataset, local)


def test_failures_that_stay(faults):
    faults.choose = lambda method, path: "500"
    with pytest.raises(RunError, match=r"s3://bucket/data/manifest.json: 4 tries failed"):
        HiddenStatesDataset(URL)


def test_expired_credentials_are_said_at_once(faults):
    dataset = HiddenStatesDataset(URL)
    faults.choose = lambda method, path: "expired"
    with pytest.raises(ConfigError, match=r"access refused .*expired.*credentials"):
        _ = dataset[0]
    assert len(faults.requests) < 8, faults.requests
    with pytest.raises(ConfigError, match="access refused"):  # HEAD, whose answer has no words
        dataset.mirror.storage.size("index.arrow")


@pytest.mark.parametrize("fault", [None, "bare"])
def test_what_exists_is_not_replaced(faults, fault):
    """Of another server than Amazon's too, which names no refused condition."""
    faults.choose = lambda method, path: fault
    target = Storage(URL, write=True)
    assert target.write("new/claim", "one", create=True)
    assert not target.write("new/claim", "two", create=True)
    assert target.read("new/claim") == b"one"
    target.delete("new/claim")


def test_folders_that_a_console_made_are_no_objects(faults):
    target = Storage(f"{URL}/console", write=True)
    system = target._system
    for key in ("", "shards/"):
        system.call_s3("put_object", Bucket="bucket", Key=f"data/console/{key}", Body=b"")
    target.write("shards/file", "text")
    assert target.sizes() == {"shards/file": 4}
    for key in ("", "shards/", "shards/file"):
        system.call_s3("delete_object", Bucket="bucket", Key=f"data/console/{key}")


def test_a_download_that_is_stopped_does_not_wait_for_its_next_try(faults, monkeypatch, tmp_path):
    monkeypatch.setattr(storage, "PAUSES", (600.0,))
    faults.choose = lambda method, path: "500"
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(RunError, match="stopped"):
        Storage(URL).download("index.arrow", tmp_path / "file", stop)
