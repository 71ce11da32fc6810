"""Copies that do not block: what is used, or overwritten, before they ran gives other numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from spec_data.generation.transfers import CopyStream
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data import stream as streaming
from spec_train.data.order import BatchPlan
from spec_train.data.stream import BatchStream, BufferOptions
from spec_train.data.upload import Uploads
from tests.factory import tiny_dataset
from tests.gpu.fake_cuda import CUDA, counting, download, page_locked
from tests.gpu.late_streams import COMPUTING, LateStream
from tests.gpu.machine import gpu


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> HiddenStatesDataset:
    return HiddenStatesDataset(tiny_dataset(tmp_path_factory.mktemp("copies") / "data", n_docs=30))


def stream_of(data: HiddenStatesDataset, pin: bool) -> BatchStream:
    plan = BatchPlan(data.lengths, np.flatnonzero(data.lengths), seq_len=48, packs_per_batch=2)
    columns = ["hidden.L1", "target_argmax"]
    return BatchStream(data, plan, columns, batch_size=1, buffers=BufferOptions(pin=pin))


def sums(batch: Any) -> list[float]:
    """One number of each tensor of a batch, on the CPU or on the device."""
    tensors = download([*batch.plain().values(), *batch.hidden.values()])
    return [float(values.double().sum()) for values in tensors]


def on_gpu(data: HiddenStatesDataset, use: Callable[[Any], Any]) -> list[Any]:
    """Move two epochs to the device as the trainer does; return what `use` makes of each batch."""
    with gpu():
        stream, made = stream_of(data, pin=True), []
        uploads = Uploads(CUDA, torch.float32)
        with torch.no_grad():
            for step in stream.take(2 * len(stream.plan.batches(0))):
                for host in step.batches:
                    uploads.without_hidden(host)
                for i, batch in enumerate(uploads.batches(step, stream.peek)):
                    made.append(use(batch))
                    step.release(i)
        torch.cuda.synchronize()
    return made


@pytest.fixture(scope="module")
def expected(data: HiddenStatesDataset) -> list[list[float]]:
    stream = stream_of(data, pin=False)
    steps = stream.take(2 * len(stream.plan.batches(0)))
    return [sums(batch) for step in steps for batch in step.batches]


def test_batches_arrive_whole_also_if_they_are_used_much_later(data: Any, expected: Any) -> None:
    """Used at once; and kept while their buffers are filled again."""
    with counting() as syncs:
        assert on_gpu(data, sums) == expected
        kept = on_gpu(data, lambda batch: batch)
    assert [sums(batch) for batch in kept] == expected
    assert not any("pageable" in what for _, what in syncs)


def test_a_buffer_that_is_filled_before_its_copy_ran_is_noticed(
    data: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming._Buffer, "mark_copied", lambda _: None)
    kept = on_gpu(data, lambda batch: batch)
    assert [sums(batch) for batch in kept] != expected


def test_a_batch_that_is_used_before_it_arrived_is_noticed(
    data: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateStream, "wait_event", lambda *_: None)
    assert on_gpu(data, sums) != expected


def test_a_result_of_capture_that_is_read_before_its_copy_ran_is_noticed() -> None:
    with gpu(), torch.no_grad():
        values = torch.arange(6.0, device="cuda")
        stream = CopyStream(CUDA)
        stream.after_compute()
        into = stream.copy(values)
        assert not torch.equal(into, torch.arange(6.0))
        stream.mark().synchronize()
        assert torch.equal(into, torch.arange(6.0))


def test_an_upload_from_pageable_memory_is_counted() -> None:
    with gpu(), counting() as syncs:
        torch.ones(3).to("cuda", non_blocking=True)
        page_locked(torch.ones(3)).to("cuda", non_blocking=True)
        COMPUTING.run()
    assert list(syncs.values()) == [1] and "pageable" in next(iter(syncs))[1]
