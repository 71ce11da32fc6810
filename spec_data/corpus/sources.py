"""Resolve a source string to files and datasets, and stream the rows of each.

`resolve(name)` returns the files and datasets behind one string and checks that they exist. Each
yields (where, row) pairs and has the hash that identifies it. A row that cannot be parsed is
yielded as a `BadRow` with the reason, so that the reader counts it. A file that cannot be read any
further (a broken archive, a list with a syntax error) raises `CorpusError`.

A directory is read like a Hub repository: its known files, sorted by path, without those whose
names belong to another split. Reading `test.jsonl` along with `train.jsonl` would train on the test
set, so such files are left out by default, and `notes` names each of them.
"""

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import metadata_load

from spec_data.corpus.json_list import list_elements
from spec_data.corpus.records import COLUMNS, BadRow
from spec_data.shards.errors import CorpusError, MissingError

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
}
_SPLITS = {"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval"}
_METADATA = {"dataset_info.json", "dataset_infos.json", "config.json"}
_ROWS_PER_BATCH = 256
_CHUNK = 1 << 20

Row = tuple[str, Any]  # (where, the parsed row, or a BadRow in its place)


class Digest:
    """The hash of a source, known once its rows were read."""

    def __init__(self) -> None:
        self._compute: Callable[[], str | None] = lambda: None

    def set_source(self, compute: Callable[[], str | None]) -> None:
        """Set the function that returns the hash: of the bytes read so far and the rest, or of
        the stored file."""
        self._compute = compute

    def finish(self) -> str | None:
        """Return the hash of the whole source, or None before any row was asked for."""
        return self._compute()


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file or dataset: how to stream its rows, and what identifies its bytes.

    `name` is stored in the dataset, so it must not reveal the directories of this machine: it is
    the path of a file below the given directory, or the file name of a single file. `path` is what
    the user wrote; messages and the `where` of rows use it.
    """

    name: str
    path: str
    kind: str
    rows: Callable[[Digest], Generator[Row]]
    arrow: bool = False
    count: Callable[[], int] | None = None  # the number of rows, where it is stored
    licence: str | None = None


class _HashedFile(io.RawIOBase):
    """A file that hashes what is read from it; `finish` reads and hashes the rest."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._hash = hashlib.sha256()
        self._whole = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self._file.readinto(buffer) or 0
        self._hash.update(memoryview(buffer)[:n])
        return n

    def finish(self) -> str:
        """Hash the rest of the file, close it, and return the digest."""
        if not self._whole:
            while self.read(_CHUNK):
                pass
            self._whole = True
            self.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- from a source string to sources -------------------------------------------------------------


def corpus_directory(name: str) -> Path | None:
    """Return the local directory that a source string (PATH or PATH@SPLIT) names, else None."""
    if (path := Path(name)).is_dir():
        return path
    base, _, split = name.partition("@")
    return Path(base) if base and split and Path(base).is_dir() else None


def resolve(name: str, split: str, notes: list[str]) -> list[Source]:
    """Return the files and datasets behind one source string, and check that they exist.

    Args:
        name: a file, a directory, or a Hub dataset (NAME, NAME:CONFIG, NAME@SPLIT).
        split: the split to read, unless `name` has one.
        notes: receives one line per file that is left out.

    Raises:
        MissingError: no such file or directory.
        CorpusError: an unknown kind of file, or no file or split to read.
    """
    path = Path(name)
    base, _, named_split = name.partition("@")
    if path.is_file():
        return [_file_source(name, path, path.parent)]
    if (directory := corpus_directory(name)) is not None:
        split = split if directory == path else named_split
        if any((directory / n).is_file() for n in ("state.json", "dataset_dict.json")):
            return [_saved_dataset(name, directory, split)]
        return _directory(directory, split, notes)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or _suffix(path) in SUFFIXES:
        raise MissingError(f"corpus {name}: no such file or directory")
    hub, _, config = base.partition(":")
    return [_hub_dataset(name, hub, config or None, named_split or split)]


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _file_source(name: str, path: Path, root: Path) -> Source:
    kind = SUFFIXES.get(_suffix(path))
    if kind is None or (kind == "parquet" and path.suffix == ".gz"):
        known = ", ".join(SUFFIXES)
        raise CorpusError(
            f"corpus {name}: unknown kind of file; known: {known} (all but .parquet also as .gz)"
        )
    if kind == "jsonl" and _suffix(path) == ".json" and _holds_a_list(path):
        kind = "json"
    reader = {"jsonl": _jsonl, "json": _json_list, "parquet": _parquet, "text": _whole_text}[kind]
    return Source(
        name=path.relative_to(root).as_posix(),
        path=name,
        kind=kind,
        rows=lambda digest: reader(name, path, digest),
        arrow=kind == "parquet",
        count=(lambda: pq.read_metadata(path).num_rows) if kind == "parquet" else None,
        licence=_licence(path.parent) or _licence(root),
    )


def _holds_a_list(path: Path) -> bool:
    """Return whether the first character of a JSON file opens a list."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(256).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return False  # reading the rows reports what is wrong with the archive


def _directory(path: Path, split: str, notes: list[str]) -> list[Source]:
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
                f"{file}: left out: by its name it belongs to split '{min(words)}', not '{split}'"
            )
            continue
        sources.append(_file_source(str(file), file, path))
    if not sources:
        raise CorpusError(f"corpus {path}: no file of split '{split}' ({', '.join(SUFFIXES)})")
    return sources


def _licence(directory: Path) -> str | None:
    """Return the licence in the YAML header of a dataset card, if there is one."""
    card = directory / "README.md"
    try:
        header = metadata_load(card) if card.is_file() else None
    except Exception:  # strangers write the cards: a broken header counts as no licence
        return None
    found = (header or {}).get("license")
    return ", ".join(map(str, found)) if isinstance(found, list) else found and str(found)


# --- the rows of each kind of source -------------------------------------------------------------


@contextmanager
def _opened(name: str, path: Path, digest: Digest) -> Iterator[IO[bytes]]:
    """Open a file for its decompressed bytes; the bytes on disk are hashed as they are read."""
    raw = _HashedFile(path)
    digest.set_source(raw.finish)
    buffered = io.BufferedReader(raw, _CHUNK)
    try:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=buffered) as file:
                yield file  # type: ignore[misc]
        else:
            yield buffered
        raw.finish()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(f"{name}: not a complete gzip file: {error}") from None
    finally:
        buffered.close()


def _jsonl(name: str, path: Path, digest: Digest) -> Generator[Row]:
    """Yield one row per line that is not blank."""
    with _opened(name, path, digest) as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield f"{name}:{number}", _parsed(line)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8: {error}")
    except (json.JSONDecodeError, RecursionError) as error:
        return BadRow(f"not valid JSON: {error}")


def _json_list(name: str, path: Path, digest: Digest) -> Generator[Row]:
    """Yield one row per element of a file that holds a single list."""
    with _opened(name, path, digest) as file:
        stream = io.TextIOWrapper(file, encoding="utf-8-sig")
        try:
            for line, element in list_elements(stream, name):
                yield f"{name}:{line}", element
            stream.detach()
        except UnicodeDecodeError as error:
            raise CorpusError(f"{name}: not UTF-8: {error}") from None


def _whole_text(name: str, path: Path, digest: Digest) -> Generator[Row]:
    """Yield the whole file as one row."""
    with _opened(name, path, digest) as file:
        content = file.read()
    try:
        yield f"{name}:1", {"text": content.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        yield f"{name}:1", BadRow(f"not UTF-8: {error}")


def _parquet(name: str, path: Path, digest: Digest) -> Generator[Row]:
    """Yield the known columns of each row in file order, with one row group in memory."""
    digest.set_source(lambda: _file_hash(path))
    try:
        with pq.ParquetFile(path) as file:
            columns = [c for c in file.schema_arrow.names if c in COLUMNS]
            batches = file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns)
            yield from _numbered(name, (batch.to_pylist() for batch in batches))
    except pa.ArrowException as error:
        raise CorpusError(f"{name}: not a readable Parquet file: {error}") from None


def _numbered(name: str, batches: Iterator[list[dict[str, Any]]]) -> Generator[Row]:
    """Yield the rows of columnar batches; `where` counts rows from 0."""
    number = 0
    for batch in batches:
        for row in batch:
            yield f"{name} row {number}", row
            number += 1


def _saved_dataset(name: str, path: Path, split: str) -> Source:
    """Return the source of a directory that `datasets`' `save_to_disk` wrote."""
    own_name = _last_name(path)
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        if split not in splits:
            raise CorpusError(
                f"corpus {name}: no split '{split}'; write {path}@SPLIT with one of: "
                f"{', '.join(splits)}"
            )
        path, own_name = path / split, f"{own_name}@{split}"
    info = path / "dataset_info.json"
    stated = json.loads(info.read_text(encoding="utf-8")).get("license") if info.is_file() else None

    def rows(digest: Digest) -> Generator[Row]:
        digest.set_source(lambda: _saved_hash(path))
        try:
            dataset = datasets.load_from_disk(str(path))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise CorpusError(f"{name}: datasets cannot open it: {error}") from None
        yield from _dataset_rows(name, dataset)

    licence = stated or _licence(path) or _licence(path.parent)
    return Source(
        name=own_name,
        path=name,
        kind="hf dataset directory",
        rows=rows,
        arrow=True,
        count=lambda: datasets.load_from_disk(str(path)).num_rows,
        licence=licence,
    )


def _last_name(path: Path) -> str:
    return path.name if path.name not in ("", "..") else path.resolve().name


def _saved_hash(path: Path) -> str:
    """Return one hash over the names and contents of the Arrow files, in dataset order."""
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    whole = hashlib.sha256()
    for entry in state["_data_files"]:
        whole.update(f"{entry['filename']}\0{_file_hash(path / entry['filename'])}\n".encode())
    return whole.hexdigest()


def _hub_dataset(name: str, hub: str, config: str | None, split: str) -> Source:
    """Return the source of a dataset that `datasets` downloads and caches."""
    try:
        dataset = datasets.load_dataset(hub, config, split=split)
    except Exception as error:  # the library raises a different class for each cause
        raise CorpusError(
            f"corpus {name}: no such file or directory, and loading it as an HF dataset failed: "
            f"{error}\nwrite a Hub name as NAME, NAME:CONFIG, NAME@SPLIT or NAME:CONFIG@SPLIT"
        ) from error

    def rows(digest: Digest) -> Generator[Row]:
        digest.set_source(lambda: str(dataset._fingerprint))
        yield from _dataset_rows(name, dataset)

    licence = dataset.info.license or None
    return Source(
        name=name,
        path=name,
        kind="hf dataset",
        rows=rows,
        arrow=True,
        count=lambda: dataset.num_rows,
        licence=licence,
    )


def _dataset_rows(name: str, dataset: datasets.Dataset) -> Generator[Row]:
    known = dataset.select_columns([c for c in dataset.column_names if c in COLUMNS])
    tables = known.with_format("arrow").iter(batch_size=_ROWS_PER_BATCH)
    return _numbered(name, (table.to_pylist() for table in tables))
