"""The index of a dataset: index.arrow, checked whole before anything reads a value from it.

Arrow itself checks little: offsets outside their buffers crash a process that reads a text through
them. A checksum does not protect from that, as anyone can compute it again.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from spec_data.shards.checksums import batches_of, numbers
from spec_data.shards.errors import DatasetError
from spec_data.shards.schema import Manifest

_NUMBERS = ("shard", "row", "tokens", "supervised", "first_supervised")


INDEX_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        *(pa.field(name, pa.int32(), nullable=False) for name in _NUMBERS),
        pa.field("checksum", pa.uint64(), nullable=False),
    ]
)


def read_index(data: pa.Buffer, manifest: Manifest, file: Path) -> pa.Table:
    """Return the index in `data`, in one chunk per column: a row for each document, in order.

    Raises:
        DatasetError: it is no valid Arrow, or contradicts itself or the manifest; named by `file`.
    """
    try:
        found, batches, _ = batches_of(pa.BufferReader(data))
        if not found.equals(INDEX_SCHEMA, check_metadata=True):
            raise DatasetError(f"{file}: its columns are not those of an index; copy it again")
        for batch in batches:
            batch.validate(full=True)
        table = pa.Table.from_batches(batches, INDEX_SCHEMA).combine_chunks()
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{file}: damaged ({error}); copy it again") from None
    wrong = _wrong(table, manifest)
    if wrong:
        raise DatasetError(f"{file}: {wrong}; copy it again")
    return table


def index_numbers(table: pa.Table, name: str) -> np.ndarray:
    """Return a column of numbers of an index, [N]: a view where possible."""
    chunks = table.column(name)
    return numbers(chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks())


def _wrong(table: pa.Table, manifest: Manifest) -> str | None:
    """Return what the index says wrongly about documents, in words; None: nothing."""
    shards = manifest.shards
    rows = np.array([record.rows for record in shards], np.int64)
    if table.num_rows != rows.sum():
        return f"{table.num_rows} documents, the manifest says {rows.sum()}"
    if any(column.null_count for column in table.columns):
        return "some of its values are null"
    shard, row, tokens, supervised, first = (
        index_numbers(table, name).astype(np.int64) for name in _NUMBERS
    )
    if not np.array_equal(shard, np.repeat(np.arange(len(rows)), rows)):
        return "documents are not in the order of the manifest's shards"
    starts = np.cumsum(rows) - rows
    if not np.array_equal(row, np.arange(len(row)) - np.repeat(starts, rows)):
        return "column row does not count the rows of each shard"
    none = supervised == 0
    bad = (tokens <= 0) | (supervised < 0) | (first < 0) | (none & (first != tokens))
    bad |= ~none & (first + supervised > tokens)
    if bad.any():
        number = int(bad.argmax())
        return (
            f"document {number} has {tokens[number]} tokens, {supervised[number]} supervised, the "
            f"first at {first[number]}: impossible"
        )
    for name, values in (("tokens", tokens), ("supervised", supervised)):
        found = np.add.reduceat(values, starts) if len(rows) else np.zeros(0, np.int64)
        differs = np.flatnonzero(found != [getattr(record, name) for record in shards])
        if len(differs):
            place = int(differs[0])
            return (
                f"{found[place]} {name} tokens in {shards[place].file}, the manifest says "
                f"{getattr(shards[place], name)}"
            ).replace("tokens tokens", "tokens")
    return None
