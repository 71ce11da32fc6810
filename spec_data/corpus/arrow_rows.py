"""Stream the rows of Parquet files and of datasets of the `datasets` library.

Arrow holds one batch at a time. A row becomes Python objects only after its bytes in Arrow were
compared with `limit` (--max-row-bytes) and its values validated: a damaged Arrow file can point
outside its buffers. A row that cannot be converted is a `BadRow`. Arrow itself decodes a whole
Parquet page, so a huge cell takes its own size in memory, but not the many times of that which
Python objects and tokens would take. Every function yields (where, row); `where` counts from 0.
"""

import hashlib
import json
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from spec_data.corpus.bad_rows import BadRow, too_long
from spec_data.corpus.file_rows import Digest, Row
from spec_data.corpus.records import COLUMNS, unknown_columns
from spec_data.shards.errors import CorpusError
from spec_data.shards.files import sha256_file

_ROWS_PER_BATCH = 256
_BATCH_BYTES = 64 << 20  # of a Parquet batch of average rows


def parquet(name: str, path: Path, digest: Digest, limit: int) -> Generator[Row]:
    """Yield the known columns of each row in file order, with one row group in memory."""
    digest.set_source(lambda: sha256_file(path))
    try:
        with pa.OSFile(os.fsencode(path)) as raw, pq.ParquetFile(raw) as file:
            columns = _known_columns(file.schema_arrow.names, digest)
            if not columns:
                yield from _unknown(name, file.schema_arrow.names, file.metadata.num_rows)
                return
            batches = file.iter_batches(batch_size=_batch_rows(file.metadata), columns=columns)
            yield from _numbered(name, batches, limit)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise CorpusError(f"{name}: not a readable Parquet file: {error}") from error


def _known_columns(names: Sequence[str], digest: Digest) -> list[str]:
    """Return the columns to read; the others are named in the digest."""
    known = {*COLUMNS, *digest.more_columns}
    digest.unread_columns = [name for name in names if name not in known]
    return [name for name in names if name in known]


def _unknown(name: str, columns: Sequence[str], rows: int) -> Iterator[Row]:
    """Yield the bad rows of a table without a known column."""
    reason = unknown_columns(columns)
    for number in range(rows):
        yield f"{name} row {number}", reason


def _batch_rows(metadata: pq.FileMetaData) -> int:
    """Return how many rows to read at once."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    average = max((g.total_byte_size // max(1, g.num_rows) for g in groups), default=0)
    return max(1, min(_ROWS_PER_BATCH, _BATCH_BYTES // max(1, average)))


def dataset_rows(
    name: str, dataset: datasets.Dataset, digest: Digest, limit: int
) -> Generator[Row]:
    """Yield the known columns of each row of a dataset."""
    try:
        columns = _known_columns(dataset.column_names, digest)
        if not columns:
            yield from _unknown(name, dataset.column_names, dataset.num_rows)
            return
        known = dataset.select_columns(columns)
        tables = known.with_format("arrow").iter(batch_size=_ROWS_PER_BATCH)
        yield from _numbered(name, tables, limit)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise CorpusError(f"{name}: datasets cannot read its rows: {error}") from error


def _numbered(
    name: str, batches: Iterable[pa.RecordBatch | pa.Table], limit: int
) -> Generator[Row]:
    number = 0
    for batch in batches:
        for row in _rows(batch, limit):
            yield f"{name} row {number}", row
            number += 1


def _rows(batch: pa.RecordBatch | pa.Table, limit: int) -> Iterator[Any]:
    """Yield the rows of a batch as dicts, with a BadRow for each that cannot be one."""
    try:
        batch.validate(full=True)
        whole = batch.to_pylist() if batch.nbytes <= limit else None
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        whole = None  # row by row, to find out which
    yield from whole if whole is not None else _one_by_one(batch, limit)


def _one_by_one(batch: pa.RecordBatch | pa.Table, limit: int) -> Iterator[Any]:
    for number in range(batch.num_rows):
        one = batch.slice(number, 1)
        try:
            one.validate(full=True)
            yield too_long(one.nbytes, limit) if one.nbytes > limit else one.to_pylist()[0]
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            yield BadRow(f"Arrow cannot convert it: {type(error).__name__}: {error}")


# --- directories that `datasets` wrote -----------------------------------------------------------


def saved_splits(path: Path) -> list[str]:
    """Return the splits that dataset_dict.json names.

    Raises:
        BadRow: the file is broken.
    """
    found = _json(path / "dataset_dict.json").get("splits")
    if not isinstance(found, list) or not all(isinstance(split, str) for split in found):
        raise BadRow("dataset_dict.json has no list of splits")
    return found


def saved_licence(path: Path) -> str | None:
    """Return the licence that dataset_info.json names, if there is one."""
    try:
        found = _json(path / "dataset_info.json").get("license")
    except BadRow:
        return None  # reading the rows reports it
    return found if isinstance(found, str) and found else None


def saved_rows(name: str, path: Path, digest: Digest, limit: int) -> Generator[Row]:
    """Yield the rows of a directory that `save_to_disk` wrote; one BadRow if it cannot be opened.

    The file formats of such a directory belong to `datasets`, which raises many kinds of errors.
    """
    try:
        if (path / "dataset_info.json").is_file():
            _json(path / "dataset_info.json")
        files = _data_files(path)
        dataset = datasets.load_from_disk(str(path))
    except BadRow as reason:
        yield name, reason
        return
    except Exception as error:
        yield name, BadRow(f"datasets cannot open it: {type(error).__name__}: {error}")
        return
    digest.set_source(lambda: _saved_hash(path, files))
    yield from dataset_rows(name, dataset, digest, limit)


def _data_files(path: Path) -> list[str]:
    """Return the names of the Arrow files of a saved dataset, in its order."""
    entries = _json(path / "state.json").get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise BadRow("state.json has no list of data files")
    names = [entry.get("filename") for entry in entries]
    if not all(isinstance(file, str) and (path / file).is_file() for file in names):
        raise BadRow("a file that state.json names is missing")
    return names


def _json(file: Path) -> dict[str, Any]:
    """Return the table in a JSON file.

    Raises:
        BadRow: the file is missing, is not JSON, or holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadRow(f"{file.name} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise BadRow(f"{file.name} holds no JSON object")
    return found


def saved_hash(path: Path) -> str | None:
    """Return the hash that reading a saved dataset sets; None if its files are not named."""
    try:
        return _saved_hash(path, _data_files(path))
    except (BadRow, OSError):
        return None


def _saved_hash(path: Path, files: list[str]) -> str:
    """Return one hash over the names and contents of the Arrow files, in dataset order."""
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file}\0{sha256_file(path / file)}\n".encode())
    return whole.hexdigest()
