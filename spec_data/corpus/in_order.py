"""Map rows to results in other processes; the results come in the order of the rows.

One process reads, counts and writes; the others parse, render and tokenise, which takes some twenty
times as long. Rows go out in chunks, and only a few chunks are under way, so memory is bounded. The
first rows are mapped in a thread: a small corpus is finished before processes would have started.

`datasets.map` does the same for tables whose columns have types. Rows of a corpus have none before
they are parsed, and a bad row must be counted where it stands.
"""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from spec_data.corpus.file_rows import JsonText
from spec_data.corpus.record_reader import RawRow, RowResult
from spec_data.models.trial import MemoryBound
from spec_data.shards.errors import CorpusError, RunError

T = TypeVar("T")
Work = Callable[[RawRow], RowResult]
"""Maps one row. An exception that it raises ends the run."""
Chunk = list[RawRow]

_FEW = 512  # rows that are mapped before other processes start
_ROWS, _BYTES = 64, 1 << 20  # of a chunk
_MOST = 16  # processes by default: one process cannot read for more
_SECONDS = 600.0  # for a chunk: chat templates are programs, and one may not end
_MEMORY, _PER_BYTE = 4 << 30, 300
"""Bytes of memory for a chunk, and further ones for each byte of its largest row: a tokenizer takes
up to 250 (Linux)."""
_LAST_SECONDS = 5.0  # for chunks in work when nobody wants their results any more


def default_processes() -> int:
    """Return the number of cores that this process may use, at most 16."""
    linux = sys.platform == "linux"
    return min(_MOST, len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1)


def in_order(
    rows: Iterator[RawRow], work: Work, processes: int
) -> Generator[tuple[RawRow, RowResult]]:
    """Yield every row with its result, in order; `processes` map rows.

    An exception that `rows` raise is raised after the results before it. `work` is inherited by
    forked processes and copied to any other.

    Raises:
        RunError: a process ended.
        CorpusError: some rows take too long, or all memory.
    """
    chunks, count = _chunks(rows), 0
    for chunk in chunks:
        # The results of this thread are waited for no longer than those of a process.
        bound = _bound_of(chunk)
        try:
            yield from _results(chunk, _in_thread(_mapped, work, chunk, bound))
        finally:
            bound.close()  # of a thread that never ends
        count += len(chunk)
        if processes > 1 and count >= _FEW:
            yield from _in_pool(chunks, work, processes)


def in_time(where: str, function: Callable[..., T], *args: Any) -> T:
    """Return what a call returns that renders the row `where`, outside of `in_order`.

    Raises:
        CorpusError: it takes too long, or all memory. Any exception of `function`.
    """
    bound = MemoryBound(_MEMORY)
    future = _in_thread(_alone, bound, function, *args)
    try:
        if not wait([future], _SECONDS).done:
            raise _never_ends(where)
        return future.result()
    except MemoryError:
        raise _takes_all(where, _MEMORY) from None
    finally:
        bound.close()  # of a thread that never ends


def _alone(bound: MemoryBound, function: Callable[..., T], *args: Any) -> T:
    with bound:
        return function(*args)


def _in_thread(function: Callable[..., T], *args: Any) -> "Future[T]":
    """Return the coming result of a call in a thread, which ends with this process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _never_ends(where: str) -> CorpusError:
    return CorpusError(
        f"{where}: not rendered in {_SECONDS:g} s; the chat template of the target's tokenizer may "
        "not end there"
    )


def _takes_all(where: str, most: int) -> CorpusError:
    return CorpusError(
        f"{where}: rendering it needs more than {most:,} bytes of memory; the chat template of the "
        "target's tokenizer may write without end there"
    )


def _bound_of(chunk: Chunk) -> MemoryBound:
    return MemoryBound(_MEMORY + _PER_BYTE * max(map(_size, chunk), default=0))


def _mapped(work: Work, chunk: Chunk, bound: MemoryBound) -> list[RowResult]:
    """Map rows in bounded memory."""
    results: list[RowResult] = []
    try:
        with bound:
            for row in chunk:
                results.append(work(row))
    except MemoryError:
        raise _takes_all(chunk[len(results)].where, bound.most) from None
    return results


def _size(row: RawRow) -> int:
    return len(row.value) if isinstance(row.value, JsonText) else 0


def _results(
    chunk: Chunk, future: "Future[list[RowResult]]"
) -> Generator[tuple[RawRow, RowResult]]:
    if not wait([future], _SECONDS).done:
        raise _never_ends(f"{chunk[0].where} to {chunk[-1].where}")
    yield from zip(chunk, future.result(), strict=True)


def _in_pool(
    chunks: Iterator[Chunk], work: Work, processes: int
) -> Generator[tuple[RawRow, RowResult]]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads do not survive a fork
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, _begin, (os.getpid(), work))
    submitted = _submitted(chunks, pool)
    under_way: deque[tuple[Chunk, Future[list[RowResult]]]] = deque()
    try:
        under_way.extend(islice(submitted, 2 * processes + 2))
        while under_way:
            yield from _results(*under_way[0])
            under_way.popleft()
            under_way.extend(islice(submitted, 1))
    except BrokenProcessPool:
        raise RunError(
            "a process that rendered documents ended: out of memory, or killed. Run the same "
            "command again with fewer processes (--num-proc), or with a smaller --max-row-bytes"
        ) from None
    finally:
        # The pool would wait for the rest of an answer whose process is killed.
        wait([future for _, future in under_way if not future.cancel()], _LAST_SECONDS)
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        # The end of a half-sent answer never comes while this process can write to the pipe, too.
        pool._result_queue._writer.close()  # type: ignore[attr-defined]
        pool.shutdown(cancel_futures=True)


def _submitted(
    chunks: Iterator[Chunk], pool: ProcessPoolExecutor
) -> Iterator[tuple[Chunk, "Future[list[RowResult]]"]]:
    """Yield chunks with their coming results; an exception of reading is the last result."""
    try:
        for chunk in chunks:
            yield chunk, pool.submit(_map, chunk)
    except Exception as error:
        failed: Future[list[RowResult]] = Future()
        failed.set_exception(error)
        yield [], failed


def _chunks(rows: Iterator[RawRow]) -> Iterator[Chunk]:
    """Cut rows into chunks; what comes before an exception of `rows` is a chunk of its own."""
    chunk: Chunk = []
    size = 0
    try:
        for row in rows:
            chunk.append(row)
            size += _size(row)
            if len(chunk) == _ROWS or size >= _BYTES:
                yield chunk
                chunk, size = [], 0
    except Exception:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


# -- in another process ----------------------------------------------------------------------------

_work: Any = None


def _begin(parent: int, work: Work) -> None:
    """Leave signals to the parent, and end when it does."""
    global _work
    _work = work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has the parent's handlers
    # a terminal or a scheduler sends these to the parent as well
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    gc.freeze()  # collecting what is shared with the parent would copy it


def _map(chunk: Chunk) -> list[RowResult]:
    return _mapped(_work, chunk, _bound_of(chunk))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
