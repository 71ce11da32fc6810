"""Resolve a source string to files and datasets, and stream the rows of each.

`resolve(name)` returns the files and datasets behind one string and checks that they exist. Each
yields (where, row) pairs and has the hash that identifies it. A row that cannot be parsed is
yielded as a `BadRow` with the reason, so that the reader counts it. A file that cannot be read any
further (a broken archive, a list with a syntax error) raises `CorpusError`. `file_rows.py`
reads the rows of files.

A directory is read like a Hub repository: its known files, sorted by path, without those whose
names belong to another split. Reading `test.jsonl` along with `train.jsonl` would train on the test
set, so such files are left out by default, and `notes` names each of them.
"""

import gzip
import hashlib
import os
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import hf_hub_download, metadata_load

from spec_data.corpus.bad_rows import BadRow, printable, too_long
from spec_data.corpus.file_rows import (
    Row,
    csv_rows,
    first_character,
    json_lines,
    json_list,
    paragraphs,
)
from spec_data.corpus.json_values import is_text
from spec_data.corpus.records import unknown_columns
from spec_data.shards.errors import CorpusError
from spec_data.shards.files import sha256_file
from spec_data.shards.path_kinds import Kind, expect, like_a_path, wrong_kind

# -- arrow rows ------------------------------------------------------------------------------------
# Stream the rows of Parquet files and of datasets of the `datasets` library.
#
# Arrow holds one batch at a time. A row becomes Python objects only after its bytes in Arrow were
# compared with `limit` (--max-row-bytes) and its values validated: a damaged Arrow file can point
# outside its buffers. A row that cannot be converted is a `BadRow`. Arrow itself decodes a whole
# Parquet page, so a huge cell takes its own size in memory, but not the many times of that which
# Python objects and tokens would take. Every function yields (where, row); `where` counts from 0.


_ROWS_PER_BATCH = 256
_BATCH_BYTES = 64 << 20  # of a Parquet batch of average rows


def parquet(name: str, path: Path, known: Collection[str], limit: int) -> Generator[Row]:
    """Yield the known columns of each row in file order, with one row group in memory."""
    try:
        with pa.OSFile(os.fsencode(path)) as raw, pq.ParquetFile(raw) as file:
            columns = [column for column in file.schema_arrow.names if column in known]
            if not columns:
                yield from _unknown(name, file.schema_arrow.names, file.metadata.num_rows)
                return
            batches = file.iter_batches(batch_size=_batch_rows(file.metadata), columns=columns)
            yield from _numbered(name, batches, limit)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise CorpusError(f"{name}: not a readable Parquet file: {error}") from error


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
    name: str, dataset: datasets.Dataset, known: Collection[str], limit: int
) -> Generator[Row]:
    """Yield the known columns of each row of a dataset."""
    try:
        columns = [column for column in dataset.column_names if column in known]
        if not columns:
            yield from _unknown(name, dataset.column_names, dataset.num_rows)
            return
        tables = dataset.select_columns(columns).with_format("arrow").iter(_ROWS_PER_BATCH)
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


# -- sources ---------------------------------------------------------------------------------------


SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
_SPLITS = {"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval"}
MAX_ROW_BYTES = 8_000_000  # tokenising takes up to 250 times as many bytes of memory
_METADATA = {"dataset_info.json", "dataset_infos.json", "config.json"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file or dataset: how to stream its rows, and what identifies its bytes.

    `rows` takes the names of the columns that are read, of those of a columnar source (`columns`).
    `name` is stored in the dataset, so it must not reveal the directories of this machine: it is
    the path of a file below the given directory, or the file name of a single file. `path` is what
    the user wrote; messages and the `where` of rows use it.
    """

    name: str
    path: str
    kind: str
    rows: Callable[[Collection[str]], Generator[Row]]
    columns: Callable[[], Sequence[str]] = lambda: ()
    arrow: bool = False
    digest: Callable[[], str | None]  # the hash of the whole source
    count: Callable[[], int] | None = None  # the number of rows, where it is stored
    licence: str | None = None


# --- from a source string to sources -------------------------------------------------------------


def corpus_directory(name: str) -> Path | None:
    """Return the local directory that a source string (PATH or PATH@SPLIT) names, else None."""
    if (path := Path(name)).is_dir():
        return path
    base, _, split = name.partition("@")
    return Path(base) if base and split and Path(base).is_dir() else None


def resolve(
    name: str, split: str, notes: list[str], max_row_bytes: int = MAX_ROW_BYTES
) -> list[Source]:
    """Return the files and datasets behind one source string, and check that they exist.

    Args:
        name: a file, a directory, a Hub dataset (NAME, NAME:CONFIG, NAME@SPLIT), or one file of a
            Hub dataset (NAME:FILE).
        split: the split to read, unless `name` has one.
        notes: receives one line per file that is left out.
        max_row_bytes: a row of more bytes is a bad row and is never held in memory.

    Raises:
        MissingError: no such file or directory.
        CorpusError: an unknown kind of file, or no file or split to read.
    """
    path = Path(name)
    base, _, named_split = name.partition("@")
    if path.is_file():
        return [_file_source(name, path, path.parent, max_row_bytes)]
    if (directory := corpus_directory(name)) is not None:
        expect(directory, Kind.CORPUS, "corpus")
        split = split if directory == path else named_split
        if any((directory / n).is_file() for n in ("state.json", "dataset_dict.json")):
            return [_saved_dataset(name, directory, split, max_row_bytes)]
        return _directory(directory, split, notes, max_row_bytes)
    hub, _, config = base.partition(":")
    if _HUB_NAME.fullmatch(hub) and _suffix(Path(config)) in SUFFIXES:
        return [_hub_file(name, hub, config, named_split, max_row_bytes)]
    if like_a_path(name) or _suffix(path) in SUFFIXES:
        raise wrong_kind(name, Kind.CORPUS, "corpus")
    return [_hub_dataset(name, hub, config or None, named_split or split, max_row_bytes)]


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _file_source(name: str, path: Path, root: Path, limit: int) -> Source:
    kind = SUFFIXES.get(_suffix(path))
    if kind is None or (kind == "parquet" and path.suffix == ".gz"):
        known = ", ".join(SUFFIXES)
        raise CorpusError(
            f"corpus {name}: unknown kind of file; known: {known} (all but .parquet also as .gz)"
        )
    if kind == "jsonl" and _suffix(path) == ".json" and first_character(path) == b"[":
        kind = "json"
    name = representable(name)
    source = Source(
        name=representable(path.relative_to(root).as_posix()),
        path=name,
        kind=kind,
        rows=lambda known: parquet(name, path, known, limit),
        digest=lambda: _file_hash(name, path),
        licence=_licence(path.parent) or _licence(root),
    )
    if kind == "parquet":
        return replace(
            source,
            arrow=True,
            columns=lambda: pq.read_schema(pa.OSFile(os.fsencode(path))).names,
            count=lambda: pq.read_metadata(path).num_rows,
        )
    reader = {"jsonl": json_lines, "json": json_list, "csv": csv_rows, "text": paragraphs}[kind]
    return replace(source, rows=lambda _: reader(name, path, limit))


def _file_hash(name: str, path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise CorpusError(f"{name}: cannot be read: {error}") from None


def representable(name: str) -> str:
    """Return a file name as UTF-8 can hold it; bytes that are not UTF-8 become `\\xe9`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace") if not is_text(name) else name


def _directory(path: Path, split: str, notes: list[str], limit: int) -> list[Source]:
    """Return the known files under a directory, sorted, without those of another split."""
    sources = []
    for file in sorted(path.rglob("*"), key=lambda f: f.relative_to(path).as_posix()):
        inside = file.relative_to(path)
        if not file.is_file() or any(part.startswith(".") for part in inside.parts):
            continue
        if _suffix(file) not in SUFFIXES or file.name in _METADATA:
            continue
        words = set(re.split(r"[^a-z]+", inside.as_posix().lower())) & _SPLITS
        if words and not any(word.startswith(split) or split.startswith(word) for word in words):
            notes.append(
                f"{representable(str(file))}: left out: by its name it belongs to split "
                f"'{min(words)}', not '{split}'"
            )
            continue
        sources.append(_file_source(str(file), file, path, limit))
    if not sources:
        raise CorpusError(f"corpus {path}: no file of split '{split}' ({', '.join(SUFFIXES)})")
    return sources


def _licence(directory: Path) -> str | None:
    """Return the licence in the YAML header of a dataset card, if there is one."""
    card = directory / "README.md"
    try:
        header = metadata_load(card) if card.is_file() else None
        found = (header or {}).get("license")
    except Exception:  # strangers write the cards: a broken header counts as no licence
        return None
    text = ", ".join(map(str, found)) if isinstance(found, list) else found and str(found)
    return printable(text) if text else None


def _saved_dataset(name: str, path: Path, split: str, limit: int) -> Source:
    """Return the source of a directory that `datasets`' `save_to_disk` wrote."""
    shown, last = representable(name), _last_name(path)
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises a different class for each cause
        raise CorpusError(
            f"corpus {shown}: datasets cannot open it: {type(error).__name__}: {error}"
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise CorpusError(
                f"corpus {shown}: no split '{split}'; write {path}@SPLIT with one of: "
                f"{', '.join(dataset)}"
            )
        dataset, last = dataset[split], f"{last}@{split}"
    return _dataset_source(
        dataset,
        limit,
        name=representable(last),
        path=shown,
        kind="hf dataset directory",
        digest=lambda: _hash_of([Path(file["filename"]) for file in dataset.cache_files]),
        licence=dataset.info.license or _licence(path),
    )


def _hash_of(files: Sequence[Path]) -> str:
    """Return one hash over the names and contents of the Arrow files of a dataset."""
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.name}\0{sha256_file(file)}\n".encode())
    return whole.hexdigest()


def _dataset_source(dataset: datasets.Dataset, limit: int, **facts: Any) -> Source:
    """Return the source of a dataset that the library has opened."""
    return Source(
        rows=lambda known: dataset_rows(facts["path"], dataset, known, limit),
        columns=lambda: dataset.column_names,
        arrow=True,
        count=lambda: dataset.num_rows,
        **facts,
    )


def _last_name(path: Path) -> str:
    return path.name if path.name not in ("", "..") else path.resolve().name


def _hub_file(name: str, hub: str, file: str, split: str, limit: int) -> Source:
    """Return the source of one file of a Hub dataset, which is downloaded to the Hub's cache."""
    if split:
        raise CorpusError(f"corpus {name}: a file has no splits; leave out @{split}")
    try:
        path = Path(hf_hub_download(hub, file, repo_type="dataset"))
    except Exception as error:  # the library raises a different class for each cause
        raise CorpusError(
            f"corpus {name}: no such file or directory, and loading {file} of the HF dataset {hub} "
            f"failed: {error}"
        ) from error
    return replace(_file_source(name, path, path.parent, limit), name=name)


def _hub_dataset(name: str, hub: str, config: str | None, split: str, limit: int) -> Source:
    """Return the source of a dataset that `datasets` downloads and caches."""
    try:
        dataset = datasets.load_dataset(hub, config, split=split)
    except Exception as error:  # the library raises a different class for each cause
        raise CorpusError(
            f"corpus {name}: no such file or directory, and loading it as an HF dataset failed: "
            f"{error}\nwrite a Hub name as NAME, NAME:CONFIG, NAME@SPLIT or NAME:CONFIG@SPLIT"
        ) from error

    return _dataset_source(
        dataset,
        limit,
        name=name,
        path=name,
        kind="hf dataset",
        digest=lambda: str(dataset._fingerprint),
        licence=dataset.info.license or None,
    )


# -- row counts ------------------------------------------------------------------------------------
# How many rows a corpus has, before it is read: exact where stored, estimated for JSON lines.
#
# Only progress bars use it, so an estimate is enough, and anything unexpected is "not known".


_SAMPLE = 8 << 20


def expected_rows(sources: Sequence[Source], limit: int | None = None) -> int | None:
    """Return about how many rows the sources have, at most `limit`; None where it is not known.

    A JSON-lines file is counted in its first 8 MiB and extrapolated by its size on disk.
    """
    counts = [_count_rows(source) for source in sources]
    known = [count for count in counts if count is not None]
    if limit is not None and sum(known) >= limit:
        return limit
    return sum(known) if len(known) == len(counts) else None


def _count_rows(source: Source) -> int | None:
    try:
        if source.count is not None:
            return source.count()
        return _lines(Path(source.path)) if source.kind == "jsonl" else None
    except Exception:  # of any library: reading the rows says what is wrong
        return None


def _lines(path: Path) -> int | None:
    """Lines of a file, plain or gzip, by the share of its bytes that a sample takes."""
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            sample = gzip.GzipFile(fileobj=raw).read(_SAMPLE)
        else:
            sample = raw.read(_SAMPLE)
        read = raw.tell()
    lines = sum(1 for line in sample.splitlines() if line.strip())
    if len(sample) < _SAMPLE:
        return lines
    return round(lines * path.stat().st_size / read)
