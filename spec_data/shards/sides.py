"""Sides: columns that were added to a sealed dataset, in files of their own beside its shards.

A side has one file per shard, with the same documents in the same order, and some of the columns of
`manifest.columns`. Such a file is an Arrow stream like a shard. The columns that no side has are in
the shards themselves, which were not written again (format version 1.3, see FORMAT.md).
"""

from dataclasses import dataclass

from spec_data.shards.schema import Column, Manifest, ShardRecord


@dataclass(frozen=True, kw_only=True)
class Side:
    """Some columns of a dataset, and the files that hold them, in the order of the shards."""

    columns: tuple[Column, ...]
    shards: tuple[ShardRecord, ...]


def sides_of(manifest: Manifest) -> tuple[Side, ...]:
    """Return the sides of a dataset, the oldest first; most datasets have none."""
    named = {column.name: column for column in manifest.columns}
    return tuple(
        Side(
            columns=tuple(named[name] for name in entry["columns"]),
            shards=tuple(ShardRecord(**record) for record in entry["shards"]),
        )
        for entry in manifest.raw.get("sides", [])
    )


def shard_columns(manifest: Manifest) -> tuple[Column, ...]:
    """Return the token columns that are in the shards themselves, in file order."""
    elsewhere = {name for entry in manifest.raw.get("sides", []) for name in entry["columns"]}
    return tuple(column for column in manifest.columns if column.name not in elsewhere)


def stored_records(manifest: Manifest) -> list[ShardRecord]:
    """Return the records of all files with documents: the shards, then those of the sides."""
    return [*manifest.shards, *(record for side in sides_of(manifest) for record in side.shards)]


def side_file(stem: str, side: int) -> str:
    """Return the name of a file of side `side` (from 1); `stem` is that of its shard."""
    return f"shards/{stem}-side{side}.arrow"
