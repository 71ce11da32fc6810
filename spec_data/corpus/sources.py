"""Resolve a source string to files and datasets, and stream the rows of each.

`resolve(name)` returns the files and datasets behind one string and checks that they exist. Each
yields (where, row) pairs and has the hash that identifies it. A row that cannot be parsed is
yielded as a `BadRow` with the reason, so that the reader counts it. A file that cannot be read any
further (a broken archive, a list with a syntax error) raises `CorpusError`. `file_rows.py` and
`arrow_rows.py` read the rows.

A directory is read like a Hub repository: its known files, sorted by path, without those whose
names belong to another split. Reading `test.jsonl` along with `train.jsonl` would train on the test
set, so such files are left out by default, and `notes` names each of them.
"""

import os
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import pyarrow.parquet as pq
from huggingface_hub import hf_hub_download, metadata_load

from spec_data.corpus.arrow_rows import (
    dataset_rows,
    parquet,
    saved_hash,
    saved_licence,
    saved_rows,
    saved_splits,
)
from spec_data.corpus.bad_rows import BadRow, printable
from spec_data.corpus.file_rows import (
    Digest,
    Row,
    csv_rows,
    first_character,
    json_lines,
    json_list,
    paragraphs,
)
from spec_data.corpus.json_values import is_text
from spec_data.shards.errors import CorpusError
from spec_data.shards.files import sha256_file
from spec_data.shards.path_kinds import Kind, expect, like_a_path, wrong_kind

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

    `rows` sets the hash of the same bytes, and of nothing else, that `digest` returns.

    `name` is stored in the dataset, so it must not reveal the directories of this machine: it is
    the path of a file below the given directory, or the file name of a single file. `path` is what
    the user wrote; messages and the `where` of rows use it.
    """

    name: str
    path: str
    kind: str
    rows: Callable[[Digest], Generator[Row]]
    arrow: bool = False
    digest: Callable[[], str | None]  # the hash of the whole source, without reading its rows
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
    readers = {"jsonl": json_lines, "json": json_list, "csv": csv_rows, "parquet": parquet}
    reader = readers.get(kind, paragraphs)
    name = representable(name)
    return Source(
        name=representable(path.relative_to(root).as_posix()),
        path=name,
        kind=kind,
        rows=lambda digest: reader(name, path, digest, limit),
        digest=lambda: _file_hash(name, path),
        arrow=kind == "parquet",
        count=(lambda: pq.read_metadata(path).num_rows) if kind == "parquet" else None,
        licence=_licence(path.parent) or _licence(root),
    )


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
    own_name, shown, broken = _last_name(path), representable(name), None
    if (path / "dataset_dict.json").is_file():
        try:
            splits = saved_splits(path)
        except BadRow as reason:
            broken, splits = reason, [split]
        if split not in splits:
            raise CorpusError(
                f"corpus {shown}: no split '{split}'; write {path}@SPLIT with one of: "
                f"{', '.join(splits)}"
            )
        path, own_name = path / split, f"{own_name}@{split}"

    def rows(digest: Digest) -> Generator[Row]:
        if broken is None:
            return saved_rows(shown, path, digest, limit)
        return (row for row in [(shown, broken)])

    return Source(
        name=representable(own_name),
        path=shown,
        kind="hf dataset directory",
        rows=rows,
        digest=lambda: saved_hash(path) if broken is None else None,
        arrow=True,
        count=lambda: datasets.load_from_disk(str(path)).num_rows,
        licence=saved_licence(path) or _licence(path) or _licence(path.parent),
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

    def rows(digest: Digest) -> Generator[Row]:
        digest.set_source(lambda: str(dataset._fingerprint))
        yield from dataset_rows(name, dataset, digest, limit)

    licence = dataset.info.license or None
    return Source(
        name=name,
        path=name,
        kind="hf dataset",
        rows=rows,
        digest=lambda: str(dataset._fingerprint),
        arrow=True,
        count=lambda: dataset.num_rows,
        licence=licence,
    )
