"""Which reads are checked: every chunk before its first use, and how often afterwards."""

import os
import pickle
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import spec_data
from spec_data.shards import shard as shard_module
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.reader import HiddenStatesDataset, open_dataset
from spec_data.shards.shard import CodedRows
from tests.spec_data.shards import codec_tools, integrity_tools
from tests.spec_data.shards.integrity_tools import flip, place_of, shard_file

whole, data = integrity_tools.whole, integrity_tools.data
target, corpus, mixed = codec_tools.target, codec_tools.corpus, codec_tools.mixed
L1 = r"column hidden\.L1: damaged"


@pytest.fixture
def hashed(monkeypatch):
    """How often each chunk was hashed, by its content."""
    seen: Counter = Counter()
    real = shard_module.checksum

    def counted(chunk):
        seen[chunk.tobytes()] += 1
        return real(chunk)

    monkeypatch.setattr(shard_module, "checksum", counted)
    return seen


def passes(dataset: HiddenStatesDataset, count: int) -> None:
    out = {c.name: torch.zeros((64, c.width) if c.width else 64) for c in dataset.manifest.columns}
    for _ in range(count):
        for row in range(len(dataset)):
            dataset.read_into(row, out)


def test_every_chunk_is_checked_before_its_first_use(whole, hashed, monkeypatch):
    monkeypatch.setattr(shard_module, "_draw", lambda: 1.0)  # no further checks
    dataset = HiddenStatesDataset(whole)
    chunks = len(dataset) * (len(dataset.manifest.columns) + 1)  # and the checksums of each row
    passes(dataset, 1)
    assert sum(hashed.values()) == chunks
    once = dict(hashed)
    passes(dataset, 2)
    assert hashed == once
    passes(HiddenStatesDataset(whole), 1)
    assert hashed == {chunk: 2 * count for chunk, count in once.items()}, "each reader for itself"


def test_later_reads_are_checked_at_random(whole, hashed):
    """200 passes over 12 documents of 8 columns: 19,200 reads; five standard deviations."""
    dataset = HiddenStatesDataset(whole)
    passes(dataset, 1)
    hashed.clear()
    passes(dataset, 200)
    reads = 200 * len(dataset) * len(dataset.manifest.columns)
    assert abs(sum(hashed.values()) - reads / 64) <= 5 * (reads / 64 * 63 / 64) ** 0.5
    first, _ = hashed.copy(), hashed.clear()
    passes(dataset, 200)
    assert first != hashed, "other reads each time"


def test_every_read_is_checked_where_that_is_asked_for(whole, hashed, monkeypatch):
    """Also in another process, and of the sources of a view."""
    dataset = open_dataset(whole, check="always")
    passes(dataset, 3)
    reads = len(dataset) * (1 + 3 * len(dataset.manifest.columns))  # once: those of each row
    assert sum(hashed.values()) == reads
    hashed.clear()
    passes(pickle.loads(pickle.dumps(dataset)), 3)
    assert sum(hashed.values()) == reads
    with pytest.raises(ConfigError, match="check='never': expected first or always"):
        open_dataset(whole, check="never")  # type: ignore[arg-type]


def test_damage_between_two_reads_is_found_at_the_next_one(data, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_module, "_draw", lambda: 0.999)
    spec_data.select(data, tmp_path / "view", where="number < 5")
    for place in (data, tmp_path / "view"):
        dataset, out = open_dataset(place, check="always"), {"hidden.L1": torch.zeros(64, 32)}
        dataset.read_into(0, out)
        flip(shard_file(data, 0), place_of(data, 0, "hidden.L1", 0)[0])
        with pytest.raises(DatasetError, match=L1):
            dataset.read_into(0, out)
        flip(shard_file(data, 0), place_of(data, 0, "hidden.L1", 0)[0])


def test_damage_that_comes_after_the_first_check_is_found_sooner_or_later(data, monkeypatch):
    monkeypatch.setattr(shard_module, "_draw", iter([0.5] * 3 + [0.0]).__next__)
    dataset, out = HiddenStatesDataset(data), {"hidden.L1": torch.zeros(64, 32)}
    dataset.read_into(0, out)
    written = shard_file(data, 0).stat()
    with shard_file(data, 0).open("r+b") as file:  # in place, as a failing disk would
        file.seek(place_of(data, 0, "hidden.L1", 0)[0])
        file.write(b"\xff\x00\xff")
    os.utime(shard_file(data, 0), ns=(written.st_atime_ns, written.st_mtime_ns))
    for _ in range(3):
        dataset.read_into(0, out)
    with pytest.raises(DatasetError, match=L1):
        dataset.read_into(0, out)


def test_undecoded_rows_are_checked_before_they_are_gathered(mixed, tmp_path):
    data = Path(shutil.copytree(mixed, tmp_path / "data"))
    flip(shard_file(data, 0), place_of(data, 0, "hidden.L0", 1)[0])
    dataset = HiddenStatesDataset(data)
    rows = CodedRows(dataset.declared["hidden.L0"].width, 4096, pin=False)
    dataset.read_into(0, {"hidden.L0": rows})
    gathered = rows.count
    with pytest.raises(DatasetError, match=r"row 1 .*column hidden\.L0: damaged"):
        dataset.read_into(1, {"hidden.L0": rows})
    assert rows.count == gathered
