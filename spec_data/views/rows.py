"""The rows of a view before it is written: which documents, from where, with which columns.

`Rows.of` has all documents of a dataset, stored or a view. Every command of this room makes its
rows from those of its inputs, and `write_view` writes them: a manifest and an index, no shard.

Shapes: N documents.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_hexdigest

from spec_data.shards.errors import ConfigError
from spec_data.shards.files import MANIFEST, dump_json, write_atomically
from spec_data.shards.index import index_numbers
from spec_data.shards.loss_masks import LossMasks
from spec_data.shards.reader import INDEX, HiddenStatesDataset, check_whole
from spec_data.shards.resumable import atomic_write
from spec_data.shards.schema import FileRecord, Manifest, Totals
from spec_data.shards.seal import arrow_stream
from spec_data.shards.view import Source, View, relative_source, view_index_schema
from spec_data.terminal.paths import check_directory_to_write

_PLAIN = ("doc_id", "source", "tokens", "supervised", "first_supervised")


@dataclass(frozen=True, kw_only=True)
class ColumnGroup:
    """Columns that are read at one location, and where that is for each row.

    Attributes:
        names: of the columns.
        source, document: number of the source, and of the document in it, int64 [N] each.
    """

    names: tuple[str, ...]
    source: np.ndarray
    document: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Documents of stored datasets.

    Attributes:
        sources: the stored datasets.
        groups: all columns, by where they are read.
        table: the columns of an index that do not depend on where the documents lie; with `spans`
            where the loss masks are not those of the sources.
    """

    sources: tuple[HiddenStatesDataset, ...]
    groups: tuple[ColumnGroup, ...]
    table: pa.Table = field(repr=False)

    @classmethod
    def of(cls, dataset: HiddenStatesDataset) -> "Rows":
        """Return all documents of a dataset with all its columns."""
        table, view = dataset.index, dataset.view
        if view is None:
            here = np.zeros(len(dataset), np.int64), np.arange(len(dataset))
            every = ColumnGroup(names=tuple(dataset.declared), source=here[0], document=here[1])
            return cls(sources=(dataset,), groups=(every,), table=table.select(list(_PLAIN)))
        groups = tuple(
            ColumnGroup(
                names=tuple(names),
                source=index_numbers(table, f"source_number.{number}").astype(np.int64),
                document=index_numbers(table, f"document.{number}").astype(np.int64),
            )
            for number, names in enumerate(view.groups)
        )
        plain = table.select([*_PLAIN, *(["spans"] if view.remasked else [])])
        return cls(sources=dataset.sources, groups=groups, table=plain)

    def __len__(self) -> int:
        return self.table.num_rows

    @property
    def remasked(self) -> bool:
        """Whether the loss masks are not those of the sources."""
        return "spans" in self.table.column_names

    def texts(self, name: str) -> list[str]:
        """Return `doc_id` or `source` of every document."""
        return self.table.column(name).to_pylist()

    def take(self, documents: np.ndarray) -> "Rows":
        """Return some of the documents, by their numbers int64 [n], in this order."""
        groups = tuple(
            replace(group, source=group.source[documents], document=group.document[documents])
            for group in self.groups
        )
        return replace(self, groups=groups, table=self.table.take(pa.array(documents)))

    def with_columns(self, names: Sequence[str]) -> "Rows":
        """Return the same documents with fewer columns."""
        narrowed = (
            replace(group, names=tuple(name for name in group.names if name in names))
            for group in self.groups
        )
        return replace(self, groups=tuple(group for group in narrowed if group.names))

    def with_masks(self, masks: LossMasks) -> "Rows":
        """Return the same documents with other loss masks; their ids stay as they are."""
        table = self.table.select(list(_PLAIN))
        for name in ("supervised", "first_supervised"):
            table = _with_column(table, name, pa.array(getattr(masks, name), pa.int32()))
        offsets, spans = masks.offsets.astype(np.int32), masks.spans.astype(np.int32)
        return replace(
            self, table=table.append_column("spans", pa.ListArray.from_arrays(offsets, spans))
        )

    def with_ids(self, ids: Sequence[str]) -> "Rows":
        """Return the same documents under other ids."""
        return replace(self, table=_with_column(self.table, "doc_id", pa.array(ids, pa.string())))

    def beside(self, other: "Rows", names: Sequence[str]) -> "Rows":
        """Return these rows with the columns `names` of `other`, which has the same documents."""
        sources, (_, numbers) = _all_sources([self, other])
        more = tuple(
            replace(group, source=numbers[group.source])
            for group in other.with_columns(names).groups
        )
        return replace(self, sources=sources, groups=self.groups + more)

    def used_sources(self) -> "Rows":
        """Return the same rows without sources of which no document is left."""
        used = np.unique(np.concatenate([group.source for group in self.groups]))
        groups = tuple(replace(g, source=np.searchsorted(used, g.source)) for g in self.groups)
        return replace(self, sources=tuple(self.sources[n] for n in used), groups=groups)


def _with_column(table: pa.Table, name: str, array: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, array)


def _all_sources(
    parts: Sequence[Rows],
) -> tuple[tuple[HiddenStatesDataset, ...], list[np.ndarray]]:
    """Return the sources of all parts, each once, and their numbers by those in each part."""
    sources: dict[str, HiddenStatesDataset] = {}
    for source in (source for part in parts for source in part.sources):
        sources.setdefault(source.manifest.fingerprint, source)
    order = list(sources)
    numbers = [
        np.array([order.index(source.manifest.fingerprint) for source in part.sources])
        for part in parts
    ]
    return tuple(sources.values()), numbers


def stacked(parts: Sequence[Rows], names: Sequence[str]) -> Rows:
    """Return the documents of several parts one after another, with the columns `names`.

    Columns that lie together in every part are one group of the result.
    """
    sources, numbers = _all_sources(parts)
    together: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        where = tuple(_group_number(part, name) for part in parts)
        together.setdefault(where, []).append(name)
    groups = []
    for where, names_there in together.items():
        old = [part.groups[number] for part, number in zip(parts, where, strict=True)]
        source = [new[group.source] for new, group in zip(numbers, old, strict=True)]
        groups.append(
            ColumnGroup(
                names=tuple(names_there),
                source=np.concatenate(source),
                document=np.concatenate([group.document for group in old]),
            )
        )
    if any(part.remasked for part in parts):
        parts = [part if part.remasked else part.with_masks(_stored_masks(part)) for part in parts]
    table = pa.concat_tables([part.table for part in parts], promote_options="permissive")
    return Rows(sources=sources, groups=tuple(groups), table=table)


def _group_number(rows: Rows, name: str) -> int:
    return next(number for number, group in enumerate(rows.groups) if name in group.names)


def _stored_masks(rows: Rows) -> LossMasks:
    """Return the loss masks of all documents, which are those of the sources."""
    located = zip(rows.groups[0].source.tolist(), rows.groups[0].document.tolist(), strict=True)
    return LossMasks.of([rows.sources[source].mask_of(document) for source, document in located])


# -- writing ---------------------------------------------------------------------------------------


def check_out(out: Path, inputs: Sequence[HiddenStatesDataset]) -> None:
    """Check that a dataset can be made of others at `out`.

    Raises:
        ConfigError: it is read-only, or one of the inputs, inside one, or contains one.
    """
    check_directory_to_write("--out", out)
    for dataset in (source for each in inputs for source in (each, *each.sources)):
        here, there = out.resolve(), dataset.path.resolve()
        if here.is_relative_to(there) or there.is_relative_to(here):
            raise ConfigError(
                f"--out {out}: it is, lies in, or contains the dataset {dataset.place}; choose "
                "another directory"
            )


def write_view(out: Path, rows: Rows, draft: Manifest) -> Manifest:
    """Write a view in one step; return its manifest, also if the very view is there already.

    `draft` is the manifest without what describes the rows and the files.

    Raises:
        ConfigError: `out` holds something else.
    """
    rows = rows.used_sources()
    sources = [
        Source(
            path=relative_source(out, source.place),
            fingerprint=source.manifest.fingerprint,
            documents=len(source),
        )
        for source in rows.sources
    ]
    groups = [list(group.names) for group in rows.groups]
    view = View(sources=sources, groups=groups, remasked=rows.remasked)
    index = arrow_stream(_index_of(rows, view))
    manifest = _view_manifest(out, rows, view, draft, index)
    if (out / MANIFEST).is_file():
        present = Manifest.read(out / MANIFEST)
        if present.fingerprint == manifest.fingerprint:
            check_whole(out)
            return present
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"--out {out}: it holds something else; choose another directory, or delete this one"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as folder:
        folder.mkdir()
        write_atomically(folder / INDEX, index)
        write_atomically(folder / MANIFEST, dump_json(manifest.to_json()))
    return manifest


def _index_of(rows: Rows, view: View) -> pa.RecordBatch:
    """Return the index of a view as one record batch."""
    schema, table = view_index_schema(view), rows.table.combine_chunks()
    arrays = {name: table.column(name).combine_chunks() for name in table.column_names}
    for number, group in enumerate(rows.groups):
        arrays[f"source_number.{number}"] = pa.array(group.source, pa.int32())
        arrays[f"document.{number}"] = pa.array(group.document, pa.int32())
    return pa.RecordBatch.from_arrays(
        [arrays[name].cast(schema.field(name).type) for name in schema.names], schema=schema
    )


def _view_manifest(out: Path, rows: Rows, view: View, draft: Manifest, index: bytes) -> Manifest:
    """Return the manifest of a view; the target's files are those of its first source."""
    record = FileRecord(
        bytes=len(index),
        sha256=hashlib.sha256(index).hexdigest(),
        xxh3=xxh3_64_hexdigest(index),
    )
    target = {n: r for n, r in rows.sources[0].manifest.files.items() if n.startswith("target/")}
    sums = {name: int(index_numbers(rows.table, name).sum()) for name in _PLAIN[2:4]}
    return draft.changed(
        where=str(out / MANIFEST),
        view=view,
        totals=Totals(documents=len(rows), **sums),
        files={INDEX: record} | target,
    ).with_fingerprint()
