"""Checksums of chunks. A chunk is one field of one document, so damage can be named by place.

The checksum is xxh3_64: one core computes 17 GB/s from memory (crc32: 2.4, SHA-256: 1.7). It finds
accidental damage; the SHA-256 in the manifest protects against forgery. The index holds a checksum
of each row's checksums, and the manifest one of the index. So every chunk is compared with what was
written at this place, and a shard under another shard's name is detected when it is first read.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64, xxh3_64_intdigest

from spec_data.shards.schema import OLD_VERSION, Column

CHECKSUMS = "checksums"
"""Name of a shard's last column: the checksums of the row's other fields, in column order."""


def checksum(chunk: np.ndarray | bytes) -> int:
    """Return the xxh3_64 of bytes, or of the bytes of a contiguous array."""
    return xxh3_64_intdigest(chunk.data if isinstance(chunk, np.ndarray) else chunk)


def turns_bytes(turns: Iterable[Sequence[Any]]) -> bytes:
    """Return the bytes that are hashed for (role, start, end) triples: one text line for each."""
    return "".join(f"{role} {start} {end}\n" for role, start, end in turns).encode()


def numbers(array: pa.Array) -> np.ndarray:
    """Return a read-only view [N] of an Arrow number array; `to_numpy` imports pandas (0.5 s)."""
    kind = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.zeros(0, kind)
    stop = array.offset + len(array)  # the buffer may be longer, by any number of bytes
    return np.frombuffer(array.buffers()[1], kind, stop)[array.offset :]


def list_views(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets int64 [rows + 1] and values [N] or [N, W] of a list array, as views."""
    values, width = array.values, None
    if isinstance(values.type, pa.FixedSizeListType):
        width, values = values.type.list_size, values.values
    flat = numbers(values)
    return numbers(array.offsets), flat if width is None else flat.reshape(-1, width)


def chunk_checksums(arrays: Sequence[pa.Array]) -> np.ndarray:
    """Return the checksum of every chunk of these fields, uint64 [rows, fields]."""
    sums = [np.fromiter(map(checksum, _chunks(array)), np.uint64) for array in arrays]
    return np.stack(sums, axis=1)


def _chunks(array: pa.Array) -> Iterator[np.ndarray | bytes]:
    """Yield the chunk of every row of a field: values [n] or [n, W], or bytes of a text."""
    if pa.types.is_large_list(array.type):
        offsets, values = list_views(array)
        yield from (values[a:b] for a, b in itertools.pairwise(offsets.tolist()))
    elif pa.types.is_string(array.type):
        yield from (text.encode() for text in array.to_pylist())
    else:
        yield from (turns_bytes(turn.values() for turn in turns) for turns in array.to_pylist())


def row_checksums(batch: pa.RecordBatch) -> np.ndarray:
    """Return a checksum of each row's checksums, uint64 [rows], as the index holds it."""
    return np.fromiter(map(checksum, stored_checksums(batch)), np.uint64)


def stored_checksums(batch: pa.RecordBatch) -> np.ndarray:
    """Return the checksums stored in a record batch, uint64 [rows, fields]; a view."""
    column = batch.column(CHECKSUMS)
    return numbers(column.values).reshape(-1, column.type.list_size)


def read_batches(file: Path | pa.Buffer) -> tuple[pa.Schema, list[pa.RecordBatch], str]:
    """Map an Arrow stream; return its schema, its record batches (views of it) and its outline.

    Only files of this process are mapped: see `stream_file`. Of others, `file` is the content.

    The outline is the xxh3_64, as 16 hex digits, of the metadata of every IPC message.
    pa.ArrowInvalid or OSError: the file is not an Arrow stream, or is damaged.
    """
    source = file if isinstance(file, pa.Buffer) else pa.memory_map(str(file))
    messages = list(pa.ipc.MessageReader.open_stream(source))
    if not messages:
        raise pa.ArrowInvalid("no message in it")
    digest = xxh3_64()
    for message in messages:
        digest.update(message.metadata)
    # Arrow looks at no kind, and reads a message of another one from wherever its offsets lead
    kinds = [message.type for message in messages]
    if kinds != ["schema"] + ["record batch"] * (len(kinds) - 1):
        raise pa.ArrowInvalid("its messages are not a schema and record batches")
    schema = pa.ipc.read_schema(messages[0])
    for message in messages[1:]:
        if _is_compressed(message.metadata.to_pybytes()):
            raise pa.ArrowInvalid("a record batch is compressed, which the format excludes")
    batches = [pa.ipc.read_record_batch(message, schema) for message in messages[1:]]
    for batch in batches:
        batch.validate()
    return schema, batches, digest.hexdigest()


def _is_compressed(metadata: bytes) -> bool:
    """Return whether a record batch is compressed: 64 kB can hold gigabytes.

    Arrow has no option that refuses to unpack it. The metadata are the flatbuffer `Message` of
    Arrow's Message.fbs, whose offsets Arrow has checked.
    """

    def field(table: int, number: int) -> int:
        """Return where a field of a table is; 0: the table does not have it."""
        vtable = table - int.from_bytes(metadata[table : table + 4], "little", signed=True)
        size, place = int.from_bytes(metadata[vtable : vtable + 2], "little"), 4 + 2 * number
        at = vtable + place
        offset = int.from_bytes(metadata[at : at + 2], "little") if place < size else 0
        return table + offset if offset else 0

    header = field(int.from_bytes(metadata[:4], "little"), 2)  # Message.header: a RecordBatch
    header += int.from_bytes(metadata[header : header + 4], "little")
    return bool(field(header, 3))  # RecordBatch.compression


_TURNS = pa.list_(pa.struct([("role", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """Return the schema of a shard: a field per text and per part of a column, then checksums."""
    fields = [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        *(field for column in columns for field in column.fields()),
        pa.field("turns", _TURNS, nullable=False),
    ]
    kind = pa.list_(pa.field("item", pa.uint64(), nullable=False), len(fields))
    fields.append(pa.field(CHECKSUMS, kind, nullable=False))
    return pa.schema(fields, metadata={"spec-data": OLD_VERSION})
