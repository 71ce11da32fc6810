"""Remote datasets through memory://: the same values, few requests, bounded disk, and damage."""

import errno
import hashlib
import json
import multiprocessing
import os
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

import spec_data
from spec_data.cli import main
from spec_data.shards import remote, storage
from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.files import cache_directory
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.storage import Storage, scheme_of
from spec_data.verification.run import examine
from tests.factory import tiny_dataset
from tests.remote_tools import put_in_memory
from tests.spec_data.runs import ON_CPU
from tests.spec_data.shards.integrity_tools import flip

URL = "memory://bucket/some data"


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return tiny_dataset(tmp_path_factory.mktemp("local") / "data", n_docs=24, docs_per_shard=7)


@pytest.fixture
def system(local, tmp_path, monkeypatch):
    """The dataset at URL, and a cache of its own."""
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "PAUSES", (0.0, 0.0, 0.0))
    found = fsspec.filesystem("memory")
    found.store.clear()
    put_in_memory(local, URL)
    yield found
    found.store.clear()


def replace(system, name: str, data: bytes) -> None:
    system.pipe_file(f"/bucket/some data/{name}", data)


def content(system, name: str) -> bytes:
    return system.cat_file(f"/bucket/some data/{name}")


def same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_every_value_is_that_of_the_local_dataset(system, local):
    here, there = HiddenStatesDataset(local), spec_data.open_dataset(URL)
    assert len(here) == len(there) and here.column_names == there.column_names
    for index in range(len(here)):
        expected, found = here[index], there[index]
        assert expected.keys() == found.keys()
        assert all(same(expected[name], found[name]) for name in expected)
    heads = load_head_tensors(local), load_head_tensors(there)
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert there.target_config() == here.target_config()
    assert there.location == HiddenStatesDataset(Path(URL)).location == URL  # a Path: one slash


def copies() -> list[Path]:
    return sorted((cache_directory("remote") / "shards").glob("*.arrow"))


def test_a_shard_is_downloaded_once_and_whole(system, local, monkeypatch):
    asked, download = [], Storage.download

    def counted(self, name, *more):
        asked.append(name)
        download(self, name, *more)

    monkeypatch.setattr(Storage, "download", counted)
    for _ in range(2):
        dataset = HiddenStatesDataset(URL, ["input_ids"])
        _ = dataset[8], dataset[9], dataset[0]
    assert asked == ["shards/unit-00001.arrow", "shards/unit-00000.arrow"]
    records = {f"{r.sha256}.arrow": r for r in dataset.manifest.shards[:2]}
    assert [file.name for file in copies()] == sorted(records)
    for file in copies():
        assert file.read_bytes() == (local / records[file.name].file).read_bytes()


def test_shards_on_disk_stay_below_the_limit_and_deleted_ones_are_closed(
    system, local, monkeypatch
):
    here = HiddenStatesDataset(local)
    limit = 2 * max(record.bytes for record in here.manifest.shards)
    monkeypatch.setenv("SPEC_DATA_REMOTE_SIZE", str(limit))
    there = HiddenStatesDataset(URL)
    for index in np.random.default_rng(0).permutation(len(here)).tolist():
        assert same(here[index]["hidden.L1"], there[index]["hidden.L1"])
        assert sum(file.stat().st_size for file in copies()) <= limit
        held = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        mine = [name for name in held if f"{cache_directory('remote')}/shards" in name]
        assert mine and not [name for name in mine if name.endswith("(deleted)")]


def test_the_shard_that_was_not_used_for_the_longest_time_goes(system, monkeypatch, tmp_path):
    records = HiddenStatesDataset(URL).manifest.shards
    monkeypatch.setenv("SPEC_DATA_REMOTE_SIZE", str(sum(r.bytes for r in records[:3])))
    cache = HiddenStatesDataset(URL).mirror
    left = tmp_path / "cache" / "remote" / "shards" / ".x.arrow.0123456789ab.tmp"
    for number in (0, 1, 2, 0):
        cache.shard(records[number])
    left.write_bytes(b"half of a shard, of a process that was killed")
    os.utime(left, (1, 1))
    cache.shard(records[3])
    assert [f.name for f in copies()] == sorted(f"{records[n].sha256}.arrow" for n in (0, 2, 3))
    assert not left.exists()
    monkeypatch.setenv("SPEC_DATA_REMOTE_SIZE", "100")
    with pytest.raises(ConfigError, match=r"unit-00001.arrow has .*SPEC_DATA_REMOTE_SIZE"):
        HiddenStatesDataset(URL).mirror.shard(records[1])


def test_a_download_that_ends_early_leaves_nothing(system, monkeypatch):
    dataset, whole = HiddenStatesDataset(URL), type(system).get_file

    def killed(self, rpath, lpath, **more):
        Path(lpath).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(type(system), "get_file", killed)
    with pytest.raises(KeyboardInterrupt):
        _ = dataset[0]

    def full(self, rpath, lpath, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(system), "get_file", full)
    with pytest.raises(RunError, match=r"the disk is full; lower SPEC_DATA_REMOTE_SIZE"):
        _ = dataset[0]
    folder = cache_directory("remote") / "shards"
    assert not [file for file in folder.iterdir() if file.suffix != ".lock"]
    monkeypatch.setattr(type(system), "get_file", whole)
    assert dataset[0]["doc_id"]


def _fetch_in_a_process(record, asked) -> None:
    """Fetch a shard, as a process of its own does; memory:// came with the fork."""
    whole = Storage.download

    def counted(self, name, *more):
        asked.put(name)
        whole(self, name, *more)

    Storage.download = counted
    HiddenStatesDataset(URL).mirror.shard(record)


def test_two_processes_share_a_download(system, local):
    record = HiddenStatesDataset(URL).manifest.shards[1]
    context = multiprocessing.get_context("fork")
    asked = context.Queue()
    own = [context.Process(target=_fetch_in_a_process, args=(record, asked)) for _ in range(2)]
    for process in own:
        process.start()
    for process in own:
        process.join(60)
    assert [process.exitcode for process in own] == [0, 0]
    assert asked.get(timeout=10) == record.file and asked.empty()
    assert [file.read_bytes() for file in copies()] == [(local / record.file).read_bytes()]


def test_shards_are_fetched_ahead_and_given_up(system, monkeypatch):
    dataset = HiddenStatesDataset(URL)
    records, cache = dataset.manifest.shards, dataset.mirror
    begun, held, whole = threading.Event(), threading.Event(), type(system).get_file

    def slow(self, rpath, lpath, callback, **more):
        begun.set()
        assert held.wait(10)
        callback.relative_update(1)
        whole(self, rpath, lpath, callback=callback, **more)

    monkeypatch.setattr(remote, "THREADS", 1)
    monkeypatch.setattr(type(system), "get_file", slow)
    assert dataset.fetch_ahead([0, 8, 1]) == records[0].bytes + records[1].bytes
    assert dataset.fetch_ahead([0, 8]) == 0  # on their way
    assert begun.wait(10)
    cache.stop()
    held.set()
    cache._pool.shutdown()
    assert not copies()
    assert [dataset[index]["doc_id"] for index in (0, 8)] == dataset.doc_ids[:9:8]
    assert dataset.fetch_ahead([0, 8]) == 0 and len(copies()) == 2


def test_damage_of_local_copies_heals(system, local):
    here, there = HiddenStatesDataset(local), HiddenStatesDataset(URL)
    _ = [there[index] for index in range(len(there))]
    cut, zeros, value, _ = copies()
    cut.write_bytes(cut.read_bytes()[:-8])
    zeros.write_bytes(bytes(zeros.stat().st_size))
    number = next(n for n, r in enumerate(there.manifest.shards) if r.sha256 == value.stem)
    data = bytearray(value.read_bytes())
    row = here.doc_ids.index(here.shard(number).index.ids[1].as_py())
    place = data.index(here[row]["hidden.L0"].view(torch.int16).numpy().tobytes())
    data[place] ^= 1
    value.write_bytes(data)
    for name in (there.mirror.fetch("index.arrow"), there.mirror.fetch("target/config.json")):
        flip(name)
    again = HiddenStatesDataset(URL)
    with pytest.raises(DatasetError, match=r"some data/shards/unit.* \(local copy .*hidden.L0"):
        _ = again[row]
    again = HiddenStatesDataset(URL)
    for index in range(len(here)):
        assert same(here[index]["hidden.L0"], again[index]["hidden.L0"])


def test_damage_of_local_tables_heals(system, local, tmp_path):
    spec_data.recode(local, tmp_path / "coded", "default")
    put_in_memory(tmp_path / "coded", f"{URL} coded")
    tables = HiddenStatesDataset(f"{URL} coded").tables
    flip(HiddenStatesDataset(f"{URL} coded").mirror.fetch("codec.safetensors"))
    again = HiddenStatesDataset(f"{URL} coded").tables
    assert all(torch.equal(tables[name].basis, again[name].basis) for name in tables) and tables


def test_damage_in_the_storage_is_named(system):
    shard = bytearray(content(system, "shards/unit-00001.arrow"))
    shard[len(shard) // 2] ^= 1
    replace(system, "shards/unit-00001.arrow", bytes(shard))
    dataset = HiddenStatesDataset(URL)
    with pytest.raises(DatasetError, match=r"some data/shards/unit-00001.arrow: damaged: its SHA"):
        _ = dataset[7 + 2]
    assert dataset[0]["doc_id"] and len(copies()) == 1
    found = examine(data=URL, running=ON_CPU, samples=2)
    assert hashlib.sha256(shard).hexdigest()[:16] in found.failures[0]
    assert all("unit-00001.arrow" in failure for failure in found.failures)
    config = content(system, "target/config.json")
    replace(system, "target/config.json", config.replace(b"1", b"2", 1))
    with pytest.raises(DatasetError, match=r"config\.json: changed or damaged.*upload it again"):
        _ = dataset.target_dir
    replace(system, "target/config.json", config)
    assert (dataset.target_dir / "config.json").read_bytes() == config


def test_a_dataset_that_is_replaced_is_no_mixture(system, local, tmp_path):
    dataset = HiddenStatesDataset(URL)
    _ = dataset[0]
    other = tiny_dataset(tmp_path / "other", n_docs=24, docs_per_shard=7, seed=1)
    put_in_memory(other, URL)
    with pytest.raises((DatasetError, MissingError), match="replaced while it was read"):
        _ = [dataset[index] for index in range(len(dataset))]
    assert same(
        HiddenStatesDataset(URL)[3]["hidden.L1"], HiddenStatesDataset(other)[3]["hidden.L1"]
    )
    system.rm("/bucket/some data", recursive=True)
    with pytest.raises(MissingError, match="deleted while it was read"):
        dataset.tables if dataset.tables else dataset.mirror.fetch("target/config.json")


def test_what_is_missing_is_said_when_it_is_opened(system):
    system.rm_file("/bucket/some data/shards/unit-00002.arrow")
    replace(system, "shards/unit-00001.arrow", content(system, "shards/unit-00001.arrow")[:-8])
    with pytest.raises(MissingError, match=r"00002.arrow: shard is missing\n.*00001.*truncated"):
        HiddenStatesDataset(URL)
    replace(system, "manifest.json", b"{}")
    with pytest.raises(DatasetError, match="not a spec-data manifest"):
        HiddenStatesDataset(URL)
    system.rm_file("/bucket/some data/manifest.json")
    with pytest.raises(MissingError, match=r"no manifest.json there"):
        HiddenStatesDataset(URL)
    replace(system, ".generate/plan.json", b"{}")
    with pytest.raises(MissingError, match="not sealed yet"):
        HiddenStatesDataset(URL)


def test_inspect_and_verify(system, local, capsys):
    assert main(["inspect", URL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == URL
    assert main(["verify", URL, "--device", "cpu"]) == 0
    there = capsys.readouterr()
    assert main(["verify", str(local), "--device", "cpu"]) == 0
    assert there.out == capsys.readouterr().out.replace(str(local), URL)
    assert f"fit eagle3 --data '{URL}'" in there.err and "--out 'some data-eagle3'" in there.err


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/data", r"ftp:// is not supported; use one of s3://, gs://, hf://"),
        ("file:///data", "write the local path without it"),
        ("s3://key:secret@bucket/data", "user, password, query"),
        ("s3://", "expected s3://NAME/FOLDER"),
        ("s3://bucket/../x", "without . and .."),
        ("gs://bucket/data", r"gs:// is read-only here"),
    ],
)
def test_urls_that_are_refused(url, said, system, monkeypatch):
    with pytest.raises(ConfigError, match=said):
        Storage(url, write=True)
    assert scheme_of("C:/x") is None and scheme_of("s3:/b") == "s3"
    monkeypatch.setenv("SPEC_DATA_REMOTE_SIZE", "much")
    with pytest.raises(ConfigError, match="SPEC_DATA_REMOTE_SIZE="):
        HiddenStatesDataset(URL)
