"""What the stream may touch and take: unread columns never, memory as much as its ring."""

import ctypes
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.order import BatchPlan
from spec_train.data.stream import BatchStream
from tests.factory import tiny_dataset
from tests.forked import Forked

STATES = ("hidden.L1", "hidden.final", "target_argmax")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_dataset(tmp_path_factory.mktemp("data") / "set", n_docs=60, docs_per_shard=30)


def read_with_poison(path: Path, poisoned: str, read: tuple[str, ...]) -> int:
    """Take every batch while the pages of one column are out of bounds: touching them kills."""
    dataset = HiddenStatesDataset(path)
    for row in range(len(dataset)):
        dataset.read_into(row, {"input_ids": torch.zeros(64, dtype=torch.int64)})
    page, pages = 4096, 0
    for shard in dataset._shards.values():
        for batch in shard.batches:
            data = batch.column(poisoned).values.values.buffers()[1]
            start, end = -(-data.address // page) * page, (data.address + data.size) // page * page
            none = 0  # PROT_NONE
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), end - start, none) == 0
            pages += (end - start) // page
    assert pages > 10
    plan = BatchPlan(dataset.lengths, np.arange(len(dataset)), seq_len=48, packs_per_batch=4)
    stream = BatchStream(dataset, plan, read, batch_size=2)
    assert sum(1 for _ in stream.take(len(plan.batches(0)))) > 4
    return 0


@pytest.mark.parametrize("poisoned", ["hidden.L2", "hidden.L1"])
def test_the_pages_of_columns_that_are_not_read_are_never_touched(path, poisoned):
    reading = Forked(lambda: read_with_poison(path, poisoned, STATES))
    _, error = reading.communicate()
    expected = -signal.SIGSEGV if poisoned in STATES else 0
    assert reading.returncode == expected, error[-2000:]


def test_no_writable_view_of_a_mapped_file_gets_out(path):
    dataset = HiddenStatesDataset(path)
    documents = [dataset[row] for row in range(len(dataset))]
    assert not any(
        array.flags.writeable
        for shard in dataset._shards.values()
        for pair in shard._views.values()
        for array in pair
    )
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(path) in line:
            start, end = line.split()[0].split("-")
            mapped.append((int(start, 16), int(end, 16)))
    assert len(mapped) >= 2
    for document in documents:
        for value in document.values():
            if isinstance(value, torch.Tensor):
                pointer = value.untyped_storage().data_ptr()
                assert not any(start <= pointer < end for start, end in mapped)
                value.zero_()  # would be a segmentation fault over mapped memory
    for name in ("lengths", "supervised", "first_supervised"):
        values = getattr(dataset, name)
        assert not any(start <= values.ctypes.data < end for start, end in mapped)
    assert not dataset.id_array.buffers()[2].is_mutable
