"""Remote datasets through memory://: the same values, few requests, bounded disk, and damage."""

import json
import os
import shutil
import threading
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

import spec_data
from spec_data.cli import main
from spec_data.options.dataset_options import VerifyConfig
from spec_data.shards import block_cache, hollow, storage
from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.shards.shard import Shard
from spec_data.shards.storage import Storage
from spec_data.shards.urls import check_dataset_url, scheme_of
from spec_data.verification.run import examine
from tests.factory import tiny_dataset

URL = "memory://bucket/some data"


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return tiny_dataset(tmp_path_factory.mktemp("local") / "data", n_docs=24, docs_per_shard=7)


@pytest.fixture
def system(local, tmp_path, monkeypatch):
    """The dataset at URL, a cache of its own, and small blocks, so that values span several."""
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(block_cache, "BLOCK", 4096)
    monkeypatch.setattr("spec_data.shards.ranged_shard.BLOCK", 4096)
    monkeypatch.setattr("spec_data.shards.mirror.BLOCK", 4096)
    monkeypatch.setattr(hollow, "_MESSAGE", 512)
    monkeypatch.setattr(hollow, "_GAP", 64)
    monkeypatch.setattr(storage, "PAUSES", (0.0, 0.0, 0.0))
    found = fsspec.filesystem("memory")
    found.store.clear()
    upload(found, local)
    yield found
    found.store.clear()


def upload(system, directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            replace(system, str(file.relative_to(directory)), file.read_bytes())


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
    heads = load_head_tensors(local), load_head_tensors(there.path)
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert there.target_config() == here.target_config()
    assert there.place == URL and HiddenStatesDataset(there.path).place == URL
    assert HiddenStatesDataset(Path(URL)).place == URL  # a Path has lost a slash


def test_only_asked_columns_are_fetched(system):
    dataset = HiddenStatesDataset(URL, ["input_ids"])
    whole = sum(record.bytes for record in dataset.manifest.shards)
    for index in range(len(dataset)):
        _ = dataset[index]
    kept = [p.stat() for p in (dataset.path / "hollow").iterdir()]
    assert sum(found.st_size for found in kept) == whole
    assert 0 < dataset.mirror.blocks.fetched < whole / 2


def test_opening_costs_few_requests(system, monkeypatch):
    calls: Counter[str] = Counter()

    def counted(name, function):
        def call(self, *args):
            calls[name] += 1
            return function(self, *args)

        return call

    for name in ("read", "read_range", "size", "sizes"):
        monkeypatch.setattr(Storage, name, counted(name, getattr(Storage, name)))
    dataset = HiddenStatesDataset(URL)
    assert calls == {"read": 1, "sizes": 1}
    assert dataset.lengths.sum()
    assert calls == {"read": 2, "sizes": 1}  # the index
    dataset = HiddenStatesDataset(URL)
    assert dataset.lengths.sum()
    assert calls == {"read": 3, "sizes": 2}  # the index is kept


def test_blocks_on_disk_stay_below_the_limit(system, local, monkeypatch):
    limit = 4 * 4096
    monkeypatch.setenv("SPEC_DATA_REMOTE_SIZE", str(limit))
    here, there = HiddenStatesDataset(local), HiddenStatesDataset(URL)
    most = 0
    for index in np.random.default_rng(0).permutation(np.repeat(np.arange(len(here)), 2)).tolist():
        assert same(here[index]["hidden.L1"], there[index]["hidden.L1"])
        blocks = (there.path / "blocks").rglob("[0-9]*")
        most = max(most, sum(p.stat().st_size for p in blocks if p.is_file()))
    ahead = block_cache.THREADS * 4096
    assert there.mirror.blocks.fetched > 4 * limit and most <= limit + ahead


def test_the_oldest_blocks_are_deleted_and_what_kills_left(tmp_path):
    folder = tmp_path / "a" / "blocks" / "s"
    folder.mkdir(parents=True)
    for number in range(8):
        (folder / f"{number:06d}").write_bytes(bytes(100))
        os.utime(folder / f"{number:06d}", (number, number))
    (folder / ".x.tmp").write_bytes(b"half")
    os.utime(folder / ".x.tmp", (1, 1))
    (tmp_path / "a" / "index.arrow").write_bytes(bytes(5000))  # no block: it stays
    block_cache.trim(tmp_path, 320)
    assert sorted(p.name for p in folder.iterdir()) == ["000005", "000006", "000007"]
    assert (tmp_path / "a" / "index.arrow").is_file()


def test_threads_share_a_cache(system, local):
    here, there = HiddenStatesDataset(local), HiddenStatesDataset(URL)
    wrong: list[int] = []

    def read(seed: int) -> None:
        for index in np.random.default_rng(seed).permutation(len(here)).tolist():
            if not same(here[index]["hidden.final"], there[index]["hidden.final"]):
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_requests_that_are_cancelled_are_made_again_by_a_reader(system, local, monkeypatch):
    dataset = HiddenStatesDataset(URL, ["input_ids"])
    blocks, record = dataset.mirror.blocks, dataset.manifest.shards[0]
    held, whole = threading.Event(), Storage.read_range

    def slow(self, *arguments):
        held.wait(10)
        return whole(self, *arguments)

    monkeypatch.setattr(block_cache, "THREADS", 1)
    monkeypatch.setattr(Storage, "read_range", slow)
    blocks.fetch_ahead(record.file, record.bytes, range(4))
    blocks.cancel()
    held.set()
    found = blocks.read(record.file, record.bytes, 100, 3 * 4096 + 5)
    assert found.tobytes() == (local / record.file).read_bytes()[100 : 3 * 4096 + 5]


def test_damage_in_the_cache_heals(system, local):
    here, there = HiddenStatesDataset(local), HiddenStatesDataset(URL)
    _ = [there[index] for index in range(len(there))]
    for file in (there.path / "blocks").rglob("[0-9]*"):
        if file.is_file():
            file.write_bytes(bytes(file.stat().st_size))
    for file in (there.path / "hollow").iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    again = HiddenStatesDataset(URL)
    for index in range(len(here)):
        assert same(here[index]["hidden.L0"], again[index]["hidden.L0"])


def test_damage_in_the_storage_is_named(system):
    shard = bytearray(content(system, "shards/unit-00001.arrow"))
    dataset = HiddenStatesDataset(URL)
    opened = HiddenStatesDataset(URL).shard(1)
    start, _ = opened._range(Shard._part(opened, dataset._columns["hidden.L1"], opened.place(2)))
    shard[start + 5] ^= 1
    replace(system, "shards/unit-00001.arrow", bytes(shard))
    with pytest.raises(DatasetError, match=r"some data/shards/unit-00001.arrow: row 2 .*hidden.L1"):
        _ = dataset[7 + 2]
    assert dataset[7 + 1]["doc_id"]
    found = examine(VerifyConfig(data=URL, device="cpu", samples=2))
    assert len(found.failures) == 2 and "unit-00001.arrow row 2" in found.failures[1]


def test_a_dataset_that_is_replaced_is_no_mixture(system, local, tmp_path):
    dataset = HiddenStatesDataset(URL)
    _ = dataset[0]
    other = tiny_dataset(tmp_path / "other", n_docs=24, docs_per_shard=7, seed=1)
    upload(system, other)
    with pytest.raises((DatasetError, MissingError), match="replaced while it was read"):
        _ = [dataset[index] for index in range(len(dataset))]
    assert same(
        HiddenStatesDataset(URL)[3]["hidden.L1"], HiddenStatesDataset(other)[3]["hidden.L1"]
    )
    system.rm("/bucket/some data", recursive=True)
    with pytest.raises(MissingError, match="deleted while it was read"):
        dataset.tables if dataset.tables else dataset.mirror.ensure("target/config.json")


def test_what_is_missing_is_said_when_it_is_opened(system):
    system.rm_file("/bucket/some data/shards/unit-00002.arrow")
    replace(system, "shards/unit-00001.arrow", content(system, "shards/unit-00001.arrow")[:-8])
    with pytest.raises(MissingError, match=r"00002.arrow: shard is missing\n.*00001.*truncated"):
        HiddenStatesDataset(URL)
    replace(system, "manifest.json", b"{}")
    with pytest.raises(DatasetError, match="no manifest of a sealed dataset"):
        HiddenStatesDataset(URL)
    system.rm_file("/bucket/some data/manifest.json")
    with pytest.raises(MissingError, match=r"no manifest.json there"):
        HiddenStatesDataset(URL)
    replace(system, ".generate/plan.json", b"{}")
    with pytest.raises(MissingError, match="not sealed yet"):
        HiddenStatesDataset(URL)


def test_a_list_that_is_late(system, monkeypatch):
    """Objects that a list does not have yet are asked for by name."""
    whole = Storage.sizes
    late = {"shards/unit-00001.arrow"}

    def sizes(self, folder=""):
        return {name: size for name, size in whole(self, folder).items() if name not in late}

    monkeypatch.setattr(Storage, "sizes", sizes)
    assert len(HiddenStatesDataset(URL)) == 24


def test_errors_that_pass_are_tried_again(system, monkeypatch):
    left: Counter = Counter({OSError: 2, TimeoutError: 1})
    memory = type(system)
    whole = memory.cat_file

    def flaky(self, path, start=None, end=None, **more):
        for error in [OSError, TimeoutError, PermissionError]:
            if left[error]:
                left[error] -= 1
                raise error("passing")
        found = whole(self, path, start=start, end=end, **more)
        if start and left["short"] < 3:
            left["short"] += 1
            return found[:-1]
        return found

    monkeypatch.setattr(memory, "cat_file", flaky)
    assert HiddenStatesDataset(URL)[3]["hidden.L1"].isfinite().all()
    left[OSError] = 99
    with pytest.raises(RunError, match="4 tries failed, the last with: OSError: passing"):
        HiddenStatesDataset(URL)
    left.clear()
    left[PermissionError] = 1
    with pytest.raises(ConfigError, match=r"access refused .*renew or set the credentials"):
        HiddenStatesDataset(URL)


def test_inspect_and_verify(system, local, capsys):
    assert main(["inspect", URL, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == URL
    assert main(["verify", URL, "--device", "cpu"]) == 0
    there = capsys.readouterr()
    assert main(["verify", str(local), "--device", "cpu"]) == 0
    here = capsys.readouterr()
    assert there.out == here.out.replace(str(local), URL)
    assert f"fit eagle3 --data '{URL}' --out 'some data-eagle3'" in there.err


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/data", r"ftp:// is not supported; use one of s3://, gs://, hf://"),
        ("abfs://c/data", "or the local path of a mount"),
        ("file:///data", "write the local path without it"),
        ("s3://key:secret@bucket/data", "without user, password"),
        ("https://host/data?token=1", "without user, password"),
        ("s3://", "expected s3://NAME/FOLDER"),
        ("s3://bucket/../x", "without . and"),
        ("gs://bucket/data", r"gcsfs is not installed; run: pip install gcsfs"),
    ],
)
def test_urls_that_are_refused(url, said, monkeypatch):
    monkeypatch.setattr(storage, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=said):
        Storage(url)


def test_web_servers_and_the_hub_are_read_only():
    for url in ("https://host/data", "hf://datasets/org/name", "gs://bucket/data"):
        check_dataset_url("--out", url)
        with pytest.raises(ConfigError, match="is read-only here"):
            check_dataset_url("--out", url, write=True)
    assert scheme_of("C:/x") is None and scheme_of("s3:/b") == "s3"


def test_sizes_of_the_cache_that_are_refused(system, monkeypatch):
    for text in ("much", "0", "-1GB"):
        monkeypatch.setenv("SPEC_DATA_REMOTE_SIZE", text)
        with pytest.raises(ConfigError, match="SPEC_DATA_REMOTE_SIZE="):
            HiddenStatesDataset(URL)
    monkeypatch.setenv("SPEC_DATA_REMOTE_SIZE", "1.5GB")
    assert block_cache.size_limit() == 1_500_000_000
    shutil.rmtree(block_cache.remote_directory(), ignore_errors=True)
