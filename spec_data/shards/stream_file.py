"""An Arrow stream whose bytes are read, not mapped: a file that changes is an error, not a crash.

A page of a mapped file that was cut off, or that a disk cannot read, ends the process (SIGBUS), and
Python cannot catch that. So record batches are laid out in memory of the size of the file, of which
only the messages and what `load` is asked for are ever filled: the rest takes no memory. Values are
read where they are needed, by `read`, from the place that Arrow gives them.
"""

import contextlib
import functools
import mmap
import os
import struct
import threading
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa

from spec_data.shards.checksums import read_batches

_CONTINUED = 0xFFFFFFFF  # before the length of a message
_BODY = 3  # number of the field `bodyLength` of a Message, in its flatbuffer
_KEPT = 64 << 20  # bytes of a buffer that a thread keeps for its next read

_kept = threading.local()
_NOTHING = np.zeros(0, np.uint8)


class ChangedError(OSError):
    """A file is not as it was when it was opened."""


class StreamFile:
    """An Arrow stream on the disk.

    Attributes:
        schema, batches: as Arrow has them; their buffers are empty until they are loaded.
        outline: the xxh3_64 of the metadata of all messages, 16 hex digits.
    """

    def __init__(self, file: Path) -> None:
        """Open a file and read its messages.

        Raises:
            OSError: it cannot be read. pa.ArrowException, ValueError: it is no stream, or damaged.
        """
        _allow_many_files()
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._stamp = self._now()
        self._size = os.fstat(self._descriptor).st_size
        if not self._size:
            raise pa.ArrowInvalid("no message in it")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = memoryview(mmap.mmap(-1, self._size, flags=flags))
        buffer = pa.py_buffer(self._memory)
        self._address, self._loaded = buffer.address, set[int]()
        self._lock = threading.Lock()
        self._read_messages()
        self.schema, self.batches, self.outline = read_batches(buffer)

    def _read_messages(self) -> None:
        """Read the metadata of every message to its place."""
        place = 0
        while place + 8 <= self._size:
            self._fill(place, 8)
            mark, length = struct.unpack_from("<Ii", self._memory, place)
            if mark != _CONTINUED or length == 0:
                return
            if length < 0 or place + 8 + length > self._size:
                raise pa.ArrowInvalid("a message that is longer than the file")
            self._fill(place + 8, length)
            body = _body_length(self._memory[place + 8 : place + 8 + length])
            if not 0 <= body <= self._size - place - 8 - length:
                raise pa.ArrowInvalid("a message that is longer than the file")
            place += 8 + length + body

    def _fill(self, start: int, length: int) -> None:
        self._read_into(self._memory[start : start + length], start)

    def _read_into(self, out: memoryview, start: int) -> None:
        """Fill `out` from the file; ChangedError: it ends before."""
        done = 0
        while done < len(out):
            count = os.preadv(self._descriptor, [out[done:]], start + done)
            if not count:
                raise ChangedError(
                    "it was cut off while it was read: another program writes this file"
                )
            done += count

    def _now(self) -> tuple[int, int]:
        state = os.fstat(self._descriptor)
        return state.st_size, state.st_mtime_ns

    def changed(self) -> bool:
        """Whether the file was written to since it was opened, or this was asked."""
        now = self._now()
        if now == self._stamp:
            return False
        self._stamp = now
        with self._lock:
            self._loaded.clear()
        return True

    def load(self, *buffers: pa.Buffer | None) -> None:
        """Read the content of buffers of the batches, once."""
        for buffer in buffers:
            if buffer is None or not buffer.size or buffer.address in self._loaded:
                continue
            start = buffer.address - self._address
            if not 0 <= start <= self._size - buffer.size:
                continue  # not of the file: Arrow has made it
            with self._lock:
                if buffer.address not in self._loaded:
                    self._fill(start, buffer.size)
                    self._loaded.add(buffer.address)

    def read(self, values: np.ndarray, *, keep: bool = True) -> np.ndarray:
        """Return the content of a part of a buffer of a batch, of the same shape and dtype.

        Without `keep`, it is overwritten by the next such read of this thread.
        """
        size = values.nbytes
        if keep or size > _KEPT:
            raw = np.empty(size, np.uint8)
        else:
            if len(kept := getattr(_kept, "bytes", _NOTHING)) < size:
                kept = _kept.bytes = np.empty(size, np.uint8)
            raw = kept[:size]
        read = raw.view(values.dtype).reshape(values.shape)
        self.read_into(values, read)
        return read

    def read_into(self, values: np.ndarray, out: np.ndarray) -> None:
        """Read the content of a part of a buffer into an array of the same shape and dtype."""
        if not (size := values.nbytes):
            return
        start = values.__array_interface__["data"][0] - self._address
        if not 0 <= start <= self._size - size or not values.flags.c_contiguous:
            raise ValueError("values outside the file")
        self._read_into(out.reshape(-1).view(np.uint8).data, start)


def _body_length(metadata: memoryview) -> int:
    """Return the length of the body behind the metadata of a message, a flatbuffer."""
    try:
        (table,) = struct.unpack_from("<I", metadata, 0)
        (back,) = struct.unpack_from("<i", metadata, table)
        (fields,) = struct.unpack_from("<H", metadata, table - back)
        if fields < 4 + 2 * _BODY + 2:
            return 0
        (offset,) = struct.unpack_from("<H", metadata, table - back + 4 + 2 * _BODY)
        return struct.unpack_from("<q", metadata, table + offset)[0] if offset else 0
    except struct.error:
        raise pa.ArrowInvalid("a message without a readable head") from None


@functools.cache
def _allow_many_files() -> None:
    """Allow as many open files as the system lets this process have: one is kept per shard."""
    import resource

    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
