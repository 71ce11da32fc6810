"""HiddenStatesDataset: open instantly, read any document, copy straight into a caller's buffer.

Opening reads the manifest and the sizes of the shards. The index and each shard are memory-mapped
at first use. All returned tensors are copies: mapped memory is read-only without torch knowing it,
and one in-place operation on it would kill the process.
"""

import logging
import operator
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from spec_data.shards.checking import FIRST, known_policy
from spec_data.shards.codec_tables import TABLES, load_tables
from spec_data.shards.codecs import tensor_of
from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.files import MANIFEST, read_object
from spec_data.shards.index import index_numbers, read_index
from spec_data.shards.lossy import Tables
from spec_data.shards.path_kinds import Kind, wrong_kind
from spec_data.shards.remote import Mirror, open_mirror, wrong_size
from spec_data.shards.schema import Column, Manifest, ShardRecord
from spec_data.shards.shard import CodedRows, IndexRows, Place, Shard, decode_rows, runs

# -- document access -------------------------------------------------------------------------------
# How documents of a dataset are reached from Python: as rows of a dataset of `datasets` are.
#
# `ds[3]` is one document, a dict; `ds[0:3]` and `ds[[0, 5]]` are one dict with a list per column;
# `len(ds)`, iteration, negative numbers and `column_names` work as they do there.


TEXTS = ("doc_id", "source", "turns")


class DocumentAccess:
    """Base class of datasets: a subclass has a length and reads one document by its number."""

    path: Path
    _columns: dict[str, Column]

    def __len__(self) -> int:
        raise NotImplementedError

    def _document(self, index: int) -> dict[str, Any]:
        """Read document `index`; a negative one counts from the end."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """Number of documents."""
        return len(self)

    @property
    def column_names(self) -> list[str]:
        """The keys of a document: `doc_id`, `source`, `turns` and the token columns."""
        return [*TEXTS, *self._columns]

    @property
    def features(self) -> dict[str, str]:
        """What a document holds by column: type, and shape in T tokens, as "bfloat16 [T, 4096]"."""
        found = {"doc_id": "string", "source": "string", "turns": "list of {role, start, end}"}
        for name, column in self._columns.items():
            kind = torch.bfloat16 if column.lossy else column.coder.logical
            shape = "[T]" if column.width is None else f"[T, {column.width}]"
            found[name] = f"{str(kind).removeprefix('torch.')} {shape}"
        return found

    def __repr__(self) -> str:
        names = ", ".join(self.column_names)
        return f"{type(self).__name__}({str(self.path)!r}, {len(self):,} documents: {names})"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._document(index) for index in range(len(self)))

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> dict[str, list[Any]]: ...
    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Return a document, or the documents of a slice or of a list of numbers.

        One document is a dict of fresh tensors (safe to modify), with `doc_id`, `source` and
        `turns`. Several are one dict with a list of these values per column.

        Raises:
            IndexError: no such document. TypeError: not a number, a slice or a list of numbers.
            DatasetError: damaged data.
        """
        if isinstance(index, str):
            raise TypeError(
                f"ds[{index!r}] would hold the column of all documents in memory; open the dataset "
                f"with columns=[{index!r}] and iterate, or take ds[0:100][{index!r}]"
            )
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return self._document(operator.index(index))
        if isinstance(index, slice):
            chosen = list(range(len(self))[index])
        else:
            try:
                chosen = [operator.index(number) for number in index]
            except TypeError:
                raise TypeError(
                    f"ds[{index!r}]: a number, a slice or a list of numbers is expected"
                ) from None
        rows = [self._document(number) for number in chosen]
        return {name: [row[name] for row in rows] for name in self.column_names}


# -- opened ----------------------------------------------------------------------------------------


def open_shard(
    place: Path | Mirror, manifest: Manifest, number: int, index: IndexRows, check: str
) -> Shard:
    """Map shard `number` of a dataset.

    Args:
        place: the directory of the dataset, or the mirror of a remote one.
        manifest: of the dataset.
        number: of the shard.
        index: what the index says about its documents.
        check: one of checking.CHECKS.

    Raises:
        DatasetError: the file is damaged, of another dataset, or another file under its name.
    """
    record = manifest.shards[number]
    given = (manifest, record, index, check)
    if not isinstance(place, Mirror):
        return Shard(place, *given)
    url, copy = place.storage.where(record.file), place.shard(record)
    try:
        return Shard(place.directory, *given, (url, copy))
    except DatasetError:  # damaged on this disk, or just deleted by another process
        copy.unlink(missing_ok=True)
    return Shard(place.directory, *given, (url, place.shard(record)))


# -- reader ----------------------------------------------------------------------------------------


INDEX = "index.arrow"
_KEPT_BY = ("supervised", "first_supervised")  # columns that tell the rows of sparse columns
_SHOWN = 20  # wrong shards that a message names


def open_dataset(
    path: str | Path, columns: str | Sequence[str] | None = None, *, check: str = FIRST
) -> "HiddenStatesDataset":
    """Open a dataset; documents are read only when they are asked for.

    Args:
        path: a sealed directory that `generate` wrote, or its URL (docs/remote.md).
        columns: the token columns to read; None: all.
        check: when data are compared with their checksums: "first" (before their first use in this
            process, and 1 read in 64 afterwards), "always", "sample" (1 read in 16) or "never".

    Returns:
        The dataset. `ds[3]` is a document: a dict of fresh tensors, such as `input_ids` int64 [T]
        and `hidden.L1` bfloat16 [T, H], and `doc_id`, `source` and `turns`. `ds[0:3]` is one dict
        with a list per column.

    Raises:
        MissingError: no such directory, or it is not sealed yet.
        DatasetError: a damaged or foreign manifest, a truncated shard, an unknown column.
        ConfigError: an unknown `check`.

    >>> ds = spec_data.open_dataset("data", columns=["input_ids", "hidden.L2"])
    >>> len(ds), ds.column_names[-2:]
    (12, ['input_ids', 'hidden.L2'])
    >>> ds[0]["hidden.L2"].shape == (len(ds[0]["input_ids"]), ds.manifest.hidden_size)
    True
    >>> len(ds[0:3]["input_ids"])
    3
    """
    chosen = [columns] if isinstance(columns, str) else columns
    return HiddenStatesDataset(path, chosen, check)


class HiddenStatesDataset(DocumentAccess):
    """A sealed dataset directory: one row per document, token frame, unshifted.

    Row t of a document holds x_t, m_t, the captured states at t, and what the target predicts for
    x_{t+1}: `hidden.final` (or top-k or logits), `target_argmax`, `target_logsumexp`. Lossy columns
    are decoded: names, projection and values are as if every column were stored in bf16.

    It is read like a dataset of the `datasets` library: `len`, iteration, `ds[3]`, `ds[-1]`, and
    `ds[0:3]` or `ds[[0, 5]]`, which return one dict with a list per column.

    Attributes:
        mirror: of a remote dataset, its local files; None: the dataset is local.
    """

    mirror: Mirror | None = None

    def __init__(
        self,
        path: str | Path,
        columns: Sequence[str] | None = None,
        check: str = FIRST,
    ) -> None:
        """Open `path`, a directory or a URL; `columns` projects the token columns (default: all).

        `check` says when chunks are compared with their checksums: "first" (before their first use
        in this process, and 1 read in 64 afterwards), "always", "sample" (1 read in 16) or "never".

        Raises:
            MissingError: no such directory, the dataset is not sealed, or a shard is missing.
            DatasetError: the manifest is damaged or foreign, a shard is truncated, or a column is
                unknown.
            ConfigError: `check` is not one of these, or the URL cannot be read here.
            RunError: the remote storage does not answer.
        """
        self._check = known_policy(check)
        self.mirror = open_mirror(path)
        self.path = self.mirror.directory if self.mirror else Path(path)
        if not (self.path / MANIFEST).is_file():
            raise wrong_kind(self.path, Kind.DATASET)
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
    def place(self) -> str:
        """Where the dataset is: its URL, or its directory."""
        return self.mirror.url if self.mirror else str(self.path)

    @property
    def columns(self) -> tuple[str, ...]:
        """Token columns after projection."""
        return tuple(self._columns)

    @property
    def final(self) -> str:
        """ "all", or "supervised": `hidden.final` is zero where x_{t+1} is not supervised."""
        return self.manifest.final

    @property
    def teacher(self) -> str:
        """ "all", or "supervised": argmax, logsumexp and stored logits are zero elsewhere."""
        return self.manifest.teacher

    @cached_property
    def tables(self) -> dict[str, Tables]:
        """Decoding tables of the lossy columns."""
        lossy = [c for c in self.manifest.columns if c.lossy]
        if lossy and self.mirror:
            self.mirror.ensure(TABLES)
        codec = self.manifest.codec
        return (
            load_tables(self.path / TABLES, lossy, codec.sha256 if codec else "") if lossy else {}
        )

    @property
    def target_dir(self) -> Path:
        """Folder with the target's config.json, tokenizer and head.safetensors."""
        return self.mirror.ensure_target() if self.mirror else self.path / "target"

    def _check_sizes(self) -> None:
        """Refuse truncated or missing shards at once, and not in the middle of a run."""
        shards = self.manifest.shards
        missing, wrong = self.mirror.sizes(shards) if self.mirror else self._sizes(shards)
        found = missing + wrong
        if found:
            more = f"\n... and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            text = "\n".join(found[:_SHOWN]) + more + "; copy the dataset again"
            raise MissingError(text) if missing else DatasetError(text)

    def _sizes(self, shards: Sequence[ShardRecord]) -> tuple[list[str], list[str]]:
        """Return what to say about shards that are missing, and of another size."""
        missing, wrong = [], []
        for record in shards:
            file = self.path / record.file
            try:
                size = file.stat().st_size
            except OSError as error:  # no such file, a link to nowhere, a folder without rights
                missing.append(f"{file}: shard is missing or out of reach ({error.strerror})")
                continue
            if size != record.bytes:
                wrong.append(wrong_size(str(file), size, record))
        return missing, wrong

    def target_config(self) -> dict[str, Any]:
        """Return the target's configuration, with every default written out.

        Raises:
            MissingError, DatasetError: the file is missing, or not the one that was sealed.
        """
        file = checked_file(self.path, "target/config.json", self.manifest)
        return read_object(file)

    @cached_property
    def _index(self) -> pa.Table:
        if self.mirror:
            self.mirror.ensure(INDEX)
        data = mapped_file(self.path, INDEX, self.manifest)
        return read_index(data, self.manifest, self.path / INDEX)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 [N]."""
        return index_numbers(self._index, "tokens").astype(np.int64)

    @cached_property
    def supervised(self) -> np.ndarray:
        """Supervised tokens per document, int64 [N]."""
        return index_numbers(self._index, "supervised").astype(np.int64)

    @cached_property
    def first_supervised(self) -> np.ndarray:
        """Index of the first supervised token, int64 [N]; the length when there is none."""
        return index_numbers(self._index, "first_supervised").astype(np.int64)

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        return index_numbers(self._index, "shard"), index_numbers(self._index, "row")

    @cached_property
    def _checksums(self) -> np.ndarray:
        return index_numbers(self._index, "checksum")

    @cached_property
    def id_array(self) -> pa.StringArray:
        """Content hashes of the documents, as a view of the index, without Python objects."""
        chunks = self._index.column("doc_id")
        return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()

    @cached_property
    def doc_ids(self) -> list[str]:
        """Content hashes of the documents."""
        return self.id_array.to_pylist()

    def source_of(self, index: int) -> str:
        """Return the source of a document: what the corpus called the place that it is from."""
        return str(self._index.column("source")[index])

    def __len__(self) -> int:
        return self.manifest.totals.documents

    def _document(self, index: int) -> dict[str, Any]:
        """Return a document as new tensors (safe to modify), `doc_id`, `source` and `turns`."""
        shard, row = self._locate(index)
        place, count = shard.place(row), shard.length(row)
        out: dict[str, Any] = shard.texts(place)
        for column in self._columns.values():
            if column.lossy or column.sparse:
                kind = torch.bfloat16 if column.lossy else column.coder.logical
                shape = (count,) if column.width is None else (count, column.width)
                values = torch.empty(shape, dtype=kind)
                self._decode(shard, place, column, values)
                out[column.name] = values
            else:
                out[column.name] = column.coder.decode(shard.values(column, place))
        return out

    def read_into(
        self,
        index: int,
        out: Mapping[str, Tensor | CodedRows | np.ndarray],
        start: int = 0,
        length: int | None = None,
    ) -> int:
        """Copy the first `length` tokens of a document into `out[column][start : start+length]`.

        Tensors of `out` are on the CPU, [T] or [T, W], and their dtype decides that of the values.
        Instead of a tensor, `out` may have its `Codec.bits`. Lossy columns may be gathered in
        `CodedRows` instead, to be decoded elsewhere. Only the columns in `out` are read. Returns
        the number of tokens written.

        Raises:
            DatasetError: an unknown column, a buffer that is too short, or damage.
        """
        shard, row = self._locate(index)
        place, whole = shard.place(row), shard.length(row)
        count = whole if length is None else min(length, whole)
        stop = start + count
        for name, buffer in out.items():
            column = self._columns.get(name)
            if column is None:
                raise DatasetError(f"{self.path}: no column {name!r} to read; {self.columns}")
            if isinstance(buffer, CodedRows):
                self._gather(shard, place, column, buffer, start, count)
                continue
            part = buffer[start:stop]
            if part.shape[0] != count:
                raise DatasetError(
                    f"buffer of {len(buffer)} tokens is too short for tokens {start} to "
                    f"{stop} of document {index}"
                )
            if column.lossy or column.sparse:
                values = part if isinstance(part, Tensor) else tensor_of(part)
                self._decode(shard, place, column, values)
            else:
                column.coder.decode_into(shard.values(column, place)[:count], part)
        return count

    def shard_of(self, index: int) -> str:
        """Return the name of the shard file that holds a document, relative to the dataset."""
        return self._locate(index)[0].record.file

    def wait_for(self, rows: Iterable[int], stop: threading.Event) -> bool:
        """Wait until documents can be read; always True at once, as this dataset is complete."""
        return True

    def fetch_ahead(self, rows: Iterable[int]) -> int:
        """Begin to download the shards of documents of a remote dataset; return their bytes.

        Those on the disk, and those on their way, count nothing.
        """
        if self.mirror is None:
            return 0
        numbers = dict.fromkeys(self._places[0][list(rows)].tolist())
        return sum(self.mirror.shards.fetch_ahead(self.manifest.shards[n]) for n in numbers)

    def _decode(self, shard: Shard, place: Place, column: Column, out: Tensor) -> None:
        """Decode the first n tokens of a lossy or sparse column into `out`, [n] or [n, W].

        Tokens without a row become zero.
        """
        stored, lossy = shard.stored(column, place), column.lossy
        tables = self.tables[column.name] if lossy else None
        if lossy and tables and not column.sparse:
            decode_rows(lossy, stored.cut(0, len(out)), tables, out)
            return
        first, done = 0, 0
        for a, b in runs(shard.kept(place)[: len(out)]):
            part, target = stored.cut(first, first + b - a), out[a:b]
            if lossy and tables:
                decode_rows(lossy, part, tables, target)
            else:
                column.coder.decode_into(part.values, target)
            out[done:a] = 0
            first, done = first + b - a, b
        out[done:] = 0

    def _gather(
        self, shard: Shard, place: Place, column: Column, out: CodedRows, start: int, count: int
    ) -> None:
        """Append the rows of the first `count` tokens of a lossy column to `out`, undecoded."""
        tokens = np.flatnonzero(shard.kept(place)[:count]) if column.sparse else np.arange(count)
        out.add(shard.stored(column, place).cut(0, len(tokens)), tokens + start)

    def _locate(self, index: int) -> tuple[Shard, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        shards, rows = self._places
        return self.shard(int(shards[index])), int(rows[index])

    def shard(self, number: int) -> Shard:
        """Return shard `number`, mapped at its first use.

        Raises:
            DatasetError: the shard is damaged, of another dataset, or another shard under its name.
        """
        found = self._shards.get(number)
        if found is None:
            record = self.manifest.shards[number]
            before = sum(other.rows for other in self.manifest.shards[:number])
            rows = slice(before, before + record.rows)
            # not of `supervised`: a subclass may have other masks than the stored ones
            supervised, first = (index_numbers(self._index, n)[rows] for n in _KEPT_BY)
            kept = supervised.astype(np.int64) - (first == 0)
            index = IndexRows(
                rows.start, self.id_array[rows], self.lengths[rows], kept, self._checksums
            )
            given = (self.mirror or self.path, self.manifest, number, index)
            found = self._shards[number] = open_shard(*given, self._check)
            if self.mirror:
                self._unmap_deleted()
        return found

    def _unmap_deleted(self) -> None:
        """Let go of copies of remote shards that were deleted: mapped, they still take the disk."""
        for number, shard in list(self._shards.items()):
            if not shard.file.exists():
                self._shards.pop(number, None)


def mapped_file(directory: Path, name: str, manifest: Manifest) -> pa.Buffer:
    """Map a small file of a dataset and compare it with the manifest's checksum.

    Raises:
        MissingError: no such file. DatasetError: the file was changed.
    """
    file = directory / name
    record = manifest.files.get(name)
    if not file.is_file() and (mirror := open_mirror(directory)):
        mirror.ensure(name)
    if not file.is_file():
        raise MissingError(f"{file}: missing; copy the dataset again")
    if record and 0 < record.bytes == file.stat().st_size:
        data = pa.memory_map(str(file)).read_buffer()
        if xxh3_64_hexdigest(data) == record.xxh3:
            return data
    raise DatasetError(
        f"{file}: changed or damaged: its checksum is not the manifest's; copy it again"
    )


def checked_file(directory: Path, name: str, manifest: Manifest) -> Path:
    """Return the path of a small file of a dataset, after `mapped_file` has checked it."""
    mapped_file(directory, name, manifest)
    return directory / name


def load_head_tensors(dataset: str | Path, manifest: Manifest | None = None) -> dict[str, Tensor]:
    """Read `embed_tokens` [V, H], `lm_head` [V, H], `norm` [H] (and `lm_head_bias` [V]).

    They keep the target's dtype. With tied embeddings, `lm_head` and `embed_tokens` are one tensor.

    Raises:
        MissingError, DatasetError: the file is missing or not what the manifest describes.
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


# -- whole -----------------------------------------------------------------------------------------
# Is a dataset that a command finds finished still whole?
#
# A command that writes a dataset returns at once if the dataset is sealed already. The seal says
# that the files were whole once. Since then a shard may have been deleted, or a copy may have
# stopped half way, and "complete already" would be wrong.


logger = logging.getLogger(__name__)

VIEW_WORK, NEXT = ".view", "next"
"""Where a command works on a dataset of datasets, and what an `append` moves into place last."""


def check_whole(place: str | Path) -> None:
    """Compare the shards of a sealed dataset (a directory or a URL) with its manifest, by size.

    The index of a local dataset is compared by its checksum, too. `verify` reads every byte. A
    dataset to which an `append` was interrupted is left to that command, with a warning.

    Raises:
        MissingError, DatasetError: a file is missing, truncated or changed.
    """
    if (Path(place) / VIEW_WORK / NEXT).is_dir():
        logger.warning("warning: %s: `append` was interrupted; run it again to finish it", place)
        return
    try:
        dataset = HiddenStatesDataset(place, columns=())
        if dataset.mirror is None:
            _ = dataset.lengths  # the first use of the index checks it
    except (DatasetError, MissingError) as error:
        raise type(error)(
            f"{error}\n{place} was finished before, and is damaged now. Restore these files from "
            "a copy; or delete it, or choose another --out, and run the same command again"
        ) from None
