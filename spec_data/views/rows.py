"""The rows of a view before it is written: which documents, from where, with which columns.

`Rows.of` has all documents of a dataset, stored or a view. Every command of this room makes its
rows from those of its inputs, and `write_view` writes them: a manifest and an index, no shard.

Shapes: N documents, G groups of columns.
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_hexdigest

from spec_data.shards.errors import ConfigError
from spec_data.shards.files import (
    MANIFEST,
    atomic_write,
    dump_json,
    remove_dead_of,
    write_atomically,
)
from spec_data.shards.index import PROMPT, LossMasks, index_numbers, view_index_schema, with_prompt
from spec_data.shards.pictures import refuse_images
from spec_data.shards.reader import INDEX, HiddenStatesDataset, check_whole
from spec_data.shards.schema import (
    FORMAT_VERSION,
    MOST_SOURCES,
    OLD_VERSION,
    FileRecord,
    Manifest,
    Totals,
    View,
    ViewSource,
)
from spec_data.shards.seal import arrow_stream
from spec_data.shards.storage import scheme_of, words_for_sources
from spec_data.terminal import NOTICE
from spec_data.terminal.paths import check_directory_to_write

logger = logging.getLogger(__name__)

_PLAIN = ("doc_id", "source", "tokens", "supervised", "first_supervised")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Documents of stored datasets.

    Attributes:
        sources: the stored datasets.
        groups: all columns; those of one group are read at one location.
        locations: number of the source, and of the document in it, int64 [G, 2, N].
        table: the columns of an index that do not depend on where the documents lie; with `spans`
            where the loss masks are not those of the sources.
    """

    sources: tuple[HiddenStatesDataset, ...]
    groups: tuple[tuple[str, ...], ...]
    locations: np.ndarray
    table: pa.Table = field(repr=False)

    @classmethod
    def of(cls, dataset: HiddenStatesDataset) -> "Rows":
        """Return all documents of a dataset with all its columns."""
        table, view = dataset.index, dataset.view
        groups = view.groups if view else [list(dataset.declared)]
        names = [[f"source_number.{g}", f"document.{g}"] for g in range(len(groups))]
        locations = (
            np.array([[index_numbers(table, name) for name in pair] for pair in names], np.int64)
            if view
            else np.stack([np.zeros(len(dataset), np.int64), np.arange(len(dataset))])[None]
        )
        spans = ["spans"] if view and view.remasked else []
        return cls(
            sources=dataset.sources,
            groups=tuple(map(tuple, groups)),
            locations=locations,
            table=table.select([*_PLAIN, *spans, *{PROMPT} & {*table.column_names}]),
        )

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
        return replace(
            self,
            locations=self.locations[:, :, documents],
            table=self.table.take(pa.array(documents)),
        )

    def with_columns(self, names: Sequence[str]) -> "Rows":
        """Return the same documents with fewer columns."""
        groups = [tuple(name for name in group if name in names) for group in self.groups]
        left = [number for number, group in enumerate(groups) if group]
        return replace(self, groups=tuple(filter(None, groups)), locations=self.locations[left])

    def with_values(self, **columns: pa.Array) -> "Rows":
        """Return the same documents with other values in columns of the table."""
        table = self.table.drop_columns([n for n in columns if n in self.table.column_names])
        for name, values in columns.items():
            table = table.append_column(name, values)
        return replace(self, table=table)

    def without(self, name: str) -> "Rows":
        """Return the same documents without a column of the table."""
        names = [n for n in self.table.column_names if n != name]
        return replace(self, table=self.table.select(names))

    def with_masks(self, masks: LossMasks) -> "Rows":
        """Return the same documents with other loss masks; their ids stay as they are."""
        offsets, spans = masks.offsets.astype(np.int32), masks.spans.astype(np.int32)
        return self.with_values(
            supervised=pa.array(masks.supervised, pa.int32()),
            first_supervised=pa.array(masks.first_supervised, pa.int32()),
            spans=pa.ListArray.from_arrays(offsets, spans),
        )

    def stored_masks(self) -> LossMasks:
        """Return the loss masks of the sources."""
        located = self.locations[0].T.tolist()
        return LossMasks.of([self.sources[s].mask_of(n) for s, n in located])

    def beside(self, other: "Rows", names: Sequence[str]) -> "Rows":
        """Return these rows with the columns `names` of `other`, which has the same documents."""
        rows, more = _of_all_sources([self, other.with_columns(names)])
        locations = np.concatenate([rows.locations, more.locations])
        return replace(rows, groups=rows.groups + more.groups, locations=locations)

    def used_sources(self) -> "Rows":
        """Return the same rows without sources of which no document is left."""
        used, numbers = np.unique(self.locations[:, 0], return_inverse=True)
        locations = self.locations.copy()
        locations[:, 0] = numbers.reshape(locations[:, 0].shape)
        return replace(self, sources=tuple(self.sources[n] for n in used), locations=locations)


def _of_all_sources(parts: Sequence[Rows]) -> list[Rows]:
    """Return the parts with the sources of all, each once."""
    sources: dict[str, HiddenStatesDataset] = {}
    for source in (source for part in parts for source in part.sources):
        sources.setdefault(source.manifest.fingerprint, source)
    order, renumbered = {name: number for number, name in enumerate(sources)}, []
    for part in parts:
        numbers = np.array([order[s.manifest.fingerprint] for s in part.sources])
        locations = part.locations.copy()
        locations[:, 0] = numbers[part.locations[:, 0]]
        renumbered.append(replace(part, sources=tuple(sources.values()), locations=locations))
    return renumbered


def stacked(parts: Sequence[Rows], names: Sequence[str]) -> Rows:
    """Return the documents of several parts one after another, with the columns `names`.

    Columns that lie together in every part are one group of the result.
    """
    parts = _of_all_sources(parts)
    together: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        group = tuple(next(n for n, g in enumerate(part.groups) if name in g) for part in parts)
        together.setdefault(group, []).append(name)
    locations = [
        np.concatenate([p.locations[n] for p, n in zip(parts, group, strict=True)], axis=1)
        for group in together
    ]
    if any(part.remasked for part in parts):
        parts = [part if part.remasked else part.with_masks(part.stored_masks()) for part in parts]
    if not all(PROMPT in part.table.column_names for part in parts):  # read where it is needed
        parts = [part.without(PROMPT) for part in parts]
    return Rows(
        sources=parts[0].sources,
        groups=tuple(map(tuple, together.values())),
        locations=np.stack(locations),
        table=pa.concat_tables([part.table for part in parts], promote_options="permissive"),
    )


# -- writing ---------------------------------------------------------------------------------------


def check_out(out: Path, inputs: Sequence[HiddenStatesDataset]) -> None:
    """Check that a dataset can be made of others at `out`.

    Raises:
        ConfigError: it is read-only, or one of the inputs, inside one, or contains one.
    """
    check_directory_to_write("--out", out)
    if not out.name.strip("."):  # it is written under another name first
        raise ConfigError(f"--out {out}: give a new directory by its name")
    for dataset in (source for each in inputs for source in (each, *each.sources)):
        here, there = out.resolve(), dataset.path.resolve()
        if here.is_relative_to(there) or there.is_relative_to(here):
            raise ConfigError(
                f"--out {out}: it is, lies in, or contains the dataset {dataset.location}; choose "
                "another directory"
            )


def write_view(out: Path, rows: Rows, draft: Manifest) -> Manifest:
    """Write a view in one step; return its manifest, also if the very view is there already.

    `draft` is the manifest without what describes the rows and the files. The target's files are
    those of the first source.

    Raises:
        ConfigError: `out` holds something else, or the rows are of too many datasets.
    """
    rows, out = rows.used_sources(), out.resolve()  # a link to an empty folder stays
    refuse_images(rows.sources, "view")
    if len(rows.sources) > MOST_SOURCES:
        raise ConfigError(
            f"--out {out}: a view of {len(rows.sources):,} datasets, at most {MOST_SOURCES:,}; "
            "`merge` some of them first, and make one dataset of these with `copy`"
        )
    sources = []
    for source in rows.sources:
        path = source.location
        if not scheme_of(path):
            path = os.path.relpath(Path(path).resolve(), out)
        fingerprint = source.manifest.fingerprint
        sources.append(ViewSource(path=path, fingerprint=fingerprint, documents=len(source)))
    view = View(sources=sources, groups=[list(g) for g in rows.groups], remasked=rows.remasked)
    index = arrow_stream(_index_of(rows, view))
    digests = {"sha256": hashlib.sha256(index).hexdigest(), "xxh3": xxh3_64_hexdigest(index)}
    record = FileRecord(bytes=len(index), **digests)
    target = {n: r for n, r in rows.sources[0].manifest.files.items() if n.startswith("target/")}
    sums = {name: int(index_numbers(rows.table, name).sum()) for name in _PLAIN[2:4]}
    manifest = draft.changed(
        where=str(out / MANIFEST),
        view=view,
        format_version=FORMAT_VERSION if PROMPT in rows.table.column_names else OLD_VERSION,
        totals=Totals(documents=len(rows), **sums),
        files={INDEX: record} | target,
    ).with_fingerprint()
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
    remove_dead_of(out)
    with atomic_write(out) as folder:
        folder.mkdir()
        write_atomically(folder / INDEX, index)
        write_atomically(folder / MANIFEST, dump_json(manifest.to_json()))
    places = [source.path for source in sources]
    if word := words_for_sources(str(out), places):
        logger.log(NOTICE, "%s: its sources are on remote storage. To read it: %s", out, word)
    return manifest


def _index_of(rows: Rows, view: View) -> pa.RecordBatch:
    """Return the index of a view as one record batch."""
    schema, table = view_index_schema(view), rows.table.combine_chunks()
    if PROMPT in table.column_names:
        schema = with_prompt(schema)
    arrays = {name: table.column(name).combine_chunks() for name in table.column_names}
    for number, (source, document) in enumerate(rows.locations):
        arrays[f"source_number.{number}"] = pa.array(source, pa.int32())
        arrays[f"document.{number}"] = pa.array(document, pa.int32())
    return pa.RecordBatch.from_arrays(
        [arrays[name].cast(schema.field(name).type) for name in schema.names], schema=schema
    )
