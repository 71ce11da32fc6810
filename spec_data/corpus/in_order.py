"""Map rows to results in other processes; the results come in the order of the rows.

One process reads, counts and writes; the others parse, render and tokenise, which takes some twenty
times as long. Rows go out in chunks, and only a few chunks are under way, so memory is bounded. The
first rows are mapped in one other process: a small corpus is finished before more would have
started. The other processes have limits (`limits.py`), because chat templates run in them.

`datasets.map` does the same for tables whose columns have types. Rows of a corpus have none before
they are parsed, and a bad row must be counted where it stands.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

from spec_data.corpus.file_rows import JsonText
from spec_data.corpus.limits import Child
from spec_data.corpus.record_reader import RawRow, RowResult

Work = Callable[[RawRow], RowResult]
"""Maps one row. An exception that it raises ends the run at that row."""
Chunk = list[RawRow]
Results = Generator[tuple[RawRow, RowResult]]

_FEW = 512  # rows that one process maps before others start
_ROWS, _BYTES = 64, 1 << 20  # of a chunk
_MOST = 16  # processes by default: one process cannot read for more


def default_processes() -> int:
    """Return the number of cores that this process may use, at most 16."""
    linux = sys.platform == "linux"
    return min(_MOST, len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1)


def in_order(
    rows: Iterator[RawRow],
    make_work: Callable[..., Work],
    args: tuple[Any, ...],
    processes: int,
) -> Results:
    """Yield every row with its result, in order.

    Args:
        rows: the rows. An exception that they raise is raised after the results before it.
        make_work: makes the work from `args`, in every process once.
        args: are inherited by a forked process and copied to any other.
        processes: how many processes map rows.

    Raises:
        RunError: a process ended.
        CorpusError: a chat template does not end, for several rows.
    """
    chunks, count = _chunks(rows), 0
    with ExitStack() as stack:

        def start() -> Child:
            child = Child(make_work, args)
            stack.callback(child.end)
            return child

        first = start()
        for chunk in chunks:
            yield from _results(chunk, *first.map(chunk))
            count += len(chunk)
            if processes > 1 and count >= _FEW:
                break
        else:
            return
        # All are forked before the first thread starts.
        children = [first, *(start() for _ in range(processes - 1))]
        pool = ThreadPoolExecutor(len(children))
        stack.callback(pool.shutdown, cancel_futures=True)
        for child in children:
            stack.callback(child.end)  # before the threads that wait for it
        yield from _in_all(chunks, children, pool)


def _results(chunk: Chunk, results: Sequence[Any], error: Exception | None) -> Results:
    """Yield the rows of a chunk with their results, then raise the error of the next row."""
    for row, result in zip(chunk, results, strict=False):
        yield row, RowResult(bad=str(result)) if isinstance(result, TimeoutError) else result
    if error is not None:
        raise error


def _in_all(
    chunks: Iterator[Chunk], children: Sequence[Child], pool: ThreadPoolExecutor
) -> Results:
    """Yield rows with their results from all children; a thread waits for each."""
    idle: SimpleQueue[Child] = SimpleQueue()
    for child in children:
        idle.put(child)

    def mapped(chunk: Chunk) -> tuple[list[Any], Exception | None]:
        child = idle.get()
        try:
            return child.map(chunk)
        finally:
            idle.put(child)

    under_way: deque[tuple[Chunk, Future]] = deque()
    failure: Exception | None = None  # of reading: raised after the results before it
    more = True
    while more or under_way:
        while more and len(under_way) < 2 * len(children) + 2:
            try:
                chunk = next(chunks)
                under_way.append((chunk, pool.submit(mapped, chunk)))
            except StopIteration:
                more = False
            except Exception as error:
                failure, more = error, False
        if under_way:
            chunk, future = under_way.popleft()
            yield from _results(chunk, *future.result())
    if failure is not None:
        raise failure


def _chunks(rows: Iterator[RawRow]) -> Iterator[Chunk]:
    """Cut rows into chunks; what comes before an exception of `rows` is a chunk of its own."""
    chunk: Chunk = []
    size = 0
    try:
        for row in rows:
            chunk.append(row)
            size += len(row.value) if isinstance(row.value, JsonText) else 0
            if len(chunk) == _ROWS or size >= _BYTES:
                yield chunk
                chunk, size = [], 0
    except Exception:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk
