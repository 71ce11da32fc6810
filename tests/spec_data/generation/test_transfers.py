"""Copies beside the forward: order, memory and results, with a device that works late."""

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import spec_data.generation.proof as proof_module
import spec_data.generation.run as generation_run
from spec_data.capture.backend import ForwardBatch
from spec_data.generation import capture, halving, ray_engine
from spec_data.generation.ray_engine import RayReplica, Replicas
from spec_data.generation.transfers import Arrival, copy_stream, encode_columns, store
from spec_data.shards.schema import Column
from spec_data.shards.writer import UnitData
from tests.gpu.late_device import LateDevice
from tests.spec_data.runs import digests, run
from tests.spec_data.shards import codec_tools
from tests.spec_data.shards.codec_tools import MIXED

target, corpus = codec_tools.target, codec_tools.corpus


def test_arrays_are_whole_after_waiting():
    streams, waiting = LateDevice(), deque()
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


FORWARD, COPY, STORE = 1.0, 0.02, 0.4
"""Seconds of a forward, of the copy of a tensor, and of the host's work on what has arrived."""


@pytest.fixture
def device(monkeypatch):
    """A late device that captures."""
    device, forward, put = LateDevice(COPY), capture.forward_columns, capture.store

    def forward_columns(*given):
        device.compute(FORWARD)
        return forward(*given)

    def store_late(arrival, *given):
        put(arrival, *given)
        device.host(STORE)

    monkeypatch.setattr(proof_module, "copy_stream", lambda *_: device)
    monkeypatch.setattr(capture, "forward_columns", forward_columns)
    monkeypatch.setattr(capture, "store", store_late)
    return device


SMALL = {"batch_tokens": "96", "max_shard_size": "2KB", "max_length": 100}


@pytest.mark.parametrize(
    "given",
    [MIXED, pytest.param({"supervision": "topk:3", "teacher": "all"}, marks=pytest.mark.long)],
)
def test_a_late_device_makes_the_same_bytes_and_is_never_idle(
    target, corpus, tmp_path, given, device
):
    """States that escape, sparse columns, and many units, of one forward or several."""
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(proof_module, "copy_stream", lambda *_: None)
        run(target, corpus, tmp_path / "plain", **given | SMALL)
    device.__init__(COPY)
    run(target, corpus, tmp_path / "late", **given | SMALL)
    shards = len(list((tmp_path / "late" / "shards").iterdir()))
    forwards = device.log.count("after compute")
    assert shards > 8 and forwards < 3 * shards and not device.queue
    # The copies of a batch are queued before the host waits for the batch before it.
    assert device.log[:3] == ["after compute", "after compute", "synchronize"]
    assert device.idle_share <= 0.02
    assert digests(tmp_path / "plain") == digests(tmp_path / "late")


def test_a_queue_that_is_emptied_after_each_unit_would_be_seen(
    target, corpus, tmp_path, monkeypatch, device
):
    def one_by_one(target, plan, units, settings, count):
        return (next(capture.capture_units(target, plan, [u], settings, count)) for u in units)

    monkeypatch.setattr(halving, "capture_units", one_by_one)
    run(target, corpus, tmp_path / "late", **MIXED | SMALL)
    assert device.idle_share > 0.2


@pytest.mark.long
def test_a_replica_of_ray_is_not_idle_either(target, corpus, tmp_path, monkeypatch, device):
    """Its units are calls in threads; those that wait are begun before one that ends is stored."""
    run(target, corpus, tmp_path / "plain", **MIXED | SMALL)
    device.__init__(COPY)

    def on_threads(options, fleet, plan, out, todo):
        class Replica(RayReplica):
            def _load(self):
                while len(self._waiting) < len(todo):
                    time.sleep(0.001)
                return super()._load()

        replica = Replica(fleet.target, options, str(out), 0, torch.get_num_threads())
        with ThreadPoolExecutor(len(todo)) as threads:
            assert list(threads.map(replica.capture, todo)) == todo
        replica.close()

    alone = nullcontext(Replicas(str(target), 1, 0, "cpu"))
    monkeypatch.setattr(ray_engine, "connected", lambda *_: alone)
    monkeypatch.setattr(generation_run, "capture_on_ray", on_threads)
    level = logging.getLogger("spec_data").level
    try:
        run(target, corpus, tmp_path / "late", engine="ray", **MIXED | SMALL)
    finally:
        logging.getLogger("spec_data").setLevel(level)
    assert len(list((tmp_path / "late" / "shards").iterdir())) > 8 and not device.queue
    assert device.idle_share <= 0.02
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
