"""From plan to batches: one thread reads ahead into reused buffers.

A ring of buffers, each one micro-batch, bounds memory whatever the dataset's size; the reader
copies documents straight into them (page-locked on CUDA). One thread rather than worker
processes: copying releases the interpreter lock, and processes would pay for shared memory, page
faults and a second copy. A buffer is handed out inside a `Step` and is overwritten only after
`Step.release` or after the next step was asked for. Once the ring is made, a step allocates
nothing that grows with tokens: a fresh tensor costs more in page faults than the copy into it.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.coded import CodedRows
from spec_data.shards.errors import DatasetError
from spec_data.shards.packing import PADDING
from spec_train.data.batch import DraftBatch
from spec_train.data.mixture import Documents
from spec_train.data.order import BatchPlan, Pack, rank_slice

READ_AHEAD = 2
"""Micro-batches read beyond those of the step in use."""
ROUND = 32
"""Rows are padded to the longest of the micro-batch, rounded up to this many slots."""
_POLL = 0.2  # seconds between looks at whether to stop, while nothing comes
_SMALL = {
    "input_ids": torch.int64,
    "loss_mask": torch.bool,
    "target_argmax": torch.int64,
    "target_logsumexp": torch.float32,
}


class _Buffer:
    """The tensors of one micro-batch, [B, seq_len, ...], filled again and again."""

    def __init__(
        self,
        dataset: Documents,
        columns: Sequence[str],
        rows: int,
        seq_len: int,
        dtype: torch.dtype,
        pin: bool,
        decode_on: torch.device | None = None,
    ) -> None:
        stored = {c.name: c for c in dataset.manifest.columns}
        self.tensors: dict[str, Tensor] = {}
        self.coded: dict[str, CodedRows] = {}
        for name in dict.fromkeys((*_SMALL, *columns)):
            column = stored.get(name)
            if column and column.lossy and decode_on is not None:
                tables = dataset.tables[name].to(decode_on)
                self.coded[name] = CodedRows(column, tables, rows * seq_len, pin)
                continue
            width = column.width if column else None
            kind = _SMALL.get(name, dtype)
            if column and name not in _SMALL and not name.startswith("hidden."):
                kind = column.coder.logical
            shape = (rows, seq_len) if width is None else (rows, seq_len, width)
            self.tensors[name] = torch.zeros(shape, dtype=kind, pin_memory=pin)
        self.document_ids = torch.zeros(rows, seq_len, dtype=torch.int64, pin_memory=pin)
        self.position_ids = torch.zeros(rows, seq_len, dtype=torch.int64, pin_memory=pin)
        self._positions = torch.arange(seq_len)
        self.columns = tuple(columns)
        self.seq_len = seq_len
        self._pinned = pin
        self._copied: Any = None  # CUDA event: the last copy out of these tensors is done

    def fill(self, dataset: Documents, packs: list[Pack], plan: BatchPlan) -> DraftBatch:
        """Read `packs` side by side; slots after the last token of a row are zero."""
        if self._copied is not None:
            self._copied.synchronize()
        lengths = [[int(plan.lengths[row]) for row in pack] for pack in packs]
        longest = max(1, *map(sum, lengths))
        width = min(self.seq_len, -(-longest // ROUND) * ROUND)
        for coded in self.coded.values():
            coded.clear()
        for b, (pack, counts) in enumerate(zip(packs, lengths, strict=True)):
            dense = {n: self.tensors[n][b, :width] for n in self.columns if n in self.tensors}
            for coded in self.coded.values():
                coded.begin_pack(b * width)
            out, start = dense | self.coded, 0
            for d, (row, count) in enumerate(zip(pack, counts, strict=True)):
                written = dataset.read_into(row, out, start, count)
                if written != count:
                    raise DatasetError(
                        f"{dataset.path}: document {row} gave {written} tokens, the index says "
                        f"{count}; run `spec-data verify`"
                    )
                self.document_ids[b, start : start + count].fill_(d)
                self.position_ids[b, start : start + count].copy_(self._positions[:count])
                start += count
            for values in (*dense.values(), self.position_ids[b, :width]):
                values[start:].zero_()
            self.document_ids[b, start:width].fill_(PADDING)
        return self._batch(packs, width)

    def mark_copied(self) -> None:
        """Note that all copies to the device are queued; `fill` waits until they are done."""
        if self._pinned:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _batch(self, packs: list[Pack], width: int) -> DraftBatch:
        view = {name: t[: len(packs), :width] for name, t in self.tensors.items()}
        small = {name: view.pop(name) for name in _SMALL}
        return DraftBatch(
            **small,
            position_ids=self.position_ids[: len(packs), :width],
            document_ids=self.document_ids[: len(packs), :width],
            hidden=view,
            rows=[list(pack) for pack in packs],
            coded=self.coded,
        )


class Step:
    """The micro-batches of one optimizer step (of this rank): batch `index` of `epoch`.

    `share` is how much of the epoch's documents is done after this step, on all ranks together.
    `numbers[i]` is how many packs of the epoch come before micro-batch i: its place on any ranks.
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
        """Append the micro-batch at place `number`, which lives in `buffer`."""
        self.batches.append(batch)
        self.numbers.append(number)
        self._buffers.append(buffer)

    def release(self, i: int) -> None:
        """Give the buffer of micro-batch i back to the reader; the batch is void after this."""
        buffer, self._buffers[i] = self._buffers[i], None
        if buffer is None:
            return
        buffer.mark_copied()
        self._free.put(buffer)


class BatchStream:
    """Steps of a plan from a position on, read ahead by a thread while `take` is iterated."""

    def __init__(
        self,
        dataset: Documents,
        plan: BatchPlan,
        columns: Sequence[str],
        *,
        batch_size: int,
        dtype: torch.dtype = torch.float32,
        pin: bool = False,
        decode_on: torch.device | str | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Read `columns` of `dataset`; a step's packs come in micro-batches of `batch_size`.

        Micro-batches are dealt out to the ranks whole, so that each is the same on any number of
        them. A rank that gets none, at the end of an epoch, gets one of padding alone: it has
        something to add nothing with.

        States have `dtype`; `pin` page-locks the buffers. Buffers are made by the first `take`.
        Lossy columns are decoded by the reading thread, or, with `decode_on`, on that device by
        `DraftBatch.to`: a half or a quarter of the bytes cross the bus.
        """
        self.dataset, self.plan = dataset, plan
        self.columns = tuple(dict.fromkeys(("input_ids", "loss_mask", *columns)))
        self.batch_size, self.dtype, self.pin = batch_size, dtype, pin
        self.decode_on = None if decode_on is None else torch.device(decode_on)
        self.rank, self.world_size = rank, world_size
        self.epoch, self.batches_done = 0, 0
        self.waited = 0.0  # seconds the consumer stood still for data
        self._ring: list[_Buffer] = []

    def state_dict(self) -> dict[str, Any]:
        """Position after the last step handed out."""
        return self.plan.state(self.epoch, self.batches_done)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, reading nothing.

        Raises:
            ConfigError: the state belongs to another dataset, seed or pack length.
        """
        self.epoch, self.batches_done = self.plan.position(state)

    def take(
        self, count: int, stopping: Callable[[], bool] = lambda: False
    ) -> Generator[Step, None, None]:
        """Yield the next `count` steps, going through as many epochs as it takes.

        Ends before that where `stopping` says so while there is nothing to read.

        Close the generator (or finish it) to stop the thread. What the thread raises is raised
        here, where the step it was reading is due.
        """
        if count and not len(self.plan.rows):
            raise DatasetError(f"{self.dataset.path}: no document to train on in this split")
        self._make_ring()
        free: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        ready: queue.SimpleQueue[Step | BaseException | None] = queue.SimpleQueue()
        for buffer in self._ring:
            free.put(buffer)
        stop = threading.Event()
        position = self.epoch, self.batches_done
        thread = threading.Thread(
            target=self._read, args=(position, count, free, ready, stop), name="read-ahead"
        )
        thread.start()
        try:
            while isinstance(step := self._next(ready, stopping), Step):
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

    def untake(self, step: Step) -> None:
        """Go back to before a step that was handed out and not used, the last one."""
        self.epoch, self.batches_done = step.epoch, step.index

    def read(self, packs: list[Pack]) -> DraftBatch:
        """Read packs into memory of their own, decoded, as a step would have them."""
        buffer = _Buffer(
            self.dataset, self.columns, len(packs), self.plan.seq_len, self.dtype, pin=False
        )
        return buffer.fill(self.dataset, packs, self.plan)

    def _make_ring(self) -> None:
        size = min(self.batch_size, self.plan.rows_per_batch)
        dealt = -(-self.plan.rows_per_batch // size)
        wanted = -(-dealt // self.world_size) + READ_AHEAD
        while len(self._ring) < wanted:
            self._ring.append(
                _Buffer(
                    self.dataset,
                    self.columns,
                    size,
                    self.plan.seq_len,
                    self.dtype,
                    self.pin,
                    self.decode_on,
                )
            )

    def _next(
        self, ready: "queue.SimpleQueue", stopping: Callable[[], bool]
    ) -> Step | BaseException | None:
        start = time.perf_counter()
        try:
            while True:
                try:
                    return ready.get(timeout=_POLL)
                except queue.Empty:
                    if stopping():
                        return None
        finally:
            self.waited += time.perf_counter() - start

    def _walk(
        self, epoch: int, done: int, count: int
    ) -> Iterator[tuple[int, int, float, list[Pack]]]:
        """Epoch, index, share of the epoch done and all packs of the next `count` steps."""
        while count > 0:
            documents, whole = 0, self.plan.documents(epoch)
            for index, batch in enumerate(self.plan.iter_batches(epoch)):
                documents += sum(map(len, batch))
                if index < done:
                    continue
                share = documents / whole
                yield epoch, index, share, batch
                count -= 1
                if not count:
                    return
            epoch, done = epoch + 1, 0

    def _deal(self, index: int, packs: list[Pack]) -> list[tuple[int, list[Pack]]]:
        """This rank's micro-batches of global batch `index`, with their places in the epoch."""
        size, first = self.batch_size, self.plan.packs_before(index)
        parts = [(first + i, packs[i : i + size]) for i in range(0, len(packs), size)]
        return rank_slice(parts, self.rank, self.world_size) or [(first + len(packs), [[]])]

    def _read(
        self,
        position: tuple[int, int],
        count: int,
        free: "queue.SimpleQueue[_Buffer | None]",
        ready: "queue.SimpleQueue[Step | BaseException | None]",
        stop: threading.Event,
    ) -> None:
        """Body of the thread: fill free buffers, hand out whole steps, then None or an error."""
        try:
            for epoch, index, share, packs in self._walk(*position, count):
                step = Step(epoch, index, share, free)
                # for those of all ranks: whoever went ahead would wait for the others elsewhere
                if not self.dataset.wait_for(itertools.chain.from_iterable(packs), stop):
                    return
                for number, part in self._deal(index, packs):
                    buffer = free.get()
                    if buffer is None or stop.is_set():
                        return
                    step.add(buffer.fill(self.dataset, part, self.plan), buffer, number)
                ready.put(step)
            ready.put(None)
        except BaseException as error:
            ready.put(error)
