"""What the stream may touch and take: unread columns never, memory as much as its ring."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.order import BatchPlan
from spec_train.data.stream import BatchStream
from tests.factory import tiny_dataset

STATES = ("hidden.L1", "hidden.final", "target_argmax")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_dataset(tmp_path_factory.mktemp("data") / "set", n_docs=60, docs_per_shard=30)


def bytes_read_of(path: Path, column: str, read: tuple[str, ...], monkeypatch) -> int:
    """Take every batch of `read`; return how many bytes of a column came from the shards."""
    dataset = HiddenStatesDataset(path)
    for row in range(len(dataset)):
        dataset.read_into(row, {"input_ids": torch.zeros(64, dtype=torch.int64)})
    places = []  # of the column, in each shard: its file, first byte and the one behind the last
    for shard in dataset._shards.values():
        stream = shard._stream
        for batch in shard._batches:
            data = batch.column(column).values.values.buffers()[1]
            start = data.address - stream._address
            places.append((stream._descriptor, start, start + data.size))
    assert sum(end - start for _, start, end in places) > 40_000
    counted, plain = [0], os.preadv

    def preadv(descriptor, buffers, start):
        count = plain(descriptor, buffers, start)
        counted[0] += sum(
            max(0, min(start + count, last) - max(start, first))
            for file, first, last in places
            if file == descriptor
        )
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    plan = BatchPlan(dataset.lengths, np.arange(len(dataset)), seq_len=48, packs_per_batch=4)
    stream = BatchStream(dataset, plan, read, batch_size=2)
    assert sum(1 for _ in stream.take(len(plan.batches(0)))) > 4
    return counted[0]


@pytest.mark.parametrize("column", ["hidden.L2", "hidden.L1"])
def test_bytes_of_columns_that_are_not_read_stay_on_the_disk(path, monkeypatch, column):
    count = bytes_read_of(path, column, STATES, monkeypatch)
    assert count > 40_000 if column in STATES else count == 0


def test_what_is_handed_out_is_memory_of_its_own(path):
    """No view of what a shard keeps, and nothing of a file is mapped."""
    dataset = HiddenStatesDataset(path)
    documents = [dataset[row] for row in range(len(dataset))]
    assert not any(
        array.flags.writeable
        for shard in dataset._shards.values()
        for pair in shard._views.values()
        for array in pair
    )
    maps = Path("/proc/self/maps")
    assert not maps.is_file() or str(path) not in maps.read_text()
    kept = [
        (shard._stream._address, shard._stream._address + shard._stream._size)
        for shard in dataset._shards.values()
    ]
    assert len(kept) >= 2
    for document in documents:
        for value in document.values():
            if isinstance(value, torch.Tensor):
                pointer = value.untyped_storage().data_ptr()
                assert not any(start <= pointer < end for start, end in kept)
                value.zero_()
    for name in ("lengths", "supervised", "first_supervised"):
        values = getattr(dataset, name)
        assert not any(start <= values.ctypes.data < end for start, end in kept)
    assert not dataset.id_array.buffers()[2].is_mutable
