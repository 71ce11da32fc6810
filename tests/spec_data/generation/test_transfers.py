"""Copies beside the forward: order, memory and results, with a device that works late."""

from collections import deque

import numpy as np
import pytest
import torch

import spec_data.generation.capture as capture_module
import spec_data.generation.replica as replica_module
from spec_data.generation.transfers import Transfers, transfers_for
from tests.spec_data.runs import digests, run
from tests.spec_data.shards import codec_tools
from tests.spec_data.shards.codec_tools import MIXED

target, corpus = codec_tools.target, codec_tools.corpus

_POISON = 0xAB


class LateStreams:
    """A queue of copies that runs only when it must: what is read too early is poison."""

    def __init__(self) -> None:
        self.queue: deque = deque()
        self.allocated: list[int] = []
        self.log: list[str] = []

    def pinned(self, size):
        self.allocated.append(size)
        return torch.full((size,), _POISON, dtype=torch.uint8)

    def after_compute(self):
        self.log.append("after compute")

    def copy(self, source, into):
        self.queue.append((source, into))

    def select(self, source, index):
        return source[index]

    def mark(self):
        return _Event(self, len(self.queue))


class _Event:
    """Runs the copies that were queued before it was made."""

    def __init__(self, streams, count):
        self.streams = streams
        self.last = streams.queue[-1] if count else None

    def synchronize(self):
        self.streams.log.append("synchronize")
        while self.last is not None and any(item is self.last for item in self.streams.queue):
            source, into = self.streams.queue.popleft()
            into.copy_(source)


def test_arrays_are_whole_after_waiting_and_their_memory_is_reused():
    streams = LateStreams()
    transfers = Transfers(streams)
    kinds = (torch.uint8, torch.bool, torch.int16, torch.int32, torch.float32)
    waiting, expected = deque(), deque()
    for step in range(7):
        rows = 3 + step % 4
        sent = {
            str(kind): torch.randint(0, 2, (rows, 5), generator=torch.manual_seed(step)).to(kind)
            for kind in kinds
        } | {"none": torch.zeros(0, 4), "odd": torch.arange(3 * rows).view(rows, 3)[:, ::2]}
        waiting.append(transfers.start(sent))
        expected.append({name: value.clone() for name, value in sent.items()})
        del sent  # the queue alone keeps the sources
        if len(waiting) > transfers.late:
            arrival, wanted = waiting.popleft(), expected.popleft()
            found = arrival.arrays()
            assert found.keys() == wanted.keys()
            assert all(np.array_equal(found[n], wanted[n].numpy()) for n in wanted)
            again = arrival.rows(wanted["odd"], np.array([2, 0]))
            assert torch.equal(again, wanted["odd"][[2, 0]])
            arrival.release()
    assert len(streams.allocated) <= 2 * 4  # two buffers, which only grow
    # The copies of a batch are queued before the host waits for the batch before it.
    work = [entry for entry in streams.log if entry in ("after compute", "synchronize")]
    assert work[:3] == ["after compute", "after compute", "synchronize"]


def test_memory_in_use_is_never_given_to_another_batch():
    transfers = Transfers(LateStreams())
    first = transfers.start({"x": torch.ones(4)})
    transfers.start({"x": torch.ones(4)})
    with pytest.raises(RuntimeError, match="was not released"):
        transfers.start({"x": torch.ones(4)})
    first.release()
    transfers.start({"x": torch.ones(4)})


@pytest.mark.parametrize("given", [{}, MIXED, {"supervision": "topk:3", "teacher": "all"}])
def test_a_late_device_makes_the_same_bytes(target, corpus, tmp_path, monkeypatch, given):
    """States that escape, sparse columns, several batches of a unit and several units."""
    small = given | {"batch_tokens": "96", "max_shard_size": "200KB", "max_length": 100}
    run(target, corpus, tmp_path / "plain", **small)
    streams = LateStreams()
    monkeypatch.setattr(replica_module, "transfers_for", lambda *_: Transfers(streams))
    run(target, corpus, tmp_path / "late", **small)
    shards = len(list((tmp_path / "late" / "shards").iterdir()))
    assert streams.log.count("after compute") > shards and not streams.queue
    assert digests(tmp_path / "plain") == digests(tmp_path / "late")


def test_a_forward_that_fails_leaves_no_memory_in_use(target, corpus, tmp_path, monkeypatch):
    """Out of memory, the unit is captured again in smaller forwards, with the same buffers."""
    streams, failures = LateStreams(), [2]
    monkeypatch.setattr(replica_module, "transfers_for", lambda *_: Transfers(streams))
    real = capture_module.forward_columns

    def failing(*args):
        failures[0] -= 1
        if failures[0] == 0:
            raise torch.OutOfMemoryError("planted")
        return real(*args)

    monkeypatch.setattr(capture_module, "forward_columns", failing)
    manifest = run(target, corpus, tmp_path / "late", batch_tokens="1024", max_length=100)
    assert failures[0] < 0 and not streams.queue
    assert manifest.totals.documents == 40


def test_a_cpu_and_full_logits_move_at_once():
    assert not transfers_for(torch.device("cpu"), ["hidden.L1"]).late
    assert not transfers_for(torch.device("cuda"), ["logits"]).late
    there = torch.arange(6.0)
    array = Transfers().start({"x": there}).arrays()["x"]
    there[0] = 7
    assert array[0] == 7  # nothing was copied
