"""Copies beside the forward: order, memory and results, with a device that works late."""

from collections import deque

import numpy as np
import pytest
import torch

import spec_data.generation.proof as proof_module
from spec_data.capture.backend import ForwardBatch
from spec_data.generation.transfers import Arrival, copy_stream, encode_columns, store
from spec_data.shards.schema import Column
from spec_data.shards.writer import UnitData
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


MASKS = ([0, 0, 0, 1], [0, 1, 1], [1, 1, 0, 0, 1])
COLUMNS = (
    Column(name="loss_mask", codec="bool8"),
    Column(name="hidden.L0", codec="bf16", width=2),
    Column(name="target_logsumexp", codec="float32", tokens="supervised"),
)


@pytest.mark.parametrize("column", ["hidden.L0", "target_logsumexp"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_tokens_lie_in_their_document_and_unusable_states_are_named(column, order):
    """Also in sparse columns, whose documents have fewer rows than tokens."""
    tokens = [(d, t) for d in order for t in range(len(MASKS[d]))]
    sparse = [(d, t) for d, t in tokens if (MASKS[d] + [0])[t + 1]]
    rows = {"hidden.L0": tokens, "target_logsumexp": sparse}
    none = torch.zeros(0, 0, dtype=torch.long)
    batch = ForwardBatch(none, none, none, order, [len(MASKS[d]) for d in order])
    for spoiled in (None, *rows[column]):
        values = {
            "hidden.L0": torch.tensor([[10.0 * d + t, -1.0] for d, t in tokens]),
            "target_logsumexp": torch.tensor([10.0 * d + t for d, t in sparse]),
        }
        expected = {}
        if column == "hidden.L0":  # constant, which is less than not finite
            values[column][tokens.index((1, 0))] = 0.0
            expected = {1: f"constant-{column}"}
        if spoiled is not None:
            values[column][rows[column].index(spoiled)] = torch.nan
            expected[spoiled[0]] = f"non-finite-{column}"
        lengths = [len(mask) for mask in MASKS]
        data = UnitData.allocate(
            COLUMNS, ["a", "b", "c"], ["s"] * 3, [[], [], []], lengths, np.concatenate(MASKS)
        )
        broken: dict[int, str] = {}
        store(Arrival(encode_columns(values, COLUMNS, {})), values, batch, COLUMNS, data, broken)
        assert broken == expected
        stored = data.tokens["target_logsumexp"]
        if column == "hidden.L0":
            assert stored.tolist() == [10.0 * d + t for d, t in sorted(sparse)]
