"""A view: a dataset without shards, whose manifest refers to rows and columns of other datasets.

A source is a stored dataset, never a view: a view of a view refers to the sources of that one. Its
fingerprint pins every byte of it. The columns of a view form groups; a document has one location
for each group. Most views have one group; `join` makes several.
"""

import os
from pathlib import Path

import pyarrow as pa

from spec_data.shards.records import Count, Record, Sha256
from spec_data.shards.urls import scheme_of


class Source(Record, frozen=True, kw_only=True):
    """A stored dataset that a view refers to: where it is, which it is, and its documents."""

    path: str
    fingerprint: Sha256
    documents: Count


class View(Record, frozen=True, kw_only=True):
    """The manifest's `view`.

    Attributes:
        sources: what it refers to.
        groups: the token columns that are read at one location, by name.
        remasked: whether the index has loss masks of its own; False: those of the sources.
    """

    sources: list[Source]
    groups: list[list[str]]
    remasked: bool = False

    def __post_init__(self) -> None:
        if not self.sources or not all(self.groups) or not self.groups:
            raise ValueError("it refers to nothing")


def view_index_schema(view: View) -> pa.Schema:
    """Return the schema of index.arrow; FORMAT.md explains it."""
    numbers = ["tokens", "supervised", "first_supervised"]
    for group in range(len(view.groups)):
        numbers += [f"source_number.{group}", f"document.{group}"]
    spans = pa.list_(pa.field("item", pa.int32(), nullable=False))
    return pa.schema(
        [
            pa.field("doc_id", pa.string(), nullable=False),
            pa.field("source", pa.string(), nullable=False),
            *(pa.field(name, pa.int32(), nullable=False) for name in numbers),
            *([pa.field("spans", spans, nullable=False)] if view.remasked else []),
        ]
    )


def source_path(view: str | Path, source: str) -> str:
    """Return the path or URL of a source, as the manifest of the view at `view` names it."""
    if scheme_of(source):
        return source
    if scheme_of(view) is None:
        return os.path.normpath(Path(view).resolve() / source)
    scheme, _, path = str(view).partition("://")
    return f"{scheme}://{os.path.normpath(Path(path) / source)}"


def relative_source(view: Path, source: str) -> str:
    """Return how the manifest of the view at `view` names a source."""
    return source if scheme_of(source) else os.path.relpath(Path(source).resolve(), view.resolve())
