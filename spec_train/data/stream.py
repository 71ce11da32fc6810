"""From the planned order to batches: one thread reads ahead into reused buffers.

A fixed number of buffers, each for one micro-batch, bounds memory for a dataset of any size. The
reader copies documents straight into them (page-locked on CUDA). It is one thread: copying releases
the interpreter lock, and processes would cost page faults and a second copy.

A buffer is passed to the consumer in a `Step`. It is overwritten only after `Step.release`, or when
the consumer requests the next step.

Shapes: B packs of a micro-batch, T slots of a pack (`seq_len` in a buffer), H hidden size.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.batch import DraftBatch
from spec_data.shards.errors import DatasetError
from spec_data.shards.packing import PADDING
from spec_data.shards.shard import CodedRows
from spec_train.data.mixture import Documents, parts_of
from spec_train.data.order import BatchPlan, Pack

T = TypeVar("T")

READ_AHEAD = 2
"""Micro-batches read beyond those of the step in use."""
ROUND = 32
"""Packs are padded to the longest of the micro-batch, rounded up to a multiple of this."""
LOOK_AHEAD = 64
"""How many steps are looked ahead, where their shards are less than a quarter of the cache."""
_POLL = 0.2  # seconds between two checks whether to stop, while waiting for data
_SMALL = {"input_ids": torch.int64, "loss_mask": torch.bool, "target_argmax": torch.int64}

PlannedStep = tuple[int, int, float, list[Pack]]
"""Epoch, index of the batch, share of the epoch done after it, and its packs on all ranks."""


@dataclass(frozen=True, kw_only=True)
class BufferOptions:
    """How the reused buffers of a stream are made."""

    dtype: torch.dtype = torch.float32
    """Of states."""
    pin: bool = False
    """Page-lock the buffers, for fast copies to CUDA."""
    decode_on: torch.device | str | None = None
    """`DraftBatch.to` decodes lossy columns on this device, so that half of the bytes
    cross the bus; None: the reading thread decodes them. Pinned batches go to this device."""
    reuse: bool = True
    """Overwrite a batch after its step; False: batches stay as they are, each in new memory."""


class _Buffer:
    """The tensors of one micro-batch, [B * seq_len] or [B * seq_len, H], reused for many.

    A micro-batch of narrower packs is their beginning: what is copied from page-locked memory to a
    device while it computes must be contiguous.
    """

    def __init__(
        self,
        dataset: Documents,
        columns: Sequence[str],
        packs: int,
        seq_len: int,
        options: BufferOptions,
    ) -> None:
        self._made_of = dataset, columns, packs, seq_len, options
        pin = options.pin
        stored = {c.name: c for c in dataset.manifest.columns}
        self.tensors: dict[str, Tensor] = {}
        self.coded: dict[str, CodedRows] = {}
        for name in dict.fromkeys((*_SMALL, *columns)):
            column = stored.get(name)
            if column and column.lossy and options.decode_on is not None:
                self.coded[name] = CodedRows(column.width or 1, packs * seq_len, pin)
                continue
            width = column.width if column else None
            kind = _SMALL.get(name, options.dtype)
            if column and name not in _SMALL and not name.startswith("hidden."):
                kind = column.coder.logical
            shape = (packs * seq_len,) if width is None else (packs * seq_len, width)
            self.tensors[name] = torch.zeros(shape, dtype=kind, pin_memory=pin)
        self.document_ids = torch.zeros(packs * seq_len, dtype=torch.int64, pin_memory=pin)
        self.position_ids = torch.zeros(packs * seq_len, dtype=torch.int64, pin_memory=pin)
        self._positions = np.arange(seq_len)
        # The same memory, as the reader writes to it (`Codec.bits`).
        self._targets: dict[str, Tensor | np.ndarray] = {}
        for name in (n for n in columns if n in self.tensors):
            values, column = self.tensors[name], stored.get(name)
            bits = column.coder.bits(values) if column and not column.lossy else None
            self._targets[name] = values if bits is None else bits
        self._ids, self._places = self.document_ids.numpy(), self.position_ids.numpy()
        self.columns = tuple(columns)
        self.seq_len = seq_len
        self._pinned, self._device = pin, options.decode_on
        self._copied: Any = None  # CUDA event: the last copy out of these tensors is done

    def fill(self, dataset: Documents, packs: Sequence[Pack]) -> DraftBatch:
        """Read `packs` into the buffer; slots after the last token of a pack are zero."""
        if self._copied is not None:
            self._copied.synchronize()
        lengths = [[min(int(dataset.lengths[row]), self.seq_len) for row in pack] for pack in packs]
        longest = max(1, *map(sum, lengths))
        width = min(self.seq_len, -(-longest // ROUND) * ROUND)  # T of this micro-batch
        for coded in self.coded.values():
            coded.clear()
        targets = {n: _of_packs(v, len(packs), width) for n, v in self._targets.items()}
        ids, places = (_of_packs(v, len(packs), width) for v in (self._ids, self._places))
        for b, (pack, counts) in enumerate(zip(packs, lengths, strict=True)):
            # views of pack b, [T] or [T, H]; its slot t is slot b * T + t of the micro-batch
            dense = {name: values[b] for name, values in targets.items()}
            for coded in self.coded.values():
                coded.begin_pack(b * width)
            out, start = dense | self.coded, 0
            for d, (row, count) in enumerate(zip(pack, counts, strict=True)):
                written = dataset.read_into(row, out, start, count, marked=False)
                if written != count:
                    raise DatasetError(
                        f"{dataset.path}: document {row} has {written} tokens, the index says "
                        f"{count}; run `spec-data verify`"
                    )
                ids[b, start : start + count] = d
                places[b, start : start + count] = self._positions[:count]
                start += count
            for values in (*dense.values(), places[b]):
                values[start:] = 0
            ids[b, start:] = PADDING
        return self._batch(packs, width)

    def free(self) -> "_Buffer":
        """Return the buffer for the next batch."""
        return self if self._made_of[-1].reuse else _Buffer(*self._made_of)

    def mark_copied(self) -> None:
        """Note that all copies to the device are queued; `fill` waits until they are done."""
        if self._pinned:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))

    def _batch(self, packs: Sequence[Pack], width: int) -> DraftBatch:
        view = {name: _of_packs(t, len(packs), width) for name, t in self.tensors.items()}
        small = {name: view.pop(name) for name in _SMALL}
        return DraftBatch(
            **small,
            target_logsumexp=view.pop("target_logsumexp", None),
            position_ids=_of_packs(self.position_ids, len(packs), width),
            document_ids=_of_packs(self.document_ids, len(packs), width),
            hidden=view,
            rows=[list(pack) for pack in packs],
            coded=self.coded,
            origin=parts_of(self._made_of[0])[0].origin,
        )


def _of_packs(values: Any, packs: int, width: int) -> Any:
    """Return the beginning of [B * seq_len] or [B * seq_len, H] as [packs, width] or with H."""
    return values[: packs * width].reshape(packs, width, *values.shape[1:])


def read_packs(
    dataset: Documents,
    packs: Sequence[Pack],
    columns: Sequence[str],
    seq_len: int,
    dtype: torch.dtype,
) -> DraftBatch:
    """Read packs of documents into new memory, decoded; documents are cut to `seq_len` tokens.

    Hidden states [B, T, H] have `dtype`; the logits of a dataset and their ids keep their own.
    """
    columns = tuple(dict.fromkeys(("input_ids", "loss_mask", *columns)))
    buffer = _Buffer(dataset, columns, len(packs), seq_len, BufferOptions(dtype=dtype))
    return buffer.fill(dataset, packs)


class Step:
    """This rank's micro-batches of one optimizer step: global batch `index` of `epoch`.

    `share` is the share of the epoch's documents, over all ranks, that is done after this step.
    `numbers[i]` is how many packs of the epoch come before micro-batch i: a number that does not
    depend on how many ranks there are.
    """

    def __init__(
        self, epoch: int, index: int, share: float, free: "queue.SimpleQueue[_Buffer | None]"
    ) -> None:
        self.epoch, self.index, self.share = epoch, index, share
        self.batches: list[DraftBatch] = []
        self.numbers: list[int] = []
        self._buffers: list[_Buffer | None] = []
        self._free = free

    def add(self, batch: DraftBatch, buffer: _Buffer, number: int) -> None:
        """Append a micro-batch whose tensors are in `buffer`; `number` goes to `numbers`."""
        self.batches.append(batch)
        self.numbers.append(number)
        self._buffers.append(buffer)

    def release(self, i: int) -> None:
        """Return the buffer of micro-batch i to the reader; do not use the batch afterwards."""
        buffer, self._buffers[i] = self._buffers[i], None
        if buffer is None:
            return
        buffer.mark_copied()
        self._free.put(buffer.free())


class BatchStream:
    """The steps of a plan from a position on. A thread reads ahead while `take` is iterated."""

    def __init__(
        self,
        dataset: Documents,
        plan: BatchPlan,
        columns: Sequence[str],
        *,
        batch_size: int,
        buffers: BufferOptions | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Read `columns` of `dataset` in the order of `plan`; the first `take` makes the buffers.

        Whole micro-batches are distributed to the ranks, so that each is the same on any number of
        ranks. At the end of an epoch, a rank without a micro-batch receives a padding-only one, so
        that it still joins the all-reduce.

        Args:
            dataset, plan: what to read, and in which order.
            columns: token columns to read; input_ids and loss_mask are always read.
            batch_size: packs of a micro-batch.
            buffers: how the buffers are made; by default float32, not page-locked, decoded.
            rank, world_size: of this process.
        """
        self.dataset, self.plan = dataset, plan
        self.columns = tuple(dict.fromkeys(("input_ids", "loss_mask", *columns)))
        self.batch_size, self.buffer_options = batch_size, buffers or BufferOptions()
        self.rank, self.world_size = rank, world_size
        self.epoch, self.batches_done = 0, 0
        self.waited = 0.0  # seconds for which the consumer waited for data
        self._buffers: list[_Buffer] = []
        self._ready: queue.Queue[Step | BaseException | None] = queue.Queue()
        self._peeked: list[Step | BaseException | None] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step that was yielded."""
        return self.plan.state(self.epoch, self.batches_done)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position without reading data.

        Raises:
            ConfigError: the state is of another dataset, seed or pack length.
        """
        self.epoch, self.batches_done = self.plan.position(state)

    def restart(self, plan: BatchPlan) -> None:
        """Go to the start of another plan, with as many packs in a batch, as long as before."""
        self.plan, self.epoch, self.batches_done = plan, 0, 0

    def take(
        self, count: int, stopping: Callable[[], bool] = lambda: False
    ) -> Generator[Step, None, None]:
        """Yield the next `count` steps, over as many epochs as needed.

        While no data is ready, `stopping` is called several times a second; if it returns True, the
        generator ends early. An exception of the reading thread is raised here, in place of the
        step that it was reading. Close (or finish) the generator to stop the thread.

        Raises:
            DatasetError: the plan has no document.
        """
        if count and not len(self.plan.rows):
            raise DatasetError(f"{self.dataset.path}: no document to train on in this split")
        self._make_buffers()
        free: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        # no SimpleQueue: a signal near the end of its `get(timeout)` can make it wait for ever
        ready = self._ready = queue.Queue()
        for buffer in self._buffers:
            free.put(buffer)
        if not self.buffer_options.reuse:
            self._buffers = []  # what was read into them is the caller's
        stop = threading.Event()
        position = self.epoch, self.batches_done
        thread = threading.Thread(
            target=self._read, args=(position, count, free, ready, stop), name="read-ahead"
        )
        thread.start()
        try:
            while isinstance(step := self._next(stopping), Step):
                self.epoch, self.batches_done = step.epoch, step.index + 1
                yield step
                for i in range(len(step.batches)):
                    step.release(i)
            if step is not None:
                raise step
        finally:
            stop.set()
            free.put(None)
            thread.join()
            self._peeked.clear()

    def peek(self) -> Step | None:
        """Return the step that `take` yields next, if it has been read; the position stays."""
        if not self._peeked:
            with contextlib.suppress(queue.Empty):
                self._peeked.append(self._ready.get_nowait())
        step = self._peeked[0] if self._peeked else None
        return step if isinstance(step, Step) else None

    def untake(self, step: Step) -> None:
        """Go back to before the last yielded step, which was not used."""
        self.epoch, self.batches_done = step.epoch, step.index

    def read(self, packs: list[Pack]) -> DraftBatch:
        """Read and decode packs into new memory, to the values that a step would have."""
        dtype = self.buffer_options.dtype
        return read_packs(self.dataset, packs, self.columns, self.plan.seq_len, dtype)

    def _make_buffers(self) -> None:
        size = min(self.batch_size, self.plan.packs_per_batch)
        batches = -(-self.plan.packs_per_batch // size)  # micro-batches of a global batch
        wanted = -(-batches // self.world_size) + READ_AHEAD
        while len(self._buffers) < wanted:
            self._buffers.append(
                _Buffer(self.dataset, self.columns, size, self.plan.seq_len, self.buffer_options)
            )

    def _next(self, stopping: Callable[[], bool]) -> Step | BaseException | None:
        if self._peeked:
            return self._peeked.pop()
        start = time.perf_counter()
        try:
            while True:
                try:
                    return self._ready.get(timeout=_POLL)
                except queue.Empty:
                    if stopping():
                        return None
        finally:
            self.waited += time.perf_counter() - start

    def _steps(self, epoch: int, done: int, count: int) -> Iterator[PlannedStep]:
        """Yield the next `count` steps after `done` batches of `epoch`."""
        while count > 0:
            documents, total = 0, self.plan.documents(epoch)
            for index, batch in enumerate(self.plan.iter_batches(epoch)):
                documents += sum(map(len, batch))
                if index < done:
                    continue
                yield epoch, index, documents / total, batch
                count -= 1
                if not count:
                    return
            epoch, done = epoch + 1, 0

    def _my_rows(self, step: PlannedStep) -> Iterable[int]:
        """Return the documents of this rank in a step."""
        mine = (packs for _, packs in self._deal(step[1], step[3]))
        return itertools.chain.from_iterable(itertools.chain.from_iterable(mine))

    def _deal(self, index: int, packs: list[Pack]) -> list[tuple[int, list[Pack]]]:
        """Return this rank's micro-batches of a global batch: packs before each, and its packs."""
        size, first = self.batch_size, self.plan.packs_before(index)
        parts = [(first + i, packs[i : i + size]) for i in range(0, len(packs), size)]
        mine = parts[self.rank :: self.world_size]  # ranks differ by at most one
        return mine or [(first + len(packs), [[]])]

    def _read(
        self,
        position: tuple[int, int],
        count: int,
        free: "queue.SimpleQueue[_Buffer | None]",
        ready: "queue.Queue[Step | BaseException | None]",
        stop: threading.Event,
    ) -> None:
        """Run the reading thread: put filled steps on `ready`, then None or an exception."""
        try:
            steps = fetched_ahead(self.dataset, self._steps(*position, count), self._my_rows)
            for epoch, index, share, packs in steps:
                step = Step(epoch, index, share, free)
                # Wait for every rank's documents; otherwise ranks block later, in a collective.
                if not self.dataset.wait_for(itertools.chain.from_iterable(packs), stop):
                    return
                for number, part in self._deal(index, packs):
                    buffer = free.get()
                    if buffer is None or stop.is_set():
                        return
                    step.add(buffer.fill(self.dataset, part), buffer, number)
                ready.put(step)
            ready.put(None)
        except BaseException as error:
            ready.put(error)


# -- remote storage --------------------------------------------------------------------------------
# The shards of coming steps are downloaded while earlier steps are read. A failure here is none of
# the run: the reader meets it again, and raises it.


def fetched_ahead(
    dataset: Documents, steps: Iterable[T], rows: Callable[[T], Iterable[int]]
) -> Iterator[T]:
    """Yield `steps`; shards of the documents `rows(step)` of coming ones are downloaded."""
    sources = [source for part in parts_of(dataset) for source in part.sources]
    mirrors = [source.mirror for source in sources if source.mirror is not None]
    if not mirrors:
        yield from steps
        return
    limit = min(mirror.limit for mirror in mirrors) // 4
    waiting: deque[tuple[T, int]] = deque()
    ahead = 0
    try:
        for step in steps:
            size = dataset.fetch_ahead(rows(step))
            waiting.append((step, size))
            ahead += size
            while waiting and (ahead > limit or len(waiting) > LOOK_AHEAD):
                first, size = waiting.popleft()
                yield first
                ahead -= size
        for step, _ in waiting:
            yield step
    finally:
        for mirror in mirrors:
            mirror.stop()  # a run that is stopped must not wait for them
