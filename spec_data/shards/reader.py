"""HiddenStatesDataset: open instantly, read any document, copy straight into a caller's buffer.

Opening reads the manifest and the sizes of the shards; the index is read, and each shard opened, at
first use. Returned tensors are memory of their own, never what a shard keeps.
"""

import logging
import operator
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex, get_args, overload

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spec_data.shards.codecs import TABLES, Tables, load_tables, tensor_of
from spec_data.shards.documents import Document, Origin
from spec_data.shards.errors import ConfigError, DatasetError, MissingError
from spec_data.shards.file_heads import instead
from spec_data.shards.files import MANIFEST, read_object, sha256_file, xxh3_file
from spec_data.shards.index import PROMPT, LossMasks, index_column, index_numbers, read_index
from spec_data.shards.passing import Growing
from spec_data.shards.path_kinds import Kind, wrong_kind
from spec_data.shards.pins import check_pin, split_pin
from spec_data.shards.prompt_keys import PromptKeys, answer_start
from spec_data.shards.remote import Mirror
from spec_data.shards.saved_tokenizer import usual_tokenizer
from spec_data.shards.schema import Column, Manifest, ShardRecord, View, predicts_supervised
from spec_data.shards.shard import (
    CHECK_AGAIN,
    TEXTS,
    Check,
    CodedRows,
    IndexRows,
    Shard,
    StoredRows,
)
from spec_data.shards.storage import check_view_sources, scheme_of
from spec_data.shards.turn_masks import Turn

INDEX = "index.arrow"
PUBLIC = (
    *("path", "location", "manifest", "columns", "column_names", "features", "index", "lengths"),
    *("supervised", "first_supervised", "doc_ids", "prompts", "source_of", "turns_of", "mask_of"),
    *("text", "tokenizer", "target_config", "target_dir", "read_into", "file", "sources", "view"),
    *("mirror", "origin"),
)
"""What a dataset shows of itself: the names that users may build on."""
MASK = "loss_mask"
_SHOWN = 20  # wrong shards that a message names

log = logging.getLogger(__name__)


def open_dataset(
    path: str | Path, columns: str | Sequence[str] | None = None, *, check: Check = "first"
) -> "HiddenStatesDataset":
    """Open a dataset; documents are read only when they are asked for.

    Args:
        path: a dataset or a view, a directory or a URL (docs/remote.md); with DIR@FINGERPRINT, that
            very dataset (docs/reliability.md).
        columns: the token columns to read; None: all.
        check: when a column of a document is compared with its checksum. first: at its first use in
            this process, and at one read in 64 afterwards; always: at every read, which takes as
            long again, for disks or memory that fail.

    Returns:
        The dataset. `ds[3]` is a document: a dict of fresh tensors, such as `input_ids` int64 [T]
        and `hidden.L1` bfloat16 [T, H], and `doc_id`, `source` and `turns`. `ds[0:3]` is one dict
        with a list per column.

    Raises:
        As HiddenStatesDataset.

    >>> ds = spec_data.open_dataset("data", columns=["input_ids", "hidden.L2"])
    >>> len(ds), ds.column_names[-2:]
    (12, ['input_ids', 'hidden.L2'])
    >>> ds[0]["hidden.L2"].shape == (len(ds[0]["input_ids"]), ds.manifest.hidden_size)
    True
    >>> len(ds[0:3]["input_ids"])
    3
    """
    return HiddenStatesDataset(path, [columns] if isinstance(columns, str) else columns, check)


class HiddenStatesDataset:
    """A sealed dataset, or a view of others: one row per document, token frame, unshifted.

    Row t of a document holds x_t, m_t, the captured states at t, and what the target predicts for
    x_{t+1}: `hidden.final` (or top-k or logits), `target_argmax`, `target_logsumexp`. Lossy columns
    are decoded: names, projection and values are as if every column were stored in bf16.

    It is read like a dataset of the `datasets` library: `len`, iteration, `ds[-1]`, `ds[[0, 5]]`.
    Another process that is given it opens it again: only its location and columns are sent.

    Attributes:
        mirror: of a remote dataset, its local files; None: the dataset is local.
        view: what a view refers to; None: the dataset has shards.
        sources: the stored datasets that are read: those of a view, or this one.
        pin: the digits of its fingerprint with which it was named; none: without.
    """

    mirror: Mirror | None = None
    view: View | None = None
    sources: "tuple[HiddenStatesDataset, ...]" = ()
    pin: str = ""
    _check: Check = "first"

    def __init__(
        self,
        path: str | Path,
        columns: Sequence[str] | None = None,
        check: Check = "first",
        *,
        stored: str = "",
    ) -> None:
        """Open `path`, a directory or a URL; `columns` projects the token columns (default: all).

        `path` may end with a pin, see `pins`. `check` is that of `open_dataset`. `stored` is the
        fingerprint that a view names: it is compared before anything but the manifest is read, and
        no view may be there.

        Raises:
            MissingError: no such directory, the dataset is not sealed, or a shard or a source of a
                view is missing.
            DatasetError: the manifest is damaged or foreign, a shard is truncated, a column is
                unknown, or a source of a view was changed or replaced.
            ConfigError: the URL cannot be read here, or another `check`. RunError: the storage does
                not answer.
        """
        if check not in get_args(Check):
            raise ConfigError(f"check={check!r}: expected first or always")
        self._check = check
        path, self.pin = split_pin(path)
        self.mirror = Mirror(path) if scheme_of(path) else None
        self.path = self.mirror.directory if self.mirror else Path(path).expanduser()
        self._location = path if self.mirror else str(self.path.absolute())
        columns = None if columns is None else tuple(columns)
        if not (self.path / MANIFEST).is_file():
            raise wrong_kind(self.path, Kind.DATASET)
        self.manifest = Manifest.read(self.path / MANIFEST)
        check_pin(self.location, self.manifest.fingerprint, self.pin)
        if stored:
            self._check_stored(stored)
        self._check_sizes()
        if unknown := [name for name in columns or () if name not in self.declared]:
            raise DatasetError(
                f"{self.path}: no column {', '.join(unknown)}; it has {', '.join(self.declared)}"
            )
        wanted = self.declared if columns is None else columns
        self._columns: dict[str, Column] = {name: self.declared[name] for name in wanted}
        self._shards: dict[int, Shard] = {}
        self.view = self.manifest.view
        self.sources = (self,) if self.view is None else self._open_sources(self.view)

    def __reduce__(self) -> Any:
        if type(self) is not HiddenStatesDataset:
            raise TypeError(f"{self!r} cannot be sent to another process: open it there")
        return _reopened, (self._location, self.columns, self.manifest.fingerprint, self._check)

    def _check_sizes(self) -> None:
        """Refuse truncated or missing shards at once, and not in the middle of a run."""
        missing, wrong = [], []
        for record in self.manifest.shards:
            where, file = f"{self.location}/{record.file}", self.path / record.file
            try:
                size = self.mirror.size(record) if self.mirror else file.stat().st_size
            except OSError:  # no such file, a link to nowhere, a folder without rights
                missing.append(f"{where}: shard is missing")
            else:
                if size != record.bytes:
                    says = f"the manifest says {record.bytes:,}: "
                    says += instead(file, "truncated or replaced")
                    wrong.append(f"{where}: {size:,} bytes, {says}")
        if damage := missing + wrong:
            more = f"\n... and {len(damage) - _SHOWN} more" if len(damage) > _SHOWN else ""
            text = "\n".join(damage[:_SHOWN]) + more + "; copy the dataset again"
            raise MissingError(text) if missing else DatasetError(text)

    def _check_stored(self, fingerprint: str) -> None:
        """Refuse what is not the stored dataset that a view names."""
        here = self.manifest.fingerprint
        if here != fingerprint:
            raise _ReplacedError(f"another dataset is there now (fingerprint {here[:16]})")
        if self.manifest.view is not None:
            raise _ReplacedError("it is a view itself, and a view refers to stored datasets only")

    def _open_sources(self, view: View) -> "tuple[HiddenStatesDataset, ...]":
        """Open what a view refers to, and prove that it is what it was."""
        opened: dict[tuple[str, str], HiddenStatesDataset] = {}
        made = self.manifest.provenance
        redo = f"or make the view again with `spec-data {made.command if made else 'select'}`"
        places = [_source_location(self.location, source.path) for source in view.sources]
        check_view_sources(self.location, places)  # before any request
        for where, source in zip(places, view.sources, strict=True):
            if (where, source.fingerprint) in opened:
                continue
            what = f"{self.location}: a view of {where} (fingerprint {source.fingerprint[:16]})"
            try:
                dataset = HiddenStatesDataset(where, check=self._check, stored=source.fingerprint)
            except _ReplacedError as error:
                raise DatasetError(f"{what}: {error}. Put the first one back, {redo}") from None
            except (MissingError, DatasetError) as error:
                moved = isinstance(error, MissingError)
                state = "was moved or deleted" if moved else "is damaged"
                raise type(error)(f"{what}, which {state}: {error}. Put it back, {redo}") from None
            opened[where, source.fingerprint] = dataset
        keys = zip(places, view.sources, strict=True)
        return tuple(opened[where, source.fingerprint] for where, source in keys)

    # -- facts ------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        """The URL of the dataset, or its directory."""
        return self.mirror.url if self.mirror else str(self.path)

    @cached_property
    def origin(self) -> Origin:
        """What its documents tell about where they were read."""
        first, manifest = next(iter(self.sources), self), self.manifest
        record = first.manifest.files.get("target/head.safetensors")  # None: not sealed yet
        where = self.mirror.url if self.mirror else str(self.path.absolute())
        head = "" if record is None else record.xxh3
        return Origin(where, manifest.fingerprint, manifest.supervision, head)

    @cached_property
    def declared(self) -> dict[str, Column]:
        """All token columns of the manifest, by name."""
        return {column.name: column for column in self.manifest.columns}

    @property
    def columns(self) -> tuple[str, ...]:
        """Token columns after projection."""
        return tuple(self._columns)

    @property
    def column_names(self) -> list[str]:
        """The keys of a document."""
        return [*TEXTS, *self._columns]

    @property
    def features(self) -> dict[str, str]:
        """What a document holds by column: type, and shape in T tokens, as "bfloat16 [T, 4096]"."""
        shapes = {"doc_id": "string", "source": "string", "turns": "list of {role, start, end}"}
        for name, column in self._columns.items():
            shape = "[T]" if column.width is None else f"[T, {column.width}]"
            shapes[name] = f"{str(column.logical).removeprefix('torch.')} {shape}"
        return shapes

    def __len__(self) -> int:
        return self.manifest.totals.documents

    def __dir__(self) -> list[str]:
        return sorted(PUBLIC)

    def __repr__(self) -> str:
        names = ", ".join(self.column_names)
        return f"{type(self).__name__}({str(self.path)!r}, {len(self):,} documents: {names})"

    @cached_property
    def tables(self) -> dict[str, Tables]:
        """Decoding tables of the lossy columns; of a view, those of its first document."""
        widths = {c.name: c.width or 1 for c in self.manifest.columns if c.lossy}
        if self.view is not None:
            first = {name: self.sources[self._references[name][0][0]] for name in widths}
            return {name: source.tables[name] for name, source in first.items()}
        if not widths:
            return {}
        file = self.mirror.fetch(TABLES) if self.mirror else self.path / TABLES
        return load_tables(file, widths, self.manifest.codec.sha256 if self.manifest.codec else "")

    def columns_of_several_tables(self) -> list[str]:
        """Return the lossy columns of a view whose documents have other tables in other sources."""
        several = []
        for column in self.manifest.columns if self.view else ():
            numbers = np.unique(self._references[column.name][0]).tolist()
            codecs = [self.sources[number].manifest.codec for number in numbers]
            if column.lossy and len({c.sha256 for c in codecs if c}) > 1:
                several.append(column.name)
        return several

    def file(self, name: str) -> Path:
        """Return the path of a small file, compared with the manifest's checksum.

        Of a view, the target's files are in its first source.

        Raises:
            MissingError: no such file. DatasetError: the file was changed.
        """
        if self.view is not None and name.startswith("target/"):
            return self.sources[0].file(name)
        file = self.mirror.fetch(name) if self.mirror else self.path / name
        if not file.is_file():
            raise MissingError(f"{file}: missing; copy the dataset again")
        record = self.manifest.files.get(name)
        same = False
        if record and record.bytes == file.stat().st_size:
            # with a pin, not xxh3: anybody can make another file of the same one
            sums = (record.sha256, sha256_file) if self.pin else (record.xxh3, xxh3_file)
            same = sums[0] == sums[1](file)
        if not same:
            why = "changed or damaged: its checksum is not the manifest's; copy it again"
            raise DatasetError(f"{file}: {instead(file, why)}")
        return file

    @property
    def target_dir(self) -> Path:
        """Folder with the target's config.json, tokenizer and head.safetensors."""
        if self.view is not None:
            return self.sources[0].target_dir
        return self.mirror.target_dir if self.mirror else self.path / "target"

    def target_config(self) -> dict[str, Any]:
        """Return the target's configuration, with every default written out; errors as `file`."""
        return read_object(self.file("target/config.json"))

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the target, as `generate` loads it.

        Raises:
            DatasetError: the dataset has no usable one.
        """
        try:
            return usual_tokenizer(self.target_dir)
        except Exception as error:  # tokenizers raises a plain Exception
            raise DatasetError(f"{self.target_dir}: no usable tokenizer ({error})") from None

    def text(self, index: int) -> str:
        """Return the text of a document, with its special tokens; errors as `ds[index]`."""
        shard, row = self.locate(index, "input_ids")
        ids = torch.empty(int(shard.index.lengths[row]), dtype=torch.int64)
        shard.decode("input_ids", row, ids)
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    # -- index ------------------------------------------------------------------------------------

    @cached_property
    def index(self) -> pa.Table:
        """index.arrow: a row per document, in order."""
        return read_index(self.file(INDEX), self.manifest)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 [N], read-only as all of these: reading relies on them."""
        return self._numbers("tokens")

    def _numbers(self, name: str) -> np.ndarray:
        numbers = index_numbers(self.index, name).astype(np.int64)
        numbers.setflags(write=False)
        return numbers

    @cached_property
    def supervised(self) -> np.ndarray:
        """Supervised tokens per document, int64 [N]."""
        return self._numbers("supervised")

    @cached_property
    def first_supervised(self) -> np.ndarray:
        """Index of the first supervised token, int64 [N]; the length when there is none."""
        return self._numbers("first_supervised")

    @cached_property
    def id_array(self) -> pa.StringArray:
        """Content hashes of the documents, as a view of the index, without Python objects."""
        return index_column(self.index, "doc_id")

    @cached_property
    def doc_ids(self) -> list[str]:
        """Content hashes of the documents."""
        return self.id_array.to_pylist()

    @cached_property
    def prompts(self) -> np.ndarray:
        """Which prompt a document answers, uint64 [N], see `prompt_keys`; format 1.0: computed."""
        if PROMPT in self.index.column_names:
            return index_numbers(self.index, PROMPT)
        log.info("%s: reading the prompts of %d documents", self.location, len(self))
        return np.array([self._prompt_of(index) for index in range(len(self))], np.uint64)

    def _prompt_of(self, index: int) -> int:
        """Return the number of the prompt of a document, of its stored tokens."""
        shard, row = self.locate(index, "input_ids")
        ids = torch.empty(int(shard.index.lengths[row]), dtype=torch.int64)
        shard.decode("input_ids", row, ids)
        mask = shard.mask(row)  # as stored: a prompt does not depend on a mask policy
        first = int(mask.argmax()) if mask.any() else len(mask)
        return self._prompt_keys.of_tokens(ids.numpy(), answer_start(self.turns_of(index), first))

    @cached_property
    def _prompt_keys(self) -> PromptKeys:
        try:
            return PromptKeys(self.tokenizer)
        except DatasetError:
            return PromptKeys(None)

    def source_of(self, index: int) -> str:
        """Return the source of a document, as the corpus called it."""
        return str(self.index.column("source")[index])

    @cached_property
    def _references(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By column of a view: the source and the document in it, int32 [N] each."""
        references: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for group, names in enumerate(self.view.groups if self.view else ()):
            source, document = (
                index_numbers(self.index, f"{kind}.{group}")
                for kind in ("source_number", "document")
            )
            references |= dict.fromkeys(names, (source, document))
        return references

    @cached_property
    def _masks(self) -> LossMasks | None:
        """Loss masks that are not those in the shards."""
        return LossMasks.of_index(self.index) if self.view and self.view.remasked else None

    @cached_property
    def _narrowed(self) -> frozenset[str]:
        """Columns of a view that has fewer tokens of them than a source stores."""
        if self.view is None:
            return frozenset()
        dense = {c.name for source in self.sources for c in source.manifest.columns if not c.sparse}
        sparse = {c.name for c in self.manifest.columns if c.sparse}
        return frozenset(sparse if self.view.remasked else sparse & dense)

    # -- documents --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._document(index) for index in range(len(self)))

    @overload
    def __getitem__(self, index: SupportsIndex) -> Document: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> dict[str, list[Any]]: ...
    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Return a document, or the documents of a slice or of a list of numbers.

        IndexError: no such document. TypeError: another index. DatasetError: damaged data.
        """
        if isinstance(index, str):
            raise TypeError(
                f"ds[{index!r}] would hold the column of all documents in memory; open the dataset "
                f"with columns=[{index!r}] and iterate, or take ds[0:100][{index!r}]"
            )
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return self._document(operator.index(index))
        numbers = range(len(self))[index] if isinstance(index, slice) else index
        try:
            chosen = [operator.index(number) for number in numbers]
            kinds = {type(number) for number in numbers}
            if bool in kinds or str(getattr(numbers, "dtype", "")) == "torch.bool":  # a mask
                raise TypeError
        except TypeError:
            expected = "expected a number, a slice or a list of numbers"
            raise TypeError(f"ds[{index!r}]: {expected}") from None
        rows = [self._document(number) for number in chosen]
        columns = {name: [row[name] for row in rows] for name in self.column_names}
        return Document(columns, self.origin)

    def _document(self, index: int) -> Document:
        """Return a document; a negative number counts from the end."""
        shard, row = self.locate(index)
        out = Document(shard.texts(row), self.origin, range(len(self))[index])
        if self.view is not None:  # which may tell sources of one name apart
            out["source"] = self.source_of(index)
        out.dataset = self
        if self.view is not None:
            out["doc_id"] = self.id_array[index].as_py()
        for column in self._columns.values():
            length = int(shard.index.lengths[row])
            shape = (length,) if column.width is None else (length, column.width)
            out[column.name] = torch.empty(shape, dtype=column.logical)
        self.read_into(index, {name: out[name] for name in self._columns})
        return out

    def turns_of(self, index: int) -> list[Turn]:
        """Return the turns of a document: role, start and end."""
        shard, row = self.locate(index)
        return [(turn["role"], turn["start"], turn["end"]) for turn in shard.texts(row)["turns"]]

    def mask_of(self, index: int) -> np.ndarray:
        """Return the loss mask of a document, bool [T]."""
        shard, row = self.locate(index)
        if self._masks is None:
            return shard.mask(row)
        return self._masks.mask(range(len(self))[index], int(shard.index.lengths[row]))

    def read_into(
        self,
        index: int,
        out: Mapping[str, Tensor | CodedRows | np.ndarray],
        start: int = 0,
        length: int | None = None,
        *,
        marked: bool = True,
    ) -> int:
        """Copy the first `length` tokens of a document into `out[column][start : start+length]`.

        `out` has tensors on the CPU, [T] or [T, W] of any dtype, or their `Codec.bits`; or
        `CodedRows`, which gather a lossy column to be decoded elsewhere. Only its columns are read.
        Returns the number of tokens written. Tokens without a row of a sparse column have
        `Column.absent`, as in a document; unless `marked`, and in `CodedRows`, zero, as padding.

        Raises:
            DatasetError: an unknown column, a buffer that is too short, or damage.
        """
        shard, row = self.locate(index)
        complete = int(shard.index.lengths[row])
        count = complete if length is None else min(length, complete)
        stop = start + count
        wanted = self._sparse_tokens(index) if not self._narrowed.isdisjoint(out) else None
        for name, buffer in out.items():
            if name not in self._columns:
                raise DatasetError(f"{self.path}: no column {name!r} to read; {self.columns}")
            if self.view is not None:
                shard, row = self.locate(index, name)
            tokens = wanted if name in self._narrowed else None
            if isinstance(buffer, CodedRows):
                shard.gather(name, row, buffer, start, count, tokens)
                continue
            part = buffer[start:stop]
            if part.shape[0] != count:
                raise DatasetError(
                    f"buffer of {len(buffer)} tokens is too short for tokens {start} to "
                    f"{stop} of document {index}"
                )
            if name == MASK and self._masks is not None:
                part[:] = torch.from_numpy(self.mask_of(index)[:count])
            else:
                shard.decode(name, row, part)
            column = self._columns[name]
            if marked and column.sparse:
                stored = shard.predicting(row) if tokens is None else tokens
                values = part if isinstance(part, Tensor) else tensor_of(part)
                values[torch.from_numpy(~stored[:count])] = column.absent
            elif tokens is not None:
                part[~tokens[:count]] = 0
        return count

    def stored_rows(self, index: int, column: Column) -> StoredRows:
        """Return a document's rows of a column: codes, or values in the codec of `column`."""
        tokens = self._sparse_tokens(index) if column.name in self._narrowed else None
        shard, row = self.locate(index, column.name)
        return shard.rows(column, row, tokens)

    def _sparse_tokens(self, index: int) -> np.ndarray:
        """Return which tokens of a document a sparse column has, bool [T]."""
        return predicts_supervised(self.mask_of(index))

    # -- shards -----------------------------------------------------------------------------------

    def locate(self, index: int, column: str | None = None) -> tuple[Shard, int]:
        """Return where a column of a document (None: its texts) is stored: the shard, and its row.

        IndexError: no such document. DatasetError: its shard is damaged.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        if self.view is not None:
            source, document = self._references[column or self.view.groups[0][0]]
            return self.sources[source[index]].locate(int(document[index]))
        number = index % len(self)
        shard = int(np.searchsorted(self._firsts, number, "right")) - 1
        return self.shard(shard), number - int(self._firsts[shard])

    @cached_property
    def _firsts(self) -> np.ndarray:
        """Number of the first document of each shard, int64 [S]."""
        rows = np.array([record.rows for record in self.manifest.shards], np.int64)
        return np.cumsum(rows) - rows

    def shard_of(self, index: int) -> str:
        """Return the shard file that holds a document: relative to the dataset, or complete."""
        shard, _ = self.locate(index)
        return shard.name if self.view else shard.record.file

    def shard(self, number: int) -> Shard:
        """Return shard `number`, opened at its first use; DatasetError as `Shard`."""
        if (shard := self._shards.get(number)) is not None:
            return shard
        record, first = self.manifest.shards[number], int(self._firsts[number])
        rows = slice(first, first + record.rows)
        # not of `supervised`: a subclass may have other masks than the stored ones
        supervised, first_supervised = (
            index_numbers(self.index, name)[rows].astype(np.int64)
            for name in ("supervised", "first_supervised")
        )
        index = IndexRows(
            first=first,
            ids=self.id_array[rows],
            lengths=self.lengths[rows],
            stored=supervised - (first_supervised == 0),
            checksums=index_numbers(self.index, "checksum"),
        )
        if self.mirror is None:
            shard = self._opened(self.path / record.file, record, index)
        else:
            url, copy = f"{self.mirror.url}/{record.file}", self.mirror.shard(record)
            try:
                shard = self._opened(copy, record, index, url)
            except DatasetError:  # damaged on this disk, or just deleted by another process
                copy.unlink(missing_ok=True)
                shard = self._opened(self.mirror.shard(record), record, index, url)
            # open copies of remote shards that were deleted still take the disk
            self._shards = {n: s for n, s in self._shards.items() if s.file.exists()}
        self._shards[number] = shard
        return shard

    def _opened(
        self, file: Path, record: ShardRecord, index: IndexRows, url: str | None = None
    ) -> Shard:
        again = CHECK_AGAIN[self._check]
        return Shard(file, self.manifest, record, index, lambda: self.tables, url, again)

    @property
    def growing(self) -> Growing | None:
        """The dataset, if it is still being generated; None: all of it is there."""
        return None

    def wait_for(self, rows: Iterable[int], stop: threading.Event) -> bool:
        """Wait until documents can be read; always True at once, as this dataset is complete."""
        return True

    def fetch_ahead(self, rows: Iterable[int]) -> int:
        """Begin to download the shards of documents of a remote dataset; return their bytes.

        Those on the disk, and those on their way, count nothing.
        """
        if self.view is not None:
            chosen = np.fromiter(rows, np.int64)
            groups = [self._references[names[0]] for names in self.view.groups]
            wanted = [(source[chosen], document[chosen]) for source, document in groups]
            return sum(
                self.sources[number].fetch_ahead(document[source == number].tolist())
                for source, document in wanted
                for number in np.unique(source).tolist()
            )
        if self.mirror is None:
            return 0
        numbers = np.searchsorted(self._firsts, list(rows), "right") - 1
        shards = [self.manifest.shards[n] for n in dict.fromkeys(numbers.tolist())]
        return sum(map(self.mirror.fetch_ahead, shards))


def _reopened(
    location: str, columns: Sequence[str], fingerprint: str, check: Check
) -> HiddenStatesDataset:
    """Open what another process has open.

    Raises:
        DatasetError: another dataset is there now; and as HiddenStatesDataset.
    """
    dataset = HiddenStatesDataset(location, columns, check)
    if dataset.manifest.fingerprint != fingerprint:
        raise DatasetError(f"{location}: replaced by another dataset meanwhile; open it again")
    return dataset


# -- small files -----------------------------------------------------------------------------------


class _ReplacedError(DatasetError):
    """Where a view has a source, there is not the dataset that it names."""


def _source_location(view: str, source: str) -> str:
    """Return the path or URL of a source, as the manifest of the view at `view` names it."""
    if scheme_of(source):
        return source
    if scheme_of(view) is None:
        return os.path.normpath(Path(view).resolve() / source)
    scheme, _, path = view.partition("://")
    return f"{scheme}://{os.path.normpath(Path(path) / source)}"


def load_head_tensors(dataset: "HiddenStatesDataset | str | Path") -> dict[str, Tensor]:
    """Read `embed_tokens` [V, H], `lm_head` [V, H], `norm` [H] (and `lm_head_bias` [V]).

    They keep the target's dtype. With tied embeddings, `lm_head` and `embed_tokens` are one tensor.

    Raises:
        MissingError, DatasetError: the file is missing or not what the manifest describes.
    """
    if isinstance(dataset, str | Path):
        dataset = HiddenStatesDataset(dataset, ())
    head, file = dataset.manifest.head, dataset.file("target/head.safetensors")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise DatasetError(f"{file}: damaged ({error}); copy it again") from None
    if head.tied:
        tensors.setdefault("lm_head", tensors.get("embed_tokens", torch.empty(0)))
    for name in ("embed_tokens", "lm_head"):
        shape = tuple(tensors[name].shape) if name in tensors else None
        if shape != (head.vocab_size, head.hidden_size):
            raise DatasetError(
                f"{file}: {name} has shape {shape}, the manifest says "
                f"({head.vocab_size}, {head.hidden_size})"
            )
    return tensors


def check_whole(path: str | Path) -> None:
    """Compare the shards of a sealed dataset (a directory or a URL) with its manifest, by size.

    So "complete already" is said only where nothing was lost. A local index is compared, too.

    Raises:
        MissingError, DatasetError: a file is missing, truncated or changed.
    """
    try:
        dataset = HiddenStatesDataset(path, columns=())
        if dataset.mirror is None:
            _ = dataset.lengths  # the first use of the index checks it
    except (DatasetError, MissingError) as error:
        raise type(error)(
            f"{error}\n{path} was finished before, and is damaged now. Restore these files from "
            "a copy; or delete it, or choose another --out, and run the same command again"
        ) from None
