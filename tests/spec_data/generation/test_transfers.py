"""Copies beside the forward: order, memory and results, with a device that works late."""

from collections import deque

import numpy as np
import pytest
import torch

import spec_data.generation.proof as proof_module
from spec_data.generation.transfers import Arrival, copy_stream
from tests.spec_data.runs import digests, run
from tests.spec_data.shards import codec_tools
from tests.spec_data.shards.codec_tools import MIXED

target, corpus = codec_tools.target, codec_tools.corpus


class LateStreams:
    """A queue of copies that runs only when it must: what is read too early is poison."""

    def __init__(self) -> None:
        self.queue: deque = deque()
        self.log: list[str] = []

    def after_compute(self):
        self.log.append("after compute")

    def copy(self, source):
        into = torch.empty_like(source)
        into.view(torch.uint8).fill_(0xAB) if source.numel() else None
        self.queue.append((source, into))
        return into

    def select(self, source, index):
        return source[index]

    def mark(self):
        return _Event(self)


class _Event:
    """Runs the copies that were queued before it was made."""

    def __init__(self, streams):
        self.streams, self.last = streams, streams.queue[-1] if streams.queue else None

    def synchronize(self):
        self.streams.log.append("synchronize")
        while self.last is not None and any(item is self.last for item in self.streams.queue):
            source, into = self.streams.queue.popleft()
            into.copy_(source)


def test_arrays_are_whole_after_waiting():
    streams, waiting = LateStreams(), deque()
    for step in range(5):
        sent = {
            str(kind): torch.randint(0, 2, (3 + step, 5)).to(kind)
            for kind in (torch.uint8, torch.int16, torch.int32, torch.float32)
        } | {"none": torch.zeros(0, 4), "odd": torch.arange(9 + 3 * step).view(-1, 3)[:, ::2]}
        wanted = {name: value.clone() for name, value in sent.items()}
        waiting.append((Arrival(sent, streams), wanted))
        del sent  # the queue alone keeps the sources
        if len(waiting) > 1:
            arrival, wanted = waiting.popleft()
            arrays = arrival.arrays()
            assert arrays.keys() == wanted.keys()
            assert all(np.array_equal(arrays[n], wanted[n].numpy()) for n in wanted)
            again = arrival.rows(wanted["odd"], np.array([2, 0]))
            assert torch.equal(again, wanted["odd"][[2, 0]])


@pytest.mark.parametrize("given", [MIXED, {"supervision": "topk:3", "teacher": "all"}])
def test_a_late_device_makes_the_same_bytes(target, corpus, tmp_path, monkeypatch, given):
    """States that escape, sparse columns, several batches of a unit and several units."""
    small = given | {"batch_tokens": "96", "max_shard_size": "200KB", "max_length": 100}
    run(target, corpus, tmp_path / "plain", **small)
    streams = LateStreams()
    monkeypatch.setattr(proof_module, "copy_stream", lambda *_: streams)
    run(target, corpus, tmp_path / "late", **small)
    shards = len(list((tmp_path / "late" / "shards").iterdir()))
    assert streams.log.count("after compute") > shards and not streams.queue
    # The copies of a batch are queued before the host waits for the batch before it.
    assert streams.log[:3] == ["after compute", "after compute", "synchronize"]
    assert digests(tmp_path / "plain") == digests(tmp_path / "late")


def test_a_cpu_and_full_logits_move_at_once():
    assert copy_stream(torch.device("cpu"), ["hidden.L1"]) is None
    assert copy_stream(torch.device("cuda"), ["logits"]) is None
