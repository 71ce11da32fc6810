"""Map rows to results in other processes; the results come in the order of the rows.

One process reads, counts and writes; the others parse, render and tokenise, which takes some twenty
times as long. Rows go out in chunks, and only a few chunks are under way, so memory is bounded. The
first rows are mapped in one other process: a small corpus is finished before more would have
started. The other processes have limits (`limits.py`), because chat templates run in them.

`datasets.map` does the same for tables whose columns have types. Rows of a corpus have none before
they are parsed, and a bad row must be counted where it stands.
"""

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

from spec_data.corpus.file_rows import JsonText
from spec_data.corpus.limits import Child
from spec_data.corpus.record_reader import RawRow, RowResult

logger = logging.getLogger(__name__)

Work = Callable[[RawRow], RowResult]
"""Maps one row. An exception that it raises ends the run at that row."""

_FEW = 512  # rows that one process maps before others start
_ROWS, _BYTES = 64, 1 << 20  # of a chunk
_MOST = 16  # processes by default: one process cannot read for more


def default_processes() -> int:
    """Return the number of cores that this process may use, at most 16."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0)) if _ON_LINUX else os.cpu_count() or 1))


_ON_LINUX = sys.platform == "linux"


def in_order(
    rows: Iterator[RawRow],
    make_work: Callable[..., Work],
    args: tuple[Any, ...],
    processes: int,
) -> Iterator[tuple[RawRow, RowResult]]:
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
    with ExitStack() as started:
        children = [_child(make_work, args, started)]
        for chunk in chunks:
            results, failure = children[0].map(chunk, _ended)
            yield from zip(chunk, results, strict=False)
            if failure is not None:
                raise failure
            count += len(chunk)
            if processes > 1 and count >= _FEW:
                break
        else:
            return
        # All are forked before the first thread starts.
        children += [_child(make_work, args, started) for _ in range(processes - 1)]
        logger.debug("rendering in %d processes", processes)
        yield from _in_all(chunks, children, started)


def _child(make_work: Callable[..., Work], args: tuple[Any, ...], started: ExitStack) -> Child:
    child = Child(make_work, args)
    started.callback(child.end)
    return child


def _ended(row: RawRow, reason: str) -> RowResult:
    """Return the result of a row that ended its process."""
    return RowResult(bad=reason)


def _in_all(
    chunks: Iterator[list[RawRow]], children: Sequence[Child], started: ExitStack
) -> Iterator[tuple[RawRow, RowResult]]:
    """Yield rows with their results from all children; a thread waits for each."""
    idle: SimpleQueue[Child] = SimpleQueue()
    for child in children:
        idle.put(child)

    def mapped(chunk: list[RawRow]) -> tuple[list[RowResult], Exception | None]:
        child = idle.get()
        try:
            return child.map(chunk, _ended)
        finally:
            idle.put(child)

    under_way: deque[tuple[list[RawRow], Future]] = deque()
    failure: Exception | None = None
    ended = False
    pool = ThreadPoolExecutor(len(children))
    started.callback(pool.shutdown, cancel_futures=True)
    for child in children:
        started.callback(child.end)  # before the threads that wait for it
    while True:
        while not ended and len(under_way) < 2 * len(children) + 2:
            try:
                chunk = next(chunks)
                under_way.append((chunk, pool.submit(mapped, chunk)))
            except StopIteration:
                ended = True
            except Exception as error:  # of reading: raised after the results before it
                failure, ended = error, True
        if not under_way:
            break
        chunk, future = under_way.popleft()
        results, ended_by = future.result()
        yield from zip(chunk, results, strict=False)
        if ended_by is not None:
            raise ended_by
    if failure is not None:
        raise failure


def _chunks(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    """Cut rows into chunks; what comes before an exception of `rows` is a chunk of its own."""
    chunk: list[RawRow] = []
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
