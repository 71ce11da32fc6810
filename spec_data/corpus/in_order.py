"""Map rows to results in several processes; the results come in the order of the rows.

One process reads, counts and writes; the others parse, render and tokenise, which takes some twenty
times as long. Rows go out in chunks, and only a few chunks are under way, so memory is bounded. The
first rows are mapped in this process: a small corpus is finished before a process would have
started.

`datasets.map` does the same for tables whose columns have types. Rows of a corpus have none before
they are parsed, and a bad row must be counted where it stands, so this is a plain process pool.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from spec_data.corpus.file_rows import JsonText
from spec_data.corpus.row_results import RawRow, RowResult
from spec_data.shards.errors import RunError

logger = logging.getLogger(__name__)

Work = Callable[[RawRow], RowResult]
"""Maps one row. An exception that it raises ends the run at that row."""

_HERE = 512  # rows that this process maps before it starts others
_ROWS, _BYTES = 64, 1 << 20  # of a chunk
_MOST = 16  # processes by default: one process cannot read for more
_PARALLEL_TOKENS = "TOKENIZERS_PARALLELISM"


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
        processes: how many processes map rows; with 1, this one does.

    Raises:
        RunError: a process ended.
    """
    here = make_work(*args)
    for count, row in enumerate(rows):
        yield row, here(row)
        if processes > 1 and count + 1 >= _HERE:
            break
    else:
        return
    yield from _elsewhere(rows, make_work, args, processes)


def _elsewhere(
    rows: Iterator[RawRow], make_work: Callable[..., Work], args: tuple[Any, ...], processes: int
) -> Iterator[tuple[RawRow, RowResult]]:
    """Yield rows with their results from other processes."""
    under_way: deque[tuple[list[RawRow], Future]] = deque()
    chunks = _chunks(rows)
    failure: Exception | None = None
    ended = False
    logger.debug("rendering in %d processes", processes)
    with _pool(make_work, args, processes) as pool:
        while True:
            while not ended and len(under_way) < 2 * processes + 2:
                try:
                    chunk = next(chunks)
                    under_way.append((chunk, pool.submit(_map_chunk, chunk)))
                except StopIteration:
                    ended = True
                except BrokenProcessPool:
                    raise _gone() from None
                except Exception as error:  # of reading: raised after the results before it
                    failure, ended = error, True
            if not under_way:
                break
            chunk, future = under_way.popleft()
            try:
                results, ended_by = future.result()
            except BrokenProcessPool:
                raise _gone() from None
            yield from zip(chunk, results, strict=False)
            if ended_by is not None:
                raise ended_by
    if failure is not None:
        raise failure


def _gone() -> RunError:
    return RunError(
        "a process that rendered documents ended: out of memory, or killed. Run the same command "
        "again with fewer processes (--num-proc), or with a smaller --max-row-bytes"
    )


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


@contextmanager
def _pool(
    make_work: Callable[..., Work], args: tuple[Any, ...], processes: int
) -> Iterator[ProcessPoolExecutor]:
    """Start processes, and end them whatever happens.

    They are forked where that is usual, so that the tokenizer need not be copied. They use no
    device and no library that had threads in this process.
    """
    context = multiprocessing.get_context("fork" if _ON_LINUX else "spawn")
    before = os.environ.get(_PARALLEL_TOKENS)
    os.environ[_PARALLEL_TOKENS] = "false"  # threads do not survive a fork
    try:
        pool = ProcessPoolExecutor(processes, context, _begin, (os.getpid(), make_work, args))
        pool.submit(_nothing)  # starts the processes
    finally:
        if before is None:
            del os.environ[_PARALLEL_TOKENS]
        else:
            os.environ[_PARALLEL_TOKENS] = before
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# --- in the other processes ----------------------------------------------------------------------

_work: Work | None = None


def _begin(parent: int, make_work: Callable[..., Work], args: tuple[Any, ...]) -> None:
    """Prepare a process: it leaves Ctrl-C to its parent, and ends when the parent does."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    logging.disable(logging.CRITICAL)  # the parent has said it all
    _work = make_work(*args)
    logging.disable(logging.NOTSET)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _nothing() -> None:
    pass


def _map_chunk(chunk: list[RawRow]) -> tuple[list[RowResult], Exception | None]:
    """Return the results of a chunk, up to the first exception, and the exception."""
    results: list[RowResult] = []
    assert _work is not None
    try:
        for row in chunk:
            results.append(_work(row))
    except Exception as error:
        return results, error
    return results, None
