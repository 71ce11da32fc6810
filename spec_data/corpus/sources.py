"""Resolve a source string to files and datasets, and stream the rows of each.

Each source yields (where, row) pairs and has the hash that identifies it. A row that cannot be
parsed is yielded as a `BadRow` with the reason, so that the reader counts it. A file that cannot be
read any further (a broken archive, a list with a syntax error) raises `CorpusError`.

A directory is read like a Hub repository: its known files, sorted by path, without those whose
names belong to another split. Reading `test.jsonl` along with `train.jsonl` would train on the test
set, so such files are left out, with a warning that names each of them.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import hf_hub_download, metadata_load

from spec_data.corpus.bad_rows import BadRow, stored, too_long
from spec_data.corpus.facts import COLUMNS, meaning_of
from spec_data.corpus.file_rows import (
    JsonText,
    Row,
    csv_rows,
    decompressed,
    first_character,
    json_lines,
    paragraphs,
)
from spec_data.corpus.json_list import json_list
from spec_data.corpus.records import REAL_NULLS, holds_text, is_text, parse_json
from spec_data.shards.errors import CorpusError
from spec_data.shards.file_heads import check_files, instead, no_data
from spec_data.shards.files import cause, sha256_file
from spec_data.shards.path_kinds import PACKED, ROWS, Kind, expect, like_a_path, wrong_kind
from spec_data.shards.source_names import distinct
from spec_data.terminal.memory_rows import PREFIX, lines_of
from spec_data.terminal.printable import one_line

if TYPE_CHECKING:  # `datasets` takes half a second to import, and few corpora need it
    import datasets

logger = logging.getLogger(__name__)

MAX_ROW_BYTES = 8_000_000  # tokenising takes up to 250 times as many bytes of memory
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
_READERS = {"jsonl": json_lines, "json": json_list, "csv": csv_rows, "text": paragraphs}
_SPLITS = {"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval"}
_METADATA = {"dataset_info.json", "dataset_infos.json", "config.json"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SAMPLE = 8 << 20  # bytes of a file of JSON lines whose lines are counted


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file or dataset: how to stream its rows, and what identifies its bytes.

    `rows` takes the names of the columns that are read, of those of a columnar source (`columns`).
    `filled` counts rows of the whole source.
    `name` is stored in the dataset, so it must not reveal the directories of this machine: it is
    the path of a file below the given directory, or the file name of a single file; with folders
    before it only where two sources would have one name. `path` is what the user wrote; messages
    and the `where` of rows use it.
    """

    name: str
    path: str
    kind: str
    rows: Callable[[Collection[str]], Generator[Row]]
    columns: Callable[[], Sequence[str]] = lambda: ()
    filled: Callable[[str], int | None] = lambda _: None  # rows where a column is not null
    digest: Callable[[], str | None]  # the hash of the whole source
    count: Callable[[], int | None] = lambda: None  # about how many rows it has; None: not known
    licence: str | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, self.path)


def _check_name(name: str, path: str) -> None:
    if not is_text(name + path):
        raise CorpusError(f"corpus {path}: its name is not UTF-8; rename it")


def with_distinct_names(sources: Sequence[Source]) -> list[Source]:
    """Return sources of which no two have one name, unless they are one file or dataset.

    A changed name begins with the folder of the file: `a/chats.jsonl` and `b/chats.jsonl`.
    """
    places, folders = [], []
    for source in sources:
        whole = Path(source.path).exists()
        local = source.path if whole else source.path.partition("@")[0]
        exists = whole or Path(local).exists()
        place = os.path.realpath(local) if exists else source.path
        rest = source.path[len(local) :]  # the split
        places.append((place, rest))
        depth = source.name.count("/") + 1
        folders.append(Path(place).parents[depth - 1].as_posix() if exists else "")
    names = distinct([source.name for source in sources], places, folders)
    for source, name in zip(sources, names, strict=True):
        if name != source.name:
            logger.info("%s: its name in the dataset is %s", source.path, name)
    return [replace(s, name=name) for s, name in zip(sources, names, strict=True)]


def expected_rows(sources: Sequence[Source], limit: int | None = None) -> int | None:
    """Return about how many rows the sources have, at most `limit`; None: not known.

    Only progress bars use it.
    """
    total = 0
    for source in sources:
        try:
            count = source.count()
        except Exception:  # of any library: reading the rows says what is wrong
            count = None
        if count is None:
            return None
        total += count
        if limit is not None and total >= limit:
            return limit
    return total


# -- from a source string to sources ---------------------------------------------------------------


def corpus_directory(name: str) -> Path | None:
    """Return the local directory that a source string (PATH or PATH@SPLIT) names, else None."""
    if (path := Path(name)).is_dir():
        return path
    base, _, split = name.partition("@")
    return Path(base) if base and split and Path(base).is_dir() else None


def resolve(name: str, split: str, max_row_bytes: int = MAX_ROW_BYTES) -> list[Source]:
    """Return the files and datasets behind one source string, and check that they exist.

    Args:
        name: a file, a directory, a Hub dataset (NAME, NAME:CONFIG, NAME@SPLIT), or one file of a
            Hub dataset (NAME:FILE).
        split: the split to read, unless `name` has one.
        max_row_bytes: a row of more bytes is a bad row and is never held in memory.

    Raises:
        MissingError: no such file or directory.
        CorpusError: an unknown kind of file, or no file or split to read.
    """
    if (lines := lines_of(name)) is not None:
        return [_memory_source(name, lines, max_row_bytes)]
    path = Path(name)
    base, _, named_split = name.partition("@")
    if path.is_file():
        return [_file_source(name, path, path.parent, max_row_bytes)]
    if (directory := corpus_directory(name)) is not None:
        expect(directory, Kind.CORPUS, "corpus")
        split = split if directory == path else named_split
        if any((directory / n).is_file() for n in ("state.json", "dataset_dict.json")):
            return [_saved_dataset(name, directory, split, max_row_bytes)]
        return _directory(directory, split, max_row_bytes)
    hub, _, config = base.partition(":")
    if _HUB_NAME.fullmatch(hub) and _suffix(Path(config)) in SUFFIXES:
        return [_hub_file(name, hub, config, named_split, max_row_bytes)]
    if like_a_path(name) or _suffix(path) in SUFFIXES:
        raise wrong_kind(name, Kind.CORPUS, "corpus")
    return [_hub_dataset(name, hub, config or None, named_split or split, max_row_bytes)]


def _memory_source(name: str, lines: Sequence[bytes], limit: int) -> Source:
    """Return the source of rows that the caller holds; its hash is that of the rows."""

    def rows(_: Collection[str]) -> Generator[Row]:
        for number, line in enumerate(lines):
            size = len(line)
            yield (
                f"memory row {number}",
                too_long(size, limit) if size > limit else JsonText(line),
            )

    return Source(
        name="memory",
        path="memory",
        kind="rows in memory",
        rows=rows,
        digest=lambda: name.removeprefix(PREFIX),
        count=lambda: len(lines),
    )


# -- files -----------------------------------------------------------------------------------------


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def _file_source(name: str, path: Path, root: Path, limit: int) -> Source:
    inside = path.relative_to(root).as_posix()
    _check_name(inside, name)
    name = one_line(name)  # rows are named by it
    kind = SUFFIXES.get(_suffix(path))
    if kind is None or (kind == "parquet" and path.suffix in PACKED):
        raise CorpusError(
            f"corpus {name}: unknown kind of file; known: {', '.join(SUFFIXES)} (all but .parquet "
            f"also compressed: {', '.join(PACKED)})"
        )
    data = kind == "parquet" or (kind != "text" and path.stat().st_size)  # others may be empty
    what = instead(path, "") if data else no_data(path)
    if what:
        raise CorpusError(f"corpus {name}: {what}")
    if kind == "jsonl" and _suffix(path) == ".json" and first_character(path) == b"[":
        kind = "json"
    facts: dict[str, Any] = {
        "name": one_line(inside),
        "path": name,
        "kind": kind,
        "digest": lambda: sha256_file(path),
        "licence": _licence(path.parent) or _licence(root),
    }
    if kind == "parquet":
        return Source(
            rows=lambda columns: _arrow_rows(name, _parquet(path, columns, limit), limit),
            columns=lambda: pq.read_schema(path).names,
            filled=lambda column: _filled(path, column),
            count=lambda: pq.read_metadata(path).num_rows,
            **facts,
        )
    if kind == "jsonl":
        facts["count"] = lambda: _count_lines(path)
    return Source(rows=lambda _: _READERS[kind](name, path, limit), **facts)


def _count_lines(path: Path) -> int:
    """Return the lines of a file, extrapolated from its beginning by its size on disk."""
    with path.open("rb") as raw, decompressed(path, raw) as file:
        sample = file.read(_SAMPLE)
        read = raw.tell()
    lines = sum(1 for line in sample.splitlines() if line.strip())
    return lines if len(sample) < _SAMPLE else round(lines * path.stat().st_size / read)


def _licence(directory: Path) -> str | None:
    """Return the licence in the YAML header of a dataset card, if there is one."""
    card = directory / "README.md"
    try:
        licence = (metadata_load(card) or {}).get("license") if card.is_file() else None
    except Exception:  # strangers write the cards: a broken header counts as no licence
        return None
    text = ", ".join(map(str, licence)) if isinstance(licence, list) else str(licence or "")
    return stored(text) if text else None


def _directory_files(path: Path, files: Iterable[Path], split: str) -> Iterator[tuple[Path, str]]:
    """Yield the known ones of the files under a directory, and why a name is not of the split."""
    for file in files:
        inside = file.relative_to(path).as_posix()
        if _suffix(file) in SUFFIXES and file.name not in _METADATA:
            yield file, _of_other_split(inside, split)


def _of_other_split(name: str, split: str) -> str:
    """Return why a file is not of a split, by its name; "": it is.

    A usual split has all files whose names have no other one; another split (train_sft) those whose
    names have it.
    """
    if split not in _SPLITS:
        whole = rf"(?<![A-Za-z0-9]){re.escape(split)}(?![A-Za-z0-9])"
        return "" if re.search(whole, name) else f"its name does not have the split '{split}'"
    words = set(re.split(r"[^a-z]+", name.lower())) & _SPLITS
    if not words or any(word.startswith(split) or split.startswith(word) for word in words):
        return ""
    return f"by its name it belongs to split '{min(words)}', not '{split}'"


def _files_below(path: Path) -> list[Path]:
    """Return the files under a directory, sorted, without hidden names.

    Links to folders elsewhere are followed, each folder once.
    """
    top, files, seen = path.resolve(), list[Path](), set[Path]()

    def followed(folder: Path) -> bool:
        return not folder.is_symlink() or not folder.resolve().is_relative_to(top)

    for folder, folders, names in os.walk(path, followlinks=True):
        if (real := Path(folder).resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        shown = sorted(name for name in folders if not name.startswith("."))
        folders[:] = [name for name in shown if followed(Path(folder, name))]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    files.sort(key=lambda file: file.relative_to(path).as_posix())
    return [file for file in files if file.is_file() or _is_lost(file)]


def _is_lost(file: Path) -> bool:
    """Name a file of rows that is none: a link to nothing, a pipe, a device; return False."""
    if set(file.suffixes) & set(ROWS):
        what = "a link to nothing" if not file.exists() else "no regular file"
        logger.warning("warning[files]: %s: left out: %s", file, what)
    return False


def _name_links(top: Path, files: Iterable[Path]) -> None:
    """Name the files that lie elsewhere, behind a link that may be a stranger's.

    Not those of the Hub's cache, in which all files of a revision are links to its blobs.
    """
    real = top.resolve()
    places = real, real.parent.parent / "blobs"
    for file in files:
        if not any(file.resolve().is_relative_to(place) for place in places):
            logger.warning(
                "warning[links]: %s: a link to %s, which is not in the folder of the corpus; its "
                "rows are read. If the link is not yours, remove it",
                *(file, file.resolve()),
            )


def corpus_files(name: str) -> list[Path]:
    """Return the files behind a source string, or the string itself where it is no directory."""
    if (directory := corpus_directory(name)) is None:
        return [Path(name)]
    split = "train" if directory == Path(name) else name.partition("@")[2]
    files = _directory_files(directory, _files_below(directory), split)
    return [file for file, other in files if not other]


def _directory(path: Path, split: str, limit: int) -> list[Source]:
    """Return the sources of a directory, without files of another split."""
    sources, files = [], _files_below(path)
    for file in files:
        if set(file.suffixes) & set(ROWS) and _suffix(file) not in SUFFIXES:
            logger.warning("warning[files]: %s: left out: no kind of file that is read", file)
    for file, other in _directory_files(path, files, split):
        if other:
            logger.warning("warning[split]: %s: left out: %s", file, other)
            continue
        sources.append(_file_source(str(file), file, path, limit))
    _name_links(path, (Path(source.path) for source in sources))
    if not sources:
        raise CorpusError(f"corpus {path}: no file of split '{split}' ({', '.join(SUFFIXES)})")
    return sources


# -- the Hub, and datasets of the `datasets` library -----------------------------------------------


@contextmanager
def _opening(name: str, problem: str, advice: str = "") -> Iterator[None]:
    """Say in words what the libraries raise, a different class for each cause."""
    try:
        yield
    except Exception as error:
        text = f"corpus {name}: {problem}: {type(error).__name__}: {error}{advice}"
        raise CorpusError(text) from error


def _hub_file(name: str, hub: str, file: str, split: str, limit: int) -> Source:
    """Return the source of one file of a Hub dataset, which is downloaded to the Hub's cache."""
    if split:
        raise CorpusError(f"corpus {name}: a file has no splits; leave out @{split}")
    problem = f"no such file or directory, and loading {file} of the HF dataset {hub} failed"
    with _opening(name, problem):
        path = Path(hf_hub_download(hub, file, repo_type="dataset"))
    return replace(_file_source(name, path, path.parent, limit), name=name)


def _saved_dataset(name: str, path: Path, split: str, limit: int) -> Source:
    """Return the source of a directory that `datasets`' `save_to_disk` wrote."""
    import datasets

    last = path.name if path.name not in ("", "..") else path.resolve().name
    for folder in (path, *(p for p in path.iterdir() if p.is_dir())):
        check_files(folder, CorpusError)
    with _opening(name, "datasets cannot open it"):
        dataset = datasets.load_from_disk(str(path))
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise CorpusError(
                f"corpus {name}: no split '{split}'; write {path}@SPLIT with one of: "
                f"{', '.join(dataset)}"
            )
        dataset, last = dataset[split], f"{last}@{split}"
    _name_links(path, (Path(file["filename"]) for file in dataset.cache_files))
    return _dataset_source(
        dataset,
        limit,
        name=last,
        path=name,
        kind="hf dataset directory",
        digest=lambda: _hash_of([Path(file["filename"]) for file in dataset.cache_files]),
        licence=dataset.info.license or _licence(path),
    )


def _hash_of(files: Sequence[Path]) -> str:
    """Return one hash over the names and contents of the Arrow files of a dataset."""
    text = "".join(f"{file.name}\0{sha256_file(file)}\n" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()


def _hub_dataset(name: str, hub: str, config: str | None, split: str, limit: int) -> Source:
    """Return the source of a dataset that `datasets` downloads and caches."""
    import datasets

    problem = "no such file or directory, and loading it as an HF dataset failed"
    advice = "\nwrite a Hub name as NAME, NAME:CONFIG, NAME@SPLIT or NAME:CONFIG@SPLIT"
    with _opening(name, problem, advice):
        dataset = datasets.load_dataset(hub, config, split=split)
    facts = {"digest": lambda: str(dataset._fingerprint), "licence": dataset.info.license or None}
    return _dataset_source(dataset, limit, name=name, path=name, kind="hf dataset", **facts)


def _dataset_source(dataset: "datasets.Dataset", limit: int, **facts: Any) -> Source:
    def batches(columns: Collection[str]) -> Iterator[pa.Table]:
        narrow = dataset.select_columns(_present(dataset.features.arrow_schema, columns))
        yield from narrow.with_format("arrow").iter(_ROWS_PER_BATCH)

    return Source(
        rows=lambda columns: _arrow_rows(facts["path"], batches(columns), limit),
        columns=lambda: dataset.column_names,
        filled=lambda column: dataset.num_rows - dataset.with_format("arrow")[column].null_count,
        count=lambda: dataset.num_rows,
        **facts,
    )


# -- rows of tables --------------------------------------------------------------------------------
# A row becomes Python objects only after its bytes in Arrow were compared with `limit`
# (--max-row-bytes) and its values validated: a damaged Arrow file can point outside its buffers.
# `where` counts from 0.

_ROWS_PER_BATCH = 256
_BATCH_BYTES = 64 << 20  # of a Parquet batch of average rows
_GROUP_ROWS = 64  # a row group of no more bytes than so many rows may have is read in any case


def _arrow_rows(
    name: str, batches: Iterable[pa.RecordBatch | pa.Table | Iterator[BadRow]], limit: int
) -> Generator[Row]:
    try:
        rows = (
            row
            for batch in batches
            for row in (batch if isinstance(batch, repeat) else _rows(batch, limit))
        )
        for number, row in enumerate(rows):
            yield f"{name} row {number}", row
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise CorpusError(f"{name}: its rows cannot be read: {cause(error)}") from error


def _parquet(
    path: Path, columns: Collection[str], limit: int
) -> Iterator[pa.RecordBatch | Iterator[BadRow]]:
    """Yield those of `columns` that a file has, with one row group in memory.

    The rows of a large group that are too long on average are bad rows: Arrow would unpack all of
    one, which can be a thousand times as large as on disk.
    """
    with pq.ParquetFile(path) as file:
        read = _present(file.schema_arrow, columns)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        average = max((g.total_byte_size // max(1, g.num_rows) for g in groups), default=0)
        batch = max(1, min(_ROWS_PER_BATCH, _BATCH_BYTES // max(1, average)))

        def too_large(number: int) -> bool:
            size = _unpacked(groups[number], read)
            return size > _GROUP_ROWS * limit and size > groups[number].num_rows * limit

        for large, numbers in groupby(range(len(groups)), key=too_large):
            if not large:
                yield from file.iter_batches(batch, row_groups=list(numbers), columns=read)
                continue
            for group in (groups[number] for number in numbers):
                size = _unpacked(group, read)
                reason = (
                    f"in a row group of {size:,} bytes, {size // max(1, group.num_rows):,} a row, "
                    f"more than the {limit:,} of --max-row-bytes"
                )
                yield repeat(BadRow(reason), group.num_rows)


def _unpacked(group: pq.RowGroupMetaData, columns: Collection[str]) -> int:
    """Return the bytes of some columns of a row group, unpacked, as its metadata has them."""
    parts = map(group.column, range(group.num_columns))
    return sum(
        part.total_uncompressed_size
        for part in parts
        if part.path_in_schema in columns or part.path_in_schema.partition(".")[0] in columns
    )


def _filled(path: Path, column: str) -> int | None:
    """Return the rows of a file where a column is not null, by its statistics; None: not known."""
    metadata, count = pq.read_metadata(path), 0
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    if column not in names:  # a nested one has other names
        return None
    place = names.index(column)
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        statistics = group.column(place).statistics
        if statistics is None or not statistics.has_null_count:
            return None
        count += group.num_rows - statistics.null_count
    return count


def _present(schema: pa.Schema, columns: Collection[str]) -> list[str]:
    """Return the columns to read.

    All of them if none of `columns` holds a text, so that bad rows name them. Others may say what
    is learned: beside token ids lists, numbers and texts, and what `_may_say` finds.
    """
    names = [name for name in schema.names if name in columns]
    if not holds_text(names):
        return list(schema.names)
    ids = "input_ids" in names
    return [f.name for f in schema if f.name in columns or _may_say(f, ids)]


def _may_say(column: pa.Field, beside_ids: bool) -> bool:
    """Return whether a column that is not read may yet say what is learned, as its type shows."""
    if _is_object(column):
        return True
    if pa.types.is_boolean(column.type):
        return meaning_of(column.name) == "rejected"  # of this answer
    may_be_list = _is_list(column.type) or _is_text(column.type)  # as JSON text
    return beside_ids and (may_be_list or pa.types.is_integer(column.type))


def _is_object(column: pa.Field) -> bool:
    """Return whether a column holds objects with a known name, or may hold them as JSON text."""
    kind = column.type
    while _is_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        return any(part.name in COLUMNS or _is_object(part) for part in kind)
    return column.name in _JSON and _is_text(kind)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


_JSON = ("metadata", "meta", "extra", "extra_info", "info")  # columns that are often JSON text


def _is_list(kind: pa.DataType) -> bool:
    tests = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    return any(test(kind) for test in tests)


def _rows(batch: pa.RecordBatch | pa.Table, limit: int) -> Iterator[Any]:
    """Yield the rows of a batch as dicts, with a BadRow for each that cannot be one."""
    rows: list[Any] = []
    try:
        batch.validate(full=True)
        if batch.nbytes <= limit:
            rows = [_plain_row(row, batch.schema) for row in batch.to_pylist()]
        elif batch.num_rows == 1:
            rows = [too_long(batch.nbytes, limit)]
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        if batch.num_rows == 1:
            rows = [BadRow(f"Arrow cannot convert it: {type(error).__name__}: {error}")]
    if rows:
        yield from rows
        return
    for number in range(batch.num_rows):
        yield from _rows(batch.slice(number, 1), limit)


class TableRow(dict[str, Any]):
    """A row of a table; `nulls` names in what nulls were left out that may have been meant."""

    nulls: tuple[str, ...] = ()


_COUNTED = {"tools": "tools", "kwargs": "chat_template_kwargs"}  # by the meaning of the column


def _plain_row(row: dict[str, Any], schema: pa.Schema) -> Any:
    """Return a row as JSON lines would hold it, or a BadRow."""
    nulls: set[str] = set()
    try:
        result = TableRow()
        for field in schema:
            place = _COUNTED.get(meaning_of(field.name) or "", "")
            result[field.name] = _plain(row[field.name], field.type, place, nulls)
    except BadRow as error:
        return error
    result.nulls = tuple(sorted(nulls))
    return result


def _plain(value: Any, kind: pa.DataType, place: str, nulls: set[str]) -> Any:
    """Return a value without the nulls of its structs, which have every key that any row has.

    A key of `REAL_NULLS` that has no other value in any row was written as null. `datasets`
    stores what has another type in another row (the schemas of tools, say) as JSON text, with the
    type `arrow.json`; it is parsed, and its nulls are real. If nulls at `place` ("": not counted)
    are left out, it is added to `nulls`.
    """
    if value is None:
        return None
    if getattr(kind, "extension_name", "") == "arrow.json":
        return parse_json(value)
    if pa.types.is_struct(kind):
        kept = [
            f
            for f in kind
            if value[f.name] is not None or (f.name in REAL_NULLS and pa.types.is_null(f.type))
        ]
        if place and len(kept) < kind.num_fields:
            nulls.add(place)
        inside = {"arguments": "arguments"}  # of a call in a message
        return {
            f.name: _plain(value[f.name], f.type, place or inside.get(f.name, ""), nulls)
            for f in kept
        }
    if _is_list(kind) and not pa.types.is_primitive(kind.value_type):
        return [_plain(part, kind.value_type, place, nulls) for part in value]
    return value
