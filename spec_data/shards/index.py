"""The index of a dataset: index.arrow, checked whole before anything reads a value from it.

Arrow checks little: offsets outside their buffers crash a process that reads a text through them,
and anyone can compute a checksum again.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spec_data.shards.checksums import numbers, read_batches
from spec_data.shards.errors import DatasetError
from spec_data.shards.files import cause
from spec_data.shards.packing import runs
from spec_data.shards.schema import OLD_VERSION, Manifest, View

_COUNTS = ("tokens", "supervised", "first_supervised")
_TEXTS = [pa.field(name, pa.string(), nullable=False) for name in ("doc_id", "source")]
INDEX_SCHEMA = pa.schema(
    [
        *_TEXTS,
        *(pa.field(name, pa.int32(), nullable=False) for name in ("shard", "row", *_COUNTS)),
        pa.field("checksum", pa.uint64(), nullable=False),
    ]
)
PROMPT = "prompt"
"""The last column of an index of format 1.1; see `prompt_keys`."""


def with_prompt(schema: pa.Schema) -> pa.Schema:
    """Return the schema of an index of format 1.1, given that of 1.0."""
    return schema.append(pa.field(PROMPT, pa.uint64(), nullable=False))


def document_digest(ids: bytes, mask: bytes, images: bytes = b"") -> bytes:
    """Return the 16 bytes of a `doc_id`; `ids` are the bytes of int32 [T], `mask` of uint8 [T].

    `images` are the digests of the images that some of the tokens stand for.

    The first 8 are of the tokens alone: documents that differ in the mask only begin alike, and so
    are on the same side of every split.
    """
    ids += images
    return hashlib.sha256(ids).digest()[:8] + hashlib.sha256(ids + mask).digest()[:8]


def view_index_schema(view: View) -> pa.Schema:
    """Return the schema of a view's index.arrow; FORMAT.md explains it."""
    groups = range(len(view.groups))
    names = [f"{name}.{group}" for group in groups for name in ("source_number", "document")]
    spans = pa.list_(pa.field("item", pa.int32(), nullable=False))
    return pa.schema(
        [
            *_TEXTS,
            *(pa.field(name, pa.int32(), nullable=False) for name in (*_COUNTS, *names)),
            *([pa.field("spans", spans, nullable=False)] if view.remasked else []),
        ]
    )


def read_index(file: Path, manifest: Manifest) -> pa.Table:
    """Return the index in a file, in one chunk per column: a row for each document, in order.

    Raises:
        DatasetError: it is no valid Arrow, or contradicts itself or the manifest.
    """
    try:
        stored, batches, _ = read_batches(pa.py_buffer(file.read_bytes()))
        schema = INDEX_SCHEMA if manifest.view is None else view_index_schema(manifest.view)
        if manifest.format_version != OLD_VERSION:
            schema = with_prompt(schema)
        if stored.equals(schema, check_metadata=True):
            for batch in batches:
                batch.validate(full=True)
            table = pa.Table.from_batches(batches, schema).combine_chunks()
            wrong = _wrong(table, manifest)
        else:
            wrong = "its columns are not those of an index"
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        wrong = f"damaged ({cause(error)})"
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
    bad = (tokens <= 0) | (supervised < 0) | (first < 0) | (first + supervised > tokens)
    if bad.any():
        return f"document {bad.argmax()} has impossible counts of tokens"
    totals = {"documents": len(tokens), "tokens": tokens.sum(), "supervised": supervised.sum()}
    for name, count in totals.items():
        if count != getattr(manifest.totals, name):
            return f"{count} {name}, the manifest says {getattr(manifest.totals, name)}"
    if manifest.view is not None:
        return _wrong_references(table, manifest.view, first)
    rows = [record.rows for record in manifest.shards]
    shard, row = (index_numbers(table, name) for name in ("shard", "row"))
    starts = np.cumsum(rows, dtype=np.int64) - rows
    in_order = np.array_equal(shard, np.repeat(np.arange(len(rows)), rows))
    if not in_order or not np.array_equal(row, np.arange(len(row)) - np.repeat(starts, rows)):
        return "documents are not in the order of the manifest's shards"
    return None


def _wrong_references(table: pa.Table, view: View, first: np.ndarray) -> str | None:
    """Return what the index of a view refers to that does not exist; None: nothing."""
    documents = np.array([source.documents for source in view.sources], np.int64)
    for group in range(len(view.groups)):
        source, document = (
            index_numbers(table, f"{name}.{group}") for name in ("source_number", "document")
        )
        bad = (source < 0) | (source >= len(documents))
        if not bad.any():
            bad = (document < 0) | (document >= documents[source])
        if bad.any():
            number = int(bad.argmax())
            place = f"document {document[number]} of source {source[number]}"
            return f"document {number} is said to be {place}, which does not exist"
    if not view.remasked:
        return None
    masks = LossMasks.of_index(table)
    tokens = index_numbers(table, "tokens").astype(np.int64)
    counts = np.diff(masks.offsets)
    if (counts % 2).any():
        return f"document {(counts % 2).argmax()} has half a span of supervised tokens"
    spans = masks.spans[masks.offsets[0] : masks.offsets[-1]].reshape(-1, 2)
    owner = np.repeat(np.arange(len(counts)), counts // 2)
    before = np.zeros(len(spans), np.int64)  # where the span before it, of one document, ends
    before[1:] = np.where(owner[1:] == owner[:-1], spans[:-1, 1], 0)
    bad = (spans[:, 0] < before) | (spans[:, 1] <= spans[:, 0]) | (spans[:, 1] > tokens[owner])
    if bad.any():
        return f"document {owner[bad.argmax()]} has impossible spans of supervised tokens"
    starts = tokens.copy()
    starts[owner[::-1]] = spans[::-1, 0]
    wrong = starts != first
    lengths = np.bincount(owner, spans[:, 1] - spans[:, 0], len(counts)).astype(np.int64)
    wrong |= lengths != masks.supervised
    if wrong.any():
        return f"document {wrong.argmax()} has other supervised tokens than its spans"
    return None


@dataclass(frozen=True, kw_only=True)
class LossMasks:
    """The loss masks of N documents, as spans of supervised tokens.

    Attributes:
        offsets: where the spans of a document begin in `spans`, int64 [N + 1].
        spans: first token and the one after the last, ascending, int64 [S].
        supervised, first_supervised: as the index has them, int64 [N] each.
    """

    offsets: np.ndarray
    spans: np.ndarray
    supervised: np.ndarray
    first_supervised: np.ndarray

    def mask(self, document: int, length: int) -> np.ndarray:
        """Return the mask of a document of `length` tokens, bool [T]."""
        mask = np.zeros(length, bool)
        spans = self.spans[self.offsets[document] : self.offsets[document + 1]]
        for first, last in spans.reshape(-1, 2).tolist():
            mask[first:last] = True
        return mask

    @classmethod
    def of(cls, masks: list[np.ndarray]) -> "LossMasks":
        """Return the spans of masks, bool [T] each."""
        edges = [runs(mask).ravel() for mask in masks]
        firsts = [int(e[0]) if len(e) else len(m) for e, m in zip(edges, masks, strict=True)]
        return cls(
            offsets=np.cumsum([0, *map(len, edges)], dtype=np.int64),
            spans=np.concatenate(edges) if edges else np.zeros(0, np.int64),
            supervised=np.array([int(mask.sum()) for mask in masks], np.int64),
            first_supervised=np.array(firsts, np.int64),
        )

    @classmethod
    def of_index(cls, table: pa.Table) -> "LossMasks":
        """Return those of a view's index."""
        spans = index_column(table, "spans")
        names = ("supervised", "first_supervised")
        return cls(
            offsets=spans.offsets.to_numpy().astype(np.int64),
            spans=spans.values.to_numpy().astype(np.int64),
            **{name: index_numbers(table, name).astype(np.int64) for name in names},
        )
