"""The index of a dataset: index.arrow, checked whole before anything reads a value from it.

Arrow itself checks little: offsets outside their buffers crash a process that reads a text through
them. A checksum does not protect from that, as anyone can compute it again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spec_data.shards.checksums import numbers, read_batches
from spec_data.shards.errors import DatasetError
from spec_data.shards.schema import Manifest, ShardRecord, Totals
from spec_data.shards.view import View, view_index_schema

_COUNTS = ("tokens", "supervised", "first_supervised")
_NUMBERS = ("shard", "row", *_COUNTS)


INDEX_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        *(pa.field(name, pa.int32(), nullable=False) for name in _NUMBERS),
        pa.field("checksum", pa.uint64(), nullable=False),
    ]
)


def read_index(file: Path, manifest: Manifest) -> pa.Table:
    """Return the index in a file, in one chunk per column: a row for each document, in order.

    Raises:
        DatasetError: it is no valid Arrow, or contradicts itself or the manifest.
    """
    try:
        found, batches, _ = read_batches(file)
        schema = INDEX_SCHEMA if manifest.view is None else view_index_schema(manifest.view)
        if found.equals(schema, check_metadata=True):
            for batch in batches:
                batch.validate(full=True)
            table = pa.Table.from_batches(batches, schema).combine_chunks()
            wrong = _wrong(table, manifest)
        else:
            wrong = "its columns are not those of an index"
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        wrong = f"damaged ({error})"
    if wrong:
        raise DatasetError(f"{file}: {wrong}; copy it again")
    return table


def index_column(table: pa.Table, name: str) -> Any:
    """Return a column of an index as one array: a view where possible."""
    chunks = table.column(name)
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def index_numbers(table: pa.Table, name: str) -> np.ndarray:
    """Return a column of numbers of an index, [N]: a view where possible."""
    return numbers(index_column(table, name))


def _wrong(table: pa.Table, manifest: Manifest) -> str | None:
    """Return what the index says wrongly about documents, in words; None: nothing."""
    if any(column.null_count for column in table.columns):
        return "some of its values are null"
    tokens, supervised, first = (index_numbers(table, name).astype(np.int64) for name in _COUNTS)
    none = supervised == 0
    bad = (tokens <= 0) | (supervised < 0) | (first < 0) | (none & (first != tokens))
    bad |= ~none & (first + supervised > tokens)
    if bad.any():
        number = int(bad.argmax())
        return (
            f"document {number} has {tokens[number]} tokens, {supervised[number]} supervised, the "
            f"first at {first[number]}: impossible"
        )
    if manifest.view is not None:
        return _wrong_in_view(table, manifest.view, manifest.totals)
    return _wrong_in_shards(table, manifest.shards)


def _wrong_in_shards(table: pa.Table, shards: Sequence[ShardRecord]) -> str | None:
    """Return where the index of a stored dataset contradicts its shards."""
    rows = np.array([record.rows for record in shards], np.int64)
    if table.num_rows != rows.sum():
        return f"{table.num_rows} documents, the manifest says {rows.sum()}"
    if not np.array_equal(index_numbers(table, "shard"), np.repeat(np.arange(len(rows)), rows)):
        return "documents are not in the order of the manifest's shards"
    starts = np.cumsum(rows) - rows
    expected = np.arange(table.num_rows) - np.repeat(starts, rows)
    if not np.array_equal(index_numbers(table, "row"), expected):
        return "column row does not count the rows of each shard"
    for name, words in (("tokens", "tokens"), ("supervised", "supervised tokens")):
        ends = np.cumsum(index_numbers(table, name), dtype=np.int64)[starts + rows - 1]
        for record, count in zip(shards, np.diff(ends, prepend=0).tolist(), strict=True):
            if count != getattr(record, name):
                return (
                    f"{count} {words} in {record.file}, the manifest says {getattr(record, name)}"
                )
    return None


def _wrong_in_view(table: pa.Table, view: View, totals: Totals) -> str | None:
    """Return where the index of a view contradicts its manifest, or itself."""
    sums = {name: int(index_numbers(table, name).sum()) for name in ("tokens", "supervised")}
    for name, count in (sums | {"documents": table.num_rows}).items():
        if count != getattr(totals, name):
            return f"{count} {name}, the manifest says {getattr(totals, name)}"
    documents = np.array([source.documents for source in view.sources], np.int64)
    for group in range(len(view.groups)):
        source = index_numbers(table, f"source_number.{group}")
        document = index_numbers(table, f"document.{group}")
        if ((source < 0) | (source >= len(documents)) | (document < 0)).any() or (
            document >= documents[source]
        ).any():
            return "it names documents that the sources do not have"
    if not view.remasked:
        return None
    offsets, spans = spans_of(table)
    edges = np.diff(spans, prepend=0) > 0  # ascending, but where a document begins
    edges[offsets[:-1][np.diff(offsets) > 0]] = True
    last = spans[offsets[1:][np.diff(offsets) > 0] - 1]
    covered = np.concatenate([[0], np.cumsum(np.where(np.arange(len(spans)) % 2, spans, -spans))])
    wrong = (np.diff(offsets) % 2).any() or not edges.all() or (spans < 0).any()
    if wrong or (last > index_numbers(table, "tokens")[np.diff(offsets) > 0]).any():
        return "spans are not ascending, or outside their document"
    if (covered[offsets[1:]] - covered[offsets[:-1]] != index_numbers(table, "supervised")).any():
        return "spans and supervised tokens differ"
    return None


def spans_of(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets, int64 [N + 1], and values, int64 [S], of the spans of a view's index."""
    array = index_column(table, "spans")
    return array.offsets.to_numpy().astype(np.int64), array.values.to_numpy().astype(np.int64)
