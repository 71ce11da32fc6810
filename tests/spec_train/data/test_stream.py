"""The stream hands out exactly the plan's batches, in bounded memory, from any position."""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from spec_data.shards.errors import DatasetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.order import BatchPlan
from spec_train.data.stream import READ_AHEAD, BatchStream, BufferOptions
from tests.factory import tiny_dataset

COLUMNS = ("input_ids", "loss_mask", "hidden.L1", "hidden.final", "target_argmax")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return HiddenStatesDataset(tiny_dataset(tmp_path_factory.mktemp("data") / "set", n_docs=40))


def make_plan(dataset, packs=4, seed=0, **changes) -> BatchPlan:
    options = dict(seq_len=48, packs_per_batch=packs, seed=seed, fingerprint="tiny") | changes
    return BatchPlan(dataset.lengths, np.arange(len(dataset)), **options)


def make_stream(dataset, columns=COLUMNS, batch_size=2, plan=None, **options) -> BatchStream:
    plan = plan or make_plan(dataset)
    return BatchStream(dataset, plan, columns, batch_size=batch_size, **options)


def snapshot(step) -> list[dict]:
    """Everything in a step, copied."""
    plain = ("input_ids", "loss_mask", "position_ids", "document_ids", "target_argmax")
    return [
        {name: getattr(b, name).clone() for name in plain}
        | {name: t.clone() for name, t in b.hidden.items()}
        | {"rows": torch.tensor([row for pack in b.rows for row in pack])}
        for b in step.batches
    ]


def same(a: list[dict], b: list[dict]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)
        for x, y in zip(a, b, strict=True)
    )


def take(stream, count) -> list[list[dict]]:
    return [snapshot(step) for step in stream.take(count)]


@pytest.mark.parametrize(("dtype", "seq_len"), [(torch.float32, 48), (torch.bfloat16, 16)])
def test_batches_hold_the_documents_of_the_plan_and_zeros_around_them(dataset, dtype, seq_len):
    """Two epochs, so that every buffer is used again with other lengths; cut to `seq_len`."""
    assert dataset.lengths.max() > 16
    plan = make_plan(dataset, seq_len=seq_len)
    stream = make_stream(dataset, plan=plan, buffers=BufferOptions(dtype=dtype))
    seen = []
    for step in stream.take(2 * len(plan.batches(0))):
        for batch in step.batches:
            for b, pack in enumerate(batch.rows):
                start = 0
                for d, row in enumerate(pack):
                    document = {k: v[:seq_len] for k, v in dataset[row].items() if k in COLUMNS}
                    count = len(document["input_ids"])
                    span = slice(start, start + count)
                    for name in (*COLUMNS[:2], "target_argmax"):
                        assert torch.equal(getattr(batch, name)[b, span], document[name])
                    for name in ("hidden.L1", "hidden.final"):
                        assert torch.equal(batch.hidden[name][b, span], document[name].to(dtype))
                    assert (batch.document_ids[b, span] == d).all()
                    assert batch.position_ids[b, span].tolist() == list(range(count))
                    start = span.stop
                    seen.append(row)
                assert not batch.input_ids[b, start:].any()
                assert not batch.loss_mask[b, start:].any()
                assert not batch.target_argmax[b, start:].any()
                assert not any(values[b, start:].any() for values in batch.hidden.values())
                assert (batch.document_ids[b, start:] == -1).all()
    assert sorted(seen) == sorted(2 * list(range(len(dataset))))


@pytest.mark.parametrize("packs", [6, None], ids=["same steps", "one micro-batch each"])
def test_micro_batches_and_their_places_are_the_same_on_any_number_of_ranks(dataset, packs):
    """As in training, and as in validation, where a step has a micro-batch of every rank."""

    def dealt(world):
        found = {}
        plan = make_plan(dataset, packs=packs or 2 * world)
        for rank in range(world):
            stream = make_stream(dataset, plan=plan, rank=rank, world_size=world)
            for step in stream.take(len(plan.batches(0))):
                for number, batch in zip(step.numbers, step.batches, strict=True):
                    if batch.rows != [[]]:
                        assert number not in found
                        found[number] = batch.rows
        return found

    alone = dealt(1)
    assert alone == dealt(3)
    assert sorted(row for rows in alone.values() for pack in rows for row in pack) == list(
        range(len(dataset))
    )


def test_a_rank_that_gets_no_micro_batch_gets_padding(dataset):
    """Even in buffers that were full before."""
    plan = make_plan(dataset, packs=64)
    rows, again = [], []
    for rank in range(2):
        stream = make_stream(dataset, plan=plan, batch_size=64, rank=rank, world_size=2)
        stream._make_buffers()
        for buffer in stream._buffers:
            for values in (*buffer.tensors.values(), buffer.document_ids):
                values.fill_(1)
        for step in stream.take(2):
            (batch,) = step.batches
            rows.append(batch.rows)
            again.append(step.numbers)
            if rank == 1:
                assert (batch.document_ids == -1).all() and not batch.loss_mask.any()
                assert not batch.input_ids.any() and not batch.position_ids.any()
                assert not any(values.any() for values in batch.hidden.values())
    assert len(rows[0]) > 1 and rows[2:] == [[[]], [[]]]
    assert again[:2] == [[0], [0]]


def global_batches(dataset, world: int, count: int, state=None) -> tuple[list, dict]:
    """The next `count` global batches of `world` ranks, as document -> values, and the state."""
    streams = [
        make_stream(dataset, rank=rank, world_size=world, batch_size=1) for rank in range(world)
    ]
    for stream in streams:
        if state is not None:
            stream.load_state_dict(state)
    batches = [{} for _ in range(count)]
    for stream in streams:
        for step, batch in zip(stream.take(count), batches, strict=True):
            for micro in step.batches:
                (rows,) = micro.rows
                for d, row in enumerate(rows):
                    span = micro.document_ids[0] == d
                    assert row not in batch
                    batch[row] = (
                        micro.input_ids[0, span].tolist(),
                        micro.hidden["hidden.L1"][0, span].sum(-1).tolist(),
                    )
    states = [stream.state_dict() for stream in streams]
    assert all(other == states[0] for other in states)
    return batches, states[0]


@pytest.mark.parametrize("before,after", [(1, 4), (2, 1), (4, 2)])
def test_resume_on_another_number_of_ranks_goes_on_with_the_next_global_batch(
    dataset, before, after
):
    """Over the border of an epoch; every document once in each epoch."""
    whole, _ = global_batches(dataset, 1, 12)
    first, state = global_batches(dataset, before, 5)
    assert state == global_batches(dataset, 1, 5)[1]
    rest, _ = global_batches(dataset, after, 7, state)
    assert first + rest == whole
    epoch = len(make_plan(dataset).batches(0))
    assert 5 < epoch < 12
    assert sorted(row for batch in whole[:epoch] for row in batch) == list(range(len(dataset)))


@pytest.mark.parametrize("done", [0, 4, 9])
def test_resume_gives_the_rest_and_reads_nothing_before_it(dataset, done, monkeypatch):
    whole = take(make_stream(dataset), 12)
    stream = make_stream(dataset)
    take(stream, done)
    state = stream.state_dict()
    read = []
    original = HiddenStatesDataset.read_into

    def spy(self, index, *args, **named):
        read.append(index)
        return original(self, index, *args, **named)

    monkeypatch.setattr(HiddenStatesDataset, "read_into", spy)
    again = make_stream(dataset)
    again.load_state_dict(state)
    rest = take(again, 12 - done)
    assert len(rest) == 12 - done
    assert all(same(a, b) for a, b in zip(whole[done:], rest, strict=True))
    assert read == [int(r) for step in rest for b in step for r in b["rows"]]


def test_stopping_early_remembers_what_was_handed_out_not_what_was_read(dataset):
    whole = take(make_stream(dataset), 5)
    stream = make_stream(dataset)
    with contextlib.closing(stream.take(5)) as steps:
        next(steps)
        next(steps)
        time.sleep(0.05)
    assert stream.state_dict()["batches_done"] == 2
    assert all(same(a, b) for a, b in zip(whole[2:], take(stream, 3), strict=True))


def test_a_batch_in_use_is_not_overwritten(dataset):
    stream = make_stream(dataset)
    for step in stream.take(10):
        before = snapshot(step)
        time.sleep(0.02)  # the reader has long filled every other buffer
        assert same(before, snapshot(step))


def test_memory_is_bounded_and_reused(dataset):
    plan = make_plan(dataset, packs=6)
    stream = make_stream(dataset, plan=plan, batch_size=2)
    pointers = {batch.input_ids.data_ptr() for step in stream.take(20) for batch in step.batches}
    assert len(pointers) <= 3 + READ_AHEAD


def test_what_the_thread_raises_arrives_with_its_step(dataset, monkeypatch):
    original = HiddenStatesDataset.read_into
    victim = make_plan(dataset).batches(0)[2][0][0]

    def fail(self, index, *args, **named):
        if index == victim:
            raise DatasetError(f"document {index} is damaged")
        return original(self, index, *args, **named)

    monkeypatch.setattr(HiddenStatesDataset, "read_into", fail)
    got = []
    with pytest.raises(DatasetError, match=f"document {victim} is damaged"):
        got.extend(snapshot(step) for step in make_stream(dataset).take(6))
    assert len(got) == 2


def test_no_thread_is_left_behind(dataset):
    before = threading.active_count()
    stream = make_stream(dataset)
    take(stream, 3)
    with contextlib.closing(stream.take(100)) as steps:
        next(steps)
    steps = stream.take(100)
    next(steps)
    del steps
    assert threading.active_count() == before


def test_an_empty_split_is_an_error_not_an_endless_loop(dataset):
    plan = BatchPlan(dataset.lengths, np.arange(0), seq_len=48, packs_per_batch=2)
    with pytest.raises(DatasetError, match="no document"):
        take(make_stream(dataset, plan=plan), 1)
    assert take(make_stream(dataset, plan=plan), 0) == []


def test_a_signal_whose_handling_takes_long_stops_a_waiting_stream(dataset, monkeypatch):
    """Longer than one poll: `SimpleQueue.get` would then wait for the data, not for the time."""
    released, caught = threading.Event(), []

    def never(rows, stop):
        while not stop.wait(0.01):
            if released.is_set():
                raise DatasetError("the stream waited for data")
        return False

    def handle(number, frame):
        time.sleep(0.3)
        caught.append(number)

    monkeypatch.setattr(dataset, "wait_for", never)
    before = signal.signal(signal.SIGTERM, handle)
    timers = [
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)),
        threading.Timer(20, released.set),
    ]
    try:
        for timer in timers:
            timer.start()
        steps = make_stream(dataset).take(1, lambda: bool(caught))
        assert list(steps) == [] and caught == [signal.SIGTERM]
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGTERM, before)
