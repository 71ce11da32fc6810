"""HiddenStatesDataset: open instantly, read any document, copy straight into a caller's buffer.

Opening reads the manifest and stats the shards; the index and each shard are memory-mapped at
first use. Everything handed out is a copy: a tensor over mapped memory is read-only behind
torch's back, and one in-place operation on it would kill the process.
"""

import bisect
import itertools
import json
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.files import sha256_file
from spec_data.shards.lossy import Tables
from spec_data.shards.rows import StoredRows, decode_rows, runs
from spec_data.shards.schema import (
    Column,
    Manifest,
    ShardRecord,
    arrow_schema,
    predicts_supervised,
)
from spec_data.shards.tables import TABLES, load_tables

MANIFEST = "manifest.json"
INDEX = "index.arrow"
_MASK = Column(name="loss_mask", codec="bool8")
_NO_ROWS = np.zeros(0, np.int32)


class HiddenStatesDataset:
    """A sealed dataset directory: one row per document, token frame, unshifted.

    Row t of a document holds x_t, m_t, the captured states at t, and what the target predicts for
    x_{t+1}: `hidden.final` (or top-k or logits), `target_argmax`, `target_logsumexp`. Lossy columns
    are decoded: columns are named, projected and handed out as if all were stored in bf16.
    """

    def __init__(self, path: str | Path, columns: Sequence[str] | None = None) -> None:
        """Open `path`; `columns` projects the token columns (default: all).

        Raises:
            MissingError: no such directory, an unsealed dataset, or a shard that is gone.
            DatasetError: a damaged or foreign manifest, a truncated shard, an unknown column.
        """
        self.path = Path(path)
        if not self.path.is_dir():
            raise MissingError(f"{self.path}: no such dataset directory")
        if not (self.path / MANIFEST).is_file():
            if (self.path / ".generate").is_dir():
                raise MissingError(
                    f"{self.path}: not sealed yet; run the same `spec-data generate` again to "
                    "finish it, or `spec-data seal` once all its workers are done"
                )
            raise MissingError(f"{self.path}: no {MANIFEST}, so this is not a spec-data dataset")
        self.manifest = Manifest.read(self.path / MANIFEST)
        self._check_sizes()
        known = {c.name: c for c in self.manifest.columns}
        unknown = [name for name in columns or () if name not in known]
        if unknown:
            raise DatasetError(
                f"{self.path}: no column {', '.join(unknown)}; it has {', '.join(known)}"
            )
        wanted = columns if columns is not None else tuple(known)
        self._columns: dict[str, Column] = {name: known[name] for name in wanted}
        self._shards: dict[int, Shard] = {}

    @property
    def columns(self) -> tuple[str, ...]:
        """Token columns after projection."""
        return tuple(self._columns)

    @property
    def final(self) -> str:
        """ "all"; or "supervised": rows of `hidden.final` are zero where x_{t+1} is not."""
        return self.manifest.final

    @cached_property
    def tables(self) -> dict[str, Tables]:
        """Decoding tables of the lossy columns."""
        widths = {c.name: c.width or 1 for c in self.manifest.columns if c.lossy}
        file = self.path / TABLES
        return load_tables(file, widths, self.manifest.codec.get("sha256", "")) if widths else {}

    @property
    def target_dir(self) -> Path:
        """Folder with the target's config.json, tokenizer and head.safetensors."""
        return self.path / "target"

    def _check_sizes(self) -> None:
        """A truncated or missing shard is an error at open, not garbage in a batch."""
        for record in self.manifest.shards:
            file = self.path / record.file
            if not file.is_file():
                raise MissingError(f"{file}: shard is missing; copy the dataset again")
            size = file.stat().st_size
            if size != record.bytes:
                raise DatasetError(
                    f"{file}: {size:,} bytes, the manifest says {record.bytes:,}: truncated or "
                    "replaced; copy this shard again"
                )

    def target_config(self) -> dict[str, Any]:
        """The target's configuration, every default spelt out.

        Raises:
            MissingError, DatasetError: the file is gone, or not the one that was sealed.
        """
        file = checked_file(self.path, "target/config.json", self.manifest)
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return config

    @cached_property
    def _index(self) -> pa.Table:
        file = checked_file(self.path, INDEX, self.manifest)
        try:
            table = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            raise DatasetError(f"{file}: damaged ({error}); copy it again") from None
        rows = self.manifest.raw["totals"]["documents"]
        if table.num_rows != rows:
            raise DatasetError(f"{file}: {table.num_rows} documents, the manifest says {rows}")
        return table

    def _index_column(self, name: str) -> np.ndarray:
        chunks = self._index.column(name)
        return np.concatenate([_numbers(chunk) for chunk in chunks.chunks] or [np.zeros(0, int)])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 [N]."""
        return self._index_column("tokens").astype(np.int64)

    @cached_property
    def supervised(self) -> np.ndarray:
        """Supervised tokens per document, int64 [N]."""
        return self._index_column("supervised").astype(np.int64)

    @cached_property
    def first_supervised(self) -> np.ndarray:
        """Index of the first supervised token, int64 [N]; the length when there is none."""
        return self._index_column("first_supervised").astype(np.int64)

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        return self._index_column("shard"), self._index_column("row")

    @cached_property
    def id_array(self) -> pa.StringArray:
        """Content hash of every document, over the mapped index: no Python object per document."""
        chunks = self._index.column("doc_id")
        return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()

    @cached_property
    def doc_ids(self) -> list[str]:
        """Content hash of every document."""
        return self.id_array.to_pylist()

    def __len__(self) -> int:
        return int(self.manifest.raw["totals"]["documents"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A document as fresh tensors (safe to modify), with `doc_id`, `source` and `turns`."""
        shard, row = self._locate(index)
        out: dict[str, Any] = shard.texts(row)
        count = shard.length(row)
        for column in self._columns.values():
            if column.lossy or column.sparse:
                values = torch.empty(count, column.width or 1, dtype=torch.bfloat16)
                self._decode(shard, row, column, values)
                out[column.name] = values
            else:
                out[column.name] = column.coder.decode(shard.part(column, row))
        return out

    def read_into(
        self, index: int, out: dict[str, Tensor], start: int = 0, length: int | None = None
    ) -> int:
        """Copy the first `length` tokens of a document into `out[column][start : start+length]`.

        `out` tensors are CPU, [T] or [T, W], and set the dtype; columns not in `out` are not
        touched. Gives the number of tokens written.

        Raises:
            DatasetError: a column that is not there, or a buffer that is too short.
        """
        shard, row = self._locate(index)
        whole = int(self.lengths[index])
        count = whole if length is None else min(length, whole)
        stop = start + count
        if shard.length(row) < count:
            raise DatasetError(
                f"{shard.file}: row {row} has {shard.length(row)} tokens, the index says "
                f"{whole}; run `spec-data verify`"
            )
        for name, buffer in out.items():
            column = self._columns.get(name)
            if column is None:
                raise DatasetError(f"{self.path}: no column {name!r} to read; {self.columns}")
            part = buffer[start:stop]
            if part.shape[0] != count:
                raise DatasetError(
                    f"buffer of {len(buffer)} tokens is too short for tokens {start} to "
                    f"{stop} of document {index}"
                )
            if column.lossy or column.sparse:
                self._decode(shard, row, column, part)
            else:
                column.coder.decode_into(shard.part(column, row)[:count], part)
        return count

    def shard_of(self, index: int) -> str:
        """Name of the shard file that holds a document, relative to the dataset."""
        return self._locate(index)[0].record.file

    def wait_for(self, rows: Sequence[int], stop: threading.Event) -> bool:
        """Return when documents can be read (these always can), or False once `stop` is set."""
        return True

    def _decode(self, shard: "Shard", row: int, column: Column, out: Tensor) -> None:
        """The first len(out) tokens of a lossy or sparse column; tokens without a row are zero."""
        stored, lossy = shard.stored(column, row), column.lossy
        tables = self.tables[column.name] if lossy else None
        if lossy and tables and not column.sparse:
            decode_rows(lossy, stored.cut(0, len(out)), tables, out)
            return
        first, done = 0, 0
        for a, b in runs(shard.kept(row)[: len(out)]):
            part, place = stored.cut(first, first + b - a), out[a:b]
            if lossy and tables:
                decode_rows(lossy, part, tables, place)
            else:
                column.coder.decode_into(part.values, place)
            out[done:a] = 0
            first, done = first + b - a, b
        out[done:] = 0

    def _locate(self, index: int) -> tuple["Shard", int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        shards, rows = self._places
        number = int(shards[index])
        if number not in self._shards:
            record = self.manifest.shards[number]
            self._shards[number] = Shard(self.path, record, self.manifest.columns)
        return self._shards[number], int(rows[index])


def _numbers(array: pa.Array) -> np.ndarray:
    """Read-only view of an Arrow array of numbers; its `to_numpy` would import pandas: 0.5 s."""
    kind = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.zeros(0, kind)
    values = np.frombuffer(array.buffers()[1], kind)
    return values[array.offset : array.offset + len(array)]


class Shard:
    """One mapped shard; numpy views of its record batches are made at first touch."""

    def __init__(self, path: Path, record: ShardRecord, columns: tuple[Column, ...]) -> None:
        self.record = record
        self.file = path / record.file
        try:
            stream = pa.ipc.open_stream(pa.memory_map(str(self.file)))
            self.batches: list[pa.RecordBatch] = list(stream)
        except (pa.ArrowInvalid, OSError) as error:
            raise DatasetError(f"{self.file}: damaged ({error}); copy it again") from None
        if not stream.schema.equals(arrow_schema(columns), check_metadata=True):
            raise DatasetError(
                f"{self.file}: its columns are not those of the manifest; it belongs to another "
                "dataset or release"
            )
        self.starts = [0, *itertools.accumulate(b.num_rows for b in self.batches)]
        if self.starts[-1] != self.record.rows:
            raise DatasetError(
                f"{self.file}: {self.starts[-1]} documents, the manifest says {self.record.rows}"
            )
        self._views: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}

    def _batch_of(self, row: int) -> tuple[int, int]:
        batch = bisect.bisect_right(self.starts, row) - 1
        return batch, row - self.starts[batch]

    def texts(self, row: int) -> dict[str, Any]:
        """doc_id, source and turns of a row."""
        batch, local = self._batch_of(row)
        return {
            name: self.batches[batch].column(name)[local].as_py()
            for name in ("doc_id", "source", "turns")
        }

    def length(self, row: int) -> int:
        """Tokens of a document."""
        return len(self.part(_MASK, row))

    def kept(self, row: int) -> np.ndarray:
        """Tokens that have a row in sparse columns, bool [T]."""
        mask = self.part(_MASK, row)
        return predicts_supervised(mask, np.array([0, len(mask)]))

    def stored(self, column: Column, row: int) -> StoredRows:
        """All parts of one document's column."""
        batch, local = self._batch_of(row)
        values = self._part(column, batch, local)
        if column.lossy is None:
            return StoredRows(values, values, _NO_ROWS, values)
        rest = (column.scale_part, *column.escape_parts)
        return StoredRows(values, *(self._part(part, batch, local) for part in rest))

    def part(self, column: Column, row: int) -> np.ndarray:
        """Stored values of one part of a document, [n] or [n, W]: a view of the mapped file."""
        return self._part(column, *self._batch_of(row))

    def _part(self, column: Column, batch: int, local: int) -> np.ndarray:
        key = (batch, column.name)
        found = self._views.get(key)
        if found is None:
            array = self.batches[batch].column(column.name)
            values, width = array.values, column.stored_width
            if width is not None:
                values = values.values
            flat = _numbers(values)
            shaped = flat.reshape(-1, width) if width is not None else flat
            found = self._views[key] = (_numbers(array.offsets), shaped)
        offsets, view = found
        return view[offsets[local] : offsets[local + 1]]


def checked_file(directory: Path, name: str, manifest: Manifest) -> Path:
    """Path of a small file of a dataset, whose checksum is the manifest's.

    Raises:
        MissingError: it is gone. DatasetError: it was changed.
    """
    file = directory / name
    record = manifest.raw["files"].get(name)
    if not file.is_file():
        raise MissingError(f"{file}: missing; copy the dataset again")
    if record is None or sha256_file(file) != record["sha256"]:
        raise DatasetError(
            f"{file}: changed or damaged: its sha256 is not the manifest's; copy it again"
        )
    return file


def load_head_tensors(dataset: str | Path, manifest: Manifest | None = None) -> dict[str, Tensor]:
    """The target's `embed_tokens` [V, H], `lm_head` [V, H], `norm` [H] (and `lm_head_bias` [V]).

    Native dtype; with tied embeddings `lm_head` is the very tensor `embed_tokens`.

    Raises:
        MissingError, DatasetError: the file is absent or not what the manifest describes.
    """
    manifest = manifest or Manifest.read(Path(dataset) / MANIFEST)
    from_file = checked_file(Path(dataset), "target/head.safetensors", manifest)
    head = manifest.head
    try:
        tensors = load_file(from_file)
    except SafetensorError as error:
        raise DatasetError(f"{from_file}: damaged ({error}); copy it again") from None
    if head.tied:
        tensors.setdefault("lm_head", tensors.get("embed_tokens", torch.empty(0)))
    for name in ("embed_tokens", "lm_head"):
        shape = tuple(tensors[name].shape) if name in tensors else None
        if shape != (head.vocab_size, head.hidden_size):
            raise DatasetError(
                f"{from_file}: {name} has shape {shape}, the manifest says "
                f"({head.vocab_size}, {head.hidden_size})"
            )
    return tensors
