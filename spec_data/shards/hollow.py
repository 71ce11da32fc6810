"""Hollow copies of remote shards: local files of the shard's size without the values of its tokens.

A hollow copy holds what is needed to find every value and to name every document: the metadata,
offsets, texts and checksums. It is a sparse file, so the values take no space on the disk, and it
is mapped like a shard. A value's address in the map tells where it is in the remote shard. What is
not there reads as zeros: nothing may use a value of a hollow copy.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from spec_data.shards.files import temporary_name, writing

_MESSAGE = 64 << 10  # bytes that are read for a message's metadata; it has a few thousand
_GAP = 256 << 10  # ranges that are nearer than this are read as one

Ranges = Sequence[tuple[int, int]]
ReadRanges = Callable[[Ranges], Iterable[bytes]]


def write_hollow_copy(file: Path, size: int, read: ReadRanges, whole: Sequence[str] = ()) -> None:
    """Write the hollow copy of a shard of `size` bytes; `file` exists once it is complete.

    `read` returns the bytes of several ranges of the shard, in order. Values of the token columns
    in `whole` are copied as well.

    Raises:
        pa.ArrowInvalid, OSError: the shard is no Arrow stream; no file is left behind.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(file)
    try:
        with temporary.open("wb") as target:
            target.truncate(size)
        with temporary.open("r+b", buffering=0) as target:
            batches = _copy_metadata(target, temporary, size, read)
            ranges = merged(_without(values_of(temporary, batches, whole), size), _GAP)
            for (start, _), data in zip(ranges, read(ranges), strict=True):
                with writing(file):
                    target.seek(start)
                    target.write(data)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def mapped(file: Path) -> pa.Buffer:
    """Map a file; `address` of the buffer is that of its first byte."""
    return pa.memory_map(str(file)).read_buffer()


def message_spans(buffer: pa.Buffer) -> list[tuple[int, int]]:
    """Return where each record batch of a mapped shard begins and ends, with its metadata."""
    source = pa.BufferReader(buffer)
    reader = pa.ipc.MessageReader.open_stream(source)
    ends = [0]
    try:
        while True:
            reader.read_next_message()
            ends.append(source.tell())
    except StopIteration:
        return list(itertools.pairwise(ends[1:]))  # the first message is the schema


def _copy_metadata(target: BinaryIO, file: Path, size: int, read: ReadRanges) -> int:
    """Copy the metadata of all messages, one after another; return the number of batches."""
    end, count = 0, 0
    while end + 8 <= size:
        (data,) = read([(end, min(end + _MESSAGE, size))])
        length = int.from_bytes(data[4:8], "little")
        if data[:4] != b"\xff\xff\xff\xff" or length > size - end:
            raise pa.ArrowInvalid(f"no message at byte {end}")
        if length == 0:
            target.seek(end)
            target.write(data[:8])
            break
        if len(data) < 8 + length:
            (data,) = read([(end, end + 8 + length)])
        target.seek(end)
        target.write(data[: 8 + length])
        source = pa.memory_map(str(file))
        source.seek(end)
        pa.ipc.MessageReader.open_stream(source).read_next_message()
        end, count = source.tell(), count + 1
    return count - 1


def values_of(file: Path, batches: int, whole: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Return where the values of token columns are in a shard whose metadata is in `file`.

    Those of the columns in `whole` are left out. The ranges are ascending.
    """
    buffer = mapped(file)
    reader = pa.ipc.open_stream(pa.BufferReader(buffer))
    found = []
    for _ in range(batches):
        batch = reader.read_next_batch()
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if pa.types.is_large_list(field.type) and field.name not in whole:
                values = column.buffers()[-1]  # the innermost: the numbers
                if values is not None and values.size:
                    start = values.address - buffer.address
                    found.append((start, start + values.size))
    return sorted(found)


def _without(values: Ranges, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of 0 to `size` that `values` (ascending) leaves."""
    last = 0
    for start, stop in values:
        if last < start:
            yield last, start
        last = stop
    if last < size:
        yield last, size


def merged(ranges: Iterable[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """Join ascending ranges that are less than `gap` apart: one request is cheaper than two."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and start - found[-1][1] < gap:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found
