"""Shards that another program writes while they are read: an error in words, never a dead process.

A page of a mapped file that is cut off ends the process by SIGBUS; so shards are read, not mapped.
"""

import errno
import os
import shutil

import pytest
import torch

from spec_data.shards import shard as shard_module
from spec_data.shards import stream_file
from spec_data.shards.errors import DatasetError, RunError, SpecDataError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.verification.run import examine
from tests.faults.tools import survived
from tests.spec_data.runs import ON_CPU
from tests.spec_data.shards import codec_tools, integrity_tools
from tests.spec_data.shards.integrity_tools import equal, flip, place_of, read_all, shard_file

whole, data = integrity_tools.whole, integrity_tools.data
target, corpus, mixed = codec_tools.target, codec_tools.corpus, codec_tools.mixed


def read(dataset) -> str:
    """Read every document; return "read", or the error in words."""
    try:
        for row in range(len(dataset)):
            _ = dataset[row]
    except SpecDataError as error:
        return f"refused: {error}"
    return "read"


@pytest.mark.parametrize("size", [0, 1, 4096, 0.5])
@pytest.mark.parametrize("used", [False, True])
def test_a_shard_that_is_cut_off_while_it_is_open_ends_no_process(data, size, used):
    def trial(_):
        dataset = HiddenStatesDataset(data)
        _ = dataset[0] if used else dataset.shard(0)
        file = shard_file(data, 0)
        os.truncate(file, int(file.stat().st_size * size) if size < 1 else size)
        return read(dataset)

    (outcome,) = survived(trial, 1)
    assert outcome.startswith("refused: ") and "unit-00000.arrow" in outcome, outcome
    assert "cut off while it was read" in outcome or "damaged" in outcome


def test_a_lossy_shard_that_is_cut_off_is_an_error(mixed, tmp_path):
    data = shutil.copytree(mixed, tmp_path / "data")

    def trial(_):
        dataset = HiddenStatesDataset(data)
        _ = dataset[0]
        os.truncate(shard_file(data, 0), 0)
        return read(dataset)

    (outcome,) = survived(trial, 1)
    assert outcome.startswith("refused: ") and "unit-00000.arrow" in outcome, outcome


def test_verify_of_a_shard_that_is_cut_off_goes_on(data, monkeypatch):
    real = stream_file.StreamFile._read_messages

    def cut(self):
        real(self)
        os.truncate(shard_file(data, 1), 5000)

    monkeypatch.setattr(stream_file.StreamFile, "_read_messages", cut)
    found = examine(str(data), running=ON_CPU)
    assert any("unit-00001.arrow" in failure for failure in found.failures)


@pytest.mark.parametrize("restored", [False, True])
def test_what_is_written_in_place_is_compared_at_the_next_read(data, monkeypatch, caplog, restored):
    """Before: one read in 64. The same bytes written again are read as before."""
    monkeypatch.setattr(shard_module, "_draw", lambda: 0.999)
    dataset, expected = HiddenStatesDataset(data), read_all(data)
    out = {"hidden.L1": torch.zeros(64, 32)}
    dataset.read_into(0, out)
    file = shard_file(data, 0)
    if restored:
        file.write_bytes(file.read_bytes())
    else:
        flip(file, place_of(data, 0, "hidden.L1", 0)[0])
    stamp = file.stat().st_mtime_ns + 10**9  # a clock of coarse ticks
    os.utime(file, ns=(stamp, stamp))
    if restored:
        assert all(equal(dataset[n], expected[n]) for n in range(len(dataset)))
    else:
        with pytest.raises(DatasetError, match=r"column hidden\.L1: damaged"):
            dataset.read_into(0, out)
    assert caplog.text.count("warning[shard-changed]") == 1


def test_a_shard_that_is_replaced_in_one_step_is_read_as_it_was(data):
    dataset, expected = HiddenStatesDataset(data), read_all(data)
    _ = dataset[0]
    other = data / "other"
    shutil.copy(shard_file(data, 1), other)
    other.replace(shard_file(data, 0))
    assert all(equal(dataset[n], expected[n]) for n in range(4))
    with pytest.raises(DatasetError, match=r"unit-00000\.arrow: row 0 .* damaged, swapped"):
        read_all(data)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_disk_that_cannot_read_is_an_error_that_names_the_shard(data, monkeypatch, after):
    dataset = HiddenStatesDataset(data)
    _ = dataset.shard(0)
    real, left = os.preadv, [after]

    def broken(*given):
        if not left[0]:
            raise OSError(errno.EIO, "Input/output error")
        left[0] -= 1
        return real(*given)

    monkeypatch.setattr(stream_file.os, "preadv", broken)
    with pytest.raises(
        DatasetError, match=r"unit-00000\.arrow.*cannot be read .*the disk reports an error"
    ):
        _ = dataset[0]


def test_too_many_open_files_are_said(data, monkeypatch):
    def full(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    dataset = HiddenStatesDataset(data)
    assert len(dataset.index)
    monkeypatch.setattr(stream_file.os, "open", full)
    with pytest.raises(RunError, match=r"too many files are open.*ulimit -n"):
        dataset.shard(0)


def test_little_of_a_shard_stays_in_memory(data):
    """The layout has the size of the file; what is filled of it are messages and offsets."""
    dataset = HiddenStatesDataset(data)
    for row in range(4):
        _ = dataset[row]
    stream = dataset.shard(0)._stream
    filled = sum(1 for byte in bytes(stream._memory) if byte)
    values = sum(d["hidden.L1"].nbytes for d in (dataset[n] for n in range(4)))
    assert filled < values
